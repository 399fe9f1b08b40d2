"""Agents with and without spans: the same limits, and the attributes of a span at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from strands import ModelRetryStrategy, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent
from strands.telemetry import tracer as strands_tracer
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import otel_limits
from otel_limits import Event, Limits, ModelCall, Started, Stop, TaskUsage, enable
from otel_limits.core.policy import ACTIONS
from otel_limits.testing import ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands import Agent

    from otel_limits.testing import Answer
    from tests.conftest import MakeAgent, Metric


def follow(provider: trace.TracerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Strands make its spans with `provider`, as if it had been the first of the process."""
    tracer = strands_tracer.Tracer()
    tracer.tracer = provider.get_tracer("strands.telemetry.tracer")
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracer)


def halted_at_three(make_agent: MakeAgent, metric: Metric) -> float:
    """Run a runaway into a cap of 3 and return how many unsampled invocations were counted."""
    model = ScriptedModel(endless(uses("search")))
    result = make_agent(model)("go")
    assert (model.calls, result.stop_reason) == (3, "max_turns")
    return metric("otel_limits_unsampled_invocations_total", agent="tester")


@pytest.fixture
def unsampled() -> Iterator[None]:
    """Run under an incoming `traceparent` whose sender does not sample."""
    carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    yield
    context.detach(token)


def test_sampled_invocation_is_not_unsampled(make_agent: MakeAgent, metric: Metric) -> None:
    """Baseline: with an SDK provider, no invocation counts as unsampled."""
    enable(Limits(max_turns=3))
    assert halted_at_three(make_agent, metric) == 0


@pytest.mark.usefixtures("hooks_only")
def test_missing_provider_keeps_cap_enforced(make_agent: MakeAgent, metric: Metric) -> None:
    """The cap is enforced, and the invocation counts as unsampled."""
    enable(Limits(max_turns=3))
    assert halted_at_three(make_agent, metric) == 1


def test_sampler_dropping_all_spans_keeps_cap_enforced(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `ALWAYS_OFF` the processor gets no span, but the cap is enforced."""
    enable(Limits(max_turns=3))
    follow(TracerProvider(sampler=ALWAYS_OFF), monkeypatch)
    assert halted_at_three(make_agent, metric) == 1


@pytest.mark.usefixtures("unsampled")
def test_unsampled_caller_keeps_cap_enforced(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ParentBased` drops all spans under a `traceparent …-00`, but the cap is enforced."""
    enable(Limits(max_turns=3))
    follow(TracerProvider(sampler=ParentBased(ALWAYS_ON)), monkeypatch)
    assert halted_at_three(make_agent, metric) == 1


def test_disabled_sdk_keeps_cap_enforced(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `OTEL_SDK_DISABLED=true` every span is a no-op, but the cap is enforced."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    enable(Limits(max_turns=3))
    follow(TracerProvider(), monkeypatch)
    assert halted_at_three(make_agent, metric) == 1


def test_third_party_provider_keeps_cap_enforced(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of a vendor's provider never reach our processor, but the cap is enforced."""
    enable(Limits(max_turns=3))
    follow(trace.NoOpTracerProvider(), monkeypatch)
    assert halted_at_three(make_agent, metric) == 1


def test_second_global_provider_is_ignored(
    make_agent: MakeAgent, metric: Metric, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry rejects a second global provider; we continue with the first one."""
    enable(Limits(max_turns=3))
    trace.set_tracer_provider(TracerProvider())
    assert "Overriding of current TracerProvider is not allowed" in caplog.text
    assert halted_at_three(make_agent, metric) == 0


def test_non_global_provider_keeps_cap_enforced(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider made before `enable()` and known to Strands only lacks our processor."""
    provider = TracerProvider()
    enable(Limits(max_turns=3))
    follow(provider, monkeypatch)
    assert halted_at_three(make_agent, metric) == 1


@pytest.mark.parametrize("count", ["0", "2", "6"])
def test_attribute_limits_do_not_hide_tokens(
    count: str, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the SDK drops the usage from the `chat` span, the hook counts it."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", count)
    enable(Limits(max_token_budget=31))
    follow(TracerProvider(), monkeypatch)
    model = ScriptedModel(endless(uses("search")))
    stop = otel_limits.stop_of(make_agent(model)("go"))
    assert stop is not None
    assert (model.calls, stop.usage) == (3, otel_limits.Usage(input=30, output=15))


@pytest.mark.parametrize(
    "opt_in",
    [
        "gen_ai_latest_experimental",
        "gen_ai_use_latest_invocation_tokens",
        "gen_ai_unredacted_attributes=",
    ],
)
def test_opt_in_conventions_give_the_same_tokens(
    opt_in: str, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of Strands' span variants gives the same tokens and span IDs."""
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", opt_in)
    events: list[Event] = []
    enable(Limits(max_token_budget=31), observers=[events.append])
    follow(TracerProvider(), monkeypatch)
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    calls = [fact for fact in events if isinstance(fact, ModelCall)]
    assert [call.usage.total for call in calls] == [15, 15, 15]
    assert all(call.span_id for call in calls)


class Remembering(ScriptedModel):
    """Lets Strands call another model while it answers, as Strands' memory does."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Trace another request, then answer."""
        strands_tracer.get_tracer().tracer.start_span("chat").end()
        async for event in super().stream(*args, **kwargs):
            yield event


def test_model_call_is_matched_to_its_own_span(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """Not under the span of another request that Strands traces in between."""
    events: list[Event] = []
    enable(observers=[events.append])
    make_agent(Remembering([says("done")]))("go")
    chats = [span for span in spans.get_finished_spans() if span.name.startswith("chat")]
    assert len(chats) == 2
    own = min(chats, key=lambda span: span.start_time or 0)
    assert own.context is not None
    calls = [fact.span_id for fact in events if isinstance(fact, ModelCall)]
    assert calls == [trace.format_span_id(own.context.span_id)]


def test_cumulative_usage_of_agent_span_is_not_counted(make_agent: MakeAgent) -> None:
    """The agent span's usage is cumulative: counting it would bill earlier invocations again."""
    events: list[Event] = []
    enable(observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    for _ in range(3):
        agent("go")
    assert [fact.usage.total for fact in events if isinstance(fact, Stop)] == [15, 15, 15]


@pytest.mark.parametrize("source", ["spans", "hooks"], indirect=True)
def test_started_event_reports_unsampled(make_agent: MakeAgent, source: str) -> None:
    """`Started.unsampled` is decided before anything is counted."""
    events: list[Event] = []
    enable(observers=[events.append])
    make_agent(ScriptedModel([says("done")]))("go")
    (started,) = [event for event in events if isinstance(event, Started)]
    assert started.unsampled == (source == "hooks")
    assert (started.invocation.trace_id is None) == (source == "hooks")


class KeepsEverything(NullConversationManager):
    """A conversation manager that fails to reduce an overflowing context."""

    def reduce_context(self, agent: Any, e: Exception | None = None, **_: Any) -> None:
        """Pretend that the context is smaller now."""


ZERO = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}

ANSWERS: st.SearchStrategy[Answer] = st.sampled_from(
    [
        uses("search"),
        uses("search", "search"),
        uses("search", usage=None),
        uses("search", usage=ZERO),
        uses("no_such_tool"),
        says("done"),
        says("done", usage=None),
        fails(ModelThrottledException("slow")),
        fails(ContextWindowOverflowException("long")),
        says("half", error=ConnectionError("gone")),
    ]
)

LIMITS = st.builds(
    Limits,
    max_turns=st.none() | st.integers(1, 6),
    max_iterations=st.none() | st.integers(1, 6),
    max_token_budget=st.none() | st.integers(1, 100),
)


def prepare(agent: Agent, legs: int, retries: set[int]) -> None:
    """Add this many legs to `agent`, and retry the model calls with these numbers."""
    left, number = iter(range(legs)), iter(range(1000))

    def resume(event: AfterInvocationEvent) -> None:
        if next(left, None) is not None:
            event.resume = "once more"

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = next(number) in retries

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    agent.hooks.add_callback(AfterModelCallEvent, retry)


IDENTITY: Any = {
    "trace_id": None,
    "invocation_id": "",
    "invocation": None,
    "started": 0.0,
    "seconds": 0.0,
    "task": TaskUsage(),
}
"""Fields that differ between two otherwise identical invocations."""


def outcome(agent: Agent) -> Any:
    """Return how an invocation ended for its caller."""
    try:
        return str(agent("go").stop_reason)
    except Exception as error:  # noqa: BLE001  compared between the two sources
        return type(error)


@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    answers=st.lists(ANSWERS, max_size=8),
    limits=LIMITS,
    action=st.sampled_from(ACTIONS),
    legs=st.integers(0, 2),
    retries=st.sets(st.integers(0, 5), max_size=2),
)
def test_spans_and_hooks_report_the_same(  # noqa: PLR0913, PLR0917  hypothesis gives each apart
    answers: list[Answer],
    limits: Limits,
    action: Any,
    legs: int,
    retries: set[int],
    make_agent: MakeAgent,
    tracers: dict[str, strands_tracer.Tracer],
) -> None:
    """Both sources count the same and halt at the same call, for any script and limits."""
    reported = []
    for source in ("spans", "hooks"):
        events: list[Event] = []
        enable(limits, action=action, observers=[events.append])
        vars(strands_tracer)["_tracer_instance"] = tracers[source]
        model = ScriptedModel([*answers, *[says("enough")] * 12])
        agent = make_agent(
            model,
            conversation_manager=KeepsEverything(),
            retry_strategy=ModelRetryStrategy(initial_delay=0, max_delay=0),
        )
        prepare(agent, legs, retries)
        end = outcome(agent)
        (stop,) = [fact for fact in events if isinstance(fact, Stop)]
        assert stop.model_calls == model.calls
        spare = {"observe": 100, "wrap_up": 1}.get(action, 0)
        assert stop.turns <= (limits.max_turns or 100) + spare
        assert stop.usage.total == sum(f.usage.total for f in events if isinstance(f, ModelCall))
        same = replace(stop, **IDENTITY)
        reported.append((end, same, [m["role"] for m in agent.messages]))
    assert reported[0] == reported[1]


# --- attributes of an invocation's span -----------------------------------------------------------

COST = "otel_limits.cost_usd"
UNPRICED = "otel_limits.unpriced_calls"


@pytest.fixture
def _priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "models:\n"
        "  priced: {price: {input: 1000, output: 2000}}\n"
        "  free: {price: {input: 0, output: 0}}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))


def of_agents(spans: InMemorySpanExporter) -> dict[str, dict[str, Any]]:
    """Our attributes on the spans of invocations, by agent."""
    return {
        span.name.removeprefix("invoke_agent "): {
            name: value
            for name, value in (span.attributes or {}).items()
            if name.startswith("otel_limits.")
        }
        for span in spans.get_finished_spans()
        if span.name.startswith("invoke_agent")
    }


def test_would_be_halt_is_on_the_span(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Reason, limit and action of the would-be halt; the stop reason is the framework's."""
    enable(Limits(max_turns=2), action="observe")
    result = make_agent(ScriptedModel([*[uses("search")] * 3, says("done")]))("go")

    assert result.stop_reason == "end_turn"
    found = of_agents(spans)["tester"]
    assert str(found.pop("otel_limits.stop.message")).startswith(
        "Agent 'tester' would have been halted by max_turns: 2 of 2 turns used. "
    )
    assert found == {
        "otel_limits.stop.would_be": "max_turns",
        "otel_limits.stop.action": "observed",
        "otel_limits.limit.name": "max_turns",
        "otel_limits.limit.value": 2,
        "otel_limits.limit.consumed": 2,
    }


def test_real_halt_is_not_a_would_be_halt(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """Dashboards that count both must not count it twice."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")

    attributes = of_agents(spans)["tester"]
    assert attributes["otel_limits.stop.reason"] == "max_turns"
    assert "otel_limits.stop.would_be" not in attributes


@pytest.mark.usefixtures("_priced")
def test_cost_is_on_the_span(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Two calls of 10 and 5 tokens at 1,000 and 2,000 USD per million, with no unpriced call."""
    enable()
    make_agent(ScriptedModel([uses("search"), says("done")], model_id="priced"))("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.04)}


@pytest.mark.usefixtures("_priced")
def test_free_model_costs_zero(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """A price of 0 is a price."""
    enable()
    make_agent(ScriptedModel([says("done")], model_id="free"))("go")

    assert of_agents(spans)["tester"] == {COST: 0.0}


@pytest.mark.usefixtures("_priced")
def test_unknown_price_leaves_cost_unset(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """Never 0, which would mean free."""
    enable()
    make_agent(ScriptedModel([says("done")], model_id="unheard-of"))("go")

    assert of_agents(spans)["tester"] == {}


@pytest.mark.usefixtures("_priced")
def test_partial_cost_is_marked_as_partial(
    make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """An agent that switches models has calls with and without a price."""
    enable()
    second = ScriptedModel([says("done")], model_id="unheard-of")

    @tool
    def switch() -> str:
        """Change the model."""
        agent.model = second
        return "done"

    agent = make_agent(ScriptedModel([uses("switch")], model_id="priced"), tools=[switch])
    agent("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.02), UNPRICED: 1}


@pytest.mark.usefixtures("_priced")
def test_failed_invocation_has_a_cost(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """The calls before the failure were billed."""
    enable()
    script = [uses("search"), fails(ConnectionError("gone"))]
    with pytest.raises(Exception, match="gone"):
        make_agent(ScriptedModel(script, model_id="priced"))("go")

    assert of_agents(spans)["tester"] == {COST: pytest.approx(0.02)}


@pytest.mark.usefixtures("_priced")
def test_nested_agent_has_its_own_cost(make_agent: MakeAgent, spans: InMemorySpanExporter) -> None:
    """Span costs can be added up: none includes that of another."""
    enable()

    @tool
    def ask() -> str:
        """Call another agent."""
        return str(make_agent(ScriptedModel([says("yes")], model_id="priced"), name="inner")("go"))

    outer = ScriptedModel([uses("ask"), says("done")], model_id="priced")
    make_agent(outer, tools=[ask], name="outer")("go")

    found = of_agents(spans)
    assert found["outer"] == {COST: pytest.approx(0.04)}
    assert found["inner"] == {COST: pytest.approx(0.02)}
