"""Actions besides halting: last answers, warnings, notes, questions and kills."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import Agent, ToolContext, tool
from strands.hooks import AfterInvocationEvent, AfterToolCallEvent, MessageAddedEvent

import otel_limits
from otel_limits import Halt, Limits, LimitsPlugin, LimitWarning, Stop, enable, kill
from otel_limits.core.usage import Tally
from otel_limits.runs.registry import LIVE
from otel_limits.runs.run import Run
from otel_limits.testing import Answer, FakeTime, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent, Metric


# --- wrap_up --------------------------------------------------------------------------------------


def test_wrap_up_happens_once_across_legs(make_agent: MakeAgent, source: str) -> None:
    """A hook that resumes forever gets only one last answer."""
    enable(Limits(max_turns=2), action="wrap_up")
    model = ScriptedModel(itertools.chain([uses("search")] * 2, endless(says("again"))))
    agent = make_agent(model)
    agent.hooks.add_callback(AfterInvocationEvent, resume_always)
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("max_turns", 3)


def resume_always(event: AfterInvocationEvent) -> None:
    """Start another leg after any outcome."""
    event.resume = "go on"


def test_last_call_has_no_tool_blocks(make_agent: MakeAgent, source: str) -> None:
    """Some providers reject tool blocks without tools, so the history is sent as text."""
    enable(Limits(max_turns=1), action="wrap_up")
    model = ScriptedModel([uses("search", arguments={"query": "x"}), says("summary")])
    make_agent(model)("go")
    blocks = [block for message in model.requests[-1] for block in message["content"]]
    assert all(set(block) == {"text"} for block in blocks)
    assert "search with" in str(blocks)
    assert "nothing found" in str(blocks)


class Report(BaseModel):
    """A structured output."""


def test_last_answer_replaces_forced_structured_output(make_agent: MakeAgent, source: str) -> None:
    """It is plain text, and structured output is no longer forced."""
    enable(Limits(max_turns=1), action="wrap_up")
    model = ScriptedModel([says("text"), says("in short")])
    result = make_agent(model)("go", structured_output_model=Report)
    assert (result.stop_reason, model.calls, result.structured_output) == ("max_turns", 2, None)
    text = "This request could not be completed because it took too many steps."
    assert str(result) == f"in short\n\n{text}\n"
    assert not otel_limits.is_synthetic(result.message)


# --- soft thresholds ------------------------------------------------------------------------------


def test_each_threshold_fires_once(
    make_agent: MakeAgent,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
    metric: Metric,
    warnings_logged: Callable[[], list[str]],
) -> None:
    """Once per invocation, limit and threshold: as an event, in the metrics and in the log."""
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5,0.9")
    enable(Limits(max_turns=10), observers=[events.append])
    make_agent(ScriptedModel([*[uses("search")] * 8, says("done")]))("go")
    warned = [event for event in events if isinstance(event, LimitWarning)]
    assert [(w.threshold, w.level.observed) for w in warned] == [(0.5, 5), (0.9, 9)]
    labels = {"agent": "tester", "limit": "max_turns"}
    assert metric("otel_limits_warnings_total", **labels, threshold="0.5") == 1
    assert metric("otel_limits_warnings_total", **labels, threshold="0.9") == 1
    assert warnings_logged() == [
        "Agent 'tester' has used 50% of max_turns: 5 of 10.",
        "Agent 'tester' has used 90% of max_turns: 9 of 10.",
    ]


def test_thresholds_are_on_the_span(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    """The live agent span gets an event with limit, value and threshold."""
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5")
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel([says("done")]))("go")
    (span,) = [s for s in spans.get_finished_spans() if s.name.startswith("invoke_agent")]
    (event,) = [e for e in span.events if e.name == "otel_limits.warning"]
    assert dict(event.attributes or {}) == {
        "otel_limits.limit.name": "max_turns",
        "otel_limits.limit.value": 2,
        "otel_limits.limit.consumed": 1,
        "otel_limits.warning.threshold": 0.5,
    }


# --- budget hints ---------------------------------------------------------------------------------


def test_budget_hint_contains_remaining_budget(
    make_agent: MakeAgent, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has a note with the remaining budget, which the history does not keep."""
    monkeypatch.setenv("OTEL_LIMITS_BUDGET_HINTS", "true")
    enable(Limits(max_turns=3))
    model = ScriptedModel([uses("search"), says("done")])
    agent = make_agent(model)
    agent("go")
    assert ["3 of 3 (max_turns)" in str(model.requests[0]), "2 of 3" in str(model.requests[1])] == [
        True,
        True,
    ]
    assert "Budget left" not in str(agent.messages)


# --- loops ----------------------------------------------------------------------------------------


def test_first_call_is_not_a_repetition(make_agent: MakeAgent, source: str) -> None:
    """A cap of 2 halts at the second call, without a nudge after the first."""
    enable(Limits(max_identical_tool_calls=2))
    model = ScriptedModel(endless(uses("search")))
    agent = make_agent(model)
    agent("go")
    assert model.calls == 2
    assert "repeating yourself" not in str(agent.messages)


def test_nudge_disabled_leaves_tool_results_unchanged(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OTEL_LIMITS_NUDGE_DISABLED=true, tool results stay unchanged."""
    monkeypatch.setenv("OTEL_LIMITS_NUDGE_DISABLED", "true")
    enable(Limits(max_identical_tool_calls=3))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    agent("go")
    assert "repeating yourself" not in str(agent.messages)


def test_polling_with_new_results_is_not_a_loop(source: str) -> None:
    """Only calls with identical results count as identical."""
    numbers = itertools.count()

    @tool
    def poll() -> str:
        """Poll."""
        return f"progress {next(numbers)}"

    enable(Limits(max_identical_tool_calls=2))
    model = ScriptedModel([*[uses("poll")] * 5, says("done")])
    assert Agent(model=model, tools=[poll], callback_handler=None)("go").stop_reason == "end_turn"


def test_exempt_tool_may_repeat(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loop limits ignore the tools named in OTEL_LIMITS_EXEMPT_TOOLS."""
    monkeypatch.setenv("OTEL_LIMITS_EXEMPT_TOOLS", "search")
    enable(Limits(max_consecutive_same_tool=2, max_identical_tool_calls=2))
    model = ScriptedModel([*[uses("search")] * 5, says("done")])
    assert make_agent(model)("go").stop_reason == "end_turn"


def test_zero_disables_loop_limit_of_environment(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's own 0 wins over the environment; an unset value inherits it."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_CONSECUTIVE_SAME_TOOL", "2")
    enable()
    own = otel_limits.LimitsPlugin(Limits(max_consecutive_same_tool=0))
    script = [*[uses("search")] * 4, says("done")]
    assert make_agent(ScriptedModel(script), plugins=[own])("go").stop_reason == "end_turn"
    assert make_agent(ScriptedModel(script))("go").stop_reason == "loop_detected"


def test_parallel_calls_are_judged_in_request_order(source: str) -> None:
    """Tools that finish in another order lead to the same verdict about the same call."""
    release = threading.Event()

    @tool
    def slow() -> str:
        """Finish last."""
        release.wait(5)
        return "x"

    @tool
    def fast() -> str:
        """Finish first."""
        release.set()
        return "y"

    enable(Limits(max_consecutive_same_tool=2), action="raise")
    model = ScriptedModel(endless(uses("slow", "fast", "fast")))
    agent = Agent(model=model, tools=[slow, fast], callback_handler=None)
    with pytest.raises(otel_limits.LoopDetectedError) as raised:
        agent("go")
    assert (raised.value.tool_name, raised.value.count) == ("fast", 2)


# --- tool calls -----------------------------------------------------------------------------------


def test_parallel_calls_beyond_cap_are_refused(
    make_agent: MakeAgent, source: str, tool_runs: list[str]
) -> None:
    """Of four parallel calls under a cap of two, two run and two are refused with the reason."""
    enable(Limits(max_tool_calls=2))
    model = ScriptedModel(endless(uses("search", "search", "search", "search")))
    agent = make_agent(model)
    result = agent("go")
    results = [block["toolResult"] for block in agent.messages[2]["content"]]
    assert (result.stop_reason, model.calls, len(tool_runs)) == ("max_tool_calls", 1, 2)
    assert [each["status"] for each in results] == ["success", "success", "error", "error"]
    assert "2 of 2 tool calls were used in this task" in str(results[2]["content"])


@pytest.mark.parametrize(("action", "effect"), [("halt", "are"), ("observe", "would have been")])
def test_the_first_refusal_of_a_tool_is_logged(
    make_agent: MakeAgent,
    warnings_logged: Callable[[], list[str]],
    action: Any,
    effect: str,
) -> None:
    """Once for each invocation: the agent continues, so nothing else would say it."""
    enable(Limits(max_calls_per_tool={"search": 2}), action=action)
    for _ in range(2):
        script = [uses("search"), uses("search", "search"), uses("search"), says("done")]
        make_agent(ScriptedModel(script), name="bot")("go")
    reached = "Agent 'bot' reached max_calls_per_tool for tool 'search': this call and later ones "
    assert warnings_logged() == [f"{reached}{effect} refused."] * 2


def test_tool_retry_is_not_another_call(
    make_agent: MakeAgent, source: str, tool_runs: list[str]
) -> None:
    """A hook that runs a tool again does not use up another call."""
    enable(Limits(max_tool_calls=1))
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))

    def again(event: AfterToolCallEvent) -> None:
        event.retry = len(tool_runs) < 3

    agent.hooks.add_callback(AfterToolCallEvent, again)
    assert (agent("go").stop_reason, len(tool_runs)) == ("end_turn", 3)


def test_direct_tool_calls_do_not_count(make_agent: MakeAgent, source: str) -> None:
    """`agent.tool.search()` is called by the application, not by the agent."""
    enable(Limits(max_tool_calls=1))
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    agent.tool.search()
    agent.tool.search()
    assert agent("go").stop_reason == "end_turn"


def test_structured_output_is_not_a_tool_call(make_agent: MakeAgent, source: str) -> None:
    """Tool limits ignore the tool that Strands adds for structured output."""
    enable(Limits(max_tool_calls=1))
    model = ScriptedModel([uses("search"), uses("Report")])
    result = make_agent(model)("go", structured_output_model=Report)
    assert result.structured_output == Report()


# --- time -----------------------------------------------------------------------------------------


class Hanging(ScriptedModel):
    """Streams one more chunk whenever it is polled, forever."""

    def __init__(self, on_chunk: Callable[[], object] = lambda: None) -> None:
        super().__init__([])
        self.on_chunk = on_chunk

    async def stream(self, *_: Any, **__: Any) -> AsyncIterable[StreamEvent]:
        """Stream without end."""
        self.calls += 1
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        while True:
            await asyncio.sleep(0.005)
            yield {"contentBlockDelta": {"delta": {"text": "."}}}
            self.on_chunk()


def test_in_flight_response_is_cancelled(
    make_agent: MakeAgent, source: str, call: Call, events: list[Event], fake_time: FakeTime
) -> None:
    """The time limit ends an endless stream, and its input is counted."""
    enable(Limits(max_duration_seconds=30), observers=[events.append])
    agent = make_agent(Hanging(lambda: fake_time.advance(30)))
    result = call(agent)
    (booked,) = [event for event in events if isinstance(event, otel_limits.ModelCall)]
    assert (result.stop_reason, booked.estimated) == ("max_duration", True)
    assert otel_limits.is_synthetic(result.message)
    assert booked.usage.input == pytest.approx(66, rel=0.2)


@pytest.mark.parametrize("cap", [0.30001, 1 / 3, 250.0004])
def test_submillisecond_cap_is_reached_on_time(cap: float) -> None:
    """Elapsed time is rounded up because the timer checks only once, at that moment."""
    assert Limits(max_duration_seconds=cap).breaches(Tally(seconds=cap))


def test_huge_time_limit_leaves_other_deadlines_enforced(make_agent: MakeAgent) -> None:
    """No system can wait that long in one call, so the timer waits repeatedly."""
    patient = make_agent(
        ScriptedModel([says("done")]), plugins=[LimitsPlugin(Limits(max_duration_seconds=1e11))]
    )
    patient("go")
    enable(Limits(max_duration_seconds=0.1))
    assert make_agent(Hanging())("go").stop_reason == "max_duration"


@pytest.mark.usefixtures("faulty")
def test_timer_after_failed_start_is_started_by_next_invocation(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, metric: Metric
) -> None:
    """When the system is briefly out of threads, one invocation runs without a timer."""
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def fail_once(thread: threading.Thread) -> None:
        failure = next(failures, None) if thread.name == "otel-limits-deadlines" else None
        if failure is not None:
            raise failure
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    enable(Limits(max_duration_seconds=0.1))
    faults = metric("otel_limits_internal_errors_total", component="deadlines")
    make_agent(ScriptedModel([says("done")]))("go")
    assert make_agent(Hanging())("go").stop_reason == "max_duration"
    assert metric("otel_limits_internal_errors_total", component="deadlines") == faults + 1


def test_long_deadline_keeps_no_ended_invocation_in_memory(make_agent: MakeAgent) -> None:
    """Many invocations come and go while the deadline of one is an hour away."""
    enable(Limits(max_duration_seconds=3600))

    async def live() -> int:
        stream: Any = make_agent(ScriptedModel([says("late")])).stream_async("go")
        await anext(stream)
        agent = make_agent(ScriptedModel(endless(says("done"))))
        for _ in range(80):
            await agent.invoke_async("go")
        gc.collect()
        held = sum(isinstance(each, Run) for each in gc.get_objects())
        await stream.aclose()
        return held

    assert asyncio.run(live()) < 40


def test_timer_thread_needs_a_time_limit(make_agent: MakeAgent) -> None:
    """The shared timer thread exists only while an invocation has a time limit."""
    enable(Limits(max_turns=3))
    make_agent(ScriptedModel([says("hello")]))("go")
    assert "otel-limits-deadlines" not in [thread.name for thread in threading.enumerate()]


def test_timer_is_removed_after_invocation(make_agent: MakeAgent) -> None:
    """An invocation that ends in time leaves no deadline behind."""
    enable(Limits(max_duration_seconds=60))
    agent = make_agent(ScriptedModel([says("hello"), says("again")]))
    agent("go")
    assert (LIVE.clock.scheduled, agent("go").stop_reason) == (0, "end_turn")


# --- kill -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [{"agent": "test*"}, {"all": True}])
def test_kill_ends_a_stream(
    make_agent: MakeAgent, source: str, which: dict[str, Any], events: list[Event]
) -> None:
    """An in-flight response ends with `killed`; the next invocation is unaffected."""
    streaming = threading.Event()
    enable(Limits(max_turns=50), observers=[events.append])
    agent = make_agent(Hanging(), callback_handler=lambda **_: streaming.set())
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(agent("go")))
    thread.start()
    assert streaming.wait(10)
    assert kill(**which) == 1
    thread.join(10)
    assert results[0].stop_reason == "killed"
    assert otel_limits.is_synthetic(results[0].message)
    agent.model = ScriptedModel([says("hello")])
    assert agent("go").stop_reason == "end_turn"


def test_kill_between_two_events_ends_a_stream(make_agent: MakeAgent, source: str) -> None:
    """The wait for the next one ends from within, so that the response counts."""
    enable(Limits(max_turns=50))
    killed: list[int] = []

    def end(**told: Any) -> None:
        if "data" in told and not killed:
            killed.append(kill(all=True))

    result = make_agent(Hanging(), callback_handler=end)("go")
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert (killed, stop.reason, stop.model_calls) == ([1], "killed", 1)


def test_kill_by_trace(make_agent: MakeAgent, events: list[Event]) -> None:
    """The trace ID of an invocation ends it, even from within one of its tools."""
    enable(Limits(max_turns=50), observers=[events.append])

    @tool
    def suicide() -> str:
        """End the invocation that runs this."""
        (started,) = [event for event in events if isinstance(event, otel_limits.Started)]
        return str(kill(trace_id=started.invocation.trace_id))

    model = ScriptedModel(endless(uses("suicide")))
    result = make_agent(model, tools=[suicide])("go")
    assert (result.stop_reason, model.calls) == ("killed", 1)


def test_kill_wins_over_observe(make_agent: MakeAgent, source: str) -> None:
    """A kill ends an invocation even if limits are only observed."""
    enable(Limits(max_turns=50), action="observe")

    @tool
    def suicide() -> str:
        """End everything."""
        return str(kill(all=True))

    model = ScriptedModel(endless(uses("suicide")))
    assert make_agent(model, tools=[suicide])("go").stop_reason == "killed"


def test_kill_with_action_raise_raises(make_agent: MakeAgent, source: str) -> None:
    """With `raise`, the call raises `KilledError`."""
    enable(action="raise")

    @tool
    def suicide() -> str:
        """End everything."""
        return str(kill(all=True))

    with pytest.raises(otel_limits.KilledError, match="was killed"):
        make_agent(ScriptedModel(endless(uses("suicide"))), tools=[suicide])("go")


@pytest.mark.parametrize("action", ["observe", "halt", "wrap_up", "raise", "ask"])
def test_kill_is_counted_by_an_action_of_its_own(
    make_agent: MakeAgent, source: str, action: Any, events: list[Event], metric: Metric
) -> None:
    """Alerts and panels about limits count other actions, so a mass kill is no sign of runaways."""
    enable(Limits(max_turns=9), action=action, observers=[events.append])

    @tool
    def suicide() -> str:
        """End everything."""
        return str(kill(all=True))

    with contextlib.suppress(otel_limits.KilledError):
        make_agent(ScriptedModel(endless(uses("suicide"))), tools=[suicide])("go")
    (halt,) = [event for event in events if isinstance(event, Halt)]
    (stop,) = [event for event in events if isinstance(event, Stop)]
    assert (halt.action, stop.action, stop.raised) == ("killed", "killed", action == "raise")
    labels = {"agent": "tester", "reason": "killed"}
    assert metric("otel_limits_stops_total", **labels, action="killed") == 1
    assert not metric("otel_limits_stops_total", **labels, action="halted")


def test_kill_after_halt_changes_nothing(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Between a halt and its message, nothing is left to end."""
    enable(Limits(max_turns=2), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(uses("search"))))

    def end_everything(event: MessageAddedEvent) -> None:
        if len(event.agent.messages) == 5:  # the result of the second tool
            kill(all=True)

    agent.hooks.add_callback(MessageAddedEvent, end_everything)
    result = agent("go")
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_turns", True)
    (stop,) = [event for event in events if isinstance(event, Stop)]
    assert (stop.reason, stop.action) == ("max_turns", "halted")


class Answer42(BaseModel):
    """A structured output."""

    answer: int = 42


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_kill_during_direct_structured_output_spares_next_invocation(
    make_agent: MakeAgent, source: str
) -> None:
    """It cannot be interrupted, so it is not counted, and the next invocation is innocent."""
    ended: list[int] = []

    class Killed(ScriptedModel):
        async def structured_output(self, output_model: Any, *_: Any, **__: Any) -> Any:
            ended.append(kill(all=True))
            yield {"output": output_model()}

    enable(Limits(max_duration_seconds=600))
    agent = make_agent(Killed([says("hello")]))
    assert agent.structured_output(Answer42, "go").answer == 42
    assert agent("go").stop_reason == "end_turn"
    assert ended == [0]


def test_kill_without_argument_raises() -> None:
    """Without an argument it raises an explanation instead of ending everything."""
    with pytest.raises(ValueError, match="all=True"):
        kill()


# --- asking ---------------------------------------------------------------------------------------


def extended(agent: Agent, asked: Any, response: object) -> Any:
    """Answer the question of an interrupted agent."""
    interrupt = asked.interrupts[0]
    answer: Any = {"interruptResponse": {"interruptId": interrupt.id, "response": response}}
    return agent([answer])


def answering(agent: Agent, response: object) -> None:
    """Add a hook that answers every question in place of a human."""

    def answer(event: AfterInvocationEvent) -> None:
        for asked in (event.result and event.result.interrupts) or ():
            answers: Any = [{"interruptResponse": {"interruptId": asked.id, "response": response}}]
            event.resume = answers

    agent.hooks.add_callback(AfterInvocationEvent, answer)


def test_hook_answer_extends_limit(make_agent: MakeAgent, source: str) -> None:
    """Within one invocation, the extension counts from the usage at the time of the question."""
    enable(Limits(max_turns=2, max_calls_per_tool={"search": 50}), action="ask")
    agent = make_agent(model := ScriptedModel([uses("search")] * 6 + [says("done")]))
    answering(agent, {"extend": {"max_turns": 3, "max_calls_per_tool": {"search": 50}}})
    assert (agent("go").stop_reason, model.calls) == ("end_turn", 7)


def test_time_extension_counts_from_its_answer(
    make_agent: MakeAgent, source: str, fake_time: FakeTime
) -> None:
    """Without an earlier time limit, time already elapsed is not deducted."""

    @tool
    def work() -> str:
        """Take time."""
        fake_time.advance(400)
        return "done"

    enable(Limits(max_turns=2), action="ask")
    model = ScriptedModel([uses("work")] * 3 + [says("done")])
    agent = make_agent(model, tools=[work])
    answering(agent, {"extend": {"max_turns": 2, "max_duration_seconds": 500}})
    assert (agent("go").stop_reason, model.calls) == ("end_turn", 4)


def test_hook_answer_applies_once(make_agent: MakeAgent, source: str) -> None:
    """A later question by a tool in the same invocation does not apply the extension again."""

    @tool(context=True)
    def pay(tool_context: ToolContext) -> str:
        """Ask before paying."""
        return str(tool_context.interrupt("approve"))

    enable(Limits(max_turns=2), action="ask")
    agent = make_agent(model := ScriptedModel(endless(uses("pay"))), tools=[pay])
    answers = iter([{"extend": {"max_turns": 2}}])

    def answer(event: AfterInvocationEvent) -> None:
        responses: Any = [
            {
                "interruptResponse": {
                    "interruptId": asked.id,
                    "response": "yes" if asked.name == "approve" else next(answers, "no"),
                }
            }
            for asked in (event.result and event.result.interrupts) or ()
        ]
        event.resume = responses or None

    agent.hooks.add_callback(AfterInvocationEvent, answer)
    assert (agent("go").stop_reason, model.calls) == ("max_turns", 4)


def test_human_answer_applies_once(make_agent: MakeAgent, source: str) -> None:
    """Nor is it applied again when a hook answers a tool in the invocation that it started."""

    @tool(context=True)
    def pay(tool_context: ToolContext) -> str:
        """Ask before paying."""
        return str(tool_context.interrupt("approve"))

    def approve(event: AfterInvocationEvent) -> None:
        interrupts = (event.result and event.result.interrupts) or ()
        responses: Any = [
            {"interruptResponse": {"interruptId": asked.id, "response": "yes"}}
            for asked in interrupts
            if asked.name == "approve"
        ]
        event.resume = responses or None

    enable(Limits(max_turns=2), action="ask")
    agent = make_agent(model := ScriptedModel(endless(uses("pay"))), tools=[pay])
    agent.hooks.add_callback(AfterInvocationEvent, approve)
    again = extended(agent, agent("go"), {"extend": {"max_turns": 2}})
    assert (again.stop_reason, model.calls) == ("interrupt", 4)


def test_hook_answer_without_extension_halts(make_agent: MakeAgent, source: str) -> None:
    """The same question is not asked repeatedly."""
    enable(Limits(max_turns=2), action="ask")
    agent = make_agent(model := ScriptedModel(endless(uses("search"))))
    answering(agent, "no")
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("max_turns", 2)
    assert otel_limits.is_synthetic(result.message)


def test_resume_without_answer_keeps_the_question(make_agent: MakeAgent, source: str) -> None:
    """E.g. one that resends a goal: Strands would raise an error that never occurs without us."""
    enable(Limits(max_turns=2), action="ask")
    agent = make_agent(model := ScriptedModel(endless(uses("search"))))

    def go_on(event: AfterInvocationEvent) -> None:
        event.resume = "try again"

    agent.hooks.add_callback(AfterInvocationEvent, go_on)
    assert (agent("go").stop_reason, model.calls) == ("interrupt", 2)


def test_extended_agent_can_finish(make_agent: MakeAgent, source: str) -> None:
    """After an extension the invocation is like any other."""
    enable(Limits(max_turns=1), action="ask")
    agent = make_agent(ScriptedModel([uses("search"), says("done"), says("next")]))
    result = extended(agent, agent("go"), {"extend": {"max_turns": 5}})
    assert (result.stop_reason, agent("go").stop_reason) == ("end_turn", "end_turn")


@pytest.mark.parametrize(
    "response",
    [
        None,
        False,
        "no",
        " Stop ",
        {"extend": {}},
        {"extend": {"max_turns": None}},
        {"extend": {"max_calls_per_tool": {}}},
    ],
    ids=str,
)
def test_refusal_halts(make_agent: MakeAgent, source: str, response: object) -> None:
    """An answer without an extension ends the agent without another model call."""
    enable(Limits(max_turns=1), action="ask")
    model = ScriptedModel(itertools.chain([uses("search")], endless(says("x"))))
    agent = make_agent(model)
    result = extended(agent, agent("go"), response)
    assert (result.stop_reason, model.calls) == ("max_turns", 1)
    assert agent("go").stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("response", "more"),
    [
        (True, 2),
        ("yes", 2),
        (" Y ", 2),
        ("continue", 2),
        ("Approve", 2),
        (3, 3),
        ("3", 3),
        ({"extend": 3}, 3),
        ({"extend": "yes"}, 2),
        ({"extend": {"max_turns": 3}}, 3),
    ],
    ids=str,
)
def test_approval_extends_the_limit(
    make_agent: MakeAgent, source: str, response: object, more: int
) -> None:
    """By the amount of the cap, or by the number that a person gives."""
    enable(Limits(max_turns=2), action="ask")
    model = ScriptedModel(endless(uses("search")))
    agent = make_agent(model)
    assert extended(agent, agent("go"), response).stop_reason == "interrupt"
    assert model.calls == 2 + more


def test_approval_extends_the_cap_of_one_tool(make_agent: MakeAgent, source: str) -> None:
    """And not those of other tools."""
    enable(Limits(max_consecutive_failures_per_tool={"search": 2, "other": 9}), action="ask")
    model = ScriptedModel(endless(uses("unknown", "search")))
    agent = make_agent(model)
    agent.tool_registry.registry.pop("search")
    assert extended(agent, agent("go"), "3").stop_reason == "interrupt"
    assert model.calls == 5


@pytest.mark.parametrize(
    "response",
    [
        "maybe",
        {"x": 1},
        {"extend": {"max_turns": 0}},
        {"extend": {"max_turns": 5, "max_turn": 5}},
        {"extend": {5: 5}},
        "-3",
        0,
    ],
    ids=str,
)
def test_other_answer_is_asked_for_once_again(
    make_agent: MakeAgent, source: str, response: object
) -> None:
    """With what would be understood; the second one halts."""
    enable(Limits(max_turns=1), action="ask")
    model = ScriptedModel(itertools.chain([uses("search")], endless(says("x"))))
    agent = make_agent(model)
    again = extended(agent, agent("go"), response)
    (asked,) = again.interrupts
    assert asked.reason["again"]
    assert asked.reason["question"].startswith("The answer was not understood. ")
    assert "The answer was not understood: " in asked.reason["sentence"]
    result = extended(agent, again, response)
    assert (result.stop_reason, model.calls) == ("max_turns", 1)
    assert agent("go").stop_reason == "end_turn"


def test_answer_to_the_second_question_extends_the_limit(
    make_agent: MakeAgent, source: str
) -> None:
    """A person who mistypes has not said no."""
    enable(Limits(max_turns=1), action="ask")
    model = ScriptedModel([uses("search"), says("done")])
    agent = make_agent(model)
    again = extended(agent, agent("go"), "yse")
    assert (extended(agent, again, "yes").stop_reason, model.calls) == ("end_turn", 2)


def test_extension_without_tool_name_keeps_tool_caps(make_agent: MakeAgent, source: str) -> None:
    """Caps of single tools stay in force when an answer mentions them without a tool name."""
    enable(Limits(max_turns=1, max_calls_per_tool={"search": 1}), action="ask")
    model = ScriptedModel(endless(uses("search")))
    agent = make_agent(model)
    again = extended(agent, agent("go"), {"extend": {"max_turns": 9, "max_calls_per_tool": {}}})
    assert again.interrupts[0].reason["limit"] == "max_calls_per_tool"


# --- metrics --------------------------------------------------------------------------------------


def test_wrapped_up_halt_has_its_own_action_label(
    make_agent: MakeAgent, source: str, metric: Metric, events: list[Event]
) -> None:
    """It is one stop with the action `wrapped_up` and without a synthetic message."""
    enable(Limits(max_turns=1), action="wrap_up", observers=[events.append])
    make_agent(ScriptedModel([uses("search"), Answer(text="summary")]))("go")
    labels = {"agent": "tester", "reason": "max_turns"}
    assert metric("otel_limits_stops_total", **labels, action="wrapped_up") == 1
    assert metric("otel_limits_synthetic_messages_total", **labels) == 0
    assert [event.action for event in events if isinstance(event, Halt)] == ["wrapped_up"]
