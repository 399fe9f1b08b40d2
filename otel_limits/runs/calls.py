"""Model calls in flight, and their admission by quotas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from otel_limits.core.price import NO_QUOTE
from otel_limits.core.terms import DEFAULT_TERMS, PricingTerms, billable_call
from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Usage, UsageRecord
from otel_limits.usage.text import tokens_of_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.core.events import Event, Invocation
    from otel_limits.core.policy import Action, Unpriced, Verdict
    from otel_limits.core.terms import BillableCall
    from otel_limits.runs.budget import Reservation
    from otel_limits.runs.conversations import Conversation


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


# --- admission by quotas --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A model call that asks for admission."""

    invocation: Invocation
    call_id: str = ""
    """Set if the invocation may have several calls in flight."""
    model: str
    """Model ID as the provider knows it, or `unknown`."""
    input: int
    """Estimated input tokens."""
    output_cap: int | None = None
    """Maximum output tokens, if the request sets one."""
    provider: str = "unknown"
    """The provider, such as `bedrock`."""
    terms: PricingTerms = DEFAULT_TERMS
    """The pricing terms of the request."""
    action: Action = "halt"
    """Action of the agent's policy at a limit."""
    unpriced: Unpriced = "warn"
    """Its behavior for calls without a price."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of the agent."""
    conversations: tuple[Conversation, ...] = ()
    """The conversations whose limits apply to it."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Returns whether the application has canceled the agent, so that the call need not wait."""


class QuotaGate(Protocol):
    """Admits model calls. Its errors never reach the agent, only its refusals do.

    It receives every event, including the usage of an admitted call and the end of an aborted
    invocation.
    """

    @property
    def holds_quotas(self) -> bool:
        """True while there is a quota that may apply to a call."""

    def __call__(self, event: Event) -> Event | None:
        """Process an event, without blocking.

        Returns:
            The event to publish: a model call with its quota charges. `None` on failure.
        """

    async def admit_by_quotas(self, request: AdmissionRequest) -> Verdict | None:
        """Return the reason to refuse a call; `None` to admit it.

        A verdict with the action `observe` is only recorded: the call is sent anyway.
        """

    async def settle(self, invocation_id: str, call_id: str = "") -> None:
        """Finish an admitted call, whose usage was published as an event."""

    def after_fork(self) -> None:
        """Reset in a child process: the parent's calls continue in the parent."""

    def close(self) -> None:
        """Send pending settlements and release resources."""
