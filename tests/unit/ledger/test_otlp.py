"""Files of spans in every form and convention, also damaged ones: what is valid is imported."""

from __future__ import annotations

import base64
import gzip
import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.paths import ROOT
from tests.price_list import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ledger.fixtures import LedgerFile


TRACE, AGENT, CALL = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7", "b7ad6b7169203331"
START = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
START_US = int(START.timestamp()) * 1_000_000
SECOND_US = 1_000_000
AGENT_ATTRIBUTES = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "clerk"}
CALL_ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-4o",
    "gen_ai.usage.input_tokens": 500,
    "gen_ai.usage.output_tokens": 50,
}
SPANS: tuple[tuple[str, str, str | None, dict[str, Any]], ...] = (
    ("invoke_agent clerk", AGENT, None, AGENT_ATTRIBUTES),
    ("chat gpt-4o", CALL, AGENT, CALL_ATTRIBUTES),
)


def typed(value: object) -> dict[str, object]:
    """An attribute's value in OTLP."""
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def otlp_span(name: str, span: str, parent: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """A span as the collector writes it."""
    return {
        "traceId": TRACE,
        "spanId": span,
        "parentSpanId": parent or "",
        "name": name,
        "startTimeUnixNano": str(START_US * 1000),
        "endTimeUnixNano": str((START_US + SECOND_US) * 1000),
        "attributes": [{"key": key, "value": typed(value)} for key, value in found.items()],
        "status": {},
    }


def batch(*spans: dict[str, Any]) -> dict[str, Any]:
    """The spans of one resource."""
    return {"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}


OTLP = [otlp_span(*each) for each in SPANS]
WHOLE = {"resourceSpans": [batch(*OTLP)]}
EACH = [{"resourceSpans": [batch(each)]} for each in OTLP]


def jaeger_span(name: str, span: str, parent: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """A span as Jaeger's query service answers it."""
    above = {"refType": "CHILD_OF", "traceID": TRACE, "spanID": parent}
    return {
        "traceID": TRACE,
        "spanID": span,
        "operationName": name,
        "references": [above] if parent else [],
        "startTime": START_US,
        "duration": SECOND_US,
        "tags": [{"key": key, "type": "string", "value": value} for key, value in found.items()],
        "logs": [],
        "processID": "p1",
    }


JAEGER = {"traceID": TRACE, "spans": [jaeger_span(*each) for each in SPANS], "processes": {}}


def console_span(name: str, span: str, parent: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """A span as Python's console exporter writes it."""
    return {
        "name": name,
        "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{span}", "trace_state": "[]"},
        "kind": "SpanKind.INTERNAL",
        "parent_id": parent and f"0x{parent}",
        "start_time": "2026-03-01T12:00:00.000000Z",
        "end_time": "2026-03-01T12:00:01.000000Z",
        "status": {"status_code": "UNSET"},
        "attributes": found,
        "events": [],
        "links": [],
        "resource": {"attributes": {}, "schema_url": ""},
    }


def mlflow_span(name: str, span: str, parent: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """A span as MLflow 3 writes it."""
    return {
        "trace_id": encoded(TRACE),
        "span_id": encoded(span),
        "parent_span_id": encoded(parent or ""),
        "name": name,
        "start_time_unix_nano": START_US * 1000,
        "end_time_unix_nano": (START_US + SECOND_US) * 1000,
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {"mlflow.traceRequestId": '"tr-1"', **found},
    }


def encoded(identity: str) -> str:
    """An ID in base64."""
    return base64.b64encode(bytes.fromhex(identity)).decode()


def numbered_span(
    name: str, span: str, parent: str | None, found: dict[str, Any]
) -> dict[str, Any]:
    """A span as MLflow 2 writes it: as the console exporter, but with its times as numbers."""
    times = {"start_time": START_US * 1000, "end_time": (START_US + SECOND_US) * 1000}
    return {**console_span(name, span, parent, found), **times, "status_code": "OK", "status": {}}


def over_lines(*documents: object) -> str:
    """Documents that are printed over several lines."""
    return "".join(json.dumps(each, indent=2) + "\n" for each in documents)


LOGGED = "Mar 01, 2026 12:00:01 PM io.opentelemetry.exporter.logging.otlp export\nINFO: {}\n"
FORMS: dict[str, str | bytes] = {
    "lines": "".join(json.dumps(each) + "\n" for each in EACH),
    "lines of Windows": "".join(json.dumps(each) + "\r\n" for each in EACH),
    "over lines": over_lines(WHOLE),
    "over lines without indentation": json.dumps(WHOLE, indent=0),
    "several over lines": over_lines(*EACH),
    "without line breaks": "".join(map(json.dumps, EACH)),
    "an array": json.dumps(EACH),
    "an array over lines": over_lines(EACH),
    "an array with a document on each line": "[\n" + ",\n".join(map(json.dumps, EACH)) + "\n]\n",
    "compressed without the suffix": gzip.compress(json.dumps(WHOLE).encode()),
    "UTF-16": json.dumps(WHOLE, indent=2).encode("utf-16"),
    "Docker's log": "".join(
        json.dumps({"log": json.dumps(each) + "\n", "stream": "stdout"}) + "\n" for each in EACH
    ),
    "Tempo": json.dumps({"batches": [batch(*OTLP)]}),
    "Tempo, second version": json.dumps({"trace": WHOLE, "metrics": {}}),
    "Jaeger": json.dumps({"data": [JAEGER], "total": 0, "errors": None}),
    "Jaeger, over lines": over_lines({"data": [JAEGER]}),
    "Jaeger, a single trace": json.dumps(JAEGER),
    "Jaeger, third version": json.dumps({"result": WHOLE}),
    "console exporter": over_lines(*(console_span(*each) for each in SPANS)),
    "Phoenix": json.dumps(
        {"data": [{**console_span(*each), "status": {}} for each in SPANS], "next_cursor": None}
    ),
    "MLflow": over_lines({"info": {}, "data": {"spans": [mlflow_span(*each) for each in SPANS]}}),
    "MLflow 2": json.dumps({"spans": [numbered_span(*each) for each in SPANS], "request": "{}"}),
    "Java's logging exporter": "".join(
        LOGGED.replace("{}", json.dumps(batch(each))) for each in OTLP
    ),
    "Java's logging exporter to a stream": "".join(json.dumps(batch(each)) for each in OTLP),
}


def written(tmp_path: Path, content: str | bytes) -> Path:
    """A file of this content, without a suffix."""
    path = tmp_path / "spans"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("content", FORMS.values(), ids=FORMS.keys())
def test_every_form_is_the_same_spans(
    ledger: LedgerFile, tmp_path: Path, content: str | bytes
) -> None:
    """One call of one agent, however it is written, and once however often it is imported."""
    path = str(written(tmp_path, content))
    for _ in range(2):
        assert main(["ledger", "import", path]) == 0
    (call,) = ledger.calls()
    (invocation,) = ledger.invocations()
    names = ("agent", "model", "input_tokens", "output_tokens", "at_us")
    assert [call[each] for each in names] == ["clerk", "gpt-4o", 500, 50, START_US + SECOND_US]
    assert (invocation["agent"], invocation["started_us"]) == ("clerk", START_US)
    assert main(["audit", "verify"]) == 0


def test_forms_mix_in_one_file(ledger: LedgerFile, tmp_path: Path) -> None:
    """A line that a program has printed, and a document that is cut off, cost no span."""
    cut = json.dumps(EACH[0])[:-40]
    console = over_lines(console_span(*SPANS[0]))
    text = f"Listening on port 8000\n{console}{cut}\n{json.dumps(EACH[1])}\n"
    assert main(["ledger", "import", str(written(tmp_path, text))]) == 0
    assert (len(ledger.calls()), len(ledger.invocations())) == (1, 1)


@pytest.mark.parametrize("end", [None, "0", 0], ids=["absent", "text", "zero"])
def test_span_without_end_is_left_out_alone(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: object
) -> None:
    """It was running when the file was written. The others of its batch had ended."""
    running = {**otlp_span("GET /", "00000000000000aa", None, {}), "endTimeUnixNano": end}
    path = written(tmp_path, json.dumps({"resourceSpans": [batch(*OTLP, running)]}))
    assert main(["ledger", "import", str(path)]) == 0
    assert "1 span without an end was skipped." in capsys.readouterr().out
    assert len(ledger.calls()) == 1


def test_at_most_three_parts_are_quoted(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log may have thousands of other lines."""
    path = written(tmp_path, "nonsense\n" * 5 + json.dumps(WHOLE))
    assert main(["ledger", "import", str(path)]) == 0
    said = capsys.readouterr().out
    assert [line.strip() for line in said.splitlines()[1:]] == [
        *(f"{path}, line {number}: There is no JSON object on it." for number in (1, 2, 3)),
        "and 2 more",
    ]
    assert len(ledger.calls()) == 1


def broken(change: Callable[[dict[str, Any]], Any]) -> str:
    """Jaeger's answer with something else in it."""
    changed = json.loads(json.dumps(JAEGER))
    change(changed["spans"][0])
    return json.dumps({"data": [changed]})


UNREADABLE = {
    "Jaeger without a time": broken(lambda span: span.pop("startTime")),
    "Jaeger with a time as text": broken(lambda span: span.update(startTime="yesterday")),
    "Jaeger with tags of another kind": broken(lambda span: span.update(tags=7)),
    "console with another time": over_lines({**console_span(*SPANS[0]), "start_time": "noon"}),
    "console without IDs": over_lines({**console_span(*SPANS[0]), "context": {}}),
    "a log line that is none": json.dumps({"log": "{started}"}),
    "traces that are none": json.dumps({"data": [7]}),
    "a trace that is none": json.dumps({"trace": 7}),
    "batches that are none": json.dumps({"batches": 7}),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_other_content_is_said_and_costs_no_other_span(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """Its place is shown, and the next document counts."""
    path = written(tmp_path, f"{content}\n{json.dumps(WHOLE)}\n")
    assert main(["ledger", "import", str(path)]) == 0
    assert f"{path}, line 1: " in capsys.readouterr().out
    assert len(ledger.calls()) == 1


def test_memory_of_large_document_is_said(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is imported, and the output has the command that divides it."""
    path = written(tmp_path, json.dumps(WHOLE)[:-1] + " " * 65 * 1024**2 + "}")
    assert main(["ledger", "import", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{path}, line 1 (65 MB). With less memory, import the output of: jq -c " in said
    assert len(ledger.calls()) == 1


USAGE = {"gen_ai.usage.prompt_tokens": 700, "gen_ai.usage.completion_tokens": 101}
OTHER = "00000000000000bb"
LEFT_OUT = "1 span reports 801 tokens that are not counted, as no attribute shows a model call: "


@pytest.mark.parametrize(
    ("spans", "is_said"),
    [
        ([("llm_request", OTHER, None, USAGE)], True),
        ([("step", OTHER, None, USAGE), ("inner step", "00000000000000cc", OTHER, USAGE)], True),
        ([("step", OTHER, None, USAGE), ("chat gpt-4o", CALL, OTHER, CALL_ATTRIBUTES)], False),
        ([("chat gpt-4o", CALL, None, CALL_ATTRIBUTES), ("http", OTHER, CALL, USAGE)], False),
        ([("GET /", OTHER, None, {"http.response.body.size": 801})], False),
    ],
    ids=["a server", "a sum of sums", "a sum of a call", "a part of a call", "no usage"],
)
def test_tokens_that_are_not_counted_are_said(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spans: list[tuple[str, str, str | None, dict[str, Any]]],
    *,
    is_said: bool,
) -> None:
    """An inference server names neither a model nor an operation; sums of known calls are known."""
    document = {"resourceSpans": [batch(*(otlp_span(*each) for each in spans))]}
    path = written(tmp_path, f"{json.dumps(WHOLE)}\n{json.dumps(document)}")
    assert main(["ledger", "import", str(path)]) == 0
    assert (LEFT_OUT in capsys.readouterr().out) == is_said
    assert len(ledger.calls()) == 1


# --- attributes of every convention ---------------------------------------------------------------

EMITTED = ROOT / "tests/emitters"


ONE = ((1_200, 30, 1_000),)
TWO = (*ONE, (1_300, 20, 1_200))
"""Input, output and cached tokens of the calls, as `tests/emitters/make.py` has them answered."""

UNTOLD = ((1_200, 30, 0),)
"""LiteLLM's own spans do not say how much was cached."""

FILES = {
    "openinference-openai": ("(no agent)", ONE),
    "openinference-anthropic": ("(no agent)", ONE),
    "openinference-langchain": ("(no agent)", TWO),
    "openinference-openai-agents": ("forecaster", TWO),
    "openllmetry-openai": ("(no agent)", ONE),
    "openllmetry-anthropic": ("(no agent)", ONE),
    "openllmetry-langchain": ("ask", TWO),
    "openllmetry-openai-agents": ("forecaster", TWO),
    "langfuse": ("(no agent)", ONE),
    "langsmith": ("(no agent)", TWO),
    "litellm": ("(no agent)", UNTOLD),
    "pydantic-ai": ("forecaster", TWO),
    "google-adk": ("forecaster", TWO),
    "strands-1.30": ("forecaster", TWO),
    "strands": ("forecaster", TWO),
}


def test_every_file_is_imported() -> None:
    """None lies there unread."""
    assert sorted(FILES) == sorted(file.stem for file in EMITTED.glob("*.jsonl"))


@pytest.mark.parametrize("library", FILES)
def test_spans_of_the_libraries_themselves_are_imported(library: str, ledger: LedgerFile) -> None:
    """Every call once, cached tokens within the input, whatever sums stand around them."""
    agent, calls = FILES[library]
    assert main(["ledger", "import", str(EMITTED / f"{library}.jsonl")]) == 0
    rows = sorted(ledger.calls(), key=lambda call: call["input_tokens"])
    found = [
        tuple(row[f"{part}_tokens"] for part in ("input", "output", "cache_read")) for row in rows
    ]
    assert found == list(calls)
    assert {(row["state"], row["agent"]) for row in rows} == {("measured", agent)}
    assert all("-4" in row["model"] or "gemini-2.5" in row["model"] for row in rows)


def test_the_same_spans_again_are_the_same_calls(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing all files, then again: the second run reports how many were already there."""
    files = [str(file) for file in EMITTED.glob("*.jsonl")]
    for _ in range(2):
        assert main(["ledger", "import", *files]) == 0
    number = sum(len(calls) for _, calls in FILES.values())
    assert f"{number} model calls were already in the ledger" in capsys.readouterr().out
    assert len(ledger.calls()) == number


@listed
def test_imported_calls_of_libraries_are_priced(ledger: LedgerFile) -> None:
    """By each library's model and vendor names; one price for one call, whichever reports it."""
    files = [str(EMITTED / f"{library}.jsonl") for library in FILES if FILES[library][1] != UNTOLD]
    assert main(["ledger", "import", *files]) == 0
    prices: dict[tuple[str, int], set[int]] = {}
    for row in ledger.calls():
        prices.setdefault((row["model"][:3], row["input_tokens"]), set()).add(row["price_pico"])
    assert {len(each) for each in prices.values()} == {1}, prices
    assert not any(None in each for each in prices.values()), prices


def spans(*marked: dict[str, Any]) -> str:
    """A line of spans with these attributes, each within the one before."""
    listed = [
        {
            "traceId": "1" * 32,
            "spanId": f"{number + 1:016x}",
            "parentSpanId": f"{number:016x}" if number else "",
            "name": "x",
            "startTimeUnixNano": "1700000000000000000",
            "endTimeUnixNano": "1700000001000000000",
            "attributes": [
                {
                    "key": key,
                    "value": {"intValue" if isinstance(each, int) else "stringValue": each},
                }
                for key, each in attributes.items()
            ],
        }
        for number, attributes in enumerate(marked)
    ]
    scope = {"scope": {"name": "any"}, "spans": listed}
    return json.dumps({"resourceSpans": [{"scopeSpans": [scope]}]}) + "\n"


USED = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5}


@pytest.mark.parametrize(
    ("marked", "calls"),
    [
        ([{"gen_ai.operation.name": "chat", **USED}], 1),
        ([{"gen_ai.operation.name": "invoke_agent", **USED}], 1),
        ([{"gen_ai.operation.name": "embeddings", **USED}], 0),
        ([{"openinference.span.kind": "CHAIN", **USED}], 0),
        ([{"traceloop.span.kind": "workflow", **USED}], 0),
        ([{"llm.request.type": "chat", **USED}], 1),
        ([{"mlflow.spanType": '"CHAT_MODEL"', **USED}], 1),
        ([{"mlflow.spanType": '"CHAIN"', **USED}], 0),
        ([{"genkit:metadata:subtype": "model", **USED}], 1),
        ([{"genkit:metadata:subtype": "flow", **USED}], 0),
        ([{"gen_ai.request.model": "m", **USED}], 1),
        ([{"openinference.span.kind": "AGENT", **USED}, {"llm.request.type": "chat", **USED}], 1),
        ([{"gen_ai.operation.name": "chat", **USED}, {"llm.request.type": "chat", **USED}], 1),
    ],
)
def test_only_model_calls_are_counted(
    marked: list[dict[str, Any]], calls: int, ledger: LedgerFile, tmp_path: Path
) -> None:
    """By what the span says it is; sums of known calls are never added. None is status 1."""
    file = tmp_path / "spans.jsonl"
    file.write_text(spans(*marked))
    assert main(["ledger", "import", str(file)]) == (0 if calls else 1)
    assert len(ledger.calls()) == calls


def test_file_without_model_calls_is_reported(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message, because the file was exported for another purpose."""
    assert not ledger.path.exists()
    file = tmp_path / "spans.jsonl"
    file.write_text(spans({"http.request.method": "GET"}))
    assert main(["ledger", "import", str(file)]) == 1
    assert capsys.readouterr().err.startswith("No model calls found in 1 span of 1 JSON document.")


@pytest.mark.parametrize("unset", [{}, {"value": None}, {"value": {}}])
def test_an_attribute_without_a_value_costs_nothing_else(
    unset: dict[str, Any], ledger: LedgerFile, tmp_path: Path
) -> None:
    """An unset count is unreported; the other spans of the line are read."""
    document = json.loads(spans({"gen_ai.operation.name": "chat", **USED}))
    (span,) = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    span["attributes"][-1] = {"key": "gen_ai.usage.output_tokens", **unset}
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps(document))
    assert main(["ledger", "import", str(file)]) == 0
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["output_tokens"], call["state"]) == (10, 0, "estimated")


def test_a_share_of_cached_tokens_is_never_above_all(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Strands 1.30 passed on Bedrock's report: cached tokens excluded from the input."""
    file = tmp_path / "spans.jsonl"
    used = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.total_tokens": 12_060,
        "gen_ai.usage.cache_read_input_tokens": 12_000,
    }
    file.write_text(spans(used))
    assert main(["ledger", "import", str(file)]) == 0
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["cache_read_tokens"]) == (12_050, 12_000)
    capsys.readouterr()
    assert main(["audit", "spend", "--ledger", str(ledger.path), "--format", "json"]) == 0
    total = json.loads(capsys.readouterr().out)["totals"]["spend"]
    assert total["cached_share"] == pytest.approx(12_000 / 12_050)


def test_a_price_for_bedrock_alone_is_that_of_an_imported_call(
    ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strands' spans name Strands where the seller should be; the id of the model says Bedrock."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "models: {'us.anthropic.*': {provider: bedrock, price: {input: 1, output: 1}}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["ledger", "import", str(EMITTED / "strands.jsonl")]) == 0
    assert {row["price_source"] for row in ledger.calls()} == {"policy"}


@listed
def test_calls_without_measured_usage_are_listed_with_the_reason(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens without a known rate are named as the provider named them."""
    chat: dict[str, Any] = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o", **USED,
    }  # fmt: skip
    calls: tuple[dict[str, Any], ...] = (
        {**chat, "gen_ai.usage.quantum_input_tokens": 4},
        {**chat, "gen_ai.usage.total_tokens": 40},
        {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o"},
        {**chat, "gen_ai.usage.cost": 7},
    )
    file = tmp_path / "spans.jsonl"
    lines = (spans(each).replace("1" * 32, f"{n:032x}") for n, each in enumerate(calls, 1))
    file.write_text("".join(lines))
    assert main(["ledger", "import", str(file)]) == 0
    capsys.readouterr()
    assert main(["audit", "unmeasured", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["unmeasured"]
    assert {(each["reason"], each["calls"], each["tokens"]) for each in rows} == {
        ("the rate of its gen_ai.usage.quantum_input_tokens is unknown", 1, 15),
        ("its total has more tokens than its parts", 1, 40),
        ("unmeasured: the provider reported no usage", 1, 0),
    }
    prices = [each["price_pico"] for each in ledger.calls() if each["input_tokens"]]
    assert sorted(each is None for each in prices) == [False, True, True]
    assert main(["ledger", "reprice"]) == 0
    assert prices == [each["price_pico"] for each in ledger.calls() if each["input_tokens"]]


# --- manipulated and damaged files ----------------------------------------------------------------


def line(number: int, **changes: object) -> str:
    """A model call as the collector writes it."""
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    counts = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5}
    span = {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "name": "chat",
        "startTimeUnixNano": "1760000000000000000",
        "endTimeUnixNano": "1760000001000000000",
        "attributes": [
            *({"key": k, "value": {"stringValue": v}} for k, v in attributes.items()),
            *({"key": k, "value": {"intValue": v}} for k, v in counts.items()),
        ],
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span | changes]}]}]})


HOSTILE = {
    "deep": '{"resourceSpans":' + "[" * 100_000,
    "infinity": line(1000).replace('"1760000001000000000"', "Infinity"),
    "huge": line(1000).replace('"1760000001000000000"', "1" + "0" * 30),
    "negative": line(1000, endTimeUnixNano="-99999999999999999999"),
    "text": line(1000, startTimeUnixNano="yesterday"),
    "nul": "\x00",
    "long number": line(1000, endTimeUnixNano="9" * 5000),
    "not a list": '{"resourceSpans": 7}',
    "other JSON": '{"agent": "a", "input_tokens": 5}',
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_line_costs_no_good_one(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    """It is counted and shown with file and line; the fifty lines around it are imported."""
    path = tmp_path / "spans.jsonl"
    lines = [line(number) for number in range(1, 51)]
    lines.insert(25, bad)
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    assert main(["ledger", "import", str(path)]) == 0
    told = capsys.readouterr().out
    assert "Imported 50 model calls" in told
    assert f"{path}, line 26: " in told
    assert len(ledger.calls()) == 50


def test_calls_in_a_ring_all_count(ledger: LedgerFile, tmp_path: Path) -> None:
    """Each says that it is within the next: none of them is lost for being within another."""
    path = tmp_path / "spans.jsonl"
    trace, ids = f"{1:032x}", [f"{number:016x}" for number in (1, 2, 3)]
    ring = zip(ids, [*ids[1:], ids[0]], strict=True)
    lines = [line(1, traceId=trace, spanId=each, parentSpanId=other) for each, other in ring]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 0
    assert len(ledger.calls()) == 3


def test_the_mark_that_windows_puts_in_front_is_not_damage(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of such a file counts; a single one of anything is not written as several."""
    path = tmp_path / "spans.jsonl"
    path.write_text(line(1), encoding="utf-8-sig")
    assert main(["ledger", "import", str(path)]) == 0
    told = capsys.readouterr().out
    assert told == "Imported 1 model call, 1 invocation and 0 tool calls.\n"


def test_a_damaged_archive_gives_what_is_before_the_damage(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flipped bytes end the reading of a file, and of no other; where it ended is said."""
    path, whole = tmp_path / "spans.jsonl.gz", tmp_path / "whole.jsonl"
    packed = bytearray(
        gzip.compress("\n".join(line(n) for n in range(1, 3001)).encode(), compresslevel=1)
    )
    for place in range(len(packed) * 3 // 4, len(packed) * 3 // 4 + 8):
        packed[place] ^= 0xFF
    path.write_bytes(packed)
    whole.write_text(line(5000), encoding="utf-8")
    assert main(["ledger", "import", str(path), str(whole)]) == 0
    assert f"{path}, " in capsys.readouterr().out
    assert 500 < len(ledger.calls()) < 3002
    assert main(["audit", "verify"]) == 0


def test_a_file_of_something_else_is_refused(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export of the ledger is not OTLP: every line is named, and a script sees the status."""
    path = tmp_path / "calls.jsonl"
    path.write_text('{"agent": "a", "input_tokens": 5}\n', encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 1
    said = capsys.readouterr().err
    assert "Imported 0 model calls" in said
    assert f"{path}, line 1: It has none of resourceSpans, " in said


def in_former_words(text: str) -> str:
    """Scopes as the first versions of OTLP called them."""
    return text.replace("scopeSpans", "instrumentationLibrarySpans")


def in_words_of_protobuf(text: str) -> str:
    """Names of fields as in the protocol's definition, which protobuf's JSON can keep."""
    return re.sub(
        '"([a-z]+[A-Z][A-Za-z]+)":', lambda name: re.sub("([A-Z])", r"_\1", name[0]).lower(), text
    )


@pytest.mark.parametrize(
    "reworded",
    [
        in_former_words,
        in_words_of_protobuf,
        lambda text: in_words_of_protobuf(in_former_words(text)),
        lambda text: in_former_words(text).replace(
            '"instrumentationLibrarySpans"', '"scopeSpans": [], "instrumentationLibrarySpans"'
        ),
    ],
    ids=["former", "protobuf", "former in protobuf", "both"],
)
def test_other_names_of_the_fields_are_read(
    ledger: LedgerFile, tmp_path: Path, reworded: Callable[[str], str]
) -> None:
    """Older exporters and protobuf's JSON write the same spans."""
    path = tmp_path / "spans.jsonl"
    text = reworded(line(1))
    assert text != line(1)
    path.write_text(text, encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 0
    assert ledger.tokens() == 15


SPAN = json.loads(line(1))["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
NOTHING = {
    "other fields": ({"spans_of": [SPAN]}, "but keys spans_of"),
    "unknown scopes": (
        {"resourceSpans": [{"resource": {}, "librarySpans": [{"spans": [SPAN]}]}]},
        "It has librarySpans instead of scopeSpans.",
    ),
    "unknown spans": (
        {"resourceSpans": [{"scopeSpans": [{"scope": {}, "span": SPAN}]}]},
        "It has span instead of spans.",
    ),
    "spans without scopes": ({"resourceSpans": [{"spans": [SPAN]}]}, "It has spans instead of"),
    "no spans": ({"resourceSpans": []}, "No model calls found in 0 spans of 1 JSON document."),
    "metrics": ({"resourceMetrics": [{}]}, "No model calls found in 0 spans of 1 JSON document."),
    "logs": ({"resource_logs": [{}]}, "No model calls found in 0 spans of 1 JSON document."),
}


@pytest.mark.parametrize(("document", "sentence"), NOTHING.values(), ids=NOTHING.keys())
def test_import_without_model_calls_fails_and_names_the_content(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    document: object,
    sentence: str,
) -> None:
    """A job that imports the wrong file every night must not look like one that works."""
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 1
    said = capsys.readouterr()
    assert (said.out, sentence in said.err) == ("", True), said.err


def test_import_of_empty_file_is_an_error(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that imports it every night must not look like one that works."""
    path = tmp_path / "spans.json"
    path.touch()
    assert main(["ledger", "import", str(path)]) == 1
    assert "in 0 spans of 0 JSON documents" in capsys.readouterr().err


def test_bad_lines_are_shown_beside_spans_without_a_call(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The missing model calls may have been in them."""
    path = tmp_path / "spans.jsonl"
    path.write_text(f"{line(1, attributes=[], name='GET')}\nnonsense\n", encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 1
    said = capsys.readouterr().err
    assert "No model calls found in 1 span of 1 JSON document." in said
    assert f"{path}, line 2: " in said
