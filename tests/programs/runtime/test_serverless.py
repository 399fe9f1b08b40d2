"""A runtime that is frozen or ended right after its answer has exported everything, as on AWS."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.launching import RUN, fresh_environment
from tests.ledger.fixtures import LedgerFile
from tests.otlp.receiver import Received, http_receiver
from tests.pages import BLOCK, files
from tests.paths import ROOT, SCRIPTS
from tests.processes import PATIENCE_SECONDS, SOON, bounded, free_port
from tests.programs.runtime.test_flush import export_to, stops
from tests.programs.runtime.test_workers import ask

LAMBDA, AGENTCORE = (ROOT / f"otel_limits/docs/{name}.md" for name in ("lambda", "agentcore"))
AGENTS = """\
from served import call
def answer(prompt):
    return call("function")
"""
"""The part that the pages leave to their reader: here an agent that never stops."""
HALTED = {"model_calls": 3, "stop_reason": "max_turns"}


@dataclass
class Service:
    """The side of AWS: events for a function, and what it answers."""

    events: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    answers: queue.Queue[Any] = field(default_factory=queue.Queue)
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released whenever the function asks for its next event, which is when it is frozen."""


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve the runtime interface of Lambda; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            service.asked.release()
            event = service.events.get(timeout=PATIENCE_SECONDS)
            self.send_response(200 if event else 204)
            self.send_header("Lambda-Runtime-Aws-Request-Id", "request")
            self.end_headers()
            if event:
                self.wfile.write(json.dumps(event).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            service.answers.put(json.loads(body))
            self.send_response(202)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Be silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(SOON,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def written(directory: Path) -> Path:
    """Write the programs of the pages, with agents to ask."""
    (wrapper,) = (body for name, body in BLOCK.findall(LAMBDA.read_text()) if name == "sh")
    programs = {**files(LAMBDA), **files(AGENTCORE), "my_agents.py": AGENTS, "wrapper": wrapper}
    for name, body in programs.items():
        (directory / name).write_text(body, encoding="utf-8")
    return directory


def settings(directory: Path, endpoint: str) -> dict[str, str]:
    """Variables as the pages have them; nothing is exported before a minute has passed."""
    return fresh_environment(
        OTEL_LIMITS_MAX_TURNS="3",
        OTEL_LIMITS_LEDGER=str(directory / "ledger.db"),
        OTEL_LIMITS_METRICS="otlp",
        PYTHONPATH=f"{directory}{os.pathsep}{SCRIPTS}",
        **export_to(endpoint),
    )


@dataclass
class Frozen:
    """A function that was called and then frozen, twice."""

    answers: list[Any] = field(default_factory=list)
    halts: list[int] = field(default_factory=list)
    """As in the metrics that had arrived by that moment."""
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Invocations that have ended, and model calls, in the database at that time."""
    spilled: list[list[Path]] = field(default_factory=list)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """Call a function twice, and freeze it when it asks for the next event."""
    directory = written(tmp_path_factory.mktemp("function"))
    ledger, service, seen, received = (
        LedgerFile(directory / "ledger.db"), Service(), Frozen(), Received()
    )  # fmt: skip
    with http_receiver(received) as endpoint, serving(service) as address:
        environ = settings(directory, endpoint)
        environ |= {"AWS_LAMBDA_RUNTIME_API": address, "_HANDLER": "function.handler"}
        command = ["sh", "wrapper", sys.executable, str(SCRIPTS / "function_runtime.py")]
        with subprocess.Popen(command, env=environ, cwd=directory) as process, bounded(process):
            assert service.asked.acquire(timeout=PATIENCE_SECONDS)
            for _ in range(2):
                service.events.put({"prompt": "go"})
                seen.answers.append(service.answers.get(timeout=PATIENCE_SECONDS))
                assert service.asked.acquire(timeout=PATIENCE_SECONDS)
                process.send_signal(signal.SIGSTOP)
                seen.halts.append(stops(received))
                seen.rows.append(counted(ledger.path))
                seen.spilled.append(ledger.spills())
                process.send_signal(signal.SIGCONT)
            service.events.put(None)
    return seen


def counted(path: Path) -> tuple[int, int]:
    """Count rows without writing, to check for locks on the database."""
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as ledger:
        ledger.execute("BEGIN IMMEDIATE")
        (ended,) = ledger.execute(
            "SELECT count(*) FROM otel_limits_invocations WHERE ended_us IS NOT NULL"
        ).fetchone()
        (calls,) = ledger.execute("SELECT count(*) FROM otel_limits_model_calls").fetchone()
        ledger.execute("ROLLBACK")
    return ended, calls


def test_a_function_is_limited_before_and_after_it_was_frozen(frozen: Frozen) -> None:
    """In each of its requests."""
    assert frozen.answers == [HALTED, HALTED]


def test_metrics_have_arrived_when_it_is_frozen(frozen: Frozen) -> None:
    """Although no interval has passed."""
    assert frozen.halts == [1, 2]


def test_rows_are_in_the_database_when_it_is_frozen(frozen: Frozen) -> None:
    """All of them, without a lock on the database, and without rows in a file that may be gone."""
    assert frozen.rows == [(1, 3), (2, 6)]
    assert frozen.spilled == [[], []]


def test_killed_session_has_exported_everything(tmp_path: Path) -> None:
    """As AgentCore may end it, with its disk."""
    directory, received, port = written(tmp_path), Received(), free_port()
    with http_receiver(received) as endpoint:
        command = [*RUN, "--", sys.executable, "-m", "uvicorn", "runtime:app", f"--port={port}"]
        with subprocess.Popen(
            command, env=settings(directory, endpoint), cwd=directory, stderr=subprocess.DEVNULL
        ) as process:
            try:
                ask(port, "ping")
                assert post(port) == {"result": HALTED}
            finally:
                process.kill()
        assert stops(received) == 1
    assert counted(directory / "ledger.db") == (1, 3)
    assert LedgerFile(directory / "ledger.db").spills() == []


def post(port: int) -> Any:
    """Call the session."""
    request = Request(
        f"http://127.0.0.1:{port}/invocations",
        data=json.dumps({"prompt": "go"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=PATIENCE_SECONDS) as answer:  # noqa: S310  loopback
        return json.load(answer)
