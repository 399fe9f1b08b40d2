"""Audits of quotas and policies, with a ledger in PostgreSQL and quotas in Redis."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits.cli import main
from otel_limits.core.events import QuotaUse
from otel_limits.quotas.keys import Template
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.postgresql import PROGRAMS
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests import postgresql as databases
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

pytestmark = pytest.mark.skipif(
    not PROGRAMS and os.environ.get("CI") != "true",
    reason="PostgreSQL is missing: apt-get install postgresql.",
)

QUOTAS: dict[str, dict[str, Any]] = {
    "fleet": {"tokens": 1_000_000, "window": "year"},
    "calls": {"model_calls": 3, "window": "year", "key": "{agent}/{baggage.user}"},
    "runs": {"invocations": 100, "window": "year", "key": "baggage.user"},
    "spend": {"usd": 7, "window": "year", "key": "baggage.user", "where": {"baggage.user": "j*"}},
}
QUESTIONS = (
    ("policies",),
    ("budget",),
    ("whois", "tester/joe"),
    ("spend", "--by", "agent"),
    ("spend", "--by", "provider"),
    ("stops",),
    ("unmeasured",),
    ("whois", "#182838919694"),  # that of joe
    ("whois", "0123abcd"),  # perhaps the beginning of the hash of a conversation
)


@tool
def give_up() -> str:
    """End this and all other invocations."""
    otel_limits.kill(all=True)
    return "killed"


def test_a_fleet_is_audited(  # noqa: PLR0913, PLR0917  fixtures
    hold: Hold,
    server: Server,
    postgresql: databases.Server,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    events: list[Event],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys come from the recorded charges, without audit keys; SQLite gives the same answers."""
    postgresql.ask("postgres", "CREATE DATABASE audited")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", postgresql.url("audited"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "9")
    prices = {"*": {"price": {"input": 1000, "output": 2000}}}
    hold(QUOTAS, server.url, [events.append], 60, models=prices)
    for user in ("joe", "jane", "ann"):
        with carrying(user=user):
            make_agent(ScriptedModel([uses("search"), says("x", usage=None)]))("go")
            if user == "joe":
                make_agent(ScriptedModel(endless(uses("search"))))("go")
    make_agent(ScriptedModel(endless(uses("give_up"))), name="killed", tools=[give_up])("go")
    otel_limits.disable()
    counted = {
        (each.quota, each.key): Decimal(each.used) for each in events if isinstance(each, QuotaUse)
    }

    def ask(*question: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["audit", *question, "--format", "json"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        del answer["about"]
        return answer

    answers = [ask(*question) for question in QUESTIONS]
    policies, budget, whois, spend, *_ = answers
    assert {(row["quota"], row["key"]): Decimal(row["used"]) for row in budget["budget"]} == counted
    # Of the calls for others than Joe and Jane: the quota may have been added later.
    assert budget["summary"].startswith("3 calls are not counted for spend, since the ledger does")
    keys = {row["hash"]: row["records"] for row in whois["whois"] if row["known"] == "yes"}
    joe = shown_key("tester", "joe")
    assert keys == {joe: 4}  # the charges of three calls, and a halt
    assert {(row["limit"], row["source"]) for row in policies["limits"]} == {
        ("max_turns", "environment")
    }
    assert [row["accepted"] for row in policies["versions"]] == ["yes"]
    assert spend["totals"]["spend"]["estimated_calls"] == 3
    assert spend["totals"]["outcomes"]["killed"] == 1
    copy = str(tmp_path / "copy.db")
    assert main(["ledger", "merge", postgresql.url("audited"), "--into", copy]) == 0
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", copy)
    assert [ask(*question) for question in QUESTIONS] == answers


def shown_key(agent: str, user: str) -> str:
    """The key of the quota `calls`, as it is shown."""
    return Template(QUOTAS["calls"]["key"]).key_of_text("calls", f"{agent}/{user}").shown
