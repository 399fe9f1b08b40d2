"""What is asked before a model call goes out, of those who count for a whole fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from otel_limits.core.terms import DEFAULT_TERMS, PricingTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.core.events import Event, Invocation
    from otel_limits.core.policy import Action, Unpriced, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model call that wants to go out."""

    invocation: Invocation
    model: str
    """Model id as the provider knows it, or `unknown`."""
    input: int
    """Input tokens that it is projected to have."""
    output_cap: int | None = None
    """Most output tokens that the model may answer with, where the request says so."""
    provider: str = "unknown"
    """Who is asked, such as `bedrock`."""
    terms: PricingTerms = DEFAULT_TERMS
    """What it asks for that its price depends on."""
    action: Action = "halt"
    """What the agent's policy does at a limit."""
    unpriced: Unpriced = "warn"
    """What it does where a price is unknown."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of the agent."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Tells whether the application has cancelled the agent: then nobody waits for the call."""


class QuotaGate(Protocol):
    """Admits model calls. Nothing that it does is felt by the agent, except a refusal.

    It is told every event, so that it knows what an admitted call took and when an invocation that
    was broken off is over.
    """

    @property
    def holds_quotas(self) -> bool:
        """True while there is a quota that a call may have to ask."""

    def __call__(self, event: Event) -> Event | None:
        """Take note of an event, without waiting for anything.

        Returns:
            The event as it is to be told: a model call with what quotas count of it. `None` when
            that failed.
        """

    async def admit(self, request: Request) -> Verdict | None:
        """Ask whether the call may go out; `None` when it may.

        A verdict with the action `observe` is only noted: the call goes out all the same.
        """

    async def settle(self, invocation_id: str) -> None:
        """The call that was admitted is over, and what it took has been told as an event."""

    def after_fork(self) -> None:
        """Start afresh in a child: its parent's calls go on in the parent."""

    def close(self) -> None:
        """Send what is left and let go."""
