"""Model calls under way: what is known of each, and what it counts when it ends."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Final

from otel_limits.core.usage import EXACT

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.core.facts import CallKind
    from otel_limits.core.usage import Tally, Usage

CHARACTERS_PER_TOKEN: Final = 4
"""What an estimate assumes where the framework offers no projection."""


class OpenCall:
    """A model call whose end has not been seen yet."""

    is_open = True
    """False once it has been booked."""
    span_id: str | None = None
    """Its `chat` span, as soon as that has begun."""
    streamed = False
    """True when the provider sent something, so that it will bill the input."""
    reported = False
    """True when the provider sent usage, be it zero."""
    usage: Usage | None = None
    """What the provider sent, before anybody folded cached tokens into anything."""
    usage_total: int | None = None
    counted: Usage | None = None
    """The same as it counts, cached tokens in the input; `None` when it cannot be used."""

    def __init__(
        self,
        model: str,
        input_estimate: int = 0,
        started: float | None = None,
        provider: str = "unknown",
    ) -> None:
        """Remember what is known before the answer comes: little, where nobody saw it begin."""
        self.model = model
        self.provider = provider
        self.input_estimate = input_estimate
        self.started = started


def add_call(tally: Tally, usage: Usage, price: Decimal | None, *, estimated: bool) -> None:
    """Add one model call to a tally."""
    tally.input += usage.input
    tally.output += usage.output
    if usage.cache_read or usage.cache_write:
        tally.cache_read += usage.cache_read
        tally.cache_write += usage.cache_write
    tally.model_calls += 1
    tally.unmeasured_calls += estimated
    if price is not None:
        tally.cost = EXACT.add(tally.cost, price)
    elif usage.input or usage.output:
        tally.unpriced_calls += 1


def call_kind(usage: Usage | None, call: OpenCall, *, failed: bool) -> CallKind:
    """Tell a failed, a measured, a real zero-token and an unmeasured call apart."""
    if failed:
        return "failed"
    if usage is not None and (usage.input or usage.output):
        return "measured"
    return "zero_token" if call.reported else "unmeasured"


FOLLOWED: Final[contextvars.ContextVar[OpenCall | None]] = contextvars.ContextVar(
    "otel_limits_followed", default=None
)
"""The side call that we are within: what it asks in turn, or traces, is the same call."""
