"""Spans that say little: calls without tokens, tokens without a call, unknown attributes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

import pytest
from opentelemetry import trace

from otel_limits import Event, Limits, ModelCall, disable, enable
from otel_limits.cli import main
from otel_limits.testing import ScriptedModel, endless, says, uses
from otel_limits.usage.text import tokens_of_text
from tests.features.page import SUBJECTS
from tests.ledger.otlp import line
from tests.unit.ledger.test_imports import (
    FORESTS,
    OPENINFERENCE,
    SILENT,
    Tree,
    agent_with,
    grow,
    oi,
    ol,
    other,
    silent,
    stop_of,
)
from tests.unit.ledger.test_otlp import CALL_ATTRIBUTES, START_US, TRACE, typed
from tests.wire.cases import png

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import Metric
    from tests.features.subject import Subject
    from tests.ledger.fixtures import LedgerFile


ENGLISH = "The harbour master wrote down every ship that came in during the storm. " * 20
"""About 300 tokens."""


def named(response: str) -> Tree:
    """One that says which response it shows, but not its tokens."""
    scope, attributes, _ = silent()
    return (scope, {**attributes, "gen_ai.response.id": response}, [])


def counting(tokens: Any) -> Tree:
    """One that says the same of input and output."""
    scope, attributes, _ = ol()
    used = dict.fromkeys(("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"), tokens)
    return (scope, {**attributes, **used}, [])


def botocore() -> Tree:
    """One whose prompt a guardrail blocked, so that it used nothing."""
    zeros = {"gen_ai.usage.input_tokens": 0, "gen_ai.usage.output_tokens": 0}
    scope = "opentelemetry.instrumentation.botocore.bedrock-runtime"
    return (scope, {"gen_ai.operation.name": "chat", **zeros}, [])


SILENT_FORESTS: dict[str, tuple[list[Tree], dict[str, int]]] = {
    "one": ([silent()], {"unmeasured": 1}),
    "two": ([silent(), silent()], {"unmeasured": 2}),
    "one within another": ([silent(silent(silent()))], {"unmeasured": 1}),
    "tried twice": ([silent(silent(), silent())], {"unmeasured": 1}),
    "the inner one is told": ([silent(ol())], {"measured": 1}),
    "the outer one is told": ([oi(silent())], {"measured": 1}),
    "the outermost is told": ([oi(other("CHAIN", silent(silent())))], {"measured": 1}),
    "within a chain": ([other("CHAIN", silent(), oi())], {"measured": 1, "unmeasured": 1}),
    "around a chain": ([silent(other("CHAIN", oi(), silent()))], {"measured": 1}),
    "a tool asks within it": ([silent(other("TOOL", oi()))], {"measured": 1, "unmeasured": 1}),
    "within what a tool asks": ([oi(other("TOOL", silent()))], {"measured": 1, "unmeasured": 1}),
    "one response, told later": ([named("r"), ol(response="r")], {"measured": 1}),
    "one response, told before": ([ol(response="r"), named("r")], {"measured": 1}),
    "one response, never told": ([named("r"), named("r")], {"unmeasured": 1}),
    "two responses": ([named("r"), ol(response="s")], {"measured": 1, "unmeasured": 1}),
    "zeros": ([counting(0)], {"unmeasured": 1}),
    "zeros that Bedrock has said": ([botocore()], {"zero_token": 1}),
    "no numbers": ([counting("x")], {"unmeasured": 1}),
    "only a model": ([("app", {"gen_ai.request.model": "m"}, [])], {}),
}


def side_calls(events: list[Event]) -> list[ModelCall]:
    """Those that the loop did not make."""
    return [each for each in events if isinstance(each, ModelCall) and each.side]


@pytest.fixture
def events() -> list[Event]:
    """Publish events."""
    return []


@pytest.mark.parametrize("name", SILENT_FORESTS)
@pytest.mark.usefixtures("source")
def test_a_call_without_tokens_is_counted_once(name: str, events: list[Event]) -> None:
    """As an unmeasured call, unless another span reports its tokens; also with hooks alone."""
    forest, kinds = SILENT_FORESTS[name]
    enable(observers=[events.append])
    agent_with(lambda: grow(*forest))("go")
    assert Counter(each.kind for each in side_calls(events)) == kinds
    assert stop_of(events).model_calls == sum(kinds.values()) + 2


def test_an_import_finds_the_same_calls(
    ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Of all these spans, and of those that know their tokens."""
    enable()
    everything = [forest for forest, _ in (*SILENT_FORESTS.values(), *FORESTS.values())]
    file, imported = tmp_path / "spans.jsonl", tmp_path / "imported.db"
    for forest in everything:
        agent_with(partial(grow, *forest))("go")
    disable()
    file.write_text(line(spans.get_finished_spans()))
    assert main(["ledger", "import", "--ledger", str(imported), str(file)]) == 0
    columns = ("trace_id", "state", "estimated", "input_tokens", "output_tokens")
    counted = [states(each, columns) for each in (ledger, type(ledger)(imported))]
    assert counted[0] == counted[1]


def states(ledger: LedgerFile, columns: tuple[str, ...]) -> Counter[tuple[Any, ...]]:
    """How often a ledger has each kind of call in each trace."""
    traces = {row["id"]: row["trace_id"] for row in ledger.invocations()}
    rows = ({**row, "trace_id": traces[row["invocation_id"]]} for row in ledger.calls())
    return Counter(tuple(row[each] for each in columns) for row in rows)


KNOWN: dict[str, dict[str, Any]] = {"silent": SILENT, "told": OPENINFERENCE}
ORDERS = [
    (begins, ends)
    for number in range(3)
    for begins in permutations(range(2), number)
    for ends in permutations(set(range(3)) - set(begins))
]
"""Which of three spans have ended when the last one begins, and how the others end."""


def tangle(outer: str, inner: str, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
    """Make a call within a chain within a call, which end in the given order."""
    chain = {"openinference.span.kind": "CHAIN"}
    spans: list[trace.Span] = []
    for number, attributes in enumerate((KNOWN[outer], chain, KNOWN[inner])):
        if number == 2:
            for ended in begins:
                spans[ended].end()
        around = trace.set_span_in_context(spans[-1]) if spans else None
        start = trace.get_tracer("foreign").start_span
        spans.append(start("call", around, attributes=attributes))
    for number in ends:
        spans[number].end()


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("outer", "inner"), [("silent", "silent"), ("silent", "told"), ("told", "silent")]
)
def test_the_order_in_which_they_end_does_not_matter(
    outer: str, inner: str, events: list[Event]
) -> None:
    """It is one call, with its tokens where one of them says those."""
    enable(observers=[events.append])

    def ask() -> None:
        for order in ORDERS:
            tangle(outer, inner, *order)

    agent_with(ask)("go")
    kind = "unmeasured" if outer == inner else "measured"
    assert Counter(each.kind for each in side_calls(events)) == {kind: len(ORDERS)}


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("inner", ["silent", "told"])
def test_one_that_ends_after_the_agent_is_counted(
    inner: str, ledger: LedgerFile, events: list[Event]
) -> None:
    """Once what is around it has ended, which may know its tokens."""
    enable(observers=[events.append])
    spans: list[trace.Span] = []

    def begin() -> None:
        start = trace.get_tracer("foreign").start_span
        spans.append(start("call", attributes=SILENT))
        around = trace.set_span_in_context(spans[0])
        spans.append(start("call", around, attributes=KNOWN[inner]))

    agent_with(begin)("go")
    spans[1].end()
    spans[0].end()
    disable()
    kind = "unmeasured" if inner == "silent" else "measured"
    assert [each.kind for each in side_calls(events)] == [kind]
    assert len(ledger.calls("side")) == 1


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("shown", KNOWN)
def test_a_span_around_a_call_that_is_counted_anyway_shows_that_call(
    shown: str, events: list[Event]
) -> None:
    """For example Langfuse's around one of Strands' models; its siblings count."""
    enable(observers=[events.append])
    helper = ScriptedModel([says("x"), says("y")], model_id="helper")

    async def drain() -> None:
        with trace.get_tracer("foreign").start_as_current_span("call", attributes=KNOWN[shown]):
            async for _ in helper.stream([]):
                pass
        grow(oi())

    agent_with(lambda: asyncio.run(drain()))("go")
    counted = [(each.model, each.usage.total) for each in side_calls(events)]
    assert counted == [("helper", 15), ("m", 1_000)]


MESSAGES: Any = [{"role": "user", "parts": [{"type": "text", "content": ENGLISH}]}]
REPLY: Any = [{"role": "assistant", "parts": [{"type": "text", "content": "In the storm, ten."}]}]
WRITTEN: dict[str, dict[str, Any]] = {
    "conventions": {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(MESSAGES),
        "gen_ai.output.messages": json.dumps(REPLY),
    },
    "OpenLLMetry": {
        "llm.request.type": "chat",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": ENGLISH,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "In the storm, ten.",
        "gen_ai.completion.0.finish_reason": "stop",
    },
    "OpenInference": {
        "openinference.span.kind": "LLM",
        "input.value": json.dumps({"messages": MESSAGES, "model": "gpt-4o"}),
        "output.value": json.dumps(REPLY),
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": ENGLISH,
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.contents.0.message_content.type": "text",
        "llm.output_messages.0.message.contents.0.message_content.text": "In the storm, ten.",
    },
    "Langfuse": {
        "langfuse.observation.type": "generation",
        "langfuse.observation.input": json.dumps([{"role": "user", "content": ENGLISH}]),
        "langfuse.observation.output": json.dumps(REPLY[0]),
    },
    "one part of the tokens": {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.input.messages": json.dumps(MESSAGES),
    },
}


@pytest.mark.parametrize("convention", WRITTEN)
@pytest.mark.usefixtures("source")
def test_the_texts_of_a_span_are_estimated(convention: str, events: list[Event]) -> None:
    """Prompt and answer, as each instrumentation has them; reported usage is taken as is."""
    enable(observers=[events.append])
    agent_with(lambda: grow(("any", WRITTEN[convention], [])))("go")
    (call,) = side_calls(events)
    assert (call.kind, call.estimated) == ("estimated", True)
    assert call.usage.input == pytest.approx(tokens_of_text(ENGLISH), abs=5)
    assert call.usage.output == pytest.approx(9, abs=1)


def test_the_events_of_a_span_are_estimated(events: list[Event]) -> None:
    """As the conventions had the texts before 1.37."""
    enable(observers=[events.append])

    def ask() -> None:
        with trace.get_tracer("any").start_as_current_span("chat m", attributes=SILENT) as span:
            span.add_event("gen_ai.user.message", {"content": ENGLISH})
            span.add_event("gen_ai.choice", {"message": json.dumps({"content": "In, ten."})})

    agent_with(ask)("go")
    (call,) = side_calls(events)
    assert call.usage.input == pytest.approx(tokens_of_text(ENGLISH), abs=5)
    assert call.usage.output in (2, 3)


def test_a_picture_in_a_span_is_not_text(events: list[Event]) -> None:
    """400 kB of base64 count by width and height, in any of the ways to write them."""
    enable(observers=[events.append])
    data = base64.b64encode(png(1_000, 800)).decode()
    url = f"data:image/png;base64,{data}"
    parts = (
        {"type": "blob", "mime_type": "image/png", "modality": "image", "content": data},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    )

    def ask() -> None:
        for part in parts:
            messages = json.dumps([{"role": "user", "content": [part]}])
            told = {"gen_ai.request.model": "gpt-4o", "gen_ai.input.messages": messages}
            grow(("any", {**told, "gen_ai.operation.name": "chat"}, []))

    agent_with(ask)("go")
    assert [each.usage.input for each in side_calls(events)] == [765 + 4] * 3  # OpenAI's 765


@pytest.mark.usefixtures("source")
def test_a_call_that_failed_uses_nothing(events: list[Event]) -> None:
    """Unless it had begun to answer."""
    enable(observers=[events.append])

    def ask() -> None:
        asked, answered = WRITTEN["conventions"], dict(WRITTEN["conventions"])
        del answered["gen_ai.output.messages"]
        for attributes in (answered, asked):
            span = trace.get_tracer("any").start_span("chat m", attributes=attributes)
            span.set_status(trace.StatusCode.ERROR)
            span.end()

    agent_with(ask)("go")
    refused, broken = side_calls(events)
    assert (refused.kind, refused.usage.total, refused.estimated) == ("failed", 0, False)
    assert (broken.kind, broken.estimated) == ("failed", True)
    assert broken.usage.total > tokens_of_text(ENGLISH)


@pytest.mark.usefixtures("source")
def test_an_agent_is_halted_by_what_its_tools_use(ledger: LedgerFile, metric: Metric) -> None:
    """Unreported tokens are estimated; metrics and ledger have each call once."""
    enable(Limits(max_token_budget=3 * tokens_of_text(ENGLISH)))
    model = ScriptedModel(endless(uses("ask")))
    text = {**WRITTEN["OpenInference"], "llm.model_name": "m"}
    result = agent_with(lambda: grow(("any", text, [])), model=model)("go")
    assert (model.calls, result.stop_reason) == (3, "max_token_budget")
    called = metric("otel_limits_model_calls_total", agent="tester", model="m", kind="estimated")
    assert called == 3
    disable()
    assert len(ledger.calls("state = 'estimated' AND model = 'm'")) == 3


def test_a_span_that_is_only_named_like_a_call_is_not_one(events: list[Event]) -> None:
    """Any span may be called `chat`; with the name of a model it is one."""
    enable(observers=[events.append])

    def ask() -> None:
        tracer = trace.get_tracer("app")
        tracer.start_span("chat room", attributes={"room": 7}).end()
        tracer.start_span("chat m", attributes={"gen_ai.request.model": "m"}).end()

    agent_with(ask)("go")
    assert [(each.model, each.kind) for each in side_calls(events)] == [("m", "unmeasured")]


def test_many_of_them_within_one_that_is_open_are_counted(events: list[Event]) -> None:
    """Of those waiting for it to report their tokens, a thousand are remembered."""
    enable(observers=[events.append])
    agent_with(lambda: grow(other("CHAIN", *[silent()] * 1_200)))("go")
    assert Counter(each.kind for each in side_calls(events)) == {"unmeasured": 1_200}


def test_an_import_reads_messages_that_are_structured(ledger: LedgerFile, tmp_path: Path) -> None:
    """As the conventions allow instead of JSON; infinitely nested values are skipped."""
    said: Any = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": ENGLISH}}]}}
    nested: Any = {}
    for _ in range(100):
        nested = {"arrayValue": {"values": [nested]}}
    messages = {"arrayValue": {"values": [said, nested]}}
    span = {
        "traceId": "1" * 32,
        "spanId": "2" * 16,
        "name": "chat m",
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000001000000000",
        "attributes": [
            {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
            {"key": "gen_ai.input.messages", "value": messages},
        ],
    }
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    assert main(["ledger", "import", str(file)]) == 0
    (call,) = ledger.calls()
    assert (call["state"], call["input_tokens"]) == ("estimated", tokens_of_text(ENGLISH))


# --- tokens without a model call ------------------------------------------------------------------

FOUND: dict[str, Any] = dict(CALL_ATTRIBUTES)
A, B, STEP, C, D, ROOT = (f"00000000000000{each}" for each in ("aa", "bb", "5e", "cc", "dd", "00"))
Lines = Sequence[dict[str, Any]]


def span(
    name: str, identity: str, parent: str, *, at: tuple[int, int], scope: str = "acme", **found: Any
) -> dict[str, Any]:
    """A document with one span, which lasts from one second to another one."""
    known = {
        "traceId": TRACE,
        "spanId": identity,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str((START_US + at[0] * 1_000_000) * 1000),
        "endTimeUnixNano": str((START_US + at[1] * 1_000_000) * 1000),
        "attributes": [{"key": key, "value": typed(value)} for key, value in found.items()],
        "status": {},
    }
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [known]}]}]}


def sums(tokens: int) -> dict[str, Any]:
    """The total of a span."""
    return {"gen_ai.usage.input_tokens": tokens - 10, "gen_ai.usage.output_tokens": 10}


def agent(
    identity: str,
    parent: str = "",
    tokens: int | None = None,
    at: tuple[int, int] = (0, 9),
    scope: str = "acme",
) -> dict[str, Any]:
    """The span of an agent, with a total or without one."""
    return span(
        "invoke_agent clerk",
        identity,
        parent,
        at=at,
        scope=scope,
        **(sums(tokens) if tokens else {}),
    )


def call(identity: str, parent: str, at: tuple[int, int] = (2, 3)) -> dict[str, Any]:
    """The span of a model call with 550 tokens."""
    return span("chat gpt-4o", identity, parent, at=at, **FOUND)


def imported(tmp_path: Path, *files: Lines) -> None:
    """Import files, one after another."""
    for lines in files:
        path = tmp_path / "spans.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
        main(["ledger", "import", str(path)])


def spent(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The answer of `audit spend`."""
    capsys.readouterr()
    assert main(["audit", "spend", "--format", "json", *options]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


TOTAL = [agent(A, tokens=1000)]
STEPS = [span("step", STEP, A, at=(1, 4))]
LATER = [call(C, A)]
FILES: dict[str, tuple[list[Lines], list[int]]] = {
    "a total": ([TOTAL], [1000]),
    "a total and its call": ([[*TOTAL, *LATER]], [550]),
    "a total, and its call in another file": ([TOTAL, LATER], [550]),
    "a call, and its total in another file": ([LATER, TOTAL], [550]),
    "a total, its call, and again": ([TOTAL, LATER, TOTAL, LATER], [550]),
    "a call below a span of the first file": ([[*TOTAL, *STEPS], [call(C, STEP)]], [550]),
    "a call below a span of the second file": ([TOTAL, [*STEPS, call(C, STEP)]], [550]),
    "a call of another time": ([TOTAL, [call(C, STEP, at=(20, 21))]], [550, 1000]),
    "totals within a total": ([[*TOTAL, agent(B, A, 400), agent(D, A, 600)]], [1000]),
    "a total within an agent with a call": ([[*TOTAL, *LATER, agent(B, A, 400)]], [400, 550]),
    "a total next to an agent with a call": (
        [[agent(A, ROOT), *LATER, span("run", ROOT, "", at=(0, 9)), agent(B, ROOT, 400)]],
        [400, 550],
    ),
    "a sum of a total": (
        [[span("run", ROOT, "", at=(0, 9), **sums(1000)), agent(A, ROOT, 1000)]],
        [1000],
    ),
    "a total of a whole life": ([[agent(A, tokens=1000, scope="strands.telemetry.tracer")]], []),
}


@pytest.mark.parametrize(("files", "counted"), FILES.values(), ids=FILES)
def test_total_of_an_agent_counts_until_its_calls_are_known(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: list[Lines],
    counted: list[int],
) -> None:
    """In any order of files; no token counts twice, and none is called uncounted."""
    imported(tmp_path, *files)
    calls = ledger.calls()
    assert sorted(each["input_tokens"] + each["output_tokens"] for each in calls) == counted
    answer = spent(capsys)
    assert "uncounted" not in answer
    assert answer["complete"].startswith("Totals of the whole ledger match: ")
    assert main(["audit", "verify"]) == 0


QUANTUM = "gen_ai.usage.quantum_tokens"
ONLY_UNKNOWN: dict[str, Any] = {QUANTUM: 500}
CHAT: dict[str, Any] = {"gen_ai.operation.name": "chat"}
UNKNOWN = f"the meaning of {QUANTUM} is unknown"
SERVER_SPAN = [span("llm_request", B, "", at=(0, 1), **sums(801))]
LEFT_OUT: dict[str, tuple[Lines, tuple[str, str, int, int]]] = {
    "nothing shows a call": (
        SERVER_SPAN,
        ("llm_request", "no attribute shows a model call", 1, 801),
    ),
    "an unknown attribute": (
        [span("llm_request", A, "", at=(0, 1), **ONLY_UNKNOWN)],
        ("llm_request", UNKNOWN, 1, 500),
    ),
    "a call with nothing else": (
        [span("chat m", A, "", at=(0, 1), **CHAT, **ONLY_UNKNOWN)],
        ("chat m", UNKNOWN, 1, 500),
    ),
}


@pytest.mark.parametrize(("lines", "row"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_tokens_that_are_not_counted_stay_in_the_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: Lines,
    row: tuple[str, str, int, int],
) -> None:
    """Importing again adds none; text, JSON and the page say how many and why."""
    imported(tmp_path, lines, lines)
    name, cause, spans, tokens = row
    said = {"agent": "(no agent)", "span": name, "cause": cause, "spans": spans, "tokens": tokens}
    answer = spent(capsys)
    assert answer["uncounted"] == [said]
    verdict = f"Incomplete: 1 span with {tokens} tokens was not counted ({cause}); "
    assert answer["complete"].startswith(verdict)
    assert "uncounted" not in spent(capsys, "--until", "2026-03-01")
    for form in ("table", "html"):
        assert main(["audit", "spend", "--format", form]) == 0
        assert cause in capsys.readouterr().out
    assert main(["audit", "verify", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"].startswith(verdict)


def test_calls_of_uncounted_tokens_explain_them(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum of an application is no longer missing once its calls are imported."""
    imported(tmp_path, [span("run", A, "", at=(0, 9), **sums(550))])
    assert [each["tokens"] for each in spent(capsys)["uncounted"]] == [550]
    imported(tmp_path, LATER)
    assert "uncounted" not in spent(capsys)


@pytest.mark.parametrize("is_first", [True, False])
def test_total_gives_way_to_calls_of_another_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_first: bool,
) -> None:
    """In either direction of the merge, whose totals of invocations still match."""
    places = [str(ledger.path), f"{tmp_path}/other.db"]
    for place, lines in zip(places, (TOTAL, [agent(A), *LATER]), strict=True):
        monkeypatch.setenv("OTEL_LIMITS_LEDGER", place)
        imported(tmp_path, lines)
    source, target = places if is_first else reversed(places)
    for _ in range(2):
        assert main(["ledger", "merge", source, "--into", target]) == 0
        assert spent(capsys, "--ledger", target)["totals"]["spend"]["tokens"] == 550
    assert main(["audit", "verify", "--ledger", target]) == 0


def test_uncounted_tokens_are_kept_like_other_rows(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge, an export and a close have them; a prune deletes them."""
    imported(tmp_path, SERVER_SPAN)
    merged = f"{tmp_path}/merged.db"
    for _ in range(2):
        assert main(["ledger", "merge", str(ledger.path), "--into", merged]) == 0
    assert [each["tokens"] for each in spent(capsys, "--ledger", merged)["uncounted"]] == [801]
    export = ["ledger", "export", "--format", "jsonl", "--what", "uncounted"]
    assert main([*export, "--where", "agent=(no agent)"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["span"], row["tokens"], row["at"]) == (
        "llm_request",
        801,
        "2026-03-01T12:00:01+00:00",
    )
    assert main(["ledger", "close", "--until", "2026-03-02"]) == 0
    close = tmp_path / "close.json"
    close.write_text(capsys.readouterr().out, encoding="utf-8")
    against = ["audit", "verify", "--against", str(close), "--ledger"]
    assert main([*against, merged]) == 0
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    assert "uncounted" not in spent(capsys)
    assert main([*against, str(ledger.path)]) == 0
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("DELETE FROM otel_limits_maintenance")
    capsys.readouterr()
    assert main([*against, str(ledger.path), "--format", "json"]) == 1
    days = json.loads(capsys.readouterr().out)["closed_days"]
    assert ("uncounted", "missing") in [(each["table"], each["difference"]) for each in days]


# --- tool calls -----------------------------------------------------------------------------------

E: Final = "00000000000000ee"
CONVENTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "OpenTelemetry": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"},
    "OpenInference": {"openinference.span.kind": "TOOL", "tool.name": "search"},
    "OpenLLMetry": {"traceloop.span.kind": "tool", "traceloop.entity.name": "search"},
    "a name only": {"gen_ai.operation.name": "execute_tool"},
}


def used(
    identity: str,
    parent: str,
    scope: str = "acme",
    *,
    kind: str = "OpenTelemetry",
    at: tuple[int, int] = (4, 5),
    **found: Any,
) -> dict[str, Any]:
    """The span of a tool call."""
    told = {**CONVENTIONS[kind], **found}
    return span("execute_tool search", identity, parent, at=at, scope=scope, **told)


def in_another_trace(*lines: dict[str, Any]) -> Lines:
    """The same spans in another trace."""
    return [json.loads(json.dumps(each).replace(TRACE, TRACE[::-1])) for each in lines]


WITH_ID: Final[Mapping[str, Any]] = {"gen_ai.tool.call.id": "call-1"}
OTHER_ID: Final[Mapping[str, Any]] = {"gen_ai.tool.call.id": "call-2"}
TOOLS: Final[Mapping[str, tuple[Lines, int]]] = {
    **{kind: ([agent(A), call(C, A), used(D, A, kind=kind)], 1) for kind in CONVENTIONS},
    "two": ([agent(A), call(C, A), used(D, A), used(E, A)], 2),
    "two of one ID, whose server repeats it": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, **WITH_ID)],
        2,
    ),
    "one of two instrumentations": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, "other", **WITH_ID)],
        1,
    ),
    "one of two instrumentations, one after the other": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, "other", at=(5, 6), **WITH_ID)],
        1,
    ),
    "two of one ID, at different times": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, "other", at=(6, 7), **WITH_ID)],
        2,
    ),
    "two of one ID, the earlier one exported later": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, "other", at=(2, 3), **WITH_ID)],
        2,
    ),
    "two of different IDs": (
        [agent(A), call(C, A), used(D, A, **WITH_ID), used(E, A, "other", **OTHER_ID)],
        2,
    ),
    "two without an ID": ([agent(A), call(C, A), used(D, A), used(E, A, "other")], 2),
    "two of one ID, in different traces": (
        [
            *(agent(A), call(C, A), used(D, A, **WITH_ID)),
            *in_another_trace(agent(A), call(C, A), used(E, A, "other", **WITH_ID)),
        ],
        2,
    ),
    "one within another": ([agent(A), call(C, A), used(D, A), used(E, D, "mcp")], 1),
    "one of an agent within another": (
        [agent(A), call(C, A), used(D, A), agent(B, D, at=(4, 5)), used(E, B)],
        2,
    ),
    "of a trace without its agent": ([call(C, A), used(D, A)], 1),
    "of a server": ([agent(A), call(C, A), used(D, STEP)], 0),
}


def test_tool_calls_are_imported_once(ledger: LedgerFile, tmp_path: Path) -> None:
    """Whichever instrumentation shows them; the ledger stays consistent."""
    for name, (lines, number) in TOOLS.items():
        ledger.path.unlink(missing_ok=True)
        imported(tmp_path, lines, lines)
        found = [each["tool"] for each in ledger.tools()]
        assert (name, found) == (name, ["search"] * number)
        assert sum(each["tool_calls"] for each in ledger.invocations()) == number
        assert main(["audit", "verify"]) == 0


# --- attributes that are not understood -----------------------------------------------------------

SUMS = {
    True: {"inputTokens": 90, "outputTokens": 10, "totalTokens": 100},
    False: {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
}
NAMES = {
    "strands": "quantumInputTokens",
    "langchain": "input_token_details.quantumInputTokens",
    "openai-agents": "input_tokens_details.quantumInputTokens",
}


@pytest.mark.parametrize(
    ("subject", "is_known"),
    [(subject, is_known) for subject in SUBJECTS for is_known in (True, False)],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.usefixtures("ledger")
def test_attribute_that_is_not_understood_is_named_everywhere(
    subject: Subject,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    *,
    is_known: bool,
) -> None:
    """Once in the log, in each event, counted, and listed with the calls, in every framework."""
    usage = {**SUMS[is_known], "quantumInputTokens": 5}
    events: list[Event] = []
    enable(Limits(max_turns=9), observers=[events.append])
    model = subject.model([uses("search", usage=usage), says("done", usage=usage)])
    subject.call(subject.agent(model))
    name = NAMES[subject.name]
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [each.unknown_usage for each in calls] == [(name,)] * 2
    assert {each.kind for each in calls} == {"measured" if is_known else "estimated"}
    assert {each.price for each in calls} == {None}
    warnings = [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and name in each.getMessage()
    ]
    assert len(warnings) == 1
    model_name = calls[0].model
    assert metric("otel_limits_unknown_usage_calls_total", agent="boss", model=model_name) == 2
    disable()
    assert main(["audit", "unmeasured", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["unmeasured"]
    reasons = {(each["reason"], each["calls"]) for each in rows}
    estimated = {("estimated: the provider reported no usage, or only a part", 2)}
    assert reasons == {(f"the rate of its {name} is unknown", 2)} | (
        set() if is_known else estimated
    )
