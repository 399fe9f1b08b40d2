"""One-time messages: the limits of a process, agents without limits, and no limits at all."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits import Limits, LimitsPlugin, enable
from otel_limits.cli import main
from otel_limits.testing import ScriptedModel, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import MakeAgent


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages about the limits of the process."""
    return [text for text in caplog.messages if text.startswith("otel-limits: enforcing ")]


@pytest.mark.usefixtures("source")
def test_first_call_logs_its_limits(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Agent, limits, action, and how it is followed; the second call says nothing."""
    caplog.set_level(logging.INFO, "otel_limits")
    enable(Limits(max_turns=30, max_tool_calls=5), action="ask", tree=Limits(max_turns=50))
    for _ in range(2):
        make_agent(ScriptedModel([says("done")]), name="research")("go")
    way = "hooks" if "hooks" in request.node.name else "spans"
    limits = "max_turns=30, max_tool_calls=5, tree_max_turns=50"
    assert logged(caplog) == [
        f"otel-limits: enforcing {limits} on agent 'research' (action=ask, source={way})"
    ]


def test_agents_that_start_concurrently_log_the_limits_once(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread starts its agent while the first one logs."""
    caplog.set_level(logging.INFO, "otel_limits")
    enable(Limits(max_turns=30))
    starts = [lambda: make_agent(ScriptedModel([says("done")]), name="research")("go")] * 3

    def start_another(record: logging.LogRecord) -> bool:
        if starts and record.getMessage().startswith("otel-limits: enforcing "):
            thread = threading.Thread(target=starts.pop())
            thread.start()
            thread.join()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [start_another])
    starts.pop()()
    assert len(starts) == 1
    assert len(logged(caplog)) == 1


def test_quiet_logs_nothing(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_LIMITS_QUIET is for those who know."""
    caplog.set_level(logging.INFO, "otel_limits")
    monkeypatch.setenv("OTEL_LIMITS_QUIET", "true")
    enable(Limits(max_turns=30))
    make_agent(ScriptedModel([says("done")]))("go")
    assert logged(caplog) == []


def test_an_agent_without_a_limit_is_warned_about_once(
    make_agent: MakeAgent, warnings_logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first call, also where everything else is to be quiet."""
    monkeypatch.setenv("OTEL_LIMITS_QUIET", "true")
    enable()
    for name in ("research", "writer", "research"):
        make_agent(ScriptedModel([says("done")]), name=name)("go")
    told = [text for text in warnings_logged() if "No limits set" in text]
    assert [name for text in told for name in ("research", "writer") if name in text] == [
        "research",
        "writer",
    ]


@pytest.mark.parametrize(
    "arguments",
    [{"limits": Limits(max_turns=3)}, {"tree": Limits(max_turns=3)}],
    ids=["limit", "tree"],
)
def test_an_agent_with_a_limit_is_not(
    make_agent: MakeAgent, warnings_logged: Callable[[], list[str]], arguments: dict[str, Any]
) -> None:
    """A limit of its budget tree is one."""
    enable(**arguments)
    make_agent(ScriptedModel([says("done")]))("go")
    assert warnings_logged() == []


def test_a_quota_is_a_limit(
    make_agent: MakeAgent,
    warnings_logged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It stops an agent, too."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {all: {tokens: 1000000, window: day}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    agent = make_agent(ScriptedModel([says("done")]))
    asyncio.run(agent.invoke_async("go"))
    assert warnings_logged() == []


@pytest.mark.parametrize(
    "defaults", ["", "defaults: {limits: {max_turns: 9}}\n"], ids=["none", "default"]
)
def test_a_misspelled_agent_of_the_policy_file_is_named(
    make_agent: MakeAgent,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    defaults: str,
) -> None:
    """Its limits apply to no agent; a glob that matches is no mistake."""
    caplog.set_level(logging.INFO, "otel_limits")
    policy = tmp_path / "policy.yaml"
    agents = "{researcher: {limits: {max_turns: 3}}, 'write*': {limits: {max_turns: 3}}}"
    policy.write_text(f"{defaults}agents: {agents}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    for name in ("reseacher", "writer"):
        make_agent(ScriptedModel([says("done")]), name=name)("go")
    named = [text for text in caplog.messages if "The policy file names" in text]
    assert len(named) == 1
    assert named[0].endswith(". The policy file names 'researcher', not 'reseacher'.")


@pytest.mark.parametrize(
    ("policy", "exempt"),
    [
        ("defaults: {limits: {max_calls_per_tool: {serach: 2, fetch: 1}}}", ""),
        ("{tools: {serach: {exempt: true}, fetch: {action: refuse}}}", ""),
        ("{}", "serach,fetch"),
    ],
    ids=["cap", "section", "variable"],
)
def test_a_misspelled_tool_of_a_limit_is_named(
    make_agent: MakeAgent,
    warnings_logged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: str,
    exempt: str,
) -> None:
    """At the first call of the tool that may be meant; a tool that exists is no mistake."""
    file = tmp_path / "policy.yaml"
    file.write_text(policy, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(file))
    monkeypatch.setenv("OTEL_LIMITS_EXEMPT_TOOLS", exempt)
    enable(Limits(max_turns=3))
    tools = [
        tool(name=name, description=name)(lambda: "no") for name in ("search", "fetch", "fetc")
    ]
    script = [uses("search"), uses("fetch"), uses("search"), uses("fetc")]
    make_agent(ScriptedModel([*script, says("done")]), name="bot", tools=tools)("go")
    named = [text for text in warnings_logged() if "limits name tool" in text]
    assert named == ["The limits name tool 'serach', but agent 'bot' calls 'search'."]


def test_a_plugin_is_a_limit(
    make_agent: MakeAgent, warnings_logged: Callable[[], list[str]]
) -> None:
    """Limits of its own agent; another one has none."""
    enable()
    make_agent(ScriptedModel([says("x")]), plugins=[LimitsPlugin(Limits(max_turns=3))])("go")
    assert warnings_logged() == []
    make_agent(ScriptedModel([says("x")]), name="other")("go")
    assert len(warnings_logged()) == 1


def test_check_prints_the_same(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It is not an error: metrics alone need no limit."""
    assert main(["check"]) == 0
    assert "No limits set for agents." in capsys.readouterr().err
    policy = tmp_path / "limits.yaml"
    policy.write_text("defaults: {max_turn: 3}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["check"]) == 1
    said = capsys.readouterr().err
    assert "limits.yaml was rejected, so none of its limits apply." in said
    assert "No limits set" not in said
    monkeypatch.delenv("OTEL_LIMITS_POLICY")
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "3")
    assert main(["check"]) == 0
    assert capsys.readouterr().err == ""


def test_the_warnings_are_bounded(warnings_logged: Callable[[], list[str]]) -> None:
    """A program that makes up names does not fill its log, or memory."""
    from otel_limits.core.policy import Policy
    from otel_limits.runs.registry import LIVE

    enable()
    for number in range(150):
        LIVE.start(f"agent {number}", Policy()).finish("end_turn")
    assert len([text for text in warnings_logged() if "No limits set" in text]) == 100


def test_the_facts_say_it_too(make_agent: MakeAgent, events: list[otel_limits.Event]) -> None:
    """The event of a starting invocation."""
    enable(Limits(max_turns=3), tree=Limits(max_turns=5), action="ask", observers=[events.append])
    make_agent(ScriptedModel([uses("search"), says("done")]))("go")
    started = next(event for event in events if isinstance(event, otel_limits.Started))
    assert dict(started.tree) == {"tree_max_turns": 5}
    assert (started.has_quotas, started.configured_action) == (False, "ask")
