"""Effects of a halt: one warning, one marked message, and attributes on the live span."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from opentelemetry.trace import StatusCode
from pydantic import BaseModel
from strands import tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    BeforeModelCallEvent,
    MessageAddedEvent,
)
from strands.session.file_session_manager import FileSessionManager

import otel_limits
from otel_limits import Breach, Event, Halt, Limits, Stop, Usage, enable
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands import Agent
    from strands.agent import AgentResult

    from tests.conftest import MakeAgent, Metric


PATHS = ("tools", "leg", "output", "retry")
"""The places in the loop where a halt can fall: after tools, before the first call of a resume
leg, before the call that only forces structured output, and before a retry."""


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


class Halting(Protocol):
    """Makes an agent that is halted after its first model call."""

    def __call__(self, **arguments: Any) -> Agent:
        """Make it; arguments go to `Agent`."""


def resume_once(agent: Agent) -> None:
    """Make `agent` start a second leg."""
    left = iter([True])

    def resume(event: AfterInvocationEvent) -> None:
        if next(left, False):
            event.resume = "once more"

    agent.hooks.add_callback(AfterInvocationEvent, resume)


def retry_once(agent: Agent) -> None:
    """Make `agent` throw away its first response."""
    left = iter([True])

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = next(left, False)

    agent.hooks.add_callback(AfterModelCallEvent, retry)


@pytest.fixture(params=PATHS)
def halting(request: pytest.FixtureRequest, make_agent: MakeAgent) -> Halting:
    """Agents that are halted at a cap of 1 turn or 15 tokens, in each place where that can be."""
    where = request.param

    def make(**arguments: Any) -> Agent:
        answer = uses("search") if where == "tools" else says("done")
        if where == "output":
            arguments["structured_output_model"] = Verdict
        agent = make_agent(ScriptedModel(endless(answer)), **arguments)
        {"leg": resume_once, "retry": retry_once}.get(where, lambda _: None)(agent)
        return agent

    return make


def ended(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Exported spans whose name begins with `name`."""
    return [span for span in spans.get_finished_spans() if span.name.startswith(name)]


LIMITS = Limits(max_token_budget=15)
"""Reached by the first model call, wherever the next one would come from."""


def test_every_place_of_a_halt_stops_at_one_call(halting: Halting, source: str) -> None:
    """One model call was made, the reason is ours, and the last message is synthetic."""
    enable(LIMITS)
    agent = halting()
    result = agent("go")
    assert isinstance(agent.model, ScriptedModel)
    assert (agent.model.calls, result.stop_reason) == (1, "max_token_budget")
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_a_halt_is_one_warning(
    halting: Halting, source: str, warnings_logged: Callable[[], list[str]]
) -> None:
    """The log says once which agent reached which cap, and what was counted."""
    enable(LIMITS)
    halting()("go")
    (warning,) = warnings_logged()
    assert warning.startswith(
        "Agent 'tester' was halted by max_token_budget: 15 of 15 tokens used. The limit is set in "
    )


def test_the_warning_of_turns(
    make_agent: MakeAgent,
    warnings_logged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names agent, limit, amount, where that is set and what to do, in this order."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    enable()
    make_agent(ScriptedModel(endless(uses("search"))), name="crawler")("go")
    sentence = (
        "Agent 'crawler' was halted by max_turns: 3 of 3 turns used. The limit is set in "
        "OTEL_LIMITS_MAX_TURNS. Run the agent again to continue, or raise the limit there."
    )
    assert warnings_logged() == [sentence]


def test_halt_is_published_once(halting: Halting, source: str, metric: Metric) -> None:
    """One halt is one `Halt` fact, one `Stop` fact, and one synthetic message in the metrics."""
    events: list[Event] = []
    enable(LIMITS, observers=[events.append])
    halting()("go")
    (halt,) = [fact for fact in events if isinstance(fact, Halt)]
    (stop,) = [fact for fact in events if isinstance(fact, Stop)]
    breach = Breach("max_token_budget", 15, 15, "max_token_budget", "tokens")
    assert (halt.breach, halt.action) == (breach, "halted")
    assert (stop.breach, stop.action, stop.reason) == (breach, "halted", "max_token_budget")
    labels = {"agent": "tester", "reason": "max_token_budget"}
    assert metric("otel_limits_synthetic_messages_total", **labels) == 1
    assert metric("otel_limits_stops_total", **labels, action="halted") == 1


def test_the_synthetic_message_is_added_once(halting: Halting, source: str) -> None:
    """`MessageAddedEvent` fires once for it, and its listeners see the marker."""
    enable(LIMITS)
    agent = halting()
    added: list[bool] = []
    agent.hooks.add_callback(
        MessageAddedEvent, lambda event: added.append(otel_limits.is_synthetic(event.message))
    )
    agent("go")
    assert added.count(True) == 1
    assert added[-1]


def test_synthetic_message_fires_no_model_event(halting: Halting, source: str) -> None:
    """No `AfterModelCallEvent` pretends that a model spoke; the stream shows the message once."""
    enable(LIMITS)
    agent = halting()
    answered: list[AfterModelCallEvent] = []
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: answered.append(event))  # noqa: PLW0108

    async def read() -> list[Any]:
        return [event["message"] async for event in agent.stream_async("go") if "message" in event]

    streamed = asyncio.run(read())
    assert len(answered) == 1
    assert [each for each in streamed if otel_limits.is_synthetic(each)] == agent.messages[-1:]


def test_the_marker(halting: Halting, source: str) -> None:
    """`metadata["custom"]` says that it is synthetic, and by which limit at which value."""
    enable(LIMITS)
    message = halting()("go").message
    custom = message["metadata"]["custom"]
    assert custom["synthetic"] is True
    expected = {
        "reason": "max_token_budget",
        "limit": "max_token_budget",
        "cap": 15,
        "observed": 15,
        "action": "halted",
        "agent": "tester",
    }
    assert custom["otel_limits"].items() >= expected.items()
    assert json.loads(json.dumps(custom)) == custom


def test_the_marker_has_no_usage(halting: Halting) -> None:
    """Strands would take a usage of zero for the size of the conversation so far."""
    enable(LIMITS)
    assert "usage" not in halting()("go").message["metadata"]


def test_the_projection_of_the_next_call_survives(make_agent: MakeAgent) -> None:
    """After a halt the projected size of the next call is still that of the whole conversation."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    projected: list[int] = []

    def note(event: BeforeModelCallEvent) -> None:
        projected.append(event.projected_input_tokens or 0)

    agent.hooks.add_callback(BeforeModelCallEvent, note)
    agent("go")
    agent("x")
    assert projected[2] > projected[1]


def test_the_model_never_sees_the_marker(halting: Halting) -> None:
    """The next request has the words of the synthetic message, and nothing of its metadata."""
    enable(LIMITS)
    agent = halting()
    agent("go")
    agent("x")
    assert isinstance(agent.model, ScriptedModel)
    request = json.dumps(agent.model.requests[-1])
    assert "could not be completed" in request
    assert "metadata" not in request
    assert '"synthetic"' not in request


def test_the_marker_is_in_the_saved_session(halting: Halting, source: str, tmp_path: Path) -> None:
    """The session on disk has the marker, and an agent that is restored from it knows it."""
    enable(LIMITS)
    halting(session_manager=FileSessionManager("s", storage_dir=str(tmp_path)))("go")
    saved = [json.loads(path.read_text()) for path in tmp_path.rglob("message_*.json")]
    marked = [m for m in saved if otel_limits.is_synthetic(m["message"])]
    assert [m["message"]["metadata"]["custom"]["otel_limits"]["cap"] for m in marked] == [15]
    restored = halting(session_manager=FileSessionManager("s", storage_dir=str(tmp_path)))
    assert otel_limits.is_synthetic(restored.messages[-1])


def test_a_zero_token_call_is_not_synthetic(make_agent: MakeAgent, source: str) -> None:
    """A real answer for which the provider reported zero tokens carries no marker."""
    enable(Limits(max_turns=2))
    zero = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    result = make_agent(ScriptedModel([says("really", usage=zero)]))("go")
    assert not otel_limits.is_synthetic(result.message)
    assert "custom" not in result.message["metadata"]
    assert otel_limits.stop_of(result) is None


def test_a_model_that_imitates_the_halt_is_not_synthetic(make_agent: MakeAgent) -> None:
    """The words of a halt in a model's mouth make no halt."""
    enable(Limits(max_turns=2))
    first = make_agent(ScriptedModel(endless(uses("search"))))("go")
    words = first.message["content"][0]["text"]
    result = make_agent(ScriptedModel([uses("search"), says(words)]))("go")
    assert (result.stop_reason, otel_limits.stop_of(result)) == ("end_turn", None)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"custom": None}, {"custom": {"synthetic": True}}, {"custom": {"otel_limits": {}}}],
)
def test_third_party_metadata_is_not_synthetic(metadata: Any) -> None:
    """A message is synthetic only when it says so and carries our object."""
    message = {"role": "assistant", "content": [{"text": "x"}], "metadata": metadata}
    assert not otel_limits.is_synthetic(message)


def test_stop_of_returns_the_whole_stop(
    halting: Halting, source: str, spans: InMemorySpanExporter
) -> None:
    """The stop has reason, breach, turns, usage, and the id of the trace where there is one."""
    enable(LIMITS)
    stop = otel_limits.stop_of(halting()("go"))
    assert stop is not None
    assert stop.breach == Breach("max_token_budget", 15, 15, "max_token_budget", "tokens")
    assert (stop.breaches, stop.reason) == ((stop.breach,), "max_token_budget")
    assert (stop.usage, stop.model_calls, stop.agent) == (Usage(input=10, output=5), 1, "tester")
    if source == "spans":
        (span,) = ended(spans, "invoke_agent")
        assert stop.trace_id == f"{span.context.trace_id:032x}"
    else:
        assert stop.trace_id is None


def test_hooks_receive_the_result_with_the_halt_reason(halting: Halting, source: str) -> None:
    """The last `AfterInvocationEvent` carries the result with the reason of the halt."""
    enable(LIMITS)
    agent = halting()
    results: list[AgentResult | None] = []
    agent.hooks.add_callback(AfterInvocationEvent, lambda event: results.append(event.result))
    agent("go")
    assert results[-1] is not None
    assert str(results[-1].stop_reason) == "max_token_budget"


def test_the_halt_is_on_the_live_agent_span(halting: Halting, spans: InMemorySpanExporter) -> None:
    """The exported `invoke_agent` span has the stop, the limit and the synthetic message."""
    enable(LIMITS)
    halting()("go")
    (span,) = ended(spans, "invoke_agent")
    expected = {
        "otel_limits.stop.reason": "max_token_budget",
        "otel_limits.stop.action": "halted",
        "otel_limits.limit.name": "max_token_budget",
        "otel_limits.limit.value": 15,
        "otel_limits.limit.consumed": 15,
        "otel_limits.message.synthetic": True,
    }
    assert (span.attributes or {}).items() >= expected.items()
    (event,) = [event for event in span.events if event.name == "otel_limits.halt"]
    assert (event.attributes or {}).items() >= expected.items()


def test_agent_span_has_the_halt_reason(halting: Halting, spans: InMemorySpanExporter) -> None:
    """Strands' own record of how the agent finished carries the reason of the halt."""
    enable(LIMITS)
    halting()("go")
    (span,) = ended(spans, "invoke_agent")
    (choice,) = [event for event in span.events if event.name == "gen_ai.choice"]
    assert (choice.attributes or {})["finish_reason"] == "max_token_budget"


def test_a_graceful_halt_is_no_error(halting: Halting, spans: InMemorySpanExporter) -> None:
    """No span of a halted invocation has status ERROR, `error.type` or an exception."""
    enable(LIMITS)
    halting()("go")
    exported = spans.get_finished_spans()
    assert [s.name for s in exported if s.status.status_code is StatusCode.ERROR] == []
    assert [s.name for s in exported if "error.type" in (s.attributes or {})] == []
    assert [e.name for s in exported for e in s.events if e.name == "exception"] == []


def test_every_span_of_a_halt_ends(halting: Halting, open_spans: Callable[[], list[str]]) -> None:
    """As many spans end as began, so that a trace viewer shows no hole."""
    enable(LIMITS)
    halting()("go")
    assert open_spans() == []


def test_a_halt_logs_nothing_above_a_warning(
    halting: Halting, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither Strands nor OpenTelemetry finds anything wrong with a halt."""
    enable(LIMITS)
    halting()("go")
    assert [(r.name, r.levelname) for r in caplog.records if r.levelname != "DEBUG"] == [
        ("otel_limits", "WARNING")
    ]


def test_a_natural_end_leaves_no_trace(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """An invocation without a halt has no otel-limits attribute or event."""
    enable(Limits(max_turns=9))
    make_agent(ScriptedModel([uses("search"), says("done")]))("go")
    finished = spans.get_finished_spans()
    assert any(span.name.startswith("invoke_agent") for span in finished)
    for span in finished:
        assert not any(name.startswith("otel_limits") for name in span.attributes or {})
        assert not any(event.name.startswith("otel_limits") for event in span.events)


def test_each_leg_that_is_halted_is_a_halt(
    make_agent: MakeAgent, source: str, warnings_logged: Callable[[], list[str]], metric: Metric
) -> None:
    """Two legs halted by `max_iterations` are two halts, within one finished invocation."""
    enable(Limits(max_iterations=2))
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    resume_once(agent)
    agent("go")
    assert len(warnings_logged()) == 2
    assert sum(otel_limits.is_synthetic(message) for message in agent.messages) == 2
    stops = {"agent": "tester", "reason": "max_iterations", "action": "halted"}
    assert metric("otel_limits_stops_total", **stops) == 1


def test_a_halted_leg_that_is_resumed_to_an_answer_ends_naturally(
    make_agent: MakeAgent, source: str, metric: Metric
) -> None:
    """The end of the last leg counts."""
    enable(Limits(max_iterations=1))
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    resume_once(agent)
    assert agent("go").stop_reason == "end_turn"
    stops = {"agent": "tester", "reason": "end_turn", "action": "none"}
    assert metric("otel_limits_stops_total", **stops) == 1


# --- the depth of the stack -----------------------------------------------------------------------

PACKAGE = str(Path(otel_limits.__file__).parent)

MOST_IN_A_SPAN = 9
"""Our nested frames in a span callback. A processor that needed 25 missed the last
calls of a runaway that died of recursion; one that needed 9 missed none."""

MOST_IN_A_HOOK = 13
"""The same in a hook or at a model call: four more for the path that all frameworks share."""

MOST_FOR_A_PRICE = 16
"""The same while the price of a call is looked up: an error there leaves the call unpriced, but
everything else about it is counted."""


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of the package."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class Depths:
    """Records how many of our frames each callback nests."""

    def __init__(self) -> None:
        self.callback: FrameType | None = None
        self.deepest: dict[str, tuple[int, list[str]]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Trace calls and returns."""
        if self.callback is None and event == "call" and is_entrance(frame):
            self.callback = frame
        elif event == "return" and frame is self.callback:
            self.callback = None
        elif self.callback is not None and event == "call" and is_ours(frame):
            self._note([each for each in self._down_from(frame) if is_ours(each)])

    def _down_from(self, frame: FrameType) -> list[FrameType]:
        frames = [frame]
        while frames[-1] is not self.callback and frames[-1].f_back is not None:
            frames.append(frames[-1].f_back)
        return frames[::-1]

    def _note(self, frames: list[FrameType]) -> None:
        names = [frame.f_code.co_name for frame in frames]
        name = next(name for name in names if name != "guarded")
        name += " price" if "quote" in names else ""
        if len(names) > self.deepest.get(name, (0, []))[0]:
            self.deepest[name] = (len(names), names)


PASS_THROUGH = {"_follow", "_follow_leg", "_follow_response", "streamed", "next_of"}
PASS_THROUGH |= {"stream_async"}
"""Our functions between Strands and other code, on the stack of every event."""

WRAPPERS = {"start", "end", "stream"}
"""Our wrappers around methods of Strands."""


def is_entrance(frame: FrameType) -> bool:
    """Return whether the framework, the SDK or a pass-through function called our code."""
    if not is_ours(frame) or frame.f_code.co_name in PASS_THROUGH | WRAPPERS:
        return False
    caller = frame.f_back
    return caller is None or not is_ours(caller) or caller.f_code.co_name in PASS_THROUGH


def run(agent: Agent, depths: Depths) -> None:
    """Invoke `agent` while `depths` traces it."""

    async def invoke() -> None:
        sys.setprofile(depths)
        try:
            await agent.invoke_async("go")
        finally:
            sys.setprofile(None)

    asyncio.run(invoke())


EVERY_LIMIT = Limits(
    max_turns=4,
    max_iterations=99,
    max_token_budget=10**9,
    max_tool_calls=99,
    max_duration_seconds=600,
    max_identical_tool_calls=99,
)


def most(callback: str) -> int:
    """Return the maximum depth of a callback."""
    if callback.endswith(" price"):
        return MOST_FOR_A_PRICE
    return MOST_IN_A_SPAN if callback.startswith("on_") else MOST_IN_A_HOOK


@pytest.mark.parametrize("model_id", ["scripted", "gpt-4o"])
def test_callbacks_stay_shallow(source: str, model_id: str, make_agent: MakeAgent) -> None:
    """A span callback or hook must fit in the few frames that a runaway has left."""
    enable(EVERY_LIMIT)
    model = ScriptedModel(endless(uses("search")), model_id, base_url="https://api.openai.com")
    agent = make_agent(model, tools=[search])
    agent("go")  # the traced runs find all one-time lookups cached
    depths = Depths()
    run(agent, depths)
    expected = {"message_added", "before_tools", "after_tools"}
    expected |= {"on_start", "on_end"} if source == "spans" else {"settle"}
    assert expected <= set(depths.deepest)
    too_deep = {
        name: names for name, (depth, names) in depths.deepest.items() if depth > most(name)
    }
    assert too_deep == {}
