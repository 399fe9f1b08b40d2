"""The files that people have of their spans: all of them are imported as the collector's."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
