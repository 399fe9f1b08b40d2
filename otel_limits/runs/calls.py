"""Model calls of one invocation: opened before they go out, and counted once when they end."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Final

from otel_limits.core.facts import CallKind, ModelCall
from otel_limits.core.usage import EXACT, NO_USAGE, Usage

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.core.usage import Tally
    from otel_limits.runs.run import Run

CHARACTERS_PER_TOKEN: Final = 4
"""What an estimate assumes where the framework offers no projection."""

NO_ORIGIN: Final = (None, None)
"""Source and version of a price that nobody knows."""


class OpenCall:
    """A model call whose end has not been seen yet."""

    is_open = True
    """False once it has been counted."""
    span_id: str | None = None
    """Its `chat` span, as soon as that has begun."""
    streamed = False
    """True when the provider sent something, so that it will bill the input."""
    characters = 0
    """What it has answered by now, in characters of text and arguments."""
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

    @property
    def output_estimate(self) -> int:
        """Tokens of what it has answered by now, about."""
        return -(-self.characters // CHARACTERS_PER_TOKEN)


class Calls:
    """The model calls of one invocation, and the only way in which they are counted."""

    def __init__(self, run: Run) -> None:
        """Begin with none under way."""
        self._run = run
        self.under_way: set[OpenCall] = set()
        """A loop has one at most; tools and middleware may have more beside it."""

    def open(self, model: str, input_estimate: int, provider: str = "unknown") -> OpenCall:
        """A request is about to go out."""
        call = OpenCall(model, input_estimate, self._run.runs.now(), provider)
        self.under_way.add(call)
        return call

    def settle(
        self,
        call: OpenCall,
        usage: Usage | None = None,
        *,
        failed: bool = False,
        aborted: bool = False,
        output_estimate: int = 0,
    ) -> None:
        """The end of a model call was seen: count it.

        Args:
            call: The call; one that nobody saw begin was never opened.
            usage: What the provider reported; `None` for what was noted of the call, if anything.
            failed: The call ended without a response.
            aborted: Nobody waited for the response, so that it is billed all the same.
            output_estimate: Tokens that the response is estimated to have, if any.
        """
        run = self._run
        usage = call.counted if usage is None else usage
        kind = call_kind(usage, call, failed=failed)
        estimated = False
        if kind != "measured":
            # A call that failed is billed all the same once the provider has read its input.
            billed = usage is None and (aborted or call.streamed)
            estimated = kind == "unmeasured" or (kind == "failed" and billed)
            if estimated and run.policy.unmeasured != "ignore":
                usage = Usage(input=call.input_estimate, output=output_estimate)
        counted = usage or NO_USAGE
        price = run.runs.price_of(call.model, counted)
        # One step for the invocation and its tree, as another agent may be judged by the tree.
        with run.runs.lock:
            for tally in run.tallies:
                add_call(tally, counted, price, estimated=estimated)
        # Until here a fault leaves the call open, and it is settled when the invocation ends.
        call.is_open = False
        self.under_way.discard(call)
        self._publish(call, kind, counted, price, estimated=estimated)

    def settle_all(self) -> None:
        """The invocation is over: nobody waits for what is still under way."""
        for call in tuple(self.under_way):
            self.settle(call, failed=True, aborted=True)

    def _publish(
        self,
        call: OpenCall,
        kind: CallKind,
        counted: Usage,
        price: Decimal | None,
        *,
        estimated: bool,
    ) -> None:
        run = self._run
        source, version = NO_ORIGIN if price is None else run.runs.price_origin()
        run.runs.observers.publish(
            ModelCall(
                invocation=run.invocation,
                number=run.tally.model_calls,
                model=call.model,
                kind=kind,
                usage=counted,
                estimated=estimated,
                span_id=call.span_id,
                seconds=None if call.started is None else run.runs.now() - call.started,
                price=price,
                price_source=source,
                price_version=version,
                provider=call.provider,
                reported=call.usage,
                reported_total=call.usage_total,
                turn=run.tally.turns + 1,
                iteration=run.tally.iterations + 1,
            )
        )


def add_call(tally: Tally, usage: Usage, price: Decimal | None, *, estimated: bool) -> None:
    """Add one model call to a tally."""
    tally.input += usage.input
    tally.output += usage.output
    tally.cache_read += usage.cache_read
    tally.cache_write += usage.cache_write
    tally.model_calls += 1
    tally.unmeasured_calls += estimated
    if price is not None:
        tally.cost = EXACT.add(tally.cost, price)
    elif usage.total:
        tally.unpriced_calls += 1


def call_kind(usage: Usage | None, call: OpenCall, *, failed: bool) -> CallKind:
    """Tell a failed, a measured, a real zero-token and an unmeasured call apart."""
    if failed:
        return "failed"
    if usage is not None and usage.total:
        return "measured"
    return "zero_token" if call.reported else "unmeasured"


FOLLOWED: Final[contextvars.ContextVar[OpenCall | None]] = contextvars.ContextVar(
    "otel_limits_followed", default=None
)
"""The call that we are within: what the provider asks in turn, or traces, is that same call."""
