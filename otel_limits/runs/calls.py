"""A model call in flight: its request, and all that is known of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.core.price import NO_QUOTE
from otel_limits.core.terms import DEFAULT_TERMS, billable_call
from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Usage, UsageRecord
from otel_limits.usage.text import tokens_of_text

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict
    from otel_limits.core.terms import BillableCall
    from otel_limits.runs.budget import Reservation


class InFlightCall:
    """A model call whose end has not been seen yet."""

    id = ""
    """Differs from those of the loop's other calls in flight; empty if it has one at a time."""
    refused_by: Verdict | None = None
    """Limits that have refused it before any quota was asked about it."""
    turn: Reservation | None = None
    """The turn that its response becomes, if the loop may have several calls in flight."""
    around: InFlightCall | None = None
    """The call that it helps to answer, and whose turn it shares: a model may make several."""
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
    forces_output = False
    """True if it only forces structured output, which some limits yield to."""
    formats_answer = False
    """True if it only gives the loop's answer another form, which is not a turn."""
    is_unbilled = False
    """True once the answer is marked as not written by the model: a guardrail wrote it."""
    counted: Usage = NO_USAGE
    """The part of it that was counted before the end."""
    counted_quote = NO_QUOTE
    """Its price."""
    terms = DEFAULT_TERMS
    """The pricing terms of the request."""
    raw: object = None
    """The vendor's own usage, where the framework hands on only a part of it."""
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
    def owner_of_turn(self) -> InFlightCall:
        """The call whose `turn` this one's response becomes."""
        return self.around or self

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
        record = self._record
        return billable_call(self.model, self.provider, usage, record.tier, self.terms, record)
