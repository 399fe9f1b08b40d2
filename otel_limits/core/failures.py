"""Which text of a tool is a failure, and what changes in a text although nothing moves."""

from __future__ import annotations

import json
import re
from typing import Final, TypeAlias

from otel_limits.core.labels import clean
from otel_limits.core.secrets import quote_value, redact_message
from otel_limits.core.values import CheckedKind, InvalidValueError
from otel_limits.core.wording import compiled, suggestion

BEGINNING: Final = 1_000
"""Characters of a result that are examined for a failure."""

LONGEST_OBJECT: Final = 100_000
"""Characters of a JSON object whose fields are examined."""

MOST_OF_LINE: Final = 200
"""Longest part of an error's line that is shown."""

CLOCK: Final = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
ZONE: Final = r"\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)?"
DAY: Final = r"(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*"
MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"

TIME_STAMP: Final = "|".join(
    (
        rf"\d{{4}}[-/]\d\d[-/]\d\d(?:[T ]{CLOCK}{ZONE})?",
        rf"(?:{DAY},? )?(?:\d{{1,2}} {MONTH}|{MONTH} +\d{{1,2}})(?:,? \d{{4}})?,? {CLOCK}{ZONE}",
        rf"\d{{1,2}}:\d\d:\d\d(?:[.,]\d+)?{ZONE}",
    )
)
"""ISO 8601, the dates of HTTP and of syslog, and the time of a day with seconds."""

ATTEMPT: Final = r"(?:attempt|try|retry)\s?(?:no\.?|number|#)?\s?\d+(?:\s?(?:/|of)\s?\d+)?"
DURATION: Final = (
    r"\d+(?:\.\d+)?\s?(?:[nµu]s|ms|milliseconds?|secs?|seconds?|s|mins?|minutes?|m|hours?|hrs?|h)"
)
IDENTITY: Final = (
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:0x)?[0-9a-f]{16,}"
    r"|req_[0-9a-z]{16,}"
)
"""UUIDs, hexadecimal numbers of 16 digits and more, and the request IDs of vendors."""

# What follows is examined for two characters only: a longer look would be repeated for each digit.
MOVING: Final = rf"(?i)(?<![\w.])(?:{TIME_STAMP}|{ATTEMPT}|{IDENTITY}|{DURATION})(?!\w|\.\w)"
BLOCK: Final = r"(?:type[\"']?\s*[:=]\s*[\"']text[\"'],?\s*[\"']?)?text[\"']?\s*[:=]"
"""Fields before the text of a content block, as in the results of MCP."""

OPENING: Final = rf"(?i)(?:\W|_|(?:{TIME_STAMP}|{ATTEMPT})(?!\w)|{BLOCK})*"
"""Text that may precede the word for a failure: time stamps, attempts, brackets and quotes."""

NONE: Final = (
    r"[\"']?\s*[:=]\s*(?:0(?![\w.])|(?:none|null|false|no|[\"']{2}|\[\]|\{\})\s*(?:[,;.)\]}]|$))"
)
"""The rest of a text that reports no failure: `failed: 0`, or `"error": null`."""

NUMBER: Final = r"(?![45]\d\d(?!\d))\d[\d.,]*\s?%?[ \t]*(?:$|[\r\n,;/)\]}|]|of(?!\w))"
"""A number with nothing after it, other than the status of an HTTP response."""

COUNTED: Final = r"(?:[ ][\w-]+)?[ ](?!status)(?:[\w-]*s|rate|count)(?:[ ]\w+)?"
COUNT: Final = rf"{COUNTED}[\"']?\s*[:=]\s*(?:{NUMBER}|(?:none|null)(?!\w))"
"""The rest of a text that counts things, in the plural: `Failed tests: 13`."""

FAILURE: Final = rf"""(?ix)(?:
    (?:error|exception|traceback|permission\ denied)(?![\w-])(?!{NONE}|{COUNT})
    | (?:failed|denied)(?![\w-])(?!{NONE}|{COUNT}|[\"']?\s*[:=]\s*{NUMBER})
    | (?-i:[\w.]*\w(?:Error|Exception))(?![\w-])(?!{NONE})
    | (?:success|ok)[\"']?\s*[:=]\s*false(?!\w) | is_error[\"']?\s*[:=]\s*true(?!\w)
    | (?:http(?:/\d(?:\.\d)?)?|status)(?:[ _]?(?:code|error))?[\"']?\s*[:=]?\s*
        [45]\d\d(?!\d|\.\d|\s*(?:of(?!\w)|/|%))
)"""


FailureRule: TypeAlias = "str | tuple[str, ...]"
"""`text`, `marked`, or regular expressions."""


def _rule(value: object) -> FailureRule:
    if value in ("text", "marked"):
        return str(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidValueError(suggestion(value, ("text", "marked")))
    for pattern in value:
        _require_pattern(pattern)
    return tuple(value)


def _require_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidValueError(
            f"The pattern {quote_value(pattern)} is invalid: {error}."
        ) from None


TOOL_FAILURES: Final = CheckedKind[FailureRule](
    phrase="text, marked, or a list of regular expressions",
    check=_rule,
    parse=lambda text: text.lower() if text.lower() in ("text", "marked") else text.split(","),
    schema={
        "oneOf": [
            {"enum": ["text", "marked"]},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ]
    },
)


def is_failure(text: str, rule: FailureRule = "text") -> bool:
    """Return whether the text of a result begins like that of a failure, or has a field for it.

    Args:
        text: The text. Time stamps, the number of an attempt, and brackets before it are left out.
        rule: The patterns of failures, `text` for the usual ones; `marked` for none.
    """
    if rule == "marked":
        return False
    beginning = text[:BEGINNING]
    start = compiled(OPENING).match(beginning).end()  # type: ignore[union-attr]  # it can be empty
    if rule == "text":
        return compiled(FAILURE).match(beginning, start) is not None or _has_flag(text)
    # `re` keeps what it has compiled.
    return any(re.compile(each, re.IGNORECASE).match(beginning, start) for each in rule)


def _has_flag(text: str) -> bool:
    """Return whether a field of a JSON object says that it is a failure."""
    if len(text) > LONGEST_OBJECT or not text.lstrip().startswith("{"):
        return False
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        any(fields.get(name) is False for name in ("success", "ok"))
        or any(fields.get(name) is True for name in ("is_error", "isError"))
        or fields.get("status") == "error"
    )


def without_moving_parts(text: str) -> str:
    """Return a text without what changes although nothing moves.

    These are time stamps, durations, UUIDs, hexadecimal numbers of 16 digits and more, IDs of
    requests, and the number of an attempt. Any other number is progress, such as that of a page.
    """
    return compiled(MOVING).sub("", text)


def first_line(text: str) -> str:
    """Return the first line of an error that has text, for the operator."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    # Before it is cut, so that no beginning of a secret is left.
    return clean(redact_message(line.strip()[:BEGINNING]), MOST_OF_LINE)
