"""Runs with quotas that wait, with a ledger, and whose caller stops waiting."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest
from agents import Runner, RunState, SQLiteSession, function_tool

from otel_limits import Event, Limits, ModelCall, QuotaWait, Stop, disable, enable, kill
from otel_limits.cli.parser import main
from otel_limits.runs.conversations import conversation_hash
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedAgentsModel, says, uses
from tests.ledger.otlp import line
from tests.openai_agents.runs import (
    CALLS,
    UNTRACED,
    agent,
    halt_of,
    looping,
    streamed,
    unanswered,
)

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

each_way = pytest.mark.parametrize("how", CALLS)
each_kind = pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])


def running(agent: Any, *, is_streamed: bool) -> Any:
    """Start a run."""
    return streamed(agent) if is_streamed else Runner.run(agent, "go", run_config=UNTRACED)


@each_way
def test_quota_that_waits_delays_a_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Its calls are sent once there is room for them."""
    policy = tmp_path / "policy.yaml"
    quota = "{model_calls: 2, window: PT1S, on_exceeded: wait, max_wait: 30s}"
    policy.write_text(f"quotas: {{calls: {quota}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_turns=9, observers=[events.append])
    model = ScriptedAgentsModel([*[uses("search")] * 4, says("done")])
    assert CALLS[how](agent(model)).final_output == "done"
    assert [each for each in events if isinstance(each, QuotaWait)]


@each_kind
def test_kill_ends_a_wait_for_a_quota(
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """The operator need not wait for the window."""
    policy = tmp_path / "policy.yaml"
    quota = "{model_calls: 1, window: PT1H, on_exceeded: wait, max_wait: 2h}"
    policy.write_text(f"quotas: {{calls: {quota}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_turns=9, observers=[events.append])
    model = looping()

    async def main() -> Any:
        task = asyncio.create_task(running(agent(model), is_streamed=is_streamed))
        while not any(isinstance(each, QuotaWait) for each in events):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        kill(agent="boss")
        return await task

    assert halt_of(asyncio.run(main())).reason == "killed"
    assert model.calls == 1


class Waiting(ScriptedAgentsModel):
    """A model that never answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.is_asked = asyncio.Event()

    async def get_response(self, *_: Any, **__: Any) -> Any:
        """Wait."""
        self.is_asked.set()
        await asyncio.sleep(60)

    async def stream_response(self, *_: Any, **__: Any) -> Any:
        """Do the same before the first event."""
        self.is_asked.set()
        await asyncio.sleep(60)
        yield


@each_kind
def test_run_whose_caller_stops_waiting_is_aborted(
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    events: list[Event],
) -> None:
    """The vendor may bill the call, and nothing remains of the run."""
    enable(tree=Limits(max_turns=9), observers=[events.append])

    async def main() -> None:
        model = Waiting()
        task = asyncio.create_task(running(agent(model), is_streamed=is_streamed))
        await model.is_asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [each.reason for each in events if isinstance(each, Stop)] == ["aborted"]
    assert [each.kind for each in events if isinstance(each, ModelCall)] == ["failed"]
    assert len(LIVE) == 0


@each_way
def test_ledger_has_each_call_of_a_handoff_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its agent, in one tree and one session."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    enable(tree=Limits(max_turns=4))
    second = agent(looping(model="m2"), name="second")
    script = [uses("search"), uses("transfer_to_second")]
    first = agent(ScriptedAgentsModel(script, "m1"), handoffs=[second])
    session = SQLiteSession("visit")
    CALLS[how](first, session=session)
    session.close()
    disable()
    ledger = sqlite3.connect(tmp_path / "ledger.db")
    query = "SELECT agent, model FROM otel_limits_model_calls ORDER BY id"
    assert ledger.execute(query).fetchall() == [("boss", "m1")] * 2 + [("second", "m2")] * 2
    query = "SELECT agent, session_id, reason FROM otel_limits_invocations ORDER BY agent"
    assert ledger.execute(query).fetchall() == [
        ("boss", "visit", "handoff"),
        ("second", "visit", "max_turns"),
    ]
    ledger.close()


def test_conversation_of_a_session_is_the_same_live_and_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    """Its hash is that of the agent and the session's ID, which the span has."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", f"sqlite:///{tmp_path}/live.db")
    enable(max_turns=4)
    session = SQLiteSession("visit")
    CALLS["run"](agent(ScriptedAgentsModel([says("x")])), session=session)
    session.close()
    disable()
    (tmp_path / "spans.jsonl").write_text(line(spans.get_finished_spans()), encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", f"sqlite:///{tmp_path}/imported.db")
    assert main(["ledger", "import", str(tmp_path / "spans.jsonl")]) == 0
    found = []
    for name in ("live", "imported"):
        ledger = sqlite3.connect(tmp_path / f"{name}.db")
        found += ledger.execute("SELECT conversation FROM otel_limits_invocations").fetchall()
        ledger.close()
    assert found == [(conversation_hash("boss", "visit"),)] * 2


@each_way
def test_run_that_waits_after_a_handoff_continues_with_its_second_agent(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program resumes it with the first one, whose limits do not apply."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("agents: {second: {limits: {max_turns: 2}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_turns=9)

    @function_tool(needs_approval=True)
    def delete() -> str:
        """Delete."""
        return "deleted"

    model = ScriptedAgentsModel([uses("delete"), *[uses("search")] * 9])
    second = agent(model, delete, name="second")
    first = agent(ScriptedAgentsModel([uses("transfer_to_second")]), handoffs=[second])
    session = SQLiteSession("1", tmp_path / "session.db")
    text = json.dumps(CALLS[how](first, session=session).to_state().to_json())
    state: Any = asyncio.run(RunState.from_json(first, json.loads(text)))
    state.approve(state.get_interruptions()[0])
    stop = halt_of(CALLS[how](first, state, session=session))
    assert (stop.agent, stop.reason, stop.turns, stop.tool_calls) == ("second", "max_turns", 1, 2)
    items: list[Any] = asyncio.run(session.get_items())
    assert unanswered(items) == []
    session.close()
