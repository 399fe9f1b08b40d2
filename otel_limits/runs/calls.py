"""Model calls in flight, and which of them the current task is within."""

from __future__ import annotations

import contextvars
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.core.price import NO_QUOTE
from otel_limits.core.terms import DEFAULT_TERMS, billable_call
from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Usage, UsageRecord
from otel_limits.usage.text import tokens_of_text

if TYPE_CHECKING:
    from otel_limits.core.terms import BillableCall
    from otel_limits.runs.budget import Reservation
    from otel_limits.runs.scope import Scope


class InFlightCall:
    """A model call whose end has not been seen yet."""

    id = ""
    """Differs from those of the loop's other calls in flight; empty if it has one at a time."""
    turn: Reservation | None = None
    """The turn that its response becomes, if the loop may have several calls in flight."""
    is_open = True
    """False once it has been counted, or released before it was sent."""
    started: float | None = None
    """When it was sent, by the registry's clock; `None` if that was not seen."""
    reservation: Reservation | None = None
    """Reserved in every budget of the invocation; `None` while not admitted."""
    is_paused = False
    """True while the reader of the answer does something else, or has abandoned it."""
    is_of_loop = False
    """True for a call of the agent loop, whose response becomes a turn."""
    span_id: str | None = None
    """Its `chat` span, once that has started."""
    is_traced = False
    """True once an instrumentation has made a span of this call."""
    has_ended = False
    """True once its end was seen, whether or not it was counted."""
    answered = False
    """True once the provider has accepted the request, and so will bill the input."""
    has_content = False
    """True once a part of an answer, or usage, has arrived."""
    is_unbilled = False
    """True once the answer is marked as not written by the model: a guardrail wrote it."""
    counted: Usage = NO_USAGE
    """The part of it that was counted before the end."""
    counted_quote = NO_QUOTE
    """Its price."""
    terms = DEFAULT_TERMS
    """The pricing terms of the request."""
    _record: UsageRecord = NOTHING_REPORTED

    def __init__(
        self,
        model: str,
        input_estimate: int = 0,
        provider: str = "unknown",
        output_cap: int | None = None,
    ) -> None:
        """Create a call from what is known before the answer arrives."""
        self.model = model
        self.provider = provider
        self.input_estimate = input_estimate
        self.output_cap = output_cap
        self.parts: list[str] = []
        """The text, reasoning and tool arguments answered so far."""
        self.answer_estimate = 0
        """Tokens of the answer, if only a span has reported its text."""

    @property
    def record(self) -> UsageRecord:
        """The usage that the provider reported; zeros for an answer are not a report."""
        told = self._record
        if told.is_zero and not self.is_unbilled and self.output_estimate:
            return replace(told, sure="missing", has_input=False, has_output=False)
        return told

    @record.setter
    def record(self, record: UsageRecord) -> None:
        self._record = record

    @property
    def is_side(self) -> bool:
        """True for a call outside the agent loop."""
        return not self.is_of_loop

    @property
    def output_estimate(self) -> int:
        """Estimated tokens answered so far."""
        return self.answer_estimate + tokens_of_text("".join(self.parts))

    def billable(self, usage: Usage) -> BillableCall:
        """Return the pricing inputs of this call for some usage."""
        return billable_call(self.model, self.provider, usage, self.record.tier, self.terms)


class EnclosingCall:
    """A model call within which a provider may make further requests."""

    # No `__init__`: a RecursionError raised in it could not be caught here.
    run: Scope | None = None
    call: InFlightCall | None = None
    model: object = None
    """The model that is called."""
    request: object = None
    """The binding's own state of the call."""
    is_carried = False
    """True if a request was made further in, and is this call."""
    is_over = False
    """True once that request has ended."""
    is_shared = False
    """True if further requests were made, each a separate call."""


# Set only while the provider's code runs, never across a `yield`: an async generator has no own
# context (PEP 568 was never accepted), so the reader of the stream would be within the call.
ENCLOSING_CALL: Final[contextvars.ContextVar[EnclosingCall | None]] = contextvars.ContextVar(
    "otel_limits_enclosing_call", default=None
)
"""The call that the current task is within: a provider's own requests and spans belong to it."""


def enclosing_call_of(run: Scope) -> InFlightCall | None:
    """Return the call of `run` that the current task is within, or was within when it began.

    The call may have ended: a client can keep its context and report the call later.
    """
    within = ENCLOSING_CALL.get()
    return within.call if within is not None and within.run is run else None
