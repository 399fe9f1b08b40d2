"""The gate at which quotas admit a model call, and the request for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from otel_limits.core.terms import DEFAULT_TERMS, PricingTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.core.events import Event, Invocation
    from otel_limits.core.policy import Action, Unpriced, Verdict
    from otel_limits.runs.conversations import Conversation


BLOCKED_LOOPS: Final[set[object]] = set()
"""Event loops in whose thread a synchronous call waits for quotas. No other call in them can
continue until it is done, so it must not wait for one of those."""


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

        A verdict with the action `observe` is only recorded: the call is sent anyway. One with
        `wrap_up` admits the call as the model's last answer.
        """

    async def settle(self, invocation_id: str, call_id: str = "") -> None:
        """Finish an admitted call, whose usage was published as an event."""

    def after_fork(self) -> None:
        """Reset in a child process: the parent's calls continue in the parent."""

    def close(self) -> None:
        """Send pending settlements and release resources."""


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
    obstacle: str = ""
    """Why it cannot be the model's last answer, for the operator; empty if it can."""
    unpriced: Unpriced = "warn"
    """Its behavior for calls without a price."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of the agent."""
    others: tuple[AdmissionRequest, ...] = ()
    """Further calls of the same request to a model. All of them are admitted, or none."""
    conversations: tuple[Conversation, ...] = ()
    """The conversations whose limits apply to it."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Returns whether the application has canceled the agent, so that the call need not wait."""
    is_refused: Callable[[], bool] = lambda: False
    """Returns whether limits refuse the call whatever the quotas decide, so that none is asked. It
    is called once the usage of the conversations in other processes is known."""

    @property
    def calls(self) -> tuple[AdmissionRequest, ...]:
        """All calls of the request."""
        return (self, *self.others)
