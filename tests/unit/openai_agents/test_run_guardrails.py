"""Models and agents that guardrails, hooks and instructions call have their place in a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from agents import (
    AgentHooks,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    ModelSettings,
    ModelTracing,
    OutputGuardrailTripwireTriggered,
    Runner,
    ToolGuardrailFunctionOutput,
    function_tool,
    input_guardrail,
    output_guardrail,
    tool_input_guardrail,
)

from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    ToolCall,
    enable,
    stop_of,
)
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedAgentsModel, endless, says, uses
from tests.openai_agents.runs import CALLS, UNTRACED, agent, halt_of, looping

if TYPE_CHECKING:
    from pathlib import Path

each_way = pytest.mark.parametrize("how", CALLS)
each_order = pytest.mark.parametrize("in_parallel", [False, True], ids=["before", "in parallel"])


async def asked(model: Any) -> str:
    """Call a model without an agent."""
    answer = await model.get_response(
        None,
        "fine?",
        ModelSettings(),
        [],
        None,
        [],
        ModelTracing.DISABLED,
        previous_response_id=None,
        conversation_id=None,
        prompt=None,
    )
    return str(answer.output[0].content[0].text)


def guardrail_that_asks(model: Any, *, in_parallel: bool) -> Any:
    """An input guardrail that calls a model."""

    @input_guardrail(run_in_parallel=in_parallel)
    async def check(*_: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(await asked(model), tripwire_triggered=False)

    return check


@each_order
@each_way
def test_model_in_a_guardrail_is_a_side_call(
    how: str,
    in_parallel: bool,  # noqa: FBT001  a parameter of pytest
    events: list[Event],
) -> None:
    """Its answer is no turn of the agent."""
    enable(max_turns=1, observers=[events.append])
    guard, boss = ScriptedAgentsModel([says("fine")], "guard"), looping(model="boss")
    check = guardrail_that_asks(guard, in_parallel=in_parallel)
    result = CALLS[how](agent(boss, input_guardrails=[check]))
    assert (guard.calls, boss.calls, halt_of(result).turns) == (1, 1, 1)
    calls = {each.model: each.side for each in events if isinstance(each, ModelCall)}
    assert calls == {"guard": True, "boss": False}


@each_way
def test_refused_model_in_a_guardrail_raises_there(how: str) -> None:
    """The guardrail decides, as a tool does."""
    enable(max_model_calls=1)
    guard = ScriptedAgentsModel(endless(says("fine")))
    refused: list[str] = []

    @output_guardrail
    async def check(*_: Any) -> GuardrailFunctionOutput:
        try:
            told = await asked(guard)
        except LimitReachedError as error:
            told = "unknown"
            refused.append(str(error))
        return GuardrailFunctionOutput(told, tripwire_triggered=False)

    result = CALLS[how](agent(ScriptedAgentsModel([says("done")]), output_guardrails=[check]))
    assert (result.final_output, stop_of(result), guard.calls) == ("done", None, 0)
    assert "max_model_calls" in refused[0]


@each_way
def test_models_in_hooks_and_instructions_are_side_calls(how: str, events: list[Event]) -> None:
    """Each of them runs in the loop's own task."""
    enable(max_turns=2, observers=[events.append])
    helper, boss = ScriptedAgentsModel(endless(says("be short")), "helper"), looping(model="boss")

    class Hooks(AgentHooks):
        async def on_llm_start(self, *_: Any) -> None:
            await asked(helper)

        async def on_llm_end(self, *_: Any) -> None:
            await asked(helper)

    async def instructions(_: Any, agent: Any) -> str:
        return await asked(helper)

    result = CALLS[how](agent(boss, hooks=Hooks(), instructions=instructions))
    assert (boss.calls, halt_of(result).turns) == (2, 2)
    calls = [(each.model, each.side) for each in events if isinstance(each, ModelCall)]
    assert {side for model, side in calls if model == "helper"} == {True}
    assert [side for model, side in calls if model == "boss"] == [False, False]


@each_order
@each_way
def test_limited_agent_of_a_guardrail_is_halted_there(
    how: str,
    in_parallel: bool,  # noqa: FBT001  a parameter of pytest
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guardrail sees the halt, and the run around it continues."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("agents: {guard: {limits: {max_turns: 2}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_turns=9)
    guard, seen = looping(), []

    @input_guardrail(run_in_parallel=in_parallel)
    async def check(*_: Any) -> GuardrailFunctionOutput:
        result = await Runner.run(agent(guard, name="guard"), "?", run_config=UNTRACED)
        seen.append(stop_of(result))
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    model = ScriptedAgentsModel([uses("search"), says("done")])
    result = CALLS[how](agent(model, input_guardrails=[check]))
    assert (result.final_output, stop_of(result)) == ("done", None)
    assert (guard.calls, [each.agent for each in seen if each]) == (2, ["guard"])


class Waiting(ScriptedAgentsModel):
    """A model that never answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.is_asked = asyncio.Event()

    async def get_response(self, *_: Any, **__: Any) -> Any:
        """Wait."""
        self.is_asked.set()
        await asyncio.sleep(60)


@pytest.mark.parametrize("how", ["run", "run_sync"])  # streams end at the model's next event
def test_guardrail_that_ends_a_call_in_flight_leaves_nothing(how: str, events: list[Event]) -> None:
    """The vendor bills the call that was canceled, and no reservation remains."""
    enable(tree=Limits(max_turns=5), observers=[events.append])
    model = Waiting()

    @input_guardrail
    async def check(*_: Any) -> GuardrailFunctionOutput:
        await model.is_asked.wait()
        return GuardrailFunctionOutput(None, tripwire_triggered=True)

    with pytest.raises(InputGuardrailTripwireTriggered):
        CALLS[how](agent(model, input_guardrails=[check]))
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert (call.kind, call.estimated) == ("failed", True)
    assert [each.reason for each in events if isinstance(each, Stop)] == ["guardrail"]
    assert len(LIVE) == 0


@each_way
def test_output_guardrail_may_reject_the_text_of_a_halt(how: str, events: list[Event]) -> None:
    """It sees it like an answer; the reason remains the limit."""
    enable(max_turns=1, observers=[events.append])

    @output_guardrail
    async def check(*given: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(given[2], tripwire_triggered=True)

    with pytest.raises(OutputGuardrailTripwireTriggered) as caught:
        CALLS[how](agent(looping(), output_guardrails=[check]))
    told = caught.value.guardrail_result.output.output_info
    assert told.startswith("This request could not be completed")
    stop = stop_of(caught.value)
    assert stop is not None
    assert (stop.reason, stop.action) == ("max_turns", "halted")
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns"]


@each_way
def test_tool_that_a_guardrail_rejects_uses_no_limit(how: str, events: list[Event]) -> None:
    """It has not run, and is reported as an error."""
    enable(max_tool_calls=2, max_turns=9, observers=[events.append])

    @tool_input_guardrail
    def check(_: Any) -> ToolGuardrailFunctionOutput:
        return ToolGuardrailFunctionOutput.reject_content("not allowed")

    @function_tool(tool_input_guardrails=[check])
    def delete() -> str:
        """Delete."""
        return "deleted"

    script = [*[uses("delete")] * 3, uses("search"), uses("search"), says("done")]
    result = CALLS[how](agent(ScriptedAgentsModel(script), delete))
    assert (result.final_output, stop_of(result)) == ("done", None)
    calls = [(each.tool, each.status) for each in events if isinstance(each, ToolCall)]
    assert calls == [*[("delete", "error")] * 3, *[("search", "success")] * 2]
