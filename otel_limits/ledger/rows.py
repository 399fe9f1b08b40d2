"""Events as rows of the ledger: pure functions, and the only place that decides what is recorded.

Events contain no prompt, argument, result or exception text, so neither do rows. Names come from
outside: they are cleaned and cut, so that no database rejects them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, TypeVar

from otel_limits.core.events import (
    CallKind,
    Invocation,
    ModelCall,
    PolicyRead,
    QuotaGrant,
    Started,
    Stop,
    ToolCall,
)
from otel_limits.core.labels import clean
from otel_limits.core.limits import Breach, Limits
from otel_limits.core.usage import EXACT, Usage
from otel_limits.core.wording import shortest

Item = TypeVar("Item")
Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[tuple[str, Row]]
"""Pairs of a table name and a row."""

# Prefixed, as the application may use the same database.
INVOCATIONS: Final = "otel_limits_invocations"
MODEL_CALLS: Final = "otel_limits_model_calls"
TOOL_CALLS: Final = "otel_limits_tool_calls"
UNCOUNTED: Final = "otel_limits_uncounted_spans"
ATTRIBUTES: Final = "otel_limits_attributes"
QUOTA_CHANGES: Final = "otel_limits_quota_changes"
POLICIES: Final = "otel_limits_policies"
MAINTENANCE: Final = "otel_limits_maintenance"
RECOUNTS: Final = "recount"
"""Not a table: its rows name invocations whose totals must be recounted."""
SUPERSEDED: Final = "superseded"
"""Not a table: its rows name totals and uncounted spans to delete, as their calls are known now."""
RECORDED_LIVE: Final = "recorded live"
"""Not a table: counts imported calls that were deleted, as the ledger has them as live ones."""

LOST: Final = "lost"
"""Stop reason and action of an invocation whose process vanished, as an operator declared it."""

PAUSED: Final = ("checkpoint", "interrupt")
"""Stop reasons of invocations that wait, e.g. for a person's answer: another one continues."""
NOT_KNOWN: Final = "unknown"
"""Stop reason of an imported invocation whose end no span shows."""

State = Literal["measured", "zero", "unmeasured", "estimated", "failed", "interrupted"]

UNKNOWN_SIZE: Final = ("unmeasured", "estimated", "interrupted")
"""States of a call that the provider billed without reporting its usage."""
UNANSWERED: Final = ("failed", "interrupted")
"""States of a call without a whole answer."""

SAME_CALL_MICROSECONDS: Final = 60_000_000
"""An imported span with the IDs of a recorded call is another call if their times differ by more:
an application that seeds `random` creates the same IDs in every run."""

MAX_NAME: Final = 256
MAX_SENTENCE: Final = 1024
FINGERPRINT: Final = 16
"""Hexadecimal digits of a hash that are kept."""
MOST_TOOLS: Final = 32
"""Distinct tools recorded per turn: a model can invent any number of names."""
MICROSECONDS: Final = 1_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
PICODOLLARS: Final = 10**12
"""Prices are stored as integers of 10⁻¹² USD, which databases add exactly."""
MAX_INTEGER: Final = 2**63 - 1
"""The largest integer of a column. No provider can report more tokens."""


def started_rows(event: Started) -> Rows:
    """Rows of an invocation that started: itself, and its audited attributes."""
    rows: Rows = [(INVOCATIONS, invocation_row(event, None))]
    rows.extend((ATTRIBUTES, row) for row in attribute_rows(event.invocation.id, event.attributes))
    return rows


def attribute_rows(invocation_id: str, attributes: Mapping[str, str]) -> list[Row]:
    """One row per audited attribute."""
    return [
        {"invocation_id": invocation_id, "key": key, "value": name(value)}
        for key, value in attributes.items()
    ]


def invocation_row(started: Started, stop: Stop | None) -> Row:
    """The one row of an invocation, complete once `stop` is given."""
    invocation = started.invocation
    return {
        "id": invocation.id,
        "root_id": invocation.root_id,
        "parent_id": invocation.parent_id,
        "task_id": invocation.task_id or invocation.id,
        "agent": name(invocation.agent),
        "session_id": name(started.session_id) if started.session_id is not None else None,
        "conversation": invocation.conversation or None,
        "trace_id": invocation.trace_id,
        "span_id": invocation.span_id,
        "source": "live",
        "blind": started.unsampled,
        "limits": limits_json(started),
        "limit_sources": json.dumps(dict(started.origins)) if started.origins else None,
        "configured_action": started.configured_action,
        "started_us": microseconds(started.at),
        **_ending(stop),
    }


def called_row(event: ModelCall) -> Row:
    """The row of an invocation that is only known from a call."""
    return _unstarted_row(event.invocation, event.at, None)


def recount(event: ModelCall) -> tuple[str, Row]:
    """Recount the totals of a finished invocation from its calls."""
    return (RECOUNTS, {"id": event.invocation.id})


def stopped_row(stop: Stop) -> Row:
    """The row of an invocation that started before recording did."""
    invocation = stop.invocation or Invocation(
        agent=stop.agent,
        id=stop.invocation_id,
        root_id=stop.invocation_id,
        trace_id=stop.trace_id,
    )
    return _unstarted_row(invocation, stop.started, stop)


def _unstarted_row(invocation: Invocation, at: float, stop: Stop | None) -> Row:
    """The row of an invocation whose start was not recorded."""
    started = Started(invocation=invocation, limits=Limits(), action="none", unsampled=False, at=at)
    return {**invocation_row(started, stop), **dict.fromkeys(IN_FORCE)}


IN_FORCE: Final = ("limits", "limit_sources", "configured_action")
"""Columns of the limits in force, which only the start of a live invocation reports."""


def _ending(stop: Stop | None) -> Row:
    if stop is None:
        return dict.fromkeys(ENDING)
    return {
        "ended_us": microseconds(stop.started + stop.seconds),
        "reason": name(stop.reason),
        "action": stop.action,
        **_breach(stop.breach),
        # As in the conversation and the log.
        "halt": None if stop.action == "none" else clean(stop.sentence, MAX_SENTENCE),
        "turns": stop.turns,
        "cycles": stop.cycles,
        "tool_calls": stop.tool_calls,
        "model_calls": stop.model_calls,
        **tokens(stop.usage),
        "price_pico": picodollars(stop.cost),
        "unpriced_calls": stop.unpriced_calls,
        "repeated_failures": stop.repeated_failures,
        "synthetic": stop.synthetic,
    }


def _breach(breach: Breach | None) -> Row:
    if breach is None:
        return dict.fromkeys(BREACH)
    return {
        "breach_limit": breach.limit,
        "breach_cap": str(breach.cap),
        "breach_observed": shortest(breach.observed),
        "breach_unit": breach.unit,
    }


BREACH: Final = ("breach_limit", "breach_cap", "breach_observed", "breach_unit")

ENDING: Final = (
    "ended_us", "reason", "action", *BREACH, "halt",
    "turns", "cycles", "tool_calls", "model_calls",
    "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens",
    "price_pico", "unpriced_calls", "repeated_failures", "synthetic",
)  # fmt: skip
"""Columns that are set when an invocation ends."""


def model_call_row(event: ModelCall) -> Row:
    """The row of one model call: its tokens as counted, and as reported."""
    invocation = event.invocation
    return {
        "at_us": microseconds(event.at),
        "duration_us": _duration(event.seconds),
        "trace_id": None,  # that of its invocation
        "span_id": event.span_id,
        "invocation_id": invocation.id,
        "number": event.number,
        "root_id": _other_root(invocation),
        "agent": name(invocation.agent),
        "model": name(event.model),
        "provider": name(event.provider),
        "turn": event.turn,
        "iteration": event.iteration,
        **tokens(event.usage),
        **tokens(event.reported, "reported_"),
        "reported_total_tokens": _bounded(event.reported_total),
        "state": state_of(event.kind, estimated=event.estimated),
        # Of an unmeasured call, only a reported part may count.
        "estimated": event.kind != "unmeasured"
        and is_estimate(event.usage, estimated=event.estimated),
        "price_pico": picodollars(event.price),
        "price_source": event.price_source,
        "price_version": event.price_version,
        "quota_operation": event.quota_operation,
        "quota_charges": event.quota_charges,
        "side": event.side,
        "after_tools": after_tools_text(event.after_tools),
        "cache_saved_pico": signed_picodollars(event.cache_saved),
        "stated_pico": picodollars(event.stated_cost),
        "listed_pico": picodollars(event.listed_price),
        "tier": None if event.tier is None else name(event.tier),
        "cache_write_1h_tokens": _bounded(event.usage.cache_write_1h),
        "price_basis": event.price_basis,
        **dict.fromkeys(FORMER_PRICE),
        "source": "live",
    }


FORMER_PRICE: Final = ("former_price_pico", "former_price_source", "former_price_version")
"""The recorded price of a call that was repriced."""


def _other_root(invocation: Invocation) -> str | None:
    """The root of the tree, null if it is the invocation itself, which is common."""
    return None if invocation.root_id == invocation.id else invocation.root_id


def tool_call_row(event: ToolCall) -> Row:
    """The row of one tool call, without its arguments and result."""
    return {
        "at_us": microseconds(event.at),
        "duration_us": _duration(event.seconds),
        "trace_id": None,  # that of its invocation
        "span_id": None,
        "invocation_id": event.invocation.id,
        "number": event.number,
        "root_id": _other_root(event.invocation),
        "agent": name(event.invocation.agent),
        "tool": name(event.tool),
        "status": event.status,
        # 64 bits are enough to distinguish the calls of an invocation.
        "fingerprint": event.fingerprint and event.fingerprint[:FINGERPRINT],
        "turn": event.turn,
        "breach_limit": event.limit,
        "source": "live",
    }


def after_tools_text(tools: Mapping[str, int]) -> str:
    """Format tools and how often each was called, e.g. `fetch,search*9`; empty for none."""
    counts: dict[str, int] = {}
    for tool, count in sorted(tools.items())[:MOST_TOOLS]:
        # Only invented names contain these characters.
        known = name(tool).replace(",", "_").replace("*", "_")
        counts[known] = counts.get(known, 0) + count
    return ",".join(f"{tool}*{n}" if n > 1 else tool for tool, n in counts.items())


def tools_in(text: str) -> dict[str, int]:
    """Parse the text of `after_tools_text`."""
    parts = (each.partition("*") for each in text.split(",") if each)
    return {tool: int(count or 1) for tool, _, count in parts}


def quota_change_row(event: QuotaGrant) -> Row:
    """The row of a change to a quota."""
    return {
        "id": event.id,
        "at_us": microseconds(event.at),
        "quota": name(event.quota),
        "share": name(event.key),
        "change": event.change,
        "amount": str(event.amount),
        "unit": event.unit,
        "until_us": None if event.until is None else microseconds(event.until),
        "changed_by": name(event.by),
        "reason": event.reason or None,
    }


def policy_row(event: PolicyRead, host: str) -> Row:
    """The row of a version of the policy file: one for all processes of a host that read it."""
    loosened = json.dumps(event.loosened) if event.reloaded else None
    modified_us = None if event.modified is None else microseconds(event.modified)
    parts = (host, event.path, event.digest, modified_us, event.valid, loosened)
    return {
        "id": hashlib.blake2s(json.dumps(parts).encode(), digest_size=16).hexdigest(),
        "at_us": microseconds(event.at),
        "host": name(host),
        "path": clean(event.path, MAX_SENTENCE),
        "owner": name(event.owner) or None,
        "modified_us": modified_us,
        "digest": event.digest or None,
        "accepted": event.valid,
        "loosened": loosened,
    }


def tokens(usage: Usage | None, prefix: str = "") -> Row:
    """The token columns of a usage; null without one."""
    return {
        f"{prefix}{part}_tokens": _bounded(getattr(usage, part)) if usage else None
        for part in ("input", "output", "cache_read", "cache_write")
    }


def _bounded(count: int | None) -> int | None:
    # SQLite's driver raises OverflowError beyond 64 bits, and PostgreSQL rejects the row: one
    # absurd number must not cost the whole batch.
    return None if count is None else min(count, MAX_INTEGER)


def is_estimate(usage: Usage, *, estimated: bool) -> bool:
    """Return whether tokens were estimated."""
    return estimated and usage.total > 0


def state_of(kind: CallKind, *, estimated: bool) -> State:
    """Return how the tokens of a call are known."""
    if kind == "failed" and estimated:  # its answer ended before its usage was reported
        return "interrupted"
    return "zero" if kind == "zero_token" else kind


def portions(rows: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Split rows of any kind into lists of `size`."""
    left = iter(rows)
    while portion := list(islice(left, size)):
        yield portion


def name(value: str) -> str:
    """Clean a name from outside for storage."""
    return clean(value, MAX_NAME)


def microseconds(seconds: float) -> int:
    """Convert to whole microseconds since the epoch, the stored unit of times."""
    # Today's seconds as a float have a resolution of a quarter microsecond.
    return round(seconds * MICROSECONDS)


def time_of(microseconds: int) -> datetime:
    """Convert stored microseconds to a UTC time, exactly."""
    return EPOCH + timedelta(microseconds=int(microseconds))


def _duration(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * MICROSECONDS)


def picodollars(price: Decimal | None) -> int | None:
    """Convert to whole picodollars; `None` for an unknown or invalid price."""
    # A price list may be wrong, or the application's own: anything but an amount is unknown.
    if price is None or not price.is_finite() or price < 0:
        return None
    whole = int(EXACT.multiply(price, PICODOLLARS).to_integral_value(ROUND_HALF_EVEN, EXACT))
    return whole if whole <= MAX_INTEGER else None


def signed_picodollars(amount: Decimal | None) -> int | None:
    """Convert an amount that may be negative to whole picodollars."""
    if amount is None or not amount.is_signed():
        return picodollars(amount)
    below = picodollars(-amount)
    return None if below is None else -below


def dollars(pico: int | None) -> Decimal | None:
    """Convert picodollars to USD, exactly."""
    return None if pico is None else Decimal(int(pico)).scaleb(-12, EXACT)


def dollar_text(pico: int) -> str:
    """Format picodollars as USD, exactly: `f"{dollars(pico):f}"`, in a tenth of the time."""
    whole, rest = divmod(abs(int(pico)), PICODOLLARS)
    return f"{'-' if pico < 0 else ''}{whole}.{rest:012d}"


def known_cost(pico: int | None, unpriced: int | None) -> Decimal | None:
    """Return the USD of calls with a known price; `None` if there are calls and none has one."""
    return None if unpriced and not pico else dollars(pico)


def limits_json(started: Started) -> str | None:
    """Serialize the caps of an invocation and of its budget trees as JSON; `None` without any."""
    caps = {**dict(started.limits.items()), **started.tree}
    return json.dumps(caps, default=str) if caps else None


def caps_in(text: str | None) -> dict[str, Any]:
    """Parse the caps of `limits_json`, or their sources."""
    caps: dict[str, Any] = json.loads(text) if text else {}
    return caps
