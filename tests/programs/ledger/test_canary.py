"""Nothing that was said to or by a model reaches the ledger, the metrics or the log."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from strands import tool

from otel_limits import Limits, disable, enable
from otel_limits.cli import main
from otel_limits.ledger.database import Database
from otel_limits.testing import ScriptedModel, fails, says, uses

if TYPE_CHECKING:
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile

CANARY = "canary7f3a"


@tool
def leak(query: str = "") -> str:
    """Answer with a secret."""
    return f"{CANARY}-result"


@tool
def crash(query: str = "") -> str:
    """Fail with a secret."""
    raise ValueError(f"{CANARY}-tool-error")


def speak(make_agent: MakeAgent) -> None:
    """Run agents with a secret in everything that is said, done and raised."""
    secret = {"query": f"{CANARY}-argument"}
    turns: list[Any] = [uses(name, arguments=secret) for name in ("leak", "crash", "leak", "leak")]
    scripts = [[*turns], [says(f"{CANARY}-answer")], [fails(ValueError(f"{CANARY}-error"))]]
    for script in scripts:
        agent = make_agent(
            ScriptedModel(script),
            tools=[leak, crash],
            system_prompt=f"{CANARY}-system",
            trace_attributes={"tenant.id": "acme", "secret": f"{CANARY}-attribute"},
        )
        try:
            agent(f"{CANARY}-prompt")
        except ValueError:
            continue


@pytest.mark.parametrize("outage", [False, True], ids=["database", "spill file"])
def test_no_secret_is_kept(  # noqa: PLR0913, PLR0917  fixtures
    faulty: None,
    outage: bool,  # noqa: FBT001
    source: str,
    make_agent: MakeAgent,
    ledger: LedgerFile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prompts, arguments, results, answers, exceptions, unchosen attributes: in none of them."""
    caplog.set_level(logging.DEBUG, "otel_limits")
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "tenant.id")
    if outage:
        monkeypatch.setattr(Database, "write", refuse)
    enable(Limits(max_turns=3))
    speak(make_agent)
    metrics = generate_latest(REGISTRY)
    disable()
    assert bool(ledger.spills()) is outage
    for path in ledger.path.parent.rglob("ledger*"):
        content = path.read_bytes()
        assert CANARY.encode() not in content, path
    ours = [record for record in caplog.records if record.name.startswith("otel_limits")]
    assert any("max_turns" in record.getMessage() for record in ours)
    assert [record for record in ours if CANARY in logging.Formatter().format(record)] == []
    assert b"otel_limits_stops_total{" in metrics
    assert CANARY.encode() not in metrics
    if not outage:
        assert len(ledger.calls()) == 5
        assert main(["ledger", "export", "--format", "jsonl"]) == 0
        assert main(["audit", "stops", "--format", "html"]) == 0
        assert CANARY not in capsys.readouterr().out


def refuse(_database: Database, _rows: object) -> dict[str, int]:
    """Fail as a vanished disk does."""
    raise OSError(5, "Input/output error")


NO_LEDGER = """
import sys
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
Agent(model=ScriptedModel([says("x")]), callback_handler=None)("go")
found = [name for name in sys.modules if name.startswith(("sqlalchemy", "otel_limits.ledger.d"))]
threads = [t.name for t in __import__("threading").enumerate() if "ledger" in t.name]
sys.exit(str(found + threads) if found + threads else 0)
"""


def test_without_a_ledger_nothing_is_loaded() -> None:
    """A process that keeps none imports no database and starts no thread for one."""
    done = subprocess.run(
        [sys.executable, "-c", NO_LEDGER], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
