"""Turns, and the point at which each limit halts an agent."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import Agent, ModelRetryStrategy
from strands.agent.conversation_manager import NullConversationManager
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeToolCallEvent
from strands.middleware import InvokeModelContext, InvokeModelStage
from strands.types._events import ModelStopReason
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import otel_limits
from otel_limits import Event, Limits, ModelCall, Stop, Turn, enable
from otel_limits.testing import ScriptedModel, endless, fails, only, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from strands.types.content import Messages

    from otel_limits.testing import Answer
    from tests.conftest import Call, MakeAgent, Metric

pytestmark = pytest.mark.usefixtures("source")

PER_TURN = ("max_turns", "max_iterations")


def shape(messages: Messages) -> list[str]:
    """The kinds of blocks in each message."""
    return ["+".join(sorted({key for block in m["content"] for key in block})) for m in messages]


def runaway() -> ScriptedModel:
    """A model that requests searches forever."""
    return ScriptedModel(endless(uses("search")))


def then_endless(*answers: Answer) -> Iterable[Answer]:
    """`answers`, then searches forever."""
    yield from answers
    yield from endless(uses("search"))


def stops(events: list[Event]) -> list[Stop]:
    """How each finished invocation ended."""
    return [fact for fact in events if isinstance(fact, Stop)]


def resume_always(agent: Agent, prompt: str = "once more", times: int = 1000) -> None:
    """Make `agent` start another leg after each one, `times` times."""
    left = iter(range(times))

    def resume(event: AfterInvocationEvent) -> None:
        if next(left, None) is not None:
            event.resume = prompt

    agent.hooks.add_callback(AfterInvocationEvent, resume)


class KeepsEverything(NullConversationManager):
    """A conversation manager whose recovery from an overflow changes nothing."""

    def reduce_context(self, agent: Any, e: Exception | None = None, **_: Any) -> None:
        """Pretend that the context is smaller now."""


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


@pytest.mark.parametrize("limit", PER_TURN)
@pytest.mark.parametrize("cap", [1, 2, 5, 20])
def test_a_cap_permits_exactly_that_many_model_calls(
    cap: int, limit: str, make_agent: MakeAgent
) -> None:
    """With a cap of N an endless tool loop makes exactly N model calls."""
    enable(only(limit, cap))
    model = runaway()
    result = make_agent(model)("go")
    assert (model.calls, result.stop_reason) == (cap, limit)


@pytest.mark.parametrize("cap", [1, 3])
def test_a_halted_history_ends_in_an_answer(cap: int, make_agent: MakeAgent) -> None:
    """Every tool use has its result, and the synthetic message is the assistant's last word."""
    enable(Limits(max_turns=cap))
    agent = make_agent(runaway())
    agent("go")
    assert shape(agent.messages) == ["text", *["toolUse", "toolResult"] * cap, "text"]
    assert [m["role"] for m in agent.messages] == ["user", "assistant"] * (cap + 1)
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_parallel_tools_are_one_turn(make_agent: MakeAgent, tool_runs: list[str]) -> None:
    """Three tools in one response are one turn: 2 calls and 6 tool runs at a cap of 2."""
    enable(Limits(max_turns=2))
    model = ScriptedModel(endless(uses("search", "search", "search")))
    make_agent(model)("go")
    assert (model.calls, len(tool_runs)) == (2, 6)


def test_a_tool_that_stops_the_loop_wins(make_agent: MakeAgent) -> None:
    """Where a tool of the last turn cancels the agent, that is how it ends."""
    enable(Limits(max_turns=1))
    agent = make_agent(runaway())

    def cancel(event: BeforeToolCallEvent) -> None:
        event.agent.cancel(after_current_tools=True)

    agent.hooks.add_callback(BeforeToolCallEvent, cancel)
    assert agent("go").stop_reason == "cancelled"


def test_iterations_start_again_at_a_resume_leg(make_agent: MakeAgent) -> None:
    """With one hook-resume leg and `max_iterations=3`, each leg makes 3 calls."""
    enable(Limits(max_iterations=3))
    model = runaway()
    agent = make_agent(model)
    resume_always(agent, times=1)
    result = agent("go")
    assert (model.calls, result.stop_reason) == (6, "max_iterations")


def test_turns_are_counted_over_legs(make_agent: MakeAgent) -> None:
    """With `max_turns=3` the resume leg is refused before it calls the model."""
    enable(Limits(max_turns=3))
    model = runaway()
    agent = make_agent(model)
    resume_always(agent, times=1)
    result = agent("go")
    assert (model.calls, result.stop_reason) == (3, "max_turns")


def test_a_refused_leg_answers_its_prompt(make_agent: MakeAgent) -> None:
    """The history of a refused leg ends with a synthetic message, not with an open prompt."""
    enable(Limits(max_turns=1))
    agent = make_agent(ScriptedModel([says("done")]))
    resume_always(agent, times=1)
    result = agent("go")
    assert [m["role"] for m in agent.messages] == ["user", "assistant"] * 2
    assert otel_limits.is_synthetic(agent.messages[-1])
    assert otel_limits.is_synthetic(result.message)
    assert not otel_limits.is_synthetic(agent.messages[1])


def test_a_hook_that_resumes_for_ever_is_stopped(call: Call, make_agent: MakeAgent) -> None:
    """A resume hook that never gives up gets one refused leg, and then the invocation is over."""
    enable(Limits(max_turns=2))
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)
    resume_always(agent)
    result = call(agent)
    assert (model.calls, result.stop_reason) == (2, "max_turns")
    assert shape(agent.messages) == ["text"] * 6


def test_a_leg_can_still_end_naturally_within_the_cap(make_agent: MakeAgent) -> None:
    """Two legs of two turns each are within `max_turns=4`."""
    enable(Limits(max_turns=4))
    model = ScriptedModel([uses("search"), says("one"), uses("search"), says("two")])
    agent = make_agent(model)
    resume_always(agent, times=1)
    assert agent("go").stop_reason == "end_turn"


def overflowing(after: int) -> ScriptedModel:
    """A runaway whose context overflows once, after `calls` successful calls."""
    overflow = fails(ContextWindowOverflowException("too long"))
    return ScriptedModel(then_endless(*[uses("search")] * after, overflow))


@pytest.mark.parametrize("limit", PER_TURN)
def test_a_call_that_overflowed_is_no_turn(limit: str, make_agent: MakeAgent) -> None:
    """An overflow on the first call leaves the whole cap: 4 turns in 5 calls."""
    enable(only(limit, 4))
    model = overflowing(after=0)
    result = make_agent(model, conversation_manager=KeepsEverything())("go")
    assert (model.calls, result.stop_reason) == (5, limit)


def test_iterations_start_again_after_an_overflow(make_agent: MakeAgent) -> None:
    """An overflow on the third call resets `max_iterations`: 2 + 1 failed + 4 calls."""
    enable(Limits(max_iterations=4))
    model = overflowing(after=2)
    make_agent(model, conversation_manager=KeepsEverything())("go")
    assert model.calls == 7


def test_turns_go_on_after_an_overflow(make_agent: MakeAgent) -> None:
    """An overflow on the third call does not touch `max_turns`: 2 + 1 failed + 2 calls."""
    enable(Limits(max_turns=4))
    model = overflowing(after=2)
    make_agent(model, conversation_manager=KeepsEverything())("go")
    assert model.calls == 5


def ask_once(agent: Agent) -> None:
    """Make the first tool of `agent` wait for a human."""
    asked: list[str] = []

    def ask(event: BeforeToolCallEvent) -> None:
        if not asked or event.tool_use["toolUseId"] in asked:
            asked.append(event.tool_use["toolUseId"])
            event.interrupt("approval", reason="may I?")

    agent.hooks.add_callback(BeforeToolCallEvent, ask)


@pytest.mark.parametrize("limit", PER_TURN)
def test_a_replayed_tool_batch_costs_nothing(
    limit: str, make_agent: MakeAgent, tool_runs: list[str]
) -> None:
    """Interrupted at call 1 and resumed, a cap of 2 permits 2 calls, or 2 in the resumed leg."""
    enable(only(limit, 2))
    model = runaway()
    agent = make_agent(model)
    ask_once(agent)
    interrupted = agent("go")
    assert (interrupted.stop_reason, model.calls, tool_runs) == ("interrupt", 1, [])
    answers: Any = [
        {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
        for each in interrupted.interrupts or ()
    ]
    result = agent(answers)
    permitted = 3 if limit == "max_iterations" else 2
    assert (model.calls, result.stop_reason, len(tool_runs)) == (permitted, limit, permitted)


def test_an_interrupt_on_the_last_turn_wins(make_agent: MakeAgent) -> None:
    """A tool that waits for a human at the cap is no halt: the human is asked."""
    enable(Limits(max_turns=1))
    agent = make_agent(runaway())
    ask_once(agent)
    result = agent("go")
    assert (result.stop_reason, otel_limits.stop_of(result)) == ("interrupt", None)


def test_a_history_that_ends_in_tool_use_costs_no_turn(
    make_agent: MakeAgent, tool_runs: list[str]
) -> None:
    """With a cap of 1 and no prompt the pending tool runs, and the model answers it."""
    enable(Limits(max_turns=1))
    model = ScriptedModel([says("done")])
    use = {"toolUse": {"toolUseId": "t1", "name": "search", "input": {"query": "old"}}}
    history = [
        {"role": "user", "content": [{"text": "go"}]},
        {"role": "assistant", "content": [use]},
    ]
    result = make_agent(model, messages=history)(None)
    assert (tool_runs, model.calls, result.stop_reason) == (["old"], 1, "end_turn")


def test_forced_structured_output_costs_a_turn(call: Call, make_agent: MakeAgent) -> None:
    """With `max_turns=1` the call that only forces the output is refused, without an exception."""
    enable(Limits(max_turns=1))
    model = ScriptedModel([says("done"), uses("Verdict")])
    result = call(make_agent(model), structured_output_model=Verdict)
    assert (model.calls, result.stop_reason) == (1, "max_turns")
    assert result.structured_output is None
    assert otel_limits.is_synthetic(result.message)


def test_iterations_yield_to_forced_structured_output(call: Call, make_agent: MakeAgent) -> None:
    """With `max_iterations=1` the call that only forces the output is permitted."""
    enable(Limits(max_iterations=1))
    model = ScriptedModel([says("done"), uses("Verdict")])
    result = call(make_agent(model), structured_output_model=Verdict)
    assert (model.calls, result.structured_output) == (2, Verdict())
    assert otel_limits.stop_of(result) is None


@pytest.mark.parametrize("limit", PER_TURN)
def test_output_of_the_tripping_turn_is_returned(
    limit: str, call: Call, make_agent: MakeAgent
) -> None:
    """A turn that reaches the cap and produces the output has done its job."""
    enable(only(limit, 1))
    model = ScriptedModel([uses("Verdict")])
    result = call(make_agent(model), structured_output_model=Verdict)
    assert (model.calls, result.structured_output) == (1, Verdict())
    assert otel_limits.stop_of(result) is None


def test_a_runaway_that_never_forces_its_output_is_halted(make_agent: MakeAgent) -> None:
    """Where structured output is wanted but never asked for, the cap still ends the loop."""
    enable(Limits(max_turns=3))
    model = runaway()
    result = make_agent(model)("go", structured_output_model=Verdict)
    assert (model.calls, result.stop_reason, result.structured_output) == (3, "max_turns", None)


def test_throttled_attempts_are_one_turn(make_agent: MakeAgent, events: list[Event]) -> None:
    """Throttled twice and then answered is one turn of three model calls."""
    enable(Limits(max_turns=2), observers=[events.append])
    throttled = fails(ModelThrottledException("slow down"))
    model = ScriptedModel([throttled, throttled, uses("search"), says("done")])
    strategy = ModelRetryStrategy(initial_delay=0, max_delay=0)
    result = make_agent(model, retry_strategy=strategy)("go")
    assert (model.calls, result.stop_reason) == (4, "end_turn")
    assert [f.kind for f in events if isinstance(f, ModelCall)] == ["failed"] * 2 + ["measured"] * 2
    assert [f.number for f in events if isinstance(f, Turn)] == [1, 2]


def retry_twice(agent: Agent) -> None:
    """Make `agent` throw away its first two responses."""
    left = iter(range(2))

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = next(left, None) is not None

    agent.hooks.add_callback(AfterModelCallEvent, retry)


def test_retried_responses_are_one_turn(make_agent: MakeAgent) -> None:
    """A hook that retries twice costs no turn: the cap of 1 is reached by the third response."""
    enable(Limits(max_turns=1))
    model = runaway()
    agent = make_agent(model)
    retry_twice(agent)
    result = agent("go")
    assert (model.calls, result.stop_reason) == (3, "max_turns")


def test_tokens_of_every_attempt_count(make_agent: MakeAgent, events: list[Event]) -> None:
    """Responses that a hook threw away were paid for."""
    enable(Limits(max_turns=1), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    retry_twice(agent)
    agent("go")
    (stop,) = stops(events)
    assert (stop.turns, stop.model_calls, stop.usage.total) == (1, 3, 45)


def test_a_budget_refuses_a_retry(make_agent: MakeAgent) -> None:
    """A retry that the token budget cannot pay for is refused before it is sent."""
    enable(Limits(max_token_budget=30))
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)
    retry_twice(agent)
    result = agent("go")
    assert (model.calls, result.stop_reason) == (2, "max_token_budget")
    assert shape(agent.messages) == ["text", "text"]


@pytest.mark.parametrize(("budget", "calls"), [(30, 2), (31, 3), (29, 2), (1, 1)])
def test_a_budget_is_checked_after_each_call(
    budget: int, calls: int, make_agent: MakeAgent, tool_runs: list[str]
) -> None:
    """At 15 tokens a call the first call that reaches the budget is the last; its tools run."""
    enable(Limits(max_token_budget=budget))
    model = runaway()
    result = make_agent(model)("go")
    assert (model.calls, len(tool_runs)) == (calls, calls)
    assert str(result.stop_reason) == "max_token_budget"


def test_a_budget_records_its_overshoot(make_agent: MakeAgent) -> None:
    """The stop says what was really used, not what was permitted."""
    enable(Limits(max_token_budget=31))
    stop = otel_limits.stop_of(make_agent(runaway())("go"))
    assert stop is not None
    assert stop.breach == otel_limits.Breach(
        "max_token_budget", 31, 45, "max_token_budget", "tokens"
    )
    assert stop.usage == otel_limits.Usage(input=30, output=15)


def test_turns_decide_when_both_limits_trip(make_agent: MakeAgent) -> None:
    """If `max_turns` and `max_token_budget` are reached together, `max_turns` is the reason."""
    enable(Limits(max_turns=2, max_token_budget=30))
    stop = otel_limits.stop_of(make_agent(runaway())("go"))
    assert stop is not None
    assert stop.reason == "max_turns"
    assert [breach.limit for breach in stop.breaches] == ["max_turns", "max_token_budget"]


def test_a_budget_counts_cached_tokens_once(make_agent: MakeAgent, events: list[Event]) -> None:
    """Cached tokens that the provider reports apart are input; reported within, they are not."""
    apart = {
        "inputTokens": 10,
        "outputTokens": 5,
        "totalTokens": 115,
        "cacheReadInputTokens": 80,
        "cacheWriteInputTokens": 20,
    }
    within = {**apart, "inputTokens": 110}
    enable(Limits(max_turns=9), observers=[events.append])
    model = ScriptedModel([uses("search", usage=apart), says("done", usage=within)])
    make_agent(model)("go")
    usages = [fact.usage for fact in events if isinstance(fact, ModelCall)]
    expected = otel_limits.Usage(input=110, output=5, cache_read=80, cache_write=20)
    assert usages == [expected, expected]


def test_zero_token_call_differs_from_missing_usage(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """Zeros for an empty answer are believed; a provider that reports nothing is estimated."""
    zero = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    enable(observers=[events.append])
    agent = make_agent(ScriptedModel([says("", usage=zero), says("done", usage=None)]))
    agent("go")
    agent("go")
    calls = [fact for fact in events if isinstance(fact, ModelCall)]
    assert [(call.kind, call.estimated) for call in calls] == [
        ("zero_token", False),
        ("estimated", True),
    ]
    assert (calls[0].usage.total, calls[1].usage.input > 0) == (0, True)


def test_an_estimated_call_counts_with_its_estimate(make_agent: MakeAgent) -> None:
    """A provider without usage must not run forever on a token budget."""
    enable(Limits(max_token_budget=1000))
    model = ScriptedModel(endless(uses("search", arguments={"query": "x" * 400}, usage=None)))
    result = make_agent(model)("go")
    assert str(result.stop_reason) == "max_token_budget"
    assert 2 <= model.calls <= 10


def test_unmeasured_calls_can_be_left_out(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `OTEL_LIMITS_UNMEASURED=ignore` only reported tokens count."""
    monkeypatch.setenv("OTEL_LIMITS_UNMEASURED", "ignore")
    enable(Limits(max_token_budget=1, max_turns=9))
    result = make_agent(ScriptedModel(endless(uses("search", usage=None))))("go")
    assert str(result.stop_reason) == "max_turns"


def test_unmeasured_calls_can_halt(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `OTEL_LIMITS_UNMEASURED=halt` one call of unknown size is a breach."""
    monkeypatch.setenv("OTEL_LIMITS_UNMEASURED", "halt")
    enable(Limits(max_token_budget=1_000_000))
    model = ScriptedModel(endless(uses("search", usage=None)))
    assert (make_agent(model)("go").stop_reason, model.calls) == ("max_token_budget", 1)


def test_a_stream_that_breaks_counts_its_input(make_agent: MakeAgent, events: list[Event]) -> None:
    """A request that failed in mid-stream was billed for its input."""
    enable(observers=[events.append])
    broken = says("half an answ", error=ConnectionError("gone"))
    with pytest.raises(Exception, match="gone"):
        make_agent(ScriptedModel([broken]))("go")
    (call,) = [fact for fact in events if isinstance(fact, ModelCall)]
    assert (call.kind, call.estimated, call.usage.input > 0) == ("failed", True, True)
    assert [stop.reason for stop in stops(events)] == ["error"]


def test_large_calls_are_summed_exactly(make_agent: MakeAgent, events: list[Event]) -> None:
    """Token counts stay whole numbers, however large."""
    huge = 2**39 + 1  # more than 2**40 in one figure is not readable usage
    enable(observers=[events.append])
    make_agent(ScriptedModel([uses("search", usage=tokens(huge)), says("x", usage=tokens(3))]))(
        "go"
    )
    assert [stop.usage.total for stop in stops(events)] == [huge + 3]


def test_observe_runs_to_the_natural_end(
    call: Call,
    make_agent: MakeAgent,
    warnings_logged: Callable[[], list[str]],
    metric: Metric,
) -> None:
    """With `observe` nothing is halted; what would have been is counted and logged once."""
    enable(Limits(max_turns=2), action="observe")
    model = ScriptedModel([uses("search")] * 5 + [says("done")])
    agent = make_agent(model)
    result = call(agent)
    assert (model.calls, result.stop_reason) == (6, "end_turn")
    assert not any(otel_limits.is_synthetic(message) for message in agent.messages)
    (warning,) = warnings_logged()
    assert "would have been halted by max_turns" in warning
    observed = {"agent": "tester", "reason": "max_turns", "action": "observed"}
    assert metric("otel_limits_stops_total", **observed) == 1


def test_observe_does_not_refuse_a_leg(make_agent: MakeAgent) -> None:
    """With `observe` a resume leg beyond the cap goes ahead."""
    enable(Limits(max_turns=1), action="observe")
    model = ScriptedModel([says("one"), says("two")])
    agent = make_agent(model)
    resume_always(agent, times=1)
    assert (str(agent("go")), model.calls) == ("two\n", 2)


# --- edge cases of a turn -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", PER_TURN)
def test_a_conversation_that_is_the_prompt_is_no_turn(limit: str, make_agent: MakeAgent) -> None:
    """Its responses were those of another invocation, of this agent or of another."""
    earlier = make_agent(ScriptedModel([uses("search"), uses("search"), says("done")]))
    earlier("go")
    limits: dict[str, Any] = {limit: 2}
    enable(Limits(**limits))
    model = ScriptedModel([uses("search"), says("done")])
    asked: Messages = [*earlier.messages, {"role": "user", "content": [{"text": "go on"}]}]
    assert make_agent(model)(asked).stop_reason == "end_turn"
    assert model.calls == 2


def test_a_response_with_metadata_of_the_application_is_a_turn(make_agent: MakeAgent) -> None:
    """Regardless of the hook's text."""
    enable(Limits(max_turns=3))
    model = runaway()
    agent = make_agent(model)

    def write(event: AfterModelCallEvent) -> None:
        assert event.stop_response is not None
        event.stop_response.message["metadata"] = {"custom": {"request": 1}}

    agent.hooks.add_callback(AfterModelCallEvent, write)
    assert str(agent("go").stop_reason) == "max_turns"
    assert model.calls == 3


def test_a_response_that_a_middleware_gives_is_a_turn(make_agent: MakeAgent) -> None:
    """Otherwise an agent with cached answers would run forever."""
    enable(Limits(max_turns=3))
    model = ScriptedModel([uses("search")])
    agent = make_agent(model)
    cached: list[ModelStopReason] = []

    async def cache(context: InvokeModelContext, next_fn: Any) -> Any:
        if not cached:
            async for event in next_fn(context):
                if isinstance(event, ModelStopReason):
                    cached.append(event)
                yield event
        else:
            reason, message, usage, metrics = cached[0]["stop"]
            yield ModelStopReason(reason, copy.copy(message), usage, metrics)

    agent.add_middleware(InvokeModelStage, cache)
    assert str(agent("go").stop_reason) == "max_turns"
    assert model.calls == 1


def test_hook_message_before_a_retry_is_not_a_turn(make_agent: MakeAgent) -> None:
    """A response was asked for, but what comes is none."""
    enable(Limits(max_turns=2))
    error = ModelThrottledException("slow down")
    model = ScriptedModel([fails(error), uses("search"), says("done")])
    agent = make_agent(model)

    async def say_and_retry(event: AfterModelCallEvent) -> None:
        if event.exception is not None:
            event.retry = True
            again: Any = {"role": "assistant", "content": [{"text": "once more"}]}
            await event.agent._append_messages(again)

    agent.hooks.add_callback(AfterModelCallEvent, say_and_retry)
    assert agent("go").stop_reason == "end_turn"
    assert model.calls == 3
