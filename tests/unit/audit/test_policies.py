"""Limits that were in force, where they were set, and which versions of the policy file were."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import disable, enable
from otel_limits.audit.policies import periods
from otel_limits.cli import main
from otel_limits.core.events import Invocation
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.settings.run_options import with_options
from otel_limits.testing import FakeTime, ScriptedModel, says
from tests.ledger.book import Entry, stop_of

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.audit.policies import Cap
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy file of the process."""
    path = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    return path


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The answer in JSON."""
    capsys.readouterr()
    assert main(["audit", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_limit_in_force_has_its_source(
    ledger: LedgerFile,
    policy: Path,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file, the environment, code and a preset, also of trees and single tools; the last wins."""
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    monkeypatch.setenv("OTEL_LIMITS_MAX_CONSECUTIVE_HANDOFFS", "0")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TOKEN_BUDGET", "5000")
    policy.write_text(
        "defaults:\n  action: raise\n  limits:\n    max_model_calls: 7\n"
        "    max_calls_per_tool: {search: 3}\n  tree: {max_turns: 40}\n"
    )
    for name, text in with_options({}, {"OTEL_LIMITS_MAX_TOOL_CALLS": "8"}).items():
        monkeypatch.setenv(name, text)
    enable(max_turns=9)
    make_agent(ScriptedModel([says("x")]))("go")
    (row,) = ledger.invocations()
    answers = asked(capsys, "policies"), asked(capsys, "show", row["id"])
    for answer in answers:
        found = {each["limit"]: each for each in answer["limits"]}
        assert {name: (each["cap"], each["source"]) for name, each in found.items()} == {
            "max_turns": ("9", "code"),
            "max_tool_calls": ("8", "option"),
            "max_iterations": ("25", "preset"),
            "max_model_calls": ("7", "file"),
            "max_token_budget": ("5000", "environment"),
            "max_identical_tool_calls": ("5", "preset"),
            "max_consecutive_tool_failures": ("5", "preset"),
            "max_consecutive_handoffs": ("off", "environment"),
            "max_calls_per_tool.search": ("3", "file"),
            "tree_max_turns": ("40", "file"),
            "tree_max_model_calls": ("100", "preset"),
        }
        places = {each["place"] for each in answer["limits"]} - {found["max_turns"]["place"]}
        assert places == {
            "otel-limits run --max-tool-calls",
            *("recommended", "limits.yaml:4", "limits.yaml:5", "limits.yaml:6"),
            *("OTEL_LIMITS_MAX_TOKEN_BUDGET", "OTEL_LIMITS_MAX_CONSECUTIVE_HANDOFFS"),
        }
        assert found["max_turns"]["place"].startswith("test_policies.py:")
        assert {each["action"] for each in answer["limits"]} == {"raise"}
        assert {each["invocations"] for each in answer["limits"]} == {1}


def test_limits_are_listed_by_agent_and_day(
    ledger: LedgerFile, make_agent: MakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent without limits is listed, and one of which no start is known."""
    enable(max_turns=9)
    agent = make_agent(ScriptedModel([says("x")] * 3), name="a")
    agent("go")
    agent("go")
    disable()
    enable()
    agent("go")
    rows = asked(capsys, "policies", "--where", "agent=a")["limits"]
    assert [(each["limit"], each["cap"], each["invocations"]) for each in rows] == [
        ("max_turns", "9", 2),
        ("no limits", None, 1),
    ]
    assert len({each[day] for each in rows for day in ("first_day", "last_day")}) == 1
    assert not asked(capsys, "policies", "--where", "agent=b")["limits"]


def test_period_of_limit_ends_when_agent_runs_without_it() -> None:
    """A day without invocations ends none, and a second cap of a day begins its own."""
    old: Cap = ("max_turns", "9", "halt", None, None)
    new: Cap = ("max_turns", "5", "halt", None, None)
    days: dict[str, Counter[Cap]] = {
        "2026-11-01": Counter({old: 2}),
        "2026-11-03": Counter({old: 1, new: 1}),
        "2026-11-04": Counter({new: 4}),
        "2026-11-05": Counter({old: 3}),
    }
    assert sorted(periods(days)) == [
        (("2026-11-01", "2026-11-03"), old, 3),
        (("2026-11-03", "2026-11-04"), new, 5),
        (("2026-11-05", "2026-11-05"), old, 3),
    ]


def test_versions_of_the_policy_file_are_recorded(
    ledger: LedgerFile,
    policy: Path,
    make_agent: MakeAgent,
    fake_time: FakeTime,
    faulty: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When each was read, its owner and digest, whether it was accepted, and what it loosened."""
    agent = make_agent(ScriptedModel([says("x")] * 5))
    texts = [f"defaults: {{limits: {{max_turns: {cap}}}}}" for cap in (5, 4, 50, "many", 3)]
    for text in texts:
        policy.write_text(text)
        fake_time.advance(2)
        if text is texts[0]:
            enable()
        agent("go")
    versions = asked(capsys, "policies")["versions"]
    assert [(each["accepted"], each["loosened"]) for each in versions] == [
        ("yes", None),
        ("yes", "nothing"),
        ("yes", "all agents: max_turns 4 -> 50"),
        ("no", "nothing"),
        ("yes", "nothing"),
    ]
    assert [each["digest"] for each in versions] == [
        hashlib.sha256(text.encode()).hexdigest() for text in texts
    ]
    facts = {(each["host"], each["path"], each["owner"]) for each in versions}
    assert facts == {(socket.gethostname(), str(policy), policy.owner())}
    assert main(["audit", "policies"]) == 0
    assert "who edited it is not known" in capsys.readouterr().out


def test_processes_of_a_host_record_a_version_once(
    ledger: LedgerFile, policy: Path, make_agent: MakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reads the file at its start; without an invocation, nothing is written."""
    policy.write_text("defaults: {limits: {max_turns: 5}}")
    for _ in range(2):
        enable()
        disable()
    assert not ledger.path.exists()
    for _ in range(2):
        enable()
        make_agent(ScriptedModel([says("x")]))("go")
        disable()
    assert len(ledger.rows("policies")) == 1
    assert len(asked(capsys, "policies")["versions"]) == 1


def test_invocations_without_a_known_start_have_no_limits(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not known that there were none."""
    observer = LedgerObserver(ledger.address)
    observer(stop_of(Invocation(agent="a", id="1" * 32, root_id="1" * 32), Entry()))
    observer.close()
    (row,) = asked(capsys, "policies")["limits"]
    assert (row["limit"], row["cap"], row["source"]) == ("not recorded", None, None)
