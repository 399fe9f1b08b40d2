"""Model calls in LiteLLM's spend logs: each row becomes a span within one of its session.

The rows are those of the table `LiteLLM_SpendLogs`, as `/spend/logs` and `/spend/logs/v2` return
them, or as the database writes them to CSV: litellm 1.106.12, proxy/schema.prisma and
proxy/spend_tracking/spend_tracking_utils.py, `get_logging_payload`, read 2026-11-29.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from otel_limits.core.price import GATEWAY, OWN_COST, OWN_COST_BY
from otel_limits.core.secrets import quote_value
from otel_limits.ledger.coding_agents import (
    CACHE_READ,
    CACHE_WRITE,
    INPUT,
    LOGGED,
    OUTPUT,
    SPAN_DIGITS,
    TIER,
    CallInLog,
    hashed,
)
from otel_limits.ledger.shapes import (
    TRACE_DIGITS,
    Node,
    attributes_of,
    in_scope,
    nanoseconds,
)
from otel_limits.otel import semconv
from otel_limits.otel.kinds import MODEL_CALLS, kind_of

LITELLM: Final = "litellm"
"""The agent of the imported calls: the log does not contain the agents that made them."""
SCOPE: Final = "litellm.spend_logs"
"""The scope of their spans, by which `usage/fields.yaml` has how LiteLLM counts."""
MARKS: Final = frozenset({"request_id", "call_type", "startTime", "endTime"})
"""Columns that show that a row is one of this table."""
PAGE: Final = frozenset({"data", "total_pages"})
"""Fields of a page of `/spend/logs/v2`."""

OWNERS: Final = ("end_user", "user", "team_id", "organization_id", "agent_id")
"""Columns that are recorded if the audit keys name them. No other says for whom a call was."""

FAILURE: Final = "failure"
ERROR: Final = 2
CACHE_WRITE_1H: Final = "gen_ai.usage.cache_creation.ephemeral_1h_input_tokens"
DETAILS: Final[Mapping[str, Sequence[tuple[str, ...]]]] = {
    CACHE_READ: (("cache_read_input_tokens",), ("prompt_tokens_details", "cached_tokens")),
    CACHE_WRITE: (
        ("cache_creation_input_tokens",),
        ("prompt_tokens_details", "cache_creation_tokens"),
        ("prompt_tokens_details", "cache_write_tokens"),
    ),
    CACHE_WRITE_1H: (
        (
            "prompt_tokens_details",
            "cache_creation_token_details",
            "ephemeral_1h_input_tokens",
        ),
        ("cache_creation", "ephemeral_1h_input_tokens"),
    ),
    "gen_ai.usage.reasoning_tokens": (("completion_tokens_details", "reasoning_tokens"),),
    "gen_ai.usage.input_audio_tokens": (("prompt_tokens_details", "audio_tokens"),),
    "gen_ai.usage.output_audio_tokens": (("completion_tokens_details", "audio_tokens"),),
    "gen_ai.usage.server_tool_use.web_search_requests": (
        ("server_tool_use", "web_search_requests"),
        ("prompt_tokens_details", "web_search_requests"),
    ),
}
"""Where LiteLLM keeps the parts of a usage, by attribute; the first that is there counts."""
USAGES: Final = ("additional_usage_values", "usage_object")
"""The usages within the metadata of a row."""

TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d(?::?\d\d)?)?"
)
"""PostgreSQL leaves out the zone of a time in UTC, the minutes of a zone, and trailing zeros."""


def is_spend_log(document: Any) -> bool:
    """Return whether a JSON object is a row of the table, or a page of them."""
    return isinstance(document, Mapping) and (
        document.keys() >= MARKS
        or (document.keys() >= PAGE and all(is_spend_log(each) for each in document["data"]))
    )


def spans_of_spend_log(document: Node) -> Iterator[Node]:
    """Return resource spans for the calls of a row or of a page.

    Raises:
        ValueError: A time or the metadata of a row cannot be read.
    """
    rows = [document] if document.keys() >= MARKS else document["data"]
    yield in_scope(SCOPE, [span for row in rows for span in _spans_of(row)])


def _spans_of(row: Node) -> Iterator[Node]:
    """Return the spans of a row: the request, and its session if it is a model call."""
    identity = str(row["request_id"])
    session = str(row.get("session_id") or identity)
    owners = {name: str(row[name]) for name in OWNERS if row.get(name)}
    trace = hashed([LITELLM, session])[:TRACE_DIGITS]
    # A session may have requests for several users.
    above = hashed([LITELLM, session, *owners.values()])[:SPAN_DIGITS]
    times = {
        "startTimeUnixNano": _time(row["startTime"]),
        "endTimeUnixNano": _time(row["endTime"]),
    }
    kind = str(row["call_type"])
    model = str(row.get("model") or "unknown")
    usage = _usage_of(row)
    call = {
        semconv.OPERATION: kind,
        "gen_ai.provider.name": row.get("custom_llm_provider") or LITELLM,
        semconv.REQUEST_MODEL: model,
        "gen_ai.response.id": identity,
        # The usage of a batch is that of all its requests.
        TIER: "batch" if kind.endswith("batch") else _tier_of(usage),
        **_counts(row, usage),
        # LiteLLM computes it from its list of prices, so it is only compared.
        OWN_COST: _text(row.get("spend")),
        OWN_COST_BY: GATEWAY,
    }
    call = {name: value for name, value in call.items() if value is not None}
    if kind_of(call, kind) in MODEL_CALLS:
        about = {semconv.OPERATION: "invoke_agent", semconv.AGENT_NAME: LITELLM}
        yield {
            **times,
            "traceId": trace,
            "spanId": above,
            "name": f"invoke_agent {LITELLM}",
            "attributes": attributes_of({**owners, "session.id": session, **about}),
        }
    yield {
        **times,
        "traceId": trace,
        "spanId": hashed([LITELLM, identity])[:SPAN_DIGITS],
        "parentSpanId": above,
        "name": kind,
        "status": {"code": ERROR} if row.get("status") == FAILURE else {},
        "attributes": attributes_of(call),
        LOGGED: CallInLog(
            program=LITELLM,
            models=frozenset({model, str(row.get("model_group") or model)}),
            tokens=(_count(row.get("prompt_tokens")), _count(row.get("completion_tokens"))),
            is_charged=_is_above_zero(row.get("spend")),
        ),
    }


def _counts(row: Node, usage: Node) -> dict[str, int]:
    """Return the billed tokens of a call. LiteLLM counts cached input as a part of the input."""
    if str(row.get("cache_hit")).lower() == "true":
        # The columns have the tokens of the answer that its cache contained.
        return {INPUT: 0, OUTPUT: 0, "gen_ai.usage.total_tokens": 0}
    sent, output = _count(row.get("prompt_tokens")), _count(row.get("completion_tokens"))
    # Zero is the default of the columns, so the usage of an answered call is unknown.
    if not sent and not output and row.get("status") != FAILURE:
        return {}
    found = {INPUT: sent, OUTPUT: output}
    for name, paths in DETAILS.items():
        found[name] = next(filter(None, (_count(_at(usage, path)) for path in paths)), 0)
    return {name: count for name, count in found.items() if count or name in (INPUT, OUTPUT)}


def _usage_of(row: Node) -> Node:
    """Return the whole usage of a row, which is within its metadata."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = json.loads(metadata or "{}")
    if not isinstance(metadata, Mapping):
        return {}
    usages = [metadata.get(name) for name in reversed(USAGES)]
    return {key: value for each in usages if isinstance(each, Mapping)
            for key, value in each.items() if value is not None}  # fmt: skip


def _tier_of(usage: Node) -> str | None:
    tier = usage.get("service_tier")
    return tier if isinstance(tier, str) else None


def _at(usage: Any, path: Sequence[str]) -> Any:
    for name in path:
        usage = usage.get(name) if isinstance(usage, Mapping) else None
    return usage


def _text(value: object) -> str | None:
    return None if value in (None, "") else str(value)


def _is_above_zero(value: object) -> bool:
    # CSV has it as text.
    try:
        return float(str(value)) > 0
    except ValueError:
        return False


def _count(value: object) -> int:
    """Return a count, which CSV has as text; 0 if it is none."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else 0


def _time(value: object) -> int:
    """Return a time in nanoseconds since 1970; without a zone it is in UTC."""
    found = TIME.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{quote_value(value)} is not a time such as 2026-03-01T12:00:00Z.")
    day, time, fraction, zone = found.groups()
    zone = "+00:00" if zone in (None, "Z") else f"{zone[:3]}:{zone[3:].lstrip(':') or '00'}"
    return nanoseconds(f"{day}T{time}.{(fraction or '').ljust(6, '0')[:6]}{zone}")
