"""The sentence about a halt: the agent, the limit, where it is set, and what to do next.

Message, log line, exception, span, event and audit all use it, so that they can be recognized as
the same halt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    TREE_PREFIX,
)

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach

GATEWAY_BUDGET: Final = "gateway_budget"
"""Replaces the name of a limit if a gateway or a vendor has refused a call."""

DONE: Final[Mapping[str, str]] = {
    "halted": "was halted",
    "raised": "was halted",
    "wrapped_up": "was halted after a last answer",
    "observed": "would have been halted",
    "none": "was refused a model call",
}
"""The outcome for the agent, by the action that was taken."""

KILLED_NEXT: Final = "Call the agent again when it may go on."
OBSERVED_NEXT: Final = "Continuing because the action is observe."

NEXT: Final[Mapping[str, str]] = {
    LOOP_DETECTED_STOP_REASON: "Check for a real loop before raising the limit; "
    "OTEL_LIMITS_EXEMPT_TOOLS exempts a tool that is meant to poll.",
    QUOTA_EXCEEDED_STOP_REASON: "Wait for the quota to reset, or ask an operator to raise or "
    "unblock it with `otel-limits quotas`.",
    QUOTA_UNAVAILABLE_STOP_REASON: "Restore the quota store; on_store_error in the policy file "
    "sets the behavior during an outage.",
}
"""The next step after a halt, by stop reason, if it is not to raise the limit."""


def halt_sentence(agent: str, reason: str, action: str, breach: Breach | None) -> str:
    """Return a sentence with the halted agent, the limit, where it is set, and the next step.

    Args:
        agent: Name of the agent; empty if unknown.
        reason: The stop reason.
        action: The action taken, such as `halted`.
        breach: The deciding limit, if any.
    """
    who = f"Agent {agent!r}" if agent else "The agent"
    done = DONE.get(action, DONE["halted"])
    if breach is None:
        is_killed = reason == KILLED_STOP_REASON
        return (
            f"{who} was killed by an operator. {KILLED_NEXT}"
            if is_killed
            else (f"{who} {done} by {reason}.")
        )
    then = OBSERVED_NEXT if action == "observed" else next_step(breach)
    return f"{who} {done} by {reached(breach)}{set_in(breach)} {then}"


def reached(breach: Breach) -> str:
    """Return the limit with its tool, usage and cap."""
    # The note of a quota contains its name, its key and its window.
    is_quota = breach.reason in (QUOTA_EXCEEDED_STOP_REASON, QUOTA_UNAVAILABLE_STOP_REASON)
    limit = breach.reason if is_quota else breach.limit
    tool = f" for tool {breach.subject!r}" if breach.subject else ""
    return f"{limit}{tool}: {breach.note or breach.amount}"


def set_in(breach: Breach) -> str:
    """End a sentence, and add where its limit is set, if known."""
    return f". The limit is set in {breach.origin}." if breach.origin else "."


def next_step(breach: Breach) -> str:
    """Return what the reader can do about a halt."""
    # No limit of otel-limits was reached, so none can be raised here.
    if breach.limit == GATEWAY_BUDGET:
        return "Raise the budget there."
    if breach.reason in NEXT:
        return NEXT[breach.reason]
    if breach.note:  # the cap was not reached, but the usage of a call is unknown
        return (
            "Give the price under models in the policy file."
            if breach.unit == "USD"
            else "OTEL_LIMITS_UNMEASURED=estimate counts such calls by an estimate."
        )
    there = " there" if breach.origin else ""
    # The tree is exhausted: the agent would be halted immediately if called again within it.
    if breach.limit.startswith(TREE_PREFIX):
        return f"The whole tree shares this limit: call the root agent again, or raise it{there}."
    return f"Call the agent again to continue, or raise the limit{there}."
