"""Model calls are booked once and alike, live and imported, of every instrumentation."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections import Counter
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from strands import Agent, tool

from otel_limits import Limits, disable, enable
from otel_limits.cli.parser import main
from otel_limits.core.events import Event, ModelCall, Stop
from otel_limits.runs.conversations import conversation_hash
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.ledger.otlp import line
from tests.price_list import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import Metric
    from tests.ledger.fixtures import LedgerFile


Tree = tuple[str, dict[str, Any], list[Any]]
"""The instrumentation and the attributes of a span, and the spans within it."""

OPENINFERENCE: dict[str, Any] = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.token_count.prompt": 900,
    "llm.token_count.completion": 100,
}
OPENLLMETRY: dict[str, Any] = {
    "llm.request.type": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.usage.input_tokens": 900,
    "gen_ai.usage.output_tokens": 100,
}
SILENT: dict[str, Any] = {"openinference.span.kind": "LLM", "llm.model_name": "m"}


def oi(*within: Tree, **more: Any) -> Tree:
    """One of OpenInference."""
    return ("openinference.instrumentation.openai", {**OPENINFERENCE, **more}, list(within))


def ol(*within: Tree, response: str | None = None, **more: Any) -> Tree:
    """One of OpenLLMetry."""
    told = {} if response is None else {"gen_ai.response.id": response}
    return ("opentelemetry.instrumentation.openai", {**OPENLLMETRY, **told, **more}, list(within))


def silent(*within: Tree) -> Tree:
    """A model call of which a span does not say the tokens."""
    return ("openinference.instrumentation.langchain", SILENT, list(within))


def other(kind: str, *within: Tree) -> Tree:
    """Spans that are not model calls."""
    return ("openinference.instrumentation.langchain", {"openinference.span.kind": kind}, [*within])


def call(operation: str, *within: Tree) -> Tree:
    """One of LiteLLM, which names its own function."""
    told = {"gen_ai.operation.name": operation, "llm.request.type": operation}
    return ("litellm", {**OPENLLMETRY, **told}, [*within])


def generation(*within: Tree, kind: str = "generation") -> Tree:
    """One of Langfuse."""
    used = {"input": 700, "output": 90, "input_cache_read": 200, "output_reasoning": 10}
    told = {
        "langfuse.observation.type": kind,
        "langfuse.observation.model.name": "m",
        "langfuse.observation.usage_details": json.dumps({**used, "total": 1_000}),
    }
    return ("langfuse-sdk", told, [*within])


def kernel(operation: str, *within: Tree, old: bool = False) -> Tree:
    """One of Semantic Kernel: utils/telemetry/model_diagnostics, before and after 2025."""
    names = ("response.prompt_tokens", "response.completion_tokens")
    input_name, output_name = names if old else ("usage.input_tokens", "usage.output_tokens")
    told = {
        "gen_ai.operation.name": operation,
        "gen_ai.system": "openai",
        "gen_ai.request.model": "m",
        f"gen_ai.{input_name}": 900,
        f"gen_ai.{output_name}": 100,
    }
    return ("semantic_kernel.utils.telemetry.model_diagnostics", told, [*within])


def vercel(*within: Tree, inner: bool = False) -> Tree:
    """One of Vercel's AI SDK: `ai.generateText` with the sums, `.doGenerate` with the call."""
    told = {
        "ai.operationId": "ai.generateText.doGenerate" if inner else "ai.generateText",
        "ai.model.id": "m",
        "ai.usage.inputTokens": 900,
        "ai.usage.outputTokens": 100,
    }
    standard = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 900}
    return ("ai", {**told, **(standard if inner else {})}, [*within])


HALF: dict[str, Any] = {"gen_ai.usage.output_tokens": 50}

FORESTS: dict[str, tuple[list[Tree], int]] = {
    "one": ([oi()], 1_000),
    "one of the other": ([ol()], 1_000),
    "one within another": ([oi(ol())], 1_000),
    "the other way round": ([ol(oi())], 1_000),
    "three": ([oi(ol(ol()))], 1_000),
    "three, of which the middle one is silent": ([oi(silent(ol()))], 1_000),
    "a chain": ([other("CHAIN", oi(), other("CHAIN", oi()))], 2_000),
    "within a chain within one": ([oi(other("CHAIN", ol()))], 1_000),
    "tried twice": ([silent(ol(), ol(**HALF))], 1_950),
    "a tool asks within a call": ([oi(other("TOOL", ol()))], 2_000),
    "an agent asks within a call": ([oi(other("AGENT", oi(), oi()))], 3_000),
    "one response, twice": ([ol(response="r"), oi(**{"llm.response.id": "r"})], 1_000),
    "one response, deeper": ([silent(ol(response="r")), oi(ol(response="r"))], 1_000),
    "two responses": ([ol(response="r"), ol(response="s")], 2_000),
    "a server that repeats its ids": ([ol(response="r"), ol(response="r", **HALF)], 1_950),
    "the same, seen by two": (
        [oi(ol(response="r")), oi(ol(response="r", **HALF), **{"llm.token_count.completion": 50})],
        1_950,
    ),
    "side by side, without an id": ([oi(), ol()], 2_000),
    "by LiteLLM": ([call("acompletion")], 1_000),
    "by LiteLLM, of text": ([call("text_completion"), call("atext_completion")], 2_000),
    "by LiteLLM, of responses": ([call("aresponses"), call("anthropic_messages")], 2_000),
    "by LiteLLM, within another": ([oi(call("acompletion"))], 1_000),
    "by Langfuse": ([generation(), generation(generation(kind="span"))], 2_000),
    "by Langfuse, within another": ([oi(generation())], 1_000),
    "a tool of Langfuse asks within a call": ([oi(generation(oi(), kind="tool"))], 2_000),
    "by Semantic Kernel": ([kernel("chat.completions"), kernel("chat.completions")], 2_000),
    "by an older Semantic Kernel": ([kernel("chat.completions", old=True)], 1_000),
    "by Semantic Kernel, within another": ([oi(kernel("chat.streaming_completions"))], 1_000),
    "an unknown operation": ([kernel("converse")], 1_000),
    "an unknown operation around two": ([kernel("plan", ol(**HALF), ol(**HALF))], 1_900),
    "an unknown operation around a silent one": ([kernel("plan", silent())], 1_000),
    "an unknown operation within one": ([oi(kernel("decode"))], 1_000),
    "an unknown operation around a tool": ([kernel("plan", other("TOOL", ol()))], 2_000),
    "by Vercel": ([vercel(vercel(inner=True))], 1_000),
    "embeddings, by the conventions": ([kernel("embeddings.create")], 0),
    "embeddings": ([ol(**{"llm.request.type": "embedding"})], 0),
}


def grow(*trees: Tree) -> None:
    """Make the spans of some trees."""
    for scope, attributes, within in trees:
        with trace.get_tracer(scope).start_as_current_span("call", attributes=attributes):
            grow(*within)


def agent_with(action: Callable[[], object], **more: Any) -> Agent:
    """Make an agent whose tool does something; its own two calls have 15 tokens each."""

    @tool
    def ask() -> str:
        """Call a model."""
        action()
        return "x"

    model = more.pop("model", None) or ScriptedModel([uses("ask"), says("x")])
    return Agent(model=model, tools=[ask], callback_handler=None, name="tester", **more)


@pytest.fixture
def events() -> list[Event]:
    """Publish events."""
    return []


def shown(events: list[Event]) -> int:
    """Tokens of the calls that the loop did not make."""
    return sum(each.usage.total for each in events if isinstance(each, ModelCall) and each.side)


def stop_of(events: list[Event]) -> Stop:
    """The end of the only invocation."""
    (stop,) = [each for each in events if isinstance(each, Stop)]
    return stop


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.usefixtures("source")
def test_a_call_is_booked_once(name: str, events: list[Event]) -> None:
    """With any span around or within it, and also when only hooks follow the agent."""
    forest, tokens = FORESTS[name]
    enable(observers=[events.append])
    agent_with(lambda: grow(*forest))("go")
    assert shown(events) == tokens
    assert stop_of(events).usage.total == tokens + 30


def test_an_import_counts_as_it_was_counted_live(
    ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Of the same spans, exported: each agent is a trace."""
    expected = {}
    file = tmp_path / "spans.jsonl"
    with file.open("a") as lines:
        for forest, tokens in FORESTS.values():
            agent_with(partial(grow, *forest))("go")
            finished = spans.get_finished_spans()
            lines.write(line(finished))
            expected[f"{finished[0].context.trace_id:032x}"] = tokens + 30
            spans.clear()
    assert main(["ledger", "import", str(file)]) == 0
    found = dict.fromkeys(expected, 0)
    for call in ledger.calls():
        found[call["trace_id"]] += call["input_tokens"] + call["output_tokens"]
    assert found == expected


@pytest.mark.parametrize(
    ("second", "calls"),
    [
        ({}, 1),
        ({"gen_ai.response.id": "s"}, 2),
        ({"gen_ai.request.model": "n"}, 2),
        ({"gen_ai.usage.output_tokens": 99}, 2),
    ],
    ids=["the same", "response", "model", "tokens"],
)
@pytest.mark.parametrize("seconds_later", [1, 60])
def test_a_call_in_two_traces_is_imported_once(
    ledger: LedgerFile,
    tmp_path: Path,
    spans: InMemorySpanExporter,
    second: dict[str, Any],
    calls: int,
    seconds_later: int,
) -> None:
    """A client and a gateway show one call; an ID that comes again later is another call."""
    first = OPENLLMETRY | {"gen_ai.response.id": "r"}
    for scope, attributes, later in (("app", first, 0), ("gateway", first | second, seconds_later)):
        begin = (1_760_000_000 + later) * 10**9
        span = trace.get_tracer(scope).start_span(
            "call", Context(), attributes=attributes, start_time=begin
        )
        span.end(begin + 5 * 10**9)
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", str(file)]) == 0
    assert len(ledger.calls()) == (calls if seconds_later == 1 else 2)


@pytest.mark.usefixtures("source")
def test_traced_call_counts_in_the_budget_and_is_published(
    ledger: LedgerFile, metric: Metric, events: list[Event]
) -> None:
    """An agent is halted by what its tools use; ledger and metrics have each call."""
    enable(Limits(max_token_budget=2_500), observers=[events.append])
    model = ScriptedModel(endless(uses("ask")))
    result = agent_with(lambda: grow(oi(ol())), model=model)("go")
    assert (model.calls, result.stop_reason) == (3, "max_token_budget")
    assert metric("otel_limits_tokens_total", agent="tester", model="m", type="input") == 2_700
    disable()
    assert ledger.tokens() == stop_of(events).usage.total == 3 * 1_015
    assert len(ledger.calls("side IS NOT NULL AND model = 'm'")) == 3


@pytest.mark.usefixtures("source")
def test_a_span_that_ends_later_is_booked(ledger: LedgerFile, events: list[Event]) -> None:
    """For example a stream that is read after the agent is done."""
    enable(observers=[events.append])
    began = []
    start = trace.get_tracer("foreign").start_span
    agent_with(lambda: began.append(start("call", attributes=OPENINFERENCE)))("go")
    assert stop_of(events).usage.total == 30
    began[0].end()
    disable()
    assert shown(events) == 1_000
    assert ledger.tokens() == 1_030
    (row,) = ledger.invocations()
    assert row["input_tokens"] + row["output_tokens"] == 1_030


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("is_late", [False, True], ids=["within the agent", "after it"])
def test_one_that_ends_before_what_is_within_it_is_booked_once(
    events: list[Event], *, is_late: bool
) -> None:
    """Neither has an ID; a later sibling is a separate call."""
    enable(observers=[events.append])
    spans: list[trace.Span] = []

    def begin() -> None:
        start = trace.get_tracer("foreign").start_span
        around = start("chain")
        outer = start("call", trace.set_span_in_context(around), attributes=OPENINFERENCE)
        beside = start("call", trace.set_span_in_context(around), attributes=OPENINFERENCE)
        inner = start("call", trace.set_span_in_context(outer), attributes=OPENLLMETRY)
        spans.extend((outer, around, inner, beside))

    def end() -> None:
        while spans:
            spans.pop(0).end()

    def both() -> None:
        begin()
        end()

    agent_with(begin if is_late else both)("go")
    end()
    assert shown(events) == 2_000


def tangle(between: str, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
    """Make four nested spans that end in the given order.

    Args:
        between: The kind of the second one.
        begins: Which have ended when the last one begins.
        ends: The order in which the others end.
    """
    kinds: list[dict[str, Any]] = [
        OPENINFERENCE,
        {"openinference.span.kind": between},
        {"openinference.span.kind": "CHAIN"},
        OPENLLMETRY,
    ]
    spans: list[trace.Span] = []
    start = trace.get_tracer("foreign").start_span
    for number, attributes in enumerate(kinds):
        if number == len(kinds) - 1:
            for ended in begins:
                spans[ended].end()
        around = trace.set_span_in_context(spans[-1]) if spans else None
        spans.append(start("call", around, attributes=attributes))
    for number in ends:
        spans[number].end()


ORDERS = [
    (begins, ends)
    for number in range(4)
    for begins in permutations(range(3), number)
    for ends in permutations(set(range(4)) - set(begins))
]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("between", "calls"), [("CHAIN", 1), ("TOOL", 2)])
def test_nested_call_is_recognized_in_any_order_of_ends(
    events: list[Event], between: str, calls: int
) -> None:
    """Four spans deep, in all orders; also where one begins when those around it have ended."""
    enable(observers=[events.append])

    def ask() -> None:
        for order in ORDERS:
            tangle(between, *order)

    agent_with(ask)("go")
    booked = [each for each in events if isinstance(each, ModelCall) and each.side]
    assert len(booked) == calls * len(ORDERS)


@pytest.mark.usefixtures("source")
def test_a_span_that_hangs_under_nothing_is_booked(events: list[Event]) -> None:
    """The task's scope is known without the parent span."""
    enable(observers=[events.append])

    def ask() -> None:
        start = trace.get_tracer("foreign").start_as_current_span
        with start("call", context=Context(), attributes=OPENINFERENCE):
            grow(ol())

    agent_with(ask)("go")
    assert shown(events) == 1_000


@pytest.mark.usefixtures("source")
def test_the_client_of_the_agents_own_model_is_not_booked_again(events: list[Event]) -> None:
    """Its calls are counted where their responses pass, whichever client also reports them."""
    enable(observers=[events.append])

    class Instrumented(ScriptedModel):
        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            with trace.get_tracer("foreign").start_as_current_span("call") as span:
                async for event in super().stream(*args, **kwargs):
                    yield event
                span.set_attributes(OPENINFERENCE)

    model = Instrumented([uses("ask"), says("x")])
    agent_with(lambda: None, model=model)("go")
    assert (shown(events), stop_of(events).usage.total) == (0, 30)


class Late(ScriptedModel):
    """A model whose client reports a call after it ended, as LiteLLM's does by a callback."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.contexts: list[contextvars.Context] = []

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Put the context of the call aside."""
        async for event in super().stream(*args, **kwargs):
            yield event
        self.contexts.append(contextvars.copy_context())

    def tell(self) -> None:
        """Show the calls of before."""
        while self.contexts:
            self.contexts.pop().run(grow, oi())


@pytest.mark.usefixtures("source")
def test_a_client_may_show_a_call_when_it_is_over(events: list[Event]) -> None:
    """A call of the loop, while the agent runs and after it is done."""
    enable(observers=[events.append])
    model = Late([uses("ask"), says("x")])
    agent_with(model.tell, model=model)("go")
    assert len(model.contexts) == 1
    model.tell()
    assert shown(events) == 0


@pytest.mark.usefixtures("source")
def test_a_client_of_a_tool_may_show_a_call_when_it_is_over(events: list[Event]) -> None:
    """The call was counted as it was streamed."""
    enable(observers=[events.append])
    helper = Late([says("x")])

    async def drain() -> None:
        async for _ in helper.stream([]):
            pass

    def ask() -> None:
        asyncio.run(drain())
        helper.tell()

    agent_with(ask)("go")
    assert [each.usage.total for each in events if isinstance(each, ModelCall)] == [15, 15, 15]


def test_nothing_is_booked_outside_of_an_agent(events: list[Event]) -> None:
    """Before, after, and parallel to one."""
    enable(observers=[events.append])
    grow(oi())
    agent_with(lambda: None)("go")
    grow(oi())
    assert shown(events) == 0


# --- the same spans, live and imported ------------------------------------------------------------

COLUMNS: Final = (
    *("model", "provider", "state", "estimated", "tier"),
    *("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"),
    *("reported_input_tokens", "reported_output_tokens", "reported_total_tokens"),
    *("reported_cache_read_tokens", "reported_cache_write_tokens", "cache_write_1h_tokens"),
    *("price_pico", "cache_saved_pico", "price_source", "price_basis"),
    *("stated_pico", "listed_pico"),
)
"""Columns that follow from the span. Only a live call has a number and a turn."""

SCOPES: Final = (
    "openinference.instrumentation.openai",
    "opentelemetry.instrumentation.botocore.bedrock-runtime",
    "langsmith",
    "app",
)
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"openinference.span.kind": "LLM"},
    {"gen_ai.operation.name": "chat"},
    {"gen_ai.operation.name": "converse"},
    {"llm.request.type": "completion"},
    {"langfuse.observation.type": "generation"},
    {},
)
COUNTS: Final = st.none() | st.integers(-1, 2_000) | st.sampled_from(["x", 7.0, 2**70])
TEXT: Final = st.sampled_from([None, "", "In the storm, ten ships came in."])
MAYBE: Final = {
    "gen_ai.request.model": st.sampled_from([None, "", "gpt-4o", "claude-sonnet-4-5"]),
    "gen_ai.provider.name": st.sampled_from([None, "openai", "aws.bedrock"]),
    "gen_ai.usage.input_tokens": COUNTS,
    "gen_ai.usage.output_tokens": COUNTS,
    "gen_ai.usage.total_tokens": COUNTS,
    "gen_ai.usage.cache_read.input_tokens": st.none() | st.integers(0, 900),
    "gen_ai.usage.cache_creation.input_tokens": st.none() | st.integers(0, 900),
    "llm.usage.cache_creation.ephemeral_1h_input_tokens": st.none() | st.integers(0, 900),
    "llm.token_count.prompt": st.none() | st.integers(0, 900),
    "langfuse.observation.usage_details": st.sampled_from([None, "{", json.dumps({"total": 9})]),
    "openai.response.service_tier": st.sampled_from([None, "flex"]),
    "llm.usage.service_tier": st.sampled_from([None, "priority"]),
    "otel_limits.stated_cost_usd": st.sampled_from([None, "0.000004", "0.0", "x"]),
    "otel_limits.stated_cost_by": st.sampled_from([None, "openrouter", "litellm_proxy"]),
    "gen_ai.usage.cost": st.sampled_from([None, 0.000002, -1.0, "0.1", True]),
    "server.address": st.sampled_from([None, "api.openai.com", "host.internal"]),
    "aws.region": st.sampled_from([None, "eu-central-1"]),
    "gen_ai.input.messages": TEXT,
    "gen_ai.completion.0.content": TEXT,
}


class Shown:
    """A span with its attributes, and the spans within it."""

    def __init__(self, name: str, scope: str, attributes: dict[str, Any], **more: Any) -> None:
        self.name, self.scope = name, scope
        self.attributes = {key: value for key, value in attributes.items() if value is not None}
        self.is_failed: bool = more.get("is_failed", False)
        self.within: list[Shown] = more.get("within", [])

    def grow(self) -> None:
        """Start and end the span."""
        tracer = trace.get_tracer(self.scope)
        with tracer.start_as_current_span(self.name, attributes=self.attributes) as span:
            for each in self.within:
                each.grow()
            if self.is_failed:
                span.set_status(trace.StatusCode.ERROR)

    def __repr__(self) -> str:
        """Show it in a failing example."""
        return (
            f"{self.name}[{self.scope}]{self.attributes}{'!' * self.is_failed}{self.within or ''}"
        )


@st.composite
def calls(draw: st.DrawFn, depth: int = 2) -> Shown:
    """A model call, shown by up to three spans within each other that agree on its tokens."""
    attributes = draw(st.fixed_dictionaries({}, optional=MAYBE))
    scope, is_failed = draw(st.sampled_from(SCOPES)), draw(st.booleans())
    name = draw(st.sampled_from(["chat m", "call"]))
    within = draw(st.lists(boundaries(depth - 1), max_size=1)) if depth else []
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    for kind in kinds:
        shown = Shown(name, scope, {**attributes, **kind}, is_failed=is_failed, within=within)
        within = [shown]
    return shown


@st.composite
def boundaries(draw: st.DrawFn, depth: int) -> Shown:
    """A tool, which makes its own calls."""
    return Shown(
        "tool",
        "openinference.instrumentation.langchain",
        {"openinference.span.kind": "TOOL"},
        within=draw(st.lists(calls(depth), max_size=2)),
    )


PROPERTY: Final = settings(
    derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FAILED: Final = Shown("call", "app", {**KINDS[0], "gen_ai.usage.total_tokens": 9}, is_failed=True)
MANY_CALLS: Final = st.lists(calls(), min_size=1, max_size=10)


@settings(PROPERTY, max_examples=12)
@example(shown=[FAILED])
@given(shown=MANY_CALLS)
def test_rows_of_one_span_are_the_same_live_and_imported(
    shown: list[Shown], ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """One rule reads kind, model, usage, tier, texts and status; a nightly test has more spans."""
    check_rows(shown, ledger, tmp_path, spans)


def check_rows(
    shown: list[Shown], ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Record spans live, import them into another ledger, and compare the rows."""
    spans.clear()
    imported = type(ledger)(tmp_path / "imported.db")
    for path in (ledger.path, imported.path):
        path.unlink(missing_ok=True)
    enable()

    def grow() -> None:
        for each in shown:
            each.grow()

    agent_with(grow)("go")
    disable()
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", "--ledger", str(imported.path), str(file)]) == 0
    assert rows_of(imported) == rows_of(ledger)


def rows_of(ledger: LedgerFile) -> Counter[tuple[Any, ...]]:
    """How often it has each row, by trace."""
    traces = {row["id"]: row["trace_id"] for row in ledger.invocations()}
    return Counter(
        (traces[row["invocation_id"]], *((each, row[each]) for each in COLUMNS))
        for row in ledger.calls("model != 'scripted'")
    )


@listed
@pytest.mark.parametrize(
    ("attributes", "source", "price"),
    [
        (
            {"otel_limits.stated_cost_usd": "0.05", "otel_limits.stated_cost_by": "openrouter"},
            "stated",
            50_000_000_000,
        ),
        # It was computed by the instrumentation.
        ({"gen_ai.usage.cost": 0.05}, "genai-prices", 25_000_000_000),
    ],
)
def test_stated_cost_in_a_span_is_imported(
    attributes: dict[str, Any],
    source: str,
    price: int,
    ledger: LedgerFile,
    tmp_path: Path,
    spans: InMemorySpanExporter,
) -> None:
    """Only a cost that otel-limits has copied from a response is a price."""
    used = {"gen_ai.request.model": "gpt-4o", "gen_ai.usage.input_tokens": 10_000}
    provider = {"gen_ai.provider.name": "openai", "gen_ai.usage.output_tokens": 0}
    Shown("chat", "app", {**KINDS[1], **used, **provider, **attributes}).grow()
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", str(file)]) == 0
    (row,) = ledger.calls()
    assert (row["price_source"], row["price_pico"]) == (source, price)
    assert (row["stated_pico"], row["listed_pico"]) == (50_000_000_000, 25_000_000_000)


def test_realtime_session_is_imported_as_an_invocation(
    ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """As it is live: its span has the sums of its calls, and is not a call itself."""
    attributes = {"gen_ai.operation.name": "bidi_session", "gen_ai.agent.name": "voice"}
    used = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 9}
    call = Shown("call", "app", {**KINDS[0], **used})
    Shown(
        "bidi_session voice", "strands.telemetry.tracer", {**attributes, **used}, within=[call]
    ).grow()
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", str(file)]) == 0
    (session,) = ledger.invocations()
    assert [row["invocation_id"] for row in ledger.calls()] == [session["id"]]
    assert session["agent"] == "voice"


def test_imported_agent_belongs_to_the_conversation_around_it(
    ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """As it does live; without an ID of a conversation it has none."""

    def agent_span(name: str, conversation: str | None, within: Sequence[Shown] = ()) -> Shown:
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": name,
            "gen_ai.conversation.id": conversation,
        }
        return Shown(f"invoke_agent {name}", "app", attributes, within=[*within])

    call = Shown("call", "app", {**KINDS[1], "gen_ai.usage.input_tokens": 9})
    helpers = [agent_span("helper", "its own", [call]), agent_span("other", None)]
    agent_span("lead", "thread 1", helpers).grow()
    agent_span("alone", None).grow()
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", str(file)]) == 0
    key = conversation_hash("lead", "thread 1")
    found = {row["agent"]: row["conversation"] for row in ledger.invocations()}
    assert found == {"lead": key, "helper": key, "other": key, "alone": None}
