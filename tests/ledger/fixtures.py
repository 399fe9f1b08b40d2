"""Ledgers in a file of the test's own, and how their rows are read."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_limits.ledger.address import Address, parse
from otel_limits.ledger.spill import candidates
from tests.ledger.book import DAY, NINE, Call, Entry, write


class LedgerFile:
    """An SQLite ledger, read with nothing but sqlite3."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def address(self) -> Address:
        """Where it is, as the library has it."""
        return parse("test", str(self.path), self.path.parent / "data")

    def rows(self, table: str, where: str = "1") -> list[dict[str, Any]]:
        """Rows of a table, in the order of their insertion, once none waits in a spill file."""
        eventually(lambda: self.path.exists() and not self.spills())
        connection = sqlite3.connect(self.path)
        connection.row_factory = sqlite3.Row
        try:
            query = f"SELECT * FROM otel_limits_{table} WHERE {where} ORDER BY rowid"  # noqa: S608
            return [dict(row) for row in connection.execute(query)]
        finally:
            connection.close()

    def calls(self, where: str = "1") -> list[dict[str, Any]]:
        """Model calls."""
        return self.rows("model_calls", where)

    def invocations(self, where: str = "1") -> list[dict[str, Any]]:
        """Invocations."""
        return self.rows("invocations", where)

    def tools(self) -> list[dict[str, Any]]:
        """Tool calls."""
        return self.rows("tool_calls")

    def attributes(self) -> dict[tuple[str, str], str]:
        """Audited attributes, by invocation and key."""
        return {(r["invocation_id"], r["key"]): r["value"] for r in self.rows("attributes")}

    def tokens(self) -> int:
        """Input and output of every model call."""
        return sum(call["input_tokens"] + call["output_tokens"] for call in self.calls())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let another program lock it, so that rows in spill files have to wait."""
        with (
            contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection,
            waiting_for_locks(0.01),
        ):
            connection.execute("BEGIN IMMEDIATE")
            yield

    def spills(self) -> list[Path]:
        """Spill files, wherever they may be."""
        return candidates(self.address)


@contextlib.contextmanager
def waiting_for_locks(seconds: float) -> Iterator[None]:
    """Let connections that otel-limits opens now wait this long for the locks of others."""
    connect = sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> Any:
        if "timeout" in options:  # those of tests have the default
            options["timeout"] = seconds
        opened: sqlite3.Connection = connect(*arguments, **options)
        return opened

    with unittest.mock.patch.object(sqlite3, "connect", connected):
        yield


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerFile:
    """A ledger that `enable()` will record in."""
    path = tmp_path / "ledger.db"
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return LedgerFile(path)


@pytest.fixture
def week(ledger: LedgerFile) -> LedgerFile:
    """Two tenants, two agents, two models, three days."""
    write(
        ledger.address,
        Entry(
            agent="research",
            calls=[
                Call(input=1000, output=200, cached=400, price="0.01", saved="0.009", model="big"),
                Call(input=2000, output=300, cached=1600, price="0.02", model="big"),
            ],
            attributes={"tenant.id": "acme"},
            session="s1",
            conversation="c1",
        ),
        Entry(
            agent="research",
            calls=[Call(input=500, output=50, model="small")],
            attributes={"tenant.id": "other"},
            at=NINE + DAY,
        ),
        Entry(
            agent="writer",
            calls=[
                Call(
                    input=10,
                    output=5,
                    written=5,
                    price="0.000000000001",
                    saved="-0.001",
                    model="small",
                ),
                Call(input=70, output=7, kind="estimated", estimated=True, model="small"),
                Call(input=0, output=0, kind="zero_token", model="small"),
            ],
            attributes={"tenant.id": "acme"},
            at=NINE + 2 * DAY,
        ),
    )
    return ledger


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(ledger: LedgerFile, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program that records in the ledger; none outlives its test."""
    children: list[subprocess.Popen[str]] = []

    def start(text: str, **variables: str) -> subprocess.Popen[str]:
        # An earlier child may not have read its file yet.
        file = tmp_path / f"program{len(children)}.py"
        file.write_text(text, encoding="utf-8")
        environment = os.environ | {"OTEL_LIMITS_LEDGER": str(ledger.path)} | variables
        child = subprocess.Popen(
            [sys.executable, "-u", str(file)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
            child.communicate()


def eventually(check: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until `check` holds."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "It never came to be."
        time.sleep(0.01)
