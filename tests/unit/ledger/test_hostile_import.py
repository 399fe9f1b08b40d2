"""Manipulated or damaged span files: their valid part is imported."""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile


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
