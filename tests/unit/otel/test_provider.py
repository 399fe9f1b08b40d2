"""The program's own tracer provider replaces ours, whenever it is set, and loses no span."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.util._once import Once
from strands import Agent, tool
from strands.telemetry import StrandsTelemetry
from strands.telemetry import tracer as strands_tracer

from otel_limits import Event, Limits, ModelCall, Started, Stop, disable, enable
from otel_limits.otel.provider import FallbackProvider, set_fallback
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.langchain import graphs
from tests.openai_agents import runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeAgent

REJECTED = "Overriding of current TracerProvider is not allowed"


@pytest.fixture(autouse=True)
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no tracer provider yet, as if it had just started."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(strands_tracer, "_tracer_instance", strands_tracer.Tracer())


@pytest.fixture(autouse=True)
def nothing_rejected(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, no_provider: None
) -> Any:
    """OpenTelemetry accepts every provider of the test, unless it uses `rejecting`."""
    yield
    rejections = [each.getMessage() for each in caplog.get_records("call")].count(REJECTED)
    assert rejections == ("rejecting" in request.fixturenames)


@pytest.fixture
def rejecting() -> None:
    """OpenTelemetry rejects one provider of the test."""


@pytest.fixture
def limited(events: list[Event]) -> None:
    """As `otel-limits run` enables limits."""
    enable(Limits(max_turns=3), observers=[events.append])
    RUNTIME.provide_when_missing()


@pytest.fixture
def kept() -> InMemorySpanExporter:
    """The spans of the program's provider."""
    return InMemorySpanExporter()


def provider_to(kept: InMemorySpanExporter, **options: Any) -> TracerProvider:
    """A provider of the program."""
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider


def names_of(kept: InMemorySpanExporter) -> list[str]:
    """Names of the spans that have ended."""
    return [span.name for span in kept.get_finished_spans()]


def call_strands() -> None:
    """Run a Strands agent into its limit."""
    agent = Agent(
        model=ScriptedModel(endless(uses("search"))), name="boss", callback_handler=None, tools=[]
    )
    agent("go")


def call_langchain() -> None:
    """Run a graph into its limit."""
    graphs.call_invoke(graphs.agent(graphs.looping()))


def call_openai_agents() -> None:
    """Run an agent of the OpenAI Agents SDK into its limit."""
    runs.call_run(runs.agent(runs.looping()))


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("call", [call_strands, call_langchain, call_openai_agents])
def test_provider_set_after_the_first_agent_call_gets_all_spans(
    call: Callable[[], None], kept: InMemorySpanExporter, events: list[Event]
) -> None:
    """As many as of a provider that is set before any agent call; limits are enforced by spans."""
    call()
    early = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    TracerProvider.add_span_processor(provider, SimpleSpanProcessor(early))  # type: ignore[arg-type]
    call()
    trace.set_tracer_provider(provider_to(kept))
    call()
    assert names_of(kept) == names_of(early)
    assert names_of(kept)[-1] == "invoke_agent boss"
    stops = [fact for fact in events if isinstance(fact, Stop)]
    assert [(stop.reason, stop.model_calls) for stop in stops] == [("max_turns", 3)] * 3
    assert not any(fact.unsampled for fact in events if isinstance(fact, Started))


def use_start_span(tracer: trace.Tracer) -> None:
    """Start and end a span."""
    tracer.start_span("own").end()


def use_context(tracer: trace.Tracer) -> None:
    """Start a span as the current one."""
    with tracer.start_as_current_span("own") as span:
        assert trace.get_current_span() is span


REQUESTS: dict[str, Callable[[], trace.Tracer]] = {
    "from the API": lambda: trace.get_tracer("app", "1", schema_url="https://example.org/1"),
    "from ours": lambda: trace.get_tracer_provider().get_tracer(
        "app", "1", "https://example.org/1"
    ),
}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("use", [use_start_span, use_context])
@pytest.mark.parametrize("when", ["before the first agent call", "after it", "used after it"])
@pytest.mark.parametrize("request_tracer", REQUESTS.values(), ids=REQUESTS)
def test_tracer_requested_before_starts_spans_in_the_programs_provider(
    request_tracer: Callable[[], trace.Tracer],
    when: str,
    use: Callable[[trace.Tracer], None],
    kept: InMemorySpanExporter,
) -> None:
    """Instrumentations request their tracer once, and the API's proxy keeps the first real one."""
    tracer = request_tracer()
    call_strands()
    if when == "after it":
        tracer = request_tracer()
    if when == "used after it":
        use(tracer)
    trace.set_tracer_provider(provider_to(kept))
    use(tracer)
    (span,) = kept.get_finished_spans()
    scope = span.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version, scope.schema_url) == ("app", "1", "https://example.org/1")


@pytest.mark.usefixtures("limited")
def test_decorated_function_starts_its_span_in_the_programs_provider(
    kept: InMemorySpanExporter,
) -> None:
    """A decorator starts a span at each call, and ends that of a coroutine with it."""
    call_strands()

    @trace.get_tracer("app").start_as_current_span("decorated")
    async def work() -> bool:
        await asyncio.sleep(0)
        return trace.get_current_span().is_recording()

    assert asyncio.run(work())
    trace.set_tracer_provider(provider_to(kept))
    assert asyncio.run(work())
    assert names_of(kept) == ["decorated"]


@pytest.mark.usefixtures("limited", "rejecting")
def test_second_provider_of_the_program_is_rejected(kept: InMemorySpanExporter) -> None:
    """As without otel-limits."""
    call_strands()
    own = provider_to(kept)
    trace.set_tracer_provider(own)
    trace.set_tracer_provider(TracerProvider())
    assert trace.get_tracer_provider() is own


@pytest.mark.usefixtures("limited", "rejecting")
def test_span_processor_of_the_program_makes_our_provider_its_own(
    kept: InMemorySpanExporter,
) -> None:
    """It gets every span, and a provider set later is rejected as the second one."""
    call_strands()
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    assert not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    trace.set_tracer_provider(TracerProvider())
    call_strands()
    assert "invoke_agent boss" in names_of(kept)


@pytest.mark.usefixtures("limited")
def test_program_that_configures_tracing_if_unset_sets_its_provider(
    kept: InMemorySpanExporter,
) -> None:
    """To such a program, our provider is none."""
    call_strands()
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider_to(kept))
    call_strands()
    assert "invoke_agent boss" in names_of(kept)


@pytest.mark.usefixtures("limited")
def test_strands_telemetry_created_later_gets_all_spans(kept: InMemorySpanExporter) -> None:
    """It sets a provider when it is created."""
    call_strands()
    telemetry = StrandsTelemetry()
    telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(kept))
    call_strands()
    assert "invoke_agent boss" in names_of(kept)


def runaway_with(work: Callable[[int], None]) -> ScriptedModel:
    """Run an agent into its limit; its tool does `work` with the number of its call."""
    numbers = iter(range(100))

    @tool
    def search() -> str:
        """Search."""
        work(next(numbers))
        return "nothing"

    model = ScriptedModel(endless(uses("search")))
    Agent(model=model, name="boss", tools=[search], callback_handler=None)("go")
    return model


@pytest.mark.usefixtures("limited")
def test_invocation_in_progress_continues_in_the_programs_provider(
    kept: InMemorySpanExporter, events: list[Event]
) -> None:
    """Its later spans have its trace ID, and each call is counted once."""
    ours = InMemorySpanExporter()

    def work(number: int) -> None:
        provider: Any = trace.get_tracer_provider()
        if number == 0:
            TracerProvider.add_span_processor(provider, SimpleSpanProcessor(ours))
        if number == 1:
            # As a setup function does that runs in another thread.
            setup = threading.Thread(target=trace.set_tracer_provider, args=[provider_to(kept)])
            setup.start()
            setup.join()

    model = runaway_with(work)
    (stop,) = [fact for fact in events if isinstance(fact, Stop)]
    assert stop.invocation is not None
    assert (model.calls, stop.model_calls, stop.turns) == (3, 3, 3)
    spans = [*kept.get_finished_spans(), *ours.get_finished_spans()]
    assert {trace.format_trace_id(span.context.trace_id) for span in spans} == {
        stop.invocation.trace_id
    }
    assert len({span.context.span_id for span in spans}) == len(spans)
    assert names_of(kept).count("chat") == 1
    assert names_of(ours)[-1] == "invoke_agent boss"


@pytest.mark.usefixtures("limited")
def test_calls_of_instrumented_clients_count_in_both_providers(
    kept: InMemorySpanExporter, events: list[Event]
) -> None:
    """Only its span reports such a call: before, during and after the change of provider."""
    client = trace.get_tracer("vendor")

    def work(number: int) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "small",
            "gen_ai.usage.input_tokens": 100 * (number + 1),
            "gen_ai.usage.output_tokens": 1,
        }
        with client.start_as_current_span("chat small", attributes=attributes):
            if number == 1:
                trace.set_tracer_provider(provider_to(kept))

    runaway_with(work)
    side = [
        fact.usage.input for fact in events if isinstance(fact, ModelCall) and fact.model == "small"
    ]
    assert side == [100, 200, 300]


@pytest.mark.usefixtures("limited")
def test_provider_that_drops_all_spans_keeps_cap_enforced(
    kept: InMemorySpanExporter, events: list[Event]
) -> None:
    """The program's sampler applies, and its agents are tracked through hooks."""
    call_strands()
    trace.set_tracer_provider(provider_to(kept, sampler=ALWAYS_OFF))
    call_strands()
    stops = [fact for fact in events if isinstance(fact, Stop)]
    assert [(stop.reason, stop.model_calls) for stop in stops] == [("max_turns", 3)] * 2
    assert [fact.unsampled for fact in events if isinstance(fact, Started)] == [False, True]
    assert names_of(kept) == []


class Wrapper(trace.TracerProvider):
    """A provider of the program that wraps the one it has found."""

    def __init__(self) -> None:
        self.wrapped = trace.get_tracer_provider()
        self.requests: list[str] = []

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """Note the request, and hand it on."""
        self.requests.append(args[0])
        return self.wrapped.get_tracer(*args, **kwargs)


@pytest.mark.usefixtures("limited")
def test_provider_that_wraps_ours_starts_its_spans() -> None:
    """Neither hands requests back to the other without end."""
    call_strands()
    tracer = trace.get_tracer("app")
    wrapper = Wrapper()
    trace.set_tracer_provider(wrapper)
    for each in (tracer, trace.get_tracer("later")):
        assert each.start_span("own").is_recording()
    assert set(wrapper.requests) == {"app", "later"}


@pytest.mark.usefixtures("limited")
def test_provider_set_after_disabling_is_accepted(
    kept: InMemorySpanExporter, make_agent: MakeAgent
) -> None:
    """Our provider stays, as the API cannot remove one, but not in the way."""
    call_strands()
    disable()
    trace.set_tracer_provider(provider_to(kept))
    make_agent(ScriptedModel([says("done")]))("go")
    assert "invoke_agent tester" in names_of(kept)


@pytest.mark.usefixtures("limited")
def test_enabling_again_keeps_our_provider() -> None:
    """A second one would lose the spans in progress."""
    call_strands()
    ours = trace.get_tracer_provider()
    disable()
    enable(Limits(max_turns=3))
    RUNTIME.provide_when_missing()
    call_strands()
    assert trace.get_tracer_provider() is ours


def test_provider_set_at_the_same_time_is_kept(kept: InMemorySpanExporter) -> None:
    """Another thread has set it since we looked."""
    own = provider_to(kept)
    trace.set_tracer_provider(own)
    set_fallback(FallbackProvider())
    assert trace.get_tracer_provider() is own


def test_provider_of_the_environment_variable_can_be_replaced(
    kept: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OTEL_PYTHON_TRACER_PROVIDER=otel_limits` is set by an operator, not by the program."""
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "otel_limits")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    monkeypatch.setattr(strands_tracer, "_tracer_instance", None)  # requested by the first agent
    call_strands()
    assert isinstance(trace.get_tracer_provider(), FallbackProvider)
    trace.set_tracer_provider(provider_to(kept))
    call_strands()
    assert "invoke_agent boss" in names_of(kept)
    assert names_of(kept).count("chat") == 3


class Fixed:
    """The lock of an OpenTelemetry release in which it cannot be kept open."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = False

    def do_once(self, function: Callable[[], None]) -> bool:
        """Call the first function."""
        was_done, self.is_done = self.is_done, True
        if not was_done:
            function()
        return not was_done


@pytest.mark.usefixtures("limited", "rejecting")
def test_unknown_release_of_opentelemetry_is_reported(
    kept: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    warnings_logged: Callable[[], list[str]],
    events: list[Event],
) -> None:
    """The warning contains the fix, and limits are still enforced by spans."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Fixed())
    call_strands()
    trace.set_tracer_provider(provider_to(kept))
    call_strands()
    (warning,) = [text for text in warnings_logged() if "OpenTelemetry" in text]
    assert "set it before the first agent call" in warning
    stops = [fact for fact in events if isinstance(fact, Stop)]
    assert [(stop.reason, stop.model_calls) for stop in stops] == [("max_turns", 3)] * 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copied_tracer_starts_spans_in_the_programs_provider(
    limited: None, kept: InMemorySpanExporter, copied: Callable[[trace.Tracer], trace.Tracer]
) -> None:
    """A program may copy an object that keeps one, such as an agent."""
    call_strands()
    tracer = copied(trace.get_tracer("app"))
    with tracer.start_as_current_span("before"):
        pass
    trace.set_tracer_provider(provider_to(kept))
    for each in (tracer, copied(tracer)):
        with each.start_as_current_span("after"):
            pass
    assert names_of(kept) == ["after"] * 2
