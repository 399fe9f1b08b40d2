"""Limits of agents of the OpenAI Agents SDK hold exactly, however an agent is run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
from agents import (
    Agent,
    AgentHooks,
    AgentsException,
    GuardrailFunctionOutput,
    MaxTurnsExceeded,
    ModelResponse,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    RunHooks,
    Runner,
    RunState,
    SQLiteSession,
    Usage,
    function_tool,
    input_guardrail,
)
from agents.models.interface import Model
from openai.types.responses import ResponseTextDeltaEvent
from opentelemetry.trace import StatusCode
from pydantic import BaseModel

import otel_limits
from otel_limits import (
    Event,
    Halt,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    ToolCall,
    enable,
    kill,
    stop_of,
    stops_of,
)
from otel_limits.testing import (
    FakeTime,
    ScriptedAgentsModel,
    endless,
    fails,
    says,
    tokens,
    uses,
)
from tests.features.behaviours import spans_of
from tests.openai_agents.runs import (
    CALLS,
    STEPS,
    UNTRACED,
    agent,
    halt_of,
    looping,
    unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

each_way = pytest.mark.parametrize("how", CALLS)


class Opinion(BaseModel):
    """The output of an agent that must not be text."""

    good: bool


# --- limits ---------------------------------------------------------------------------------------


def test_model_is_warned_one_call_before_a_loop_limit() -> None:
    """It gets one turn to change course; the stored conversation is unchanged."""
    enable(max_identical_tool_calls=3)
    model = looping()
    result = CALLS["run"](agent(model))
    told = [each["output"] for each in model.requests[-1] if "output" in each]
    assert "nothing about x" in told[-1]
    assert told[-1] != "nothing about x"
    stored = [each["output"] for each in result.to_input_list() if "output" in each]
    assert set(stored) == {"nothing about x"}


def test_budget_hints_are_at_the_end_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything before stays identical, so that the vendor's cache still applies."""
    monkeypatch.setenv("OTEL_LIMITS_BUDGET_HINTS", "true")
    enable(max_turns=3)
    model = looping()
    CALLS["run"](agent(model))
    assert "2 of 3 (max_turns)" in str(model.requests[1][-1]["content"])


# --- the history ----------------------------------------------------------------------------------


@each_way
def test_session_of_a_halted_run_goes_on(how: str) -> None:
    """It holds what the SDK would have stored, and the next run is a new invocation."""
    enable(max_turns=2)
    model = looping()
    session = SQLiteSession("1")
    CALLS[how](agent(model), session=session)
    items: list[Any] = asyncio.run(session.get_items())
    kinds = [each.get("type", each.get("role")) for each in items]
    assert kinds == ["user", *["function_call", "function_call_output"] * 2, "message"]
    assert "otel_limits" not in json.dumps(items)
    result = CALLS[how](agent(model), "more", session=session)
    assert model.calls == 4
    assert len(stops_of(result)) == 1
    assert unanswered(model.requests[-1]) == []
    session.close()


def test_input_list_of_a_halted_run_has_no_mark() -> None:
    """Every field of an item is sent to the API, which refuses unknown ones."""
    enable(max_turns=1)
    result = CALLS["run"](agent(looping()))
    assert "otel_limits" not in json.dumps(result.to_input_list())
    state = json.dumps(result.to_state().to_json())
    assert "max_turns_reached" not in state


@each_way
def test_typed_output_raises_the_error_of_both(how: str) -> None:
    """Our text is no value of its type, and programs catch the SDK's exceptions or ours."""
    enable(max_turns=2)
    model = looping()
    session = SQLiteSession("1")
    with pytest.raises(otel_limits.MaxTurnsReachedException) as raised:
        CALLS[how](agent(model, output_type=Opinion), session=session)
    assert isinstance(raised.value, AgentsException)
    assert isinstance(raised.value, LimitReachedError)
    error: Any = raised.value
    assert (model.calls, halt_of(error).reason, error.max_turns) == (2, "max_turns", 2)
    assert [each.type for each in error.run_data.new_items][-1] == "tool_call_output_item"
    items: list[Any] = asyncio.run(session.get_items())
    assert unanswered(items) == []
    session.close()


def test_error_of_both_survives_pickling() -> None:
    """Workers send exceptions to processes that may not have the SDK."""
    enable(max_turns=1)
    with pytest.raises(LimitReachedError) as raised:
        CALLS["run"](agent(looping(), output_type=Opinion))
    copy = pickle.loads(pickle.dumps(raised.value))  # noqa: S301  our own
    assert type(copy) is otel_limits.MaxTurnsReachedException
    assert str(copy) == str(raised.value)


def test_chain_of_responses_ends_on_the_vendors_last_one() -> None:
    """Our response is not stored at the vendor, so that nothing may refer to it."""
    enable(max_turns=2)
    for how in ("run", "run_streamed"):
        result = CALLS[how](agent(looping()), auto_previous_response_id=True)
        assert result.last_response_id == "resp-2"


# --- actions --------------------------------------------------------------------------------------


@each_way
def test_wrap_up_of_a_typed_agent_gives_its_type(how: str) -> None:
    """One last call without tools can write a value, which our text cannot be."""
    enable(max_turns=1, action="wrap_up")
    model = ScriptedAgentsModel([uses("search"), says('{"good": true}')])
    result = CALLS[how](agent(model, output_type=Opinion))
    assert result.final_output == Opinion(good=True)
    assert halt_of(result).action == "wrapped_up"


@each_way
def test_invalid_last_answer_of_a_typed_agent_raises(how: str) -> None:
    """The limit's error, not one that blames the model's format."""
    enable(max_turns=1, action="wrap_up")
    model = ScriptedAgentsModel([uses("search"), says("not JSON")])
    with pytest.raises(otel_limits.MaxTurnsReachedException, match="final answer failed"):
        CALLS[how](agent(model, output_type=Opinion))
    assert model.calls == 2


# --- retries, and the SDK's own limits ------------------------------------------------------------


RETRIED = ModelSettings(
    retry=ModelRetrySettings(
        max_retries=3, policy=lambda _: True, backoff={"initial_delay": 0.0, "jitter": False}
    )
)


@each_way
def test_failed_calls_and_their_retries_count(how: str, events: list[Event]) -> None:
    """Every request is a model call; a failed one is no turn."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedAgentsModel([fails(RuntimeError("down")), says("done")])
    CALLS[how](agent(model, model_settings=RETRIED))
    called = [each for each in events if isinstance(each, ModelCall)]
    assert [each.kind for each in called] == ["failed", "measured"]
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (stop.turns, stop.model_calls) == (1, 2)


TOO_MANY_STEPS = "This request could not be completed because it took too many steps."


@each_way
def test_last_answer_is_retried_as_the_answer_before(how: str) -> None:
    """Each answer needs two attempts, and the third attempt at the last one is a halt."""
    enable(max_turns=1, action="wrap_up")
    down = fails(RuntimeError("down"))
    for last, text in (([down, says("what I know")], "what I know"), ([down] * 9, TOO_MANY_STEPS)):
        model = ScriptedAgentsModel([down, uses("search"), *last])
        result = CALLS[how](agent(model, model_settings=RETRIED))
        assert (model.calls, halt_of(result).model_calls) == (4, 4)
        assert result.final_output == text
        assert otel_limits.is_synthetic(result) == (text == TOO_MANY_STEPS)


@each_way
def test_nothing_retries_a_halt(how: str, events: list[Event]) -> None:
    """A halt is not an error of the model; one that is raised is published once."""
    enable(max_turns=2, observers=[events.append])
    model = looping()
    with pytest.raises(LimitReachedError):
        CALLS[how](agent(model, output_type=Opinion, model_settings=RETRIED))
    assert model.calls == 2
    assert len([each for each in events if isinstance(each, Halt)]) == 1


@each_way
def test_max_turns_of_the_sdk_stays_its_own(how: str, events: list[Event]) -> None:
    """The exception is the SDK's, without our stop."""
    enable(max_turns=9, observers=[events.append])
    with pytest.raises(MaxTurnsExceeded) as raised:
        CALLS[how](agent(looping()), max_turns=2)
    assert stop_of(raised.value) is None
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns_exceeded"]


@each_way
def test_lower_max_turns_of_the_sdk_is_reported_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise our limit seems to be ignored."""
    enable(max_turns=9)
    for _ in range(2):
        with pytest.raises(MaxTurnsExceeded):
            CALLS[how](agent(looping(), name=f"impatient {how}"), max_turns=2)
    (told,) = [each for each in caplog.messages if "Agents SDK ended" in each]
    assert "its own max_turns=2, before max_turns=9 of otel-limits" in told
    assert "Set max_turns=10 in Runner.run()" in told


def test_higher_max_turns_of_the_sdk_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Then our limit decides."""
    enable(max_turns=2)
    with contextlib.suppress(LimitReachedError):
        CALLS["run"](agent(looping()), max_turns=9)
    assert "Agents SDK ended" not in caplog.text


@each_way
def test_handler_of_max_turns_is_called(how: str) -> None:
    """The application's own final answer at the SDK's limit."""
    enable(max_turns=9)
    handlers = {"max_turns": lambda _: "ours"}
    result = CALLS[how](agent(looping()), max_turns=2, error_handlers=handlers)
    assert (result.final_output, stop_of(result)) == ("ours", None)


# --- trees ----------------------------------------------------------------------------------------


@each_way
def test_tree_cap_holds_over_parallel_agents(how: str) -> None:
    """Twenty concurrent agents share the rest of the budget exactly."""
    enable(tree=Limits(max_turns=23))
    helper, boss = looping(), ScriptedAgentsModel(endless(uses(*["ask"] * 20)))

    @function_tool
    async def ask() -> str:
        """Call a colleague."""
        result = await Runner.run(agent(helper, name="helper"), "?", run_config=UNTRACED)
        return str(result.final_output)

    CALLS[how](agent(boss, ask))
    assert boss.calls + helper.calls == 23


def test_tree_cap_holds_over_gathered_runs() -> None:
    """Runs that a tool starts together belong to the tool's agent."""
    enable(tree=Limits(max_turns=8))
    helper, boss = looping(), ScriptedAgentsModel(endless(uses("ask")))

    @function_tool
    async def ask() -> str:
        """Call colleagues."""
        runs = [Runner.run(agent(helper, name="helper"), "?", run_config=UNTRACED)] * 1
        runs += [Runner.run(agent(helper, name=f"h{n}"), "?", run_config=UNTRACED) for n in "123"]
        return str([each.final_output for each in await asyncio.gather(*runs)])

    CALLS["run"](agent(boss, ask))
    assert boss.calls + helper.calls == 8


@each_way
def test_halted_helper_whose_answer_is_the_final_output_is_a_stop(how: str) -> None:
    """The end user reads its text, not that for a model."""
    enable(max_turns=2)
    boss = ScriptedAgentsModel([uses("ask", arguments={"input": "?"})])
    tool = agent(looping(), name="helper").as_tool("ask", "Ask.", max_turns=STEPS)
    behavior: Any = {"stop_at_tool_names": ["ask"]}
    result = CALLS[how](agent(boss, tool, tool_use_behavior=behavior))
    assert (halt_of(result).agent, halt_of(result).reason) == ("helper", "max_turns")
    assert result.final_output.startswith("This request could not be completed")


def test_agent_of_a_guardrail_is_a_member_of_the_tree() -> None:
    """It runs at the same time as the first model call."""
    enable(tree=Limits(max_turns=4))
    guard, boss = ScriptedAgentsModel([uses("search"), says("fine")]), looping()

    @input_guardrail
    async def check(*_: Any) -> GuardrailFunctionOutput:
        """Ask another agent."""
        result = await Runner.run(agent(guard, name="guard"), "?", run_config=UNTRACED)
        return GuardrailFunctionOutput(result.final_output, tripwire_triggered=False)

    CALLS["run"](agent(boss, input_guardrails=[check]))
    assert guard.calls + boss.calls == 4


# --- hand-offs ------------------------------------------------------------------------------------


@each_way
def test_tree_cap_holds_over_a_handoff(how: str, events: list[Event]) -> None:
    """The run continues with another agent, within the tree of the first one."""
    enable(tree=Limits(max_turns=5), observers=[events.append])
    second = looping()
    first = ScriptedAgentsModel([uses("search"), uses("search"), uses("transfer_to_second")])
    result = CALLS[how](agent(first, handoffs=[agent(second, name="second")]))
    assert (first.calls, second.calls) == (3, 2)
    assert [each.agent for each in stops_of(result)] == ["second"]
    assert [(each.agent, each.reason) for each in events if isinstance(each, Stop)] == [
        ("second", "max_turns"),
        ("boss", "handoff"),
    ]
    assert "transfer_to_second" not in [each.tool for each in events if isinstance(each, ToolCall)]


@each_way
def test_exception_after_a_handoff_is_on_the_span_of_each_agent(how: str) -> None:
    """It ends the run, which the invocation of the first agent contains."""
    enable(limits=Limits(max_turns=2), action="raise")
    first = agent(
        ScriptedAgentsModel([uses("transfer_to_second")]),
        handoffs=[agent(looping(), name="second")],
    )
    made = spans_of(lambda: CALLS[how](first))
    ends = {
        each.name: (each.attributes["error.type"], each.status.status_code)
        for each in made["invoke_agent"]
    }
    failed = ("MaxTurnsReachedException", StatusCode.ERROR)
    assert ends == {"invoke_agent boss": failed, "invoke_agent second": failed}


@each_way
def test_limits_by_name_follow_the_active_agent(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second agent has its own limits, and its own count."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("agents: {second: {limits: {max_turns: 2}}, boss: {limits: {max_turns: 9}}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    second = looping()
    first = ScriptedAgentsModel([*[uses("search")] * 3, uses("transfer_to_second")])
    result = CALLS[how](agent(first, handoffs=[agent(second, name="second")]))
    assert (first.calls, second.calls) == (4, 2)
    assert halt_of(result).agent == "second"


@each_way
def test_last_answer_after_a_handoff_is_that_of_the_active_agent(how: str) -> None:
    """The first agent, whose tree is spent, is no longer active; no hand-off can follow."""
    enable(tree=Limits(max_turns=3), action="wrap_up")
    second = ScriptedAgentsModel([uses("search"), uses("search"), says("what I know")])
    first = ScriptedAgentsModel([uses("transfer_to_second")])
    third = agent(looping(), name="third")
    result = CALLS[how](agent(first, handoffs=[agent(second, name="second", handoffs=[third])]))
    assert (result.final_output, second.calls) == ("what I know", 3)
    assert (halt_of(result).action, second.tool_specs[-1]) == ("wrapped_up", [])


def test_events_of_a_handoff_are_those_of_each_agent(events: list[Event]) -> None:
    """The ledger shows what each agent has cost, once."""
    enable(observers=[events.append], max_turns=9)
    second = ScriptedAgentsModel([uses("search"), says("done")], model="other")
    first = ScriptedAgentsModel([uses("transfer_to_second")])
    CALLS["run"](agent(first, handoffs=[agent(second, name="second")]))
    called = [(each.invocation.agent, each.model) for each in events if isinstance(each, ModelCall)]
    assert called == [("boss", "scripted"), ("second", "other"), ("second", "other")]
    roots = {each.invocation.root_id for each in events if isinstance(each, ModelCall)}
    assert len(roots) == 1


def test_kill_of_the_first_agent_ends_the_one_after_a_handoff(events: list[Event]) -> None:
    """Its invocation contains the other one, whose call is interrupted."""
    enable(max_turns=9, observers=[events.append])
    first = ScriptedAgentsModel([uses("transfer_to_second")])
    slow = agent(SlowModel(lambda: kill(agent="boss")), name="second")
    assert halt_of(CALLS["run"](agent(first, handoffs=[slow]))).reason == "killed"
    assert ends_of(events) == [("second", "killed", "killed"), ("boss", "killed", "killed")]
    assert [each.synthetic for each in stops_in(events)] == [False, True]  # there is one message


def test_kill_of_the_first_agent_after_the_last_call_is_that_of_both(events: list[Event]) -> None:
    """The run ends as killed, although the active agent has answered."""
    enable(max_turns=9, observers=[events.append])

    class Killing(AgentHooks[Any]):
        async def on_end(self, *_: Any) -> None:
            kill(agent="boss")

    first = ScriptedAgentsModel([uses("transfer_to_second")])
    second = agent(ScriptedAgentsModel([says("done")]), name="second", hooks=Killing())
    CALLS["run"](agent(first, handoffs=[second]))
    assert ends_of(events) == [("second", "killed", "killed"), ("boss", "killed", "killed")]


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_kill_of_all_agents_is_that_of_the_first_one_after_a_handoff(
    action: Any, events: list[Event]
) -> None:
    """It was to end as well, so it has not only handed off."""
    enable(max_turns=9, action=action, observers=[events.append])
    first = ScriptedAgentsModel([uses("transfer_to_second")])
    slow = agent(SlowModel(lambda: kill(all=True)), name="second")
    with contextlib.suppress(LimitReachedError):
        CALLS["run"](agent(first, handoffs=[slow]))
    assert ends_of(events) == [("second", "killed", "killed"), ("boss", "killed", "killed")]


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_deadline_of_the_first_agent_ends_the_one_after_a_handoff(
    action: Any, events: list[Event]
) -> None:
    """Both end by it, and the run has failed, so that it is not repeated forever."""
    enable(
        max_duration_seconds=30, max_repeated_failures=2, action=action, observers=[events.append]
    )

    done = {"halt": "halted", "raise": "raised"}[action]
    both = [("second", "max_duration", done), ("boss", "max_duration", done)]
    with FakeTime() as clock:
        run_past_deadline(clock)
        run_past_deadline(clock)
        assert ends_of(events) == both * 2
        run_past_deadline(clock)
    assert ends_of(events)[4:] == [("boss", "loop_detected", done)]


def test_operator_of_an_agent_that_ended_with_the_first_one_reads_its_name(
    events: list[Event],
) -> None:
    """The limit is that of the first agent, so the own limits of the second one are no cause."""
    enable(max_duration_seconds=30, observers=[events.append])
    with FakeTime() as clock:
        run_past_deadline(clock)
    second, boss = (each.sentence for each in stops_in(events))
    assert "The run ended with its first agent, 'boss'." in second
    assert "first agent" not in boss


def run_past_deadline(clock: FakeTime) -> None:
    """Run an agent for 10 seconds, and for 25 more the one to which it hands off."""

    @function_tool
    def wait() -> str:
        """Take some time."""
        clock.advance(10)
        return "done"

    first = ScriptedAgentsModel([uses("wait"), uses("transfer_to_second")])
    slow = agent(SlowModel(lambda: clock.advance(25)), name="second")
    with contextlib.suppress(LimitReachedError):
        CALLS["run"](agent(first, wait, handoffs=[slow]))


def stops_in(events: list[Event]) -> list[Stop]:
    """The ends of all agents, in their order."""
    return [each for each in events if isinstance(each, Stop)]


def ends_of(events: list[Event]) -> list[tuple[str, str, str]]:
    """The agent, the reason and the action of each end."""
    return [(each.agent, each.reason, each.action) for each in stops_in(events)]


# --- quotas, kills and deadlines ------------------------------------------------------------------


def test_quota_by_metadata_of_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's quota follows the run's own metadata."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 1, window: P1D, key: attribute.tenant}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    for tenant in ("a", "b"):
        model = looping()
        config = RunConfig(tracing_disabled=True, trace_metadata={"tenant": tenant})
        CALLS["run"](agent(model), run_config=config)
        assert model.calls == 1


class SlowModel(ScriptedAgentsModel):
    """A model that never answers."""

    waiting = 0

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        super().__init__([])
        self.on_call = on_call

    async def hang(self) -> None:
        """Wait forever."""
        SlowModel.waiting += 1
        self.on_call()
        await asyncio.Event().wait()

    async def get_response(self, *_: Any, **__: Any) -> Any:
        """Wait."""
        await self.hang()

    async def stream_response(self, *_: Any, **__: Any) -> Any:
        """Wait."""
        await self.hang()
        yield None


# --- approvals ------------------------------------------------------------------------------------


def test_interrupted_run_goes_on_from_its_state(events: list[Event]) -> None:
    """A human approves a tool, in another process; the rest is a new invocation of its task."""
    enable(max_turns=2, observers=[events.append])
    ran: list[str] = []

    @function_tool(needs_approval=True)
    def delete() -> str:
        """Delete."""
        ran.append("delete")
        return "deleted"

    model = ScriptedAgentsModel([uses("delete"), *[uses("search")] * 9])
    boss = agent(model, delete)

    async def main() -> Any:
        result: Any = await Runner.run(boss, "go", run_config=UNTRACED)
        assert len(result.interruptions) == 1
        state: Any = await RunState.from_string(boss, result.to_state().to_string())
        state.approve(state.get_interruptions()[0])
        return await Runner.run(boss, state, run_config=UNTRACED)

    result = asyncio.run(main())
    assert ran == ["delete"]
    assert model.calls == 2
    assert halt_of(result).turns == 1
    assert [each.reason for each in events if isinstance(each, Stop)] == ["interrupt", "max_turns"]
    used = [(each.tool, each.status) for each in events if isinstance(each, ToolCall)]
    assert used == [("delete", "success"), ("search", "success")]


def test_refused_tool_that_waits_for_a_human_counts_once(events: list[Event]) -> None:
    """In the run that answers its request, not in the one that was interrupted before."""
    enable(max_calls_per_tool={"delete": 1}, observers=[events.append])

    @function_tool(needs_approval=True)
    def delete() -> str:
        """Delete."""
        return "deleted"

    boss = agent(ScriptedAgentsModel([uses("delete", "delete"), says("done")]), delete)
    result = CALLS["run"](boss)
    assert not [each for each in events if isinstance(each, ToolCall)]
    state = result.to_state()
    for each in result.interruptions:
        state.approve(each)
    assert CALLS["run"](boss, state).final_output == "done"
    used = [(each.tool, each.status) for each in events if isinstance(each, ToolCall)]
    assert used == [("delete", "success"), ("delete", "refused")]


# --- the rest of a program ------------------------------------------------------------------------


def test_model_in_a_tool_is_a_side_call(events: list[Event]) -> None:
    """It counts, but is no turn; its refusal reaches the tool."""
    enable(max_model_calls=3, observers=[events.append])
    inner = ScriptedAgentsModel(endless(says("a summary")))
    refused: list[str] = []

    @function_tool
    async def summarize() -> str:
        """Summarize."""
        try:
            answer = await inner.get_response(
                None,
                "text",
                ModelSettings(),
                [],
                None,
                [],
                None,
                previous_response_id=None,
                conversation_id=None,
                prompt=None,
            )
        except LimitReachedError as error:
            refused.append(str(error))
            return "no summary"
        return str(answer.response_id)

    model = ScriptedAgentsModel(endless(uses("summarize")))
    result = CALLS["run"](agent(model, summarize))
    assert (model.calls, inner.calls) == (2, 1)
    assert len(refused) == 1
    assert "max_model_calls" in refused[0]
    assert halt_of(result).turns == 2
    assert [each.side for each in events if isinstance(each, ModelCall)] == [False, True, False]


def test_hooks_of_the_application_are_called() -> None:
    """Ours, which follow hand-offs, call each of them once."""
    enable(max_turns=9)
    seen: list[str] = []

    class Hooks(RunHooks[Any]):
        async def on_agent_start(self, *_: Any) -> None:
            seen.append("agent_start")

        async def on_llm_start(self, *_: Any) -> None:
            seen.append("llm_start")

        async def on_llm_end(self, *_: Any) -> None:
            seen.append("llm_end")

        async def on_tool_start(self, *_: Any) -> None:
            seen.append("tool_start")

        async def on_tool_end(self, *_: Any) -> None:
            seen.append("tool_end")

        async def on_agent_end(self, *_: Any) -> None:
            seen.append("agent_end")

    class Own(AgentHooks[Any]):
        async def on_llm_start(self, *_: Any) -> None:
            seen.append("own")

    boss = agent(ScriptedAgentsModel([uses("search"), says("done")]), hooks=Own())
    CALLS["run"](boss, hooks=Hooks())
    first, last = ["llm_start", "own", "llm_end"], ["agent_end"]
    assert seen == ["agent_start", *first, "tool_start", "tool_end", *first, *last]


def test_invalid_hooks_are_rejected_as_before() -> None:
    """The error is the SDK's."""
    enable(max_turns=9)
    with pytest.raises(TypeError, match="Run hooks must be instances of RunHooks"):
        CALLS["run"](agent(looping()), hooks=AgentHooks())


@each_way
def test_tokens_count_once_however_a_model_is_built(how: str, events: list[Event]) -> None:
    """A class may call its parent's method, and a model may call another one."""

    class Derived(ScriptedAgentsModel):
        async def get_response(self, *args: Any, **options: Any) -> Any:
            return await super().get_response(*args, **options)

        async def stream_response(self, *args: Any, **options: Any) -> Any:
            async for event in super().stream_response(*args, **options):
                yield event

    class Router(Model):
        def __init__(self, inner: Model) -> None:
            self.inner = inner

        async def get_response(self, *args: Any, **options: Any) -> Any:
            return await self.inner.get_response(*args, **options)

        async def stream_response(self, *args: Any, **options: Any) -> Any:
            async for event in self.inner.stream_response(*args, **options):
                yield event

    enable(max_turns=9, observers=[events.append])
    model = Derived([uses("search", usage=tokens(40)), says("done", usage=tokens(50))])
    CALLS[how](agent(Router(model)))
    assert [each.usage.total for each in events if isinstance(each, ModelCall)] == [40, 50]


class Drafting(Model):
    """A model that requests a draft of another one, and then for the answer."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner

    async def get_response(self, *args: Any, **options: Any) -> Any:
        """Answer."""
        await self.inner.get_response(*args, **options)
        return await self.inner.get_response(*args, **options)

    async def stream_response(self, *args: Any, **options: Any) -> Any:
        """Answer in parts."""
        async for _ in self.inner.stream_response(*args, **options):
            pass
        async for event in self.inner.stream_response(*args, **options):
            yield event


@each_way
def test_response_that_takes_two_calls_is_one_turn(how: str, events: list[Event]) -> None:
    """Both calls count, and neither keeps a turn from later responses."""
    enable(max_turns=4, observers=[events.append])
    inner = looping()
    stop = halt_of(CALLS[how](agent(Drafting(inner))))
    assert (stop.reason, stop.turns, inner.calls) == ("max_turns", 4, 8)
    measured = [each.usage.total for each in events if isinstance(each, ModelCall)]
    assert len(measured) == 8
    assert stop.usage.total == sum(measured)


@each_way
def test_last_turn_admits_each_call_of_its_response(how: str) -> None:
    """The turn of the first call is that of the second one, too."""
    enable(max_turns=1)
    inner = ScriptedAgentsModel([says("a draft"), says("done")])
    result = CALLS[how](agent(Drafting(inner)))
    assert (result.final_output, inner.calls) == ("done", 2)


def test_responses_requested_together_are_one_turn() -> None:
    """Whichever of them ends last."""

    class Comparing(Drafting):
        async def get_response(self, *args: Any, **options: Any) -> Any:
            both = [self.inner.get_response(*args, **options) for _ in range(2)]
            return (await asyncio.gather(*both))[0]

    enable(max_turns=3)
    inner = looping()
    stop = halt_of(CALLS["run"](agent(Comparing(inner))))
    assert (stop.turns, inner.calls) == (3, 6)


def test_calls_within_that_of_a_guardrail_take_no_turn(events: list[Event]) -> None:
    """Its model is not that of the loop, however many calls it makes."""
    judging = Drafting(ScriptedAgentsModel(endless(says("harmless"))))

    @input_guardrail(run_in_parallel=False)
    async def judge(*_: Any) -> GuardrailFunctionOutput:
        """Query a model."""
        await judging.get_response(None, "?", ModelSettings(), [], None, [], None)
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    enable(max_turns=1, observers=[events.append])
    result = CALLS["run"](agent(ScriptedAgentsModel([says("done")]), input_guardrails=[judge]))
    assert result.final_output == "done"
    assert [each.side for each in events if isinstance(each, ModelCall)] == [True, True, False]


def test_zeros_of_an_own_model_are_estimated_unless_it_states_them(events: list[Event]) -> None:
    """`Usage(requests=1)` equals a usage of zeros, and is what the SDK itself writes for none."""
    unsaid = Usage(requests=1, input_tokens=0, output_tokens=0, total_tokens=0)
    stated = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    responses = [
        ModelResponse(output=[], usage=Usage(), response_id=None),
        ModelResponse(output=[], usage=unsaid, response_id=None),
        ModelResponse(output=[], usage=unsaid, response_id=None, raw_usage=stated),
    ]

    class Silent(ScriptedAgentsModel):
        async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
            return responses.pop(0)

    enable(max_turns=9, observers=[events.append])
    model = Silent([])
    while responses:
        CALLS["run"](agent(model))
    kinds = [each.kind for each in events if isinstance(each, ModelCall)]
    assert kinds == ["estimated", "estimated", "zero_token"]


def test_mixin_with_the_methods_of_a_model_is_tracked() -> None:
    """The class that defines the method need not be a model."""

    class Methods:
        def __init__(self, model: Model) -> None:
            self.model = model

        async def get_response(self, *args: Any, **options: Any) -> Any:
            return await self.model.get_response(*args, **options)

        async def stream_response(self, *_: Any, **__: Any) -> Any:
            yield None

    class Mixed(Methods, Model):
        pass

    enable(max_turns=2)
    model = looping()
    CALLS["run"](agent(Mixed(model)))
    assert model.calls == 2


def test_stream_cancelled_after_a_turn_is_cancelled(events: list[Event]) -> None:
    """The SDK ends it in order, but without an answer."""
    enable(max_turns=9, observers=[events.append])

    async def main() -> None:
        result = Runner.run_streamed(agent(looping()), "go", run_config=UNTRACED)
        async for _ in result.stream_events():
            result.cancel(mode="after_turn")

    asyncio.run(main())
    assert [each.reason for each in events if isinstance(each, Stop)] == ["cancelled"]


def test_stream_shows_the_text_of_a_halt() -> None:
    """A chat page shows what it reads from the stream."""
    enable(max_turns=1, halt_message="Sorry, {agent} stopped.")

    async def main() -> tuple[str, list[str]]:
        result = Runner.run_streamed(agent(looping()), "go", run_config=UNTRACED)
        deltas = ""
        names: list[str] = []
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                deltas += getattr(event.data, "delta", "")
            elif event.type == "run_item_stream_event":
                names.append(event.name)
        return deltas, names

    deltas, names = asyncio.run(main())
    assert deltas == "Sorry, boss stopped."
    assert names == ["tool_called", "tool_output", "message_output_created"]


def test_tripped_guardrail_is_a_reason(events: list[Event]) -> None:
    """Dashboards separate blocked prompts from errors."""
    enable(max_turns=9, observers=[events.append])

    @input_guardrail
    async def block(*_: Any) -> GuardrailFunctionOutput:
        """Block everything."""
        return GuardrailFunctionOutput(None, tripwire_triggered=True)

    with pytest.raises(AgentsException):
        CALLS["run"](agent(looping(), input_guardrails=[block]))
    assert [each.reason for each in events if isinstance(each, Stop)] == ["guardrail"]


@pytest.mark.parametrize("is_tracked", [False, True])
def test_closed_stream_closes_that_of_the_vendor(is_tracked: bool) -> None:  # noqa: FBT001
    """A reader that leaves a stream ends the vendor's connection, also outside of a run."""
    enable(max_turns=3)
    closed: list[bool] = []
    ended: list[bool] = []

    class Endless(ScriptedAgentsModel):
        async def stream_response(self, *_: Any, **__: Any) -> Any:
            try:
                while True:
                    yield ResponseTextDeltaEvent.model_construct(delta="on and on")
            finally:
                closed.append(True)

    async def leave() -> None:
        given: Any = (None, "go", ModelSettings(), [], None, [], None)
        stream = Endless([]).stream_response(*given)
        await anext(stream)
        await stream.aclose()
        ended.extend(closed)  # not when the event loop ends

    async def check(context: Any, agent: Any, given: Any) -> Any:
        await leave()
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    if is_tracked:
        guard = input_guardrail(check)
        CALLS["run"](agent(ScriptedAgentsModel([says("done")]), input_guardrails=[guard]))
    else:
        asyncio.run(leave())
    assert ended == [True]


def test_enable_keeps_coroutine_functions() -> None:
    """Mocks and wrappers of the application call a method as what it is."""
    from agents.run import AgentRunner

    enable(max_turns=1)
    assert isinstance(Mock(spec=AgentRunner).run, AsyncMock)


def test_disable_leaves_the_sdk_as_it_was() -> None:
    """No method of it remains wrapped."""
    from agents.models.openai_responses import OpenAIResponsesModel
    from agents.run import AgentRunner

    enable(max_turns=1)
    enable(max_turns=1)  # as at each later import of a framework, the classes are watched again
    assert hasattr(AgentRunner.run, "__wrapped__")
    assert hasattr(OpenAIResponsesModel.get_response, "__wrapped__")
    otel_limits.disable()
    methods = (AgentRunner.run, AgentRunner.run_streamed, OpenAIResponsesModel.get_response)
    assert not any(hasattr(each, "__wrapped__") for each in methods)
    assert "__init_subclass__" not in vars(Model)


def test_agent_without_limits_is_not_changed() -> None:
    """Without otel-limits nothing of it remains in a run."""
    result = CALLS["run"](Agent(name="boss", model=ScriptedAgentsModel([says("done")])))
    assert (result.final_output, stops_of(result)) == ("done", ())


class Reply(BaseModel):
    """The output of a typed agent."""

    text: str


SHAPES: dict[str, Any] = {
    "agent": lambda: agent(looping()),
    "typed": lambda: agent(looping(), output_type=Reply),
    "hand-off": lambda: Agent(
        name="boss",
        model=ScriptedAgentsModel([uses("transfer_to_other")]),
        handoffs=[agent(looping(), name="other")],
    ),
    "tool-that-answers": lambda: Agent(
        name="boss",
        model=ScriptedAgentsModel([uses("other", arguments={"input": "go"})]),
        tools=[agent(looping(), name="other").as_tool("other", "Ask.", max_turns=STEPS)],
        tool_use_behavior="stop_on_first_tool",
    ),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise"])
@pytest.mark.parametrize("build", SHAPES.values(), ids=SHAPES)
def test_run_ended_by_a_limit_shows_it_or_raises(build: Any, action: Any, how: str) -> None:
    """A cut result must not pass for a finished one, in any shape."""
    enable(max_turns=3, action=action)
    try:
        stop = stop_of(CALLS[how](build()))
    except LimitReachedError as error:
        stop = error.stop
    assert stop is not None
    assert stop.reason == "max_turns"
