"""`backtest` with a policy file: the limits of each agent are tried on it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.ledger.book import NINE, Call, Entry, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

POLICY = """
defaults: {limits: {max_turns: 9}}
agents:
  "re*":
    action: halt
    limits: {max_turns: 2, max_repeated_failures: 3}
    tree: {max_turns: 30}
"""


@pytest.fixture
def policy(tmp_path: Path, ledger: LedgerFile) -> Path:
    """A policy file, and a ledger with two agents that made four turns each."""
    write(
        ledger.address,
        Entry(agent="reader", calls=[Call()] * 4),
        Entry(agent="writer", calls=[Call()] * 4, at=NINE + 60),
    )
    path = tmp_path / "limits.yaml"
    path.write_text(POLICY)
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The answer in JSON."""
    capsys.readouterr()
    assert main(["audit", "backtest", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("selected", "halts"),
    [
        ((), {"reader": 1, "writer": 0}),
        (("--agent", "*er"), {"reader": 1, "writer": 0}),
        (("--agent", "writer"), {"writer": 0}),
    ],
)
def test_each_agent_has_the_limits_of_the_file(
    policy: Path, capsys: pytest.CaptureFixture[str], selected: tuple[str, ...], halts: Any
) -> None:
    """Also if only some are selected; the same as with the limit as an option."""
    found = answer(capsys, "--policy", str(policy), *selected)
    assert {row["agent"]: row["halted"] for row in found["backtest"]} == halts
    if "reader" in halts:
        option = answer(capsys, "--max-turns", "2", "--agent", "reader")
        assert found["cuts"] == option["cuts"]


def test_a_task_has_the_limits_of_the_agent_that_ends_it(
    policy: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer answers an interrupt of the reader, to which a lower limit applies."""
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("UPDATE otel_limits_invocations SET task_id = ?", (f"{1:032x}",))
    write(ledger.address, Entry(agent="reader", calls=[Call()] * 4), first=3)
    for selected, halted in (((), 1), (("--where", "agent!=reader"), 0)):
        found = answer(capsys, "--policy", str(policy), *selected)
        halts = {row["agent"]: row["halted"] for row in found["backtest"]}
        assert halts == {"reader": halted, "writer": 0}


def test_limits_that_are_not_tested_are_named(
    policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And agents without any."""
    found = answer(capsys, "--policy", str(policy))
    assert found["summary"] == (
        "Not tested, as a ledger cannot replay them: max_repeated_failures, tree_max_turns."
    )
    policy.write_text("agents: {writer: {limits: {max_turns: 2}}}")
    found = answer(capsys, "--policy", str(policy))
    assert found["summary"] == "The file has no limit to test for reader."


def test_a_file_and_an_option_contradict_each_other(
    policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does neither of them."""
    assert main(["audit", "backtest", "--policy", str(policy), "--max-turns", "3"]) == 2
    assert "Pass either --policy or --max-turns, not both." in capsys.readouterr().err
    assert main(["audit", "backtest"]) == 2
    assert "--max-turns 20, or --policy limits.yaml" in capsys.readouterr().err
