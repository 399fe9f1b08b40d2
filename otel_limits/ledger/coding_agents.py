"""Model calls in the OTLP logs of coding agents: each becomes a span within one of its session.

These programs report a call as a log record, without a span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.ledger.shapes import (
    MICROSECOND,
    TRACE_DIGITS,
    Node,
    attributes_of,
    in_scope,
    nanoseconds,
    plain_attributes,
)
from otel_limits.otel import semconv

SPAN_DIGITS: Final = 16
MILLISECOND: Final = 1_000_000
INPUT: Final = "gen_ai.usage.input_tokens"
OUTPUT: Final = "gen_ai.usage.output_tokens"
CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE: Final = "gen_ai.usage.cache_creation.input_tokens"
GEMINI: Final = "gemini.usage_metadata."
TIER: Final = "gen_ai.response.service_tier"


LOGGED: Final = "logged"
"""The field of a span with its `CallInLog`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInLog:
    """The facts of a call in a log that the ledger may have from another source."""

    program: str
    """The program that wrote the log, which is the agent of its imported calls."""
    models: frozenset[str]
    """The names of its model: a gateway offers it by one, and calls it by another."""
    tokens: tuple[int, int]
    """Input and output of the answer, which a gateway's cache may have contained."""
    is_charged: bool = False
    """Whether a gateway computed a cost above 0, also for images or speech without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """The names in the records of a coding agent."""

    name: str
    provider: str
    events: frozenset[str]
    """Names of the event, as an attribute or as the body of the record."""
    kind: str | None
    """The value of `event.kind`, if the event is also about other things."""
    session: str
    identity: str | None
    """An attribute that identifies the call; without one, its session and its time do."""
    counts: Mapping[str, str]
    """Attributes with tokens, as OpenTelemetry or the vendor calls them."""
    is_input_uncached: bool
    """Whether its input leaves out what was read from the cache and written to it."""


# https://code.claude.com/docs/en/monitoring-usage#api-request-event, read 2026-11-29. The input
# is that of Anthropic's API, which leaves out cached tokens:
# https://docs.claude.com/en/docs/build-with-claude/prompt-caching#tracking-cache-performance
CLAUDE_CODE: Final = CodingAgent(
    name="claude-code",
    provider="anthropic",
    events=frozenset({"claude_code.api_request"}),
    kind=None,
    session="session.id",
    identity="request_id",
    counts={
        "input_tokens": INPUT,
        "output_tokens": OUTPUT,
        "cache_read_tokens": CACHE_READ,
        "cache_creation_tokens": CACHE_WRITE,
    },
    is_input_uncached=True,
)
AGENTS: Final = (
    CLAUDE_CODE,
    # openai/codex, codex-rs/otel/src/events/session_telemetry.rs, `sse_event_completed`, read
    # 2026-11-29. Its counts are those of the Responses API, whose input includes cached tokens.
    CodingAgent(
        name="codex",
        provider="openai",
        events=frozenset({"codex.sse_event"}),
        kind="response.completed",
        session="conversation.id",
        identity=None,
        counts={
            "input_token_count": INPUT,
            "output_token_count": OUTPUT,
            "cached_token_count": CACHE_READ,
        },
        is_input_uncached=False,
    ),
    # google-gemini/gemini-cli, packages/core/src/telemetry/types.ts, `ApiResponseEvent`, read
    # 2026-11-29. Its counts are those of Gemini's API, with its meaning.
    CodingAgent(
        name="gemini-cli",
        provider="gcp.gemini",
        events=frozenset({"gemini_cli.api_response"}),
        kind=None,
        session="session.id",
        identity=None,
        counts={
            "input_token_count": f"{GEMINI}prompt_token_count",
            "output_token_count": f"{GEMINI}candidates_token_count",
            "cached_content_token_count": f"{GEMINI}cached_content_token_count",
            "thoughts_token_count": f"{GEMINI}thoughts_token_count",
            "tool_token_count": f"{GEMINI}tool_use_prompt_token_count",
            "total_token_count": f"{GEMINI}total_token_count",
        },
        is_input_uncached=False,
    ),
)


def spans_of_logs(document: Node) -> Iterator[Node]:
    """Iterate over resource spans for the model calls in the logs of a document."""
    for resource in document.get("resourceLogs", ()):
        for scope in resource.get("scopeLogs", ()):
            spans = [each for record in scope.get("logRecords", ()) for each in _spans_of(record)]
            if spans:
                yield in_scope("", spans)


def _spans_of(record: Node) -> Iterator[Node]:
    """Return the spans of a log record: a session and a call, if it is about a call."""
    said = plain_attributes(record.get("attributes", ()))
    names = {record.get("eventName"), (record.get("body") or {}).get("stringValue")}
    names.add(said.get("event.name"))
    for agent in AGENTS:
        is_kind = agent.kind is None or said.get("event.kind") == agent.kind
        if is_kind and not agent.events.isdisjoint(names) and agent.counts.keys() & said.keys():
            yield from _call(agent, said, record)


def _call(agent: CodingAgent, said: Mapping[str, Any], record: Node) -> Iterator[Node]:
    end = _time_of(said, record)
    identity = str(said.get(agent.identity or "") or f"{said.get(agent.session)} {end}")
    session = str(said.get(agent.session) or identity)
    trace, span_id = key_in_log(agent, session, identity)
    above = hashed([agent.name, session, "session"])[:SPAN_DIGITS]
    start = end - int(_count(said.get("duration_ms")) or 0) * MILLISECOND
    times = {"startTimeUnixNano": start, "endTimeUnixNano": end}
    about = {semconv.OPERATION: "invoke_agent", semconv.AGENT_NAME: agent.name}
    yield {
        **times,
        "traceId": trace,
        "spanId": above,
        "name": f"invoke_agent {agent.name}",
        "attributes": attributes_of(
            {name: said[name] for name in said.keys() - agent.counts.keys()}
            | {"session.id": session, **about}
        ),
    }
    call = {
        semconv.OPERATION: "chat",
        "gen_ai.provider.name": agent.provider,
        # Claude Code may also write a span of the call.
        "gen_ai.response.id": said.get(agent.identity or ""),
        semconv.REQUEST_MODEL: said.get("model"),
        # Fast mode has other prices.
        TIER: "fast" if said.get("speed") == "fast" else None,
        **_usage(agent, said),
    }
    yield {
        **times,
        "traceId": trace,
        "spanId": span_id,
        "parentSpanId": above,
        "name": "chat",
        "attributes": attributes_of(call),
        # A program that identifies its calls may also have written a span of each.
        LOGGED: _logged(agent, call) if agent.identity is not None and call[OUTPUT] else None,
    }


def key_in_log(agent: CodingAgent, session: str, identity: str) -> tuple[str, str]:
    """Return the trace ID and the span ID of an imported call of a log."""
    trace = hashed([agent.name, session])[:TRACE_DIGITS]
    return trace, hashed([agent.name, identity])[:SPAN_DIGITS]


def _logged(agent: CodingAgent, call: Mapping[str, Any]) -> CallInLog:
    return CallInLog(
        program=agent.name,
        models=frozenset({str(call[semconv.REQUEST_MODEL])}),
        tokens=(call[INPUT] or 0, call[OUTPUT] or 0),
    )


def _usage(agent: CodingAgent, said: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the tokens of a call; as OpenTelemetry defines it, input includes cached input."""
    usage = {ours: _count(said.get(theirs)) for theirs, ours in agent.counts.items()}
    sent = usage.get(INPUT)
    if agent.is_input_uncached and sent is not None:
        usage[INPUT] = sent + (usage[CACHE_READ] or 0) + (usage[CACHE_WRITE] or 0)
    return usage


def _count(value: object) -> int | None:
    """Return a number, which may be written as text."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else None


def _time_of(said: Mapping[str, Any], record: Node) -> int:
    """Return when a call ended, in nanoseconds: its own time, or that of its record."""
    own = said.get("event.timestamp")
    if isinstance(own, str):
        return nanoseconds(own)
    time = int(record.get("timeUnixNano") or record["observedTimeUnixNano"])
    return time - time % MICROSECOND


def hashed(parts: Iterable[str]) -> str:
    """Return what identifies a span in all imports."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
