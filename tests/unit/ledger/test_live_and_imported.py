"""The same spans give the same rows of model calls, recorded live and imported."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry import trace

from otel_limits import disable, enable
from otel_limits.cli.parser import main
from otel_limits.runs.conversations import conversation_hash
from tests.ledger.otlp import line
from tests.unit.ledger.test_foreign_spans import agent_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.ledger.fixtures import LedgerFile

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
