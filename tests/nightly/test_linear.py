"""Input from outside takes CPU in proportion to its length, with any content."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from otel_limits.bindings.gateways import budget_refusal
from otel_limits.cli import main
from otel_limits.core.failures import is_failure, without_moving_parts
from otel_limits.core.labels import clean
from otel_limits.core.loops import fingerprint
from otel_limits.core.policy import Policy
from otel_limits.core.secrets import redact_message, redact_url
from otel_limits.core.terms import area_of, listing_of, premium, vendor_of
from otel_limits.core.wording import closest_match
from otel_limits.ledger.otlp import documents_in, read_spans
from otel_limits.ledger.spill import rows_in
from otel_limits.observers.toollog import TYPES
from otel_limits.observers.toollog import read as read_log
from otel_limits.settings.policy.reader import parse as parse_policy
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.table import SETTINGS
from otel_limits.top.scrapes import samples_of
from otel_limits.usage.media import pages_of
from otel_limits.usage.span_texts import estimates_of_span
from otel_limits.usage.text import tokens_of_text


class RefusedError(Exception):
    """A vendor's refusal."""

    status_code = 429


def refuse(text: str) -> None:
    """Classify the text of an error."""
    budget_refusal(RefusedError(f"{text}ai.google.dev"))


def identify(model: str) -> None:
    """Find the vendor, the price list's name and the region of a model ID."""
    vendor_of(model, model)
    listing_of(model, model, known=False)
    premium("google", model, "europe")
    area_of(model)


def configure(value: str) -> None:
    """Read the value as that of every setting."""
    for setting in SETTINGS:
        read_settings({setting.variable: value})


def misspell(name: str) -> None:
    """Read a setting with an unknown name."""
    read_settings({f"OTEL_LIMITS_{name}": "1"})
    closest_match(name, [setting.name for setting in SETTINGS])


def answered(result: str) -> None:
    """Look at the result of a tool, which may be an attacker's, with another end than its units."""
    for text in (result, f"{result}g"):
        without_moving_parts(text)
        is_failure(text)


def spilled(content: str) -> None:
    """Read a spill file with this content, and with a row that contains it."""
    row = json.dumps(["otel_limits_invocations", {"agent": content, "invocation_id": content}])
    for text in (content, f"{row}\n"):
        list(rows_in(io.BytesIO(text.encode("utf-8", "surrogatepass")), lambda _: None))


def logged(line: str) -> None:
    """Parse the line of a tool log, and one with an entry that contains it."""
    entry = dict.fromkeys(TYPES, line) | {"time": "2026-01-01T00:00:00+00:00", "number": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tools-1.ndjson")
        for text in (line, json.dumps(entry | {"trigger": False})):
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            list(read_log(path.parent))


def imported(line: str) -> None:
    """Read the line of an export of spans, and one with a span that contains it."""
    texts = {"gen_ai.request.model": line, "gen_ai.operation.name": "chat", line: line}
    attributes = [{"key": key, "value": {"stringValue": text}} for key, text in texts.items()]
    times = {"startTimeUnixNano": "1760000000000000000", "endTimeUnixNano": "1760000001000000000"}
    ids = {"traceId": "a" * 32, "spanId": "b" * 16}
    span = {"name": line, **ids, **times, "attributes": attributes}
    scope = {"scope": {"name": line}, "spans": [span]}
    for text in (line, json.dumps({"resourceSpans": [{"scopeSpans": [scope]}]})):
        for document in documents_in(text.encode("utf-8", "surrogatepass").splitlines()):
            if document.problem is None:
                read_spans(document, [line])


def scraped(page: str) -> None:
    """Read the page of an endpoint, also where the text is a label."""
    for text in (page, f'otel_limits_stops_total{{agent="{page}"}} 1\n'):
        list(samples_of(text, is_openmetrics=False))


def govern(text: str) -> None:
    """Read a policy file with this content, and with the text in keys, patterns and values."""
    quoted = json.dumps(text)
    parse_policy(text, "limits.yaml")
    for content in (
        f"defaults: {{halt_message: {quoted}, action: {quoted}}}",
        f"{{agents: {{{quoted}: {{limits: {{{quoted}: 3, max_turns: {quoted}}}}}}}}}",
        f"models: {{{quoted}: {{input_usd: 1, output_usd: 2}}}}",
        f"quotas: {{{quoted}: {{window: {quoted}, key: {quoted}, limit: {quoted}}}}}",
    ):
        document, _ = parse_policy(content, "limits.yaml")
        document.effective(text, Policy())


def govern_many(text: str) -> None:
    """Read a policy file with many agents, each with a pattern and a mistake."""
    lines = (f"  a{at}*: {{limits: {{max_turns: 3, {text[:8]}: 1}}}}" for at in range(len(text)))
    parse_policy("\n".join(("agents:", *lines)), "limits.yaml")


QUOTA: Final = "exceeded your current quota, please check your plan and billing details "

DOORS: Final[Mapping[str, tuple[Callable[[str], object], int, tuple[str, ...]]]] = {
    "PDF": (lambda text: pages_of(text.encode()), 20_000, ("/Type/ObjStm ", "/Type ", " ")),
    "error": (refuse, 100_000, (QUOTA, "quotaId ", "a")),
    "model": (identify, 10_000, ("gemini-3", "claude-", "us.", "/us-a", "a/", "-1")),
    "label": (clean, 100_000, ("a", "\n", "\ud800")),
    "arguments": (lambda text: fingerprint(text, {text: text}), 20_000, ("a", "é")),
    "prompt": (tokens_of_text, 50_000, ("a", "é ", "1", "日本")),
    "span": (
        lambda text: estimates_of_span({"gen_ai.input.messages": text}, [], "gpt-4o"),
        20_000,
        ("data:a/b;", "data:image/png;base64,", "[", '{"a":', '"'),
    ),
    "setting": (configure, 2_500, ("a", "9", "1,", "@", "{")),
    "address": (
        lambda text: read_settings({"OTEL_LIMITS_QUOTA_STORE": f"redis://{text}"}),
        5_000,
        ("/", "/a", ",a:1", "?a=b&"),
    ),
    "redacted address": (
        lambda text: redact_url(f"redis://{text}"),
        10_000,
        ("a", ".", "pass", "password=", "key='", "key ", "a:1,", "a@", "token = ", "["),
    ),
    "tool result": (answered, 20_000, ("a", "1", "1.", "1 ", "12:", "attempt ", '{"a": ', "[")),
    "tool error": (
        redact_message,
        10_000,
        (
            *("api-", "a_", "Bearer ", "x-api-key: '", "cookie: a=b;", "--token a1", "x://"),
            *("sk-a.", "token: [", "-----BEGIN PRIVATE KEY-----", "-----END", "token=\\"),
        ),
    ),
    "name": (misspell, 5_000, ("A", "MAX_")),
    "spill file": (spilled, 5_000, ("a", "[", "{", '["', "\n", "{}\n")),
    "tool log": (logged, 10_000, ("a", "[", '{"', "\\")),
    "span export": (imported, 10_000, ("a", "[", "{", "gen_ai.")),
    "scrape": (scraped, 10_000, ("a", "{", 'a="', "\\", ",", "# ", "\n")),
    "policy": (govern, 1_000, ("a", "*", "[", "{", "- ", "a: ", "&a ", "'", "1", "?")),
    "policy agents": (govern_many, 50, ("a",)),
}
"""Functions that take a text, a length to begin with, and the units to repeat."""

CASES: Final = [
    pytest.param(take, length, unit, id=f"{name}-{unit.strip()[:20]!a}")
    for name, (take, length, units) in DOORS.items()
    for unit in units
]


@pytest.mark.parametrize(("take", "length", "unit"), CASES)
def test_twice_the_length_takes_at_most_two_and_a_half_times_the_cpu(
    take: Callable[[str], object], length: int, unit: str
) -> None:
    """Twice in a row, which is easier to measure: a quadratic one would take 16 times the CPU."""
    fastest = {length: math.inf, 4 * length: math.inf}  # the least disturbed by other processes
    for attempt in range(10):
        for each, seconds in fastest.items():
            text = (unit * each)[:each]
            begin = time.process_time()
            with contextlib.suppress(ValueError):
                take(text)
            fastest[each] = min(seconds, time.process_time() - begin)
        is_linear = fastest[4 * length] <= 2.5**2 * max(fastest[length], 0.002)
        if is_linear and attempt >= 2:
            return
    pytest.fail(f"{fastest}")


MODELS: Final = 607
"""More than a cache of usual size has: such a cache forgets each model before its next call."""


def export_of(path: Path, models: int) -> str:
    """Write an export of calls, twice of each model, and return its path."""
    times = {"startTimeUnixNano": "1760000000000000000", "endTimeUnixNano": "1760000001000000000"}
    with path.open("w", encoding="utf-8") as file:
        for call in range(2 * MODELS):
            said: dict[str, dict[str, object]] = {
                "gen_ai.operation.name": {"stringValue": "chat"},
                "gen_ai.provider.name": {"stringValue": "openai"},
                "gen_ai.request.model": {"stringValue": f"gpt-4o-{call % models}"},
                "gen_ai.usage.input_tokens": {"intValue": 1_200},
                "gen_ai.usage.cache_read.input_tokens": {"intValue": 1_000},
                "gen_ai.usage.output_tokens": {"intValue": 30},
            }
            attributes = [{"key": key, "value": value} for key, value in said.items()]
            ids = {"traceId": f"{call + 1:032x}", "spanId": f"{call + 1:016x}"}
            span = {"name": "chat", **ids, **times, "attributes": attributes}
            batch = {"scopeSpans": [{"scope": {}, "spans": [span]}]}
            file.write(json.dumps({"resourceSpans": [batch]}) + "\n")
    return str(path)


def test_import_of_many_models_takes_at_most_four_times_the_cpu_of_one(tmp_path: Path) -> None:
    """A price is looked up once for each model, not for each of its calls."""
    one, many = export_of(tmp_path / "one", 1), export_of(tmp_path / "many", MODELS)
    fastest = {one: math.inf, many: math.inf}
    for attempt, file in itertools.product(range(10), fastest):
        ledger = str(tmp_path / f"{Path(file).name}-{attempt}.db")
        begin = time.process_time()
        assert main(["ledger", "import", file, "--ledger", ledger]) == 0
        fastest[file] = min(fastest[file], time.process_time() - begin)
        if attempt >= 2 and fastest[many] <= 4 * fastest[one]:
            return
    pytest.fail(f"{fastest}")
