"""Keeps the conversations of a process in step with those of the others that share a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import Event, ModelCall, Stop
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
    Limits,
)
from otel_limits.core.policy import Verdict
from otel_limits.quotas.shared_conversations import SharedConversations, parts_of, sums_of
from otel_limits.quotas.store import StoreError
from otel_limits.runs.conversations import ConversationSums

if TYPE_CHECKING:
    from otel_limits.runs.calls import AdmissionRequest
    from otel_limits.runs.conversations import Conversation

ELSEWHERE: Final = "elsewhere"
"""In `Conversation.asked_by`, for a question to a person that another process has claimed."""


class ConversationSync:
    """Sends what conversations use here, and takes over what other processes have sent.

    Args:
        shared: The conversations in the store.
        registry: Returns the lock that guards the conversations of this process.
    """

    def __init__(
        self,
        shared: SharedConversations,
        registry: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Begin without active invocations."""
        self._shared = shared
        self._registry = registry
        self._reset()

    def _reset(self) -> None:
        # Held until usage has changed hands, so that all of it is counted at any time. Reentrant,
        # because the garbage collector can end an invocation at any moment.
        self._lock = threading.RLock()
        self._active: dict[str, tuple[Conversation, ...]] = {}
        """The conversations of each invocation that has read them."""

    def after_fork(self) -> None:
        """Reset in a forked child: its parent sends its own usage."""
        self._shared.reset()
        self._reset()

    async def admit(self, request: AdmissionRequest) -> Verdict | None:
        """Take over the usage of other processes before a call is decided on.

        Returns:
            The reason to refuse the first call of an invocation, if the store did not answer.
        """
        is_first = request.invocation.id not in self._active
        for each in request.conversations:
            self._send(each)  # the usage of side calls
            if is_first:
                try:
                    await self._shared.refresh(each.key)
                except StoreError:
                    if is_required(each):
                        return unread(each)
            self._update(each)
        if is_first and request.conversations:
            self._active[request.invocation.id] = request.conversations
        return None

    @suppress_errors("quotas")
    def observe(self, event: Event) -> None:
        """Send the usage of a call, or of an invocation that ends."""
        if isinstance(event, ModelCall):
            conversations = self._active.get(event.invocation.id, ())
        elif isinstance(event, Stop):
            conversations = self._active.pop(event.invocation_id, ())
        else:
            return
        for each in conversations:
            self._send(each)

    def _send(self, conversation: Conversation) -> None:
        """Send the usage since the last time."""
        idle = conversation.policy.conversation_idle.total_seconds()
        with self._lock:
            with self._registry():
                parts = parts_of(sums_in(conversation))
                unsent, conversation.sent = minus(parts, conversation.sent), parts
            if unsent:
                self._shared.add(conversation.key, conversation.agent, unsent, idle)

    def _update(self, conversation: Conversation) -> None:
        """Count on from the sums of all processes."""
        with self._lock:
            known = self._shared.known(conversation.key)
            if known is None:  # an outage: only the sums in this process are known
                return
            with self._registry():
                everywhere = Counter(known)
                everywhere.update(minus(parts_of(sums_in(conversation)), conversation.sent))
                count_on_from(conversation, sums_of(everywhere))
                # Encoded again, because a flag can have been added several times.
                conversation.sent = parts_of(sums_of(known))


def minus(parts: Mapping[str, int], sent: Mapping[str, int]) -> dict[str, int]:
    """Return what was added since some parts were sent."""
    changes = {name: parts.get(name, 0) - sent.get(name, 0) for name in parts.keys() | sent.keys()}
    return {name: change for name, change in changes.items() if change}


def sums_in(conversation: Conversation) -> ConversationSums:
    """Return the sums of a conversation in this process."""
    tally = conversation.tally
    return ConversationSums(
        turns=tally.turns,
        model_calls=tally.model_calls,
        tool_calls=tally.tool_calls,
        tokens=tally.tokens,
        cost=tally.cost,
        cost_at_most=tally.cost_at_most,
        has_wrapped_up=conversation.wrapped_up,
        has_asked=bool(conversation.asked_by),
        granted=conversation.granted,
    )


def count_on_from(conversation: Conversation, sums: ConversationSums) -> None:
    """Let a conversation in this process have these sums."""
    tally = conversation.tally
    tally.turns, tally.model_calls = sums.turns, sums.model_calls
    tally.tool_calls = sums.tool_calls
    tally.input, tally.output = sums.tokens, 0  # no limit looks at one of them alone
    tally.cost, tally.cost_at_most = sums.cost, sums.cost_at_most
    conversation.wrapped_up = sums.has_wrapped_up
    if sums.has_asked != bool(conversation.asked_by):
        conversation.asked_by = ELSEWHERE if sums.has_asked else ""
    if conversation.granted == sums.granted:
        return
    caps = {
        name: cap - conversation.granted.get(name, 0) + sums.granted.get(name, 0)
        for name, cap in conversation.policy.limits.items()
    }
    conversation.granted = dict(sums.granted)
    conversation.policy = replace(conversation.policy, limits=Limits(**caps))


def is_required(conversation: Conversation) -> bool:
    """Return whether calls are refused while the record of a conversation cannot be read."""
    policy = conversation.policy
    return policy.conversation_on_store_error == "deny" and policy.action != "observe"


def unread(conversation: Conversation) -> Verdict:
    """Return the refusal of a call because the record of its conversation cannot be read."""
    policy = conversation.policy
    limit, cap = policy.limits.active[0]
    breach = Breach(
        limit=CONVERSATION_PREFIX + limit.name,
        cap=cap,
        observed=0,
        reason=QUOTA_UNAVAILABLE_STOP_REASON,
        unit=limit.unit,
        note="the limits of its conversation could not be checked because the quota store is "
        "unavailable",
        origin=policy.origins.get(CONVERSATION_PREFIX + limit.name, ""),
    )
    return Verdict(breach.reason, (breach,), policy.action)
