"""The sums of conversations that processes share, and how each process keeps in step.

A process reads the record of a conversation before the first model call of an invocation, and
adds to it after each call. The reply to an addition has the sums of all processes, so a process
is behind by the calls in flight at most. During an outage it counts on from what it knows, and
sends its additions afterwards.
"""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import ROUND_CEILING, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import Event, ModelCall, Stop
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Breach,
    Limits,
)
from otel_limits.core.policy import Verdict
from otel_limits.core.usage import EXACT
from otel_limits.quotas.store import CountConversation, StoreError
from otel_limits.runs.conversations import ConversationSums

if TYPE_CHECKING:
    from concurrent.futures import Future

    from otel_limits.core.usage import Number
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.store import Reply
    from otel_limits.runs.clock import Clock
    from otel_limits.runs.conversations import Conversation
    from otel_limits.runs.quota_gate import AdmissionRequest
    from otel_limits.runs.registry import RunRegistry


# --- before and after calls -----------------------------------------------------------------------

ELSEWHERE: Final = "elsewhere"
"""In `Conversation.asked_by`, for a question to a person that another process has claimed."""


class ConversationSync:
    """Sends what conversations use here, and takes over what other processes have sent.

    Args:
        shared: The conversations in the store.
        runs: The registry of this process, with its conversations and the lock that guards them.
    """

    def __init__(self, shared: SharedConversations, runs: RunRegistry) -> None:
        """Begin without active invocations."""
        self._shared = shared
        self._runs = runs
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
        # Also what it has not sent yet, e.g. a turn whose tools run: the child must not send it.
        for each in self._runs.conversations:
            each.sent = parts_of(sums_in(each))

    async def refresh(self, request: AdmissionRequest) -> Verdict | None:
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
            with self._runs.lock:
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
            with self._runs.lock:
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


# --- conversations as a process knows them --------------------------------------------------------

MAX_KNOWN: Final = 10_000
"""Conversations that a process knows at most: those it used last."""


@dataclass(slots=True)
class KnownConversation:
    """A conversation as this process knows it."""

    stored: Counter[str] | None = None
    """The sums in the store's last reply; `None` before the first."""
    unanswered: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """Additions that were sent, by their operation."""
    unsent: Counter[str] = field(default_factory=Counter)
    """Additions of an outage: the store has them when it answers again."""
    until: float = math.inf
    """When it will have been idle for too long, in monotonic seconds."""

    def sums(self) -> Counter[str] | None:
        """Return the sums with what the store has yet to add; `None` before its first reply."""
        if self.stored is None:
            return None
        sums = Counter(self.stored)
        for parts in (self.unsent, *self.unanswered.values()):
            sums.update(parts)  # and not +, which drops negative ones
        return sums


class SharedConversations:
    """The conversations that a process shares with others.

    Args:
        client: Sends operations to the store.
        clock: The clock of the process.
    """

    def __init__(self, client: StoreClient, clock: Clock) -> None:
        """Know no conversation yet."""
        self._client = client
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Reset in a forked child: its parent sends its own additions."""
        # Reentrant, because the garbage collector can end an invocation at any moment.
        self._lock = threading.RLock()
        # New in a child: a reused operation ID would not be applied.
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._known: OrderedDict[str, KnownConversation] = OrderedDict()

    async def refresh(self, key: str) -> None:
        """Read the record of a conversation.

        Raises:
            StoreError: The store did not answer.
        """
        await self._client.read_conversation(key, partial(self._answer, key, ""))

    def known(self, key: str) -> Counter[str] | None:
        """Return the sums of a conversation without a request; `None` if they were never read."""
        with self._lock:
            return self._find(key).sums()

    def add(self, key: str, agent: str, parts: Mapping[str, int], idle_seconds: float) -> None:
        """Add to the record of a conversation, without waiting."""
        operation = f"{self._owner}-{next(self._numbers)}"
        with self._lock:
            known = self._find(key)
            known.unanswered[operation] = parts
            known.until = self._clock.now() + idle_seconds
        addition = CountConversation(operation, key, agent, parts, idle_seconds)
        future = self._client.executor.send(addition)
        future.add_done_callback(partial(self._answer, key, operation))

    @suppress_errors("quotas")
    def _answer(self, key: str, operation: str, future: Future[Reply]) -> None:
        """Take over the reply to an operation. In the order of replies: the last one is right."""
        has_failed = future.cancelled() or future.exception() is not None
        with self._lock:
            known = self._find(key)
            parts = known.unanswered.pop(operation, {})
            if has_failed:
                known.unsent.update(parts)
                return
            record = future.result().conversation
            # Additions of an outage were sent before any later operation.
            known.stored, known.unsent = Counter(record.sums if record else {}), Counter()

    def _find(self, key: str) -> KnownConversation:
        """Return what is known of a conversation, which is now the one used last."""
        known = self._known.pop(key, None)
        if known is None or known.until <= self._clock.now():
            known = KnownConversation()
        self._known[key] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known


# --- sums in a store ------------------------------------------------------------------------------

PARTS_PER_USD: Final = Decimal(10**12)
"""Stores add integers: USD are counted in 10⁻¹² USD, as in the ledger."""

GRANTED: Final = "granted:"
"""Prefix of the sums that raise a limit, whose name follows."""

IN_USD: Final = ("cost", "cost_at_most", GRANTED + "max_cost_usd")
FLAGS: Final = ("has_wrapped_up", "has_asked")
"""Sums of which only matters whether anything was added."""


def parts_of(sums: ConversationSums) -> dict[str, int]:
    """Encode sums for a store, which adds integers; without zeros."""
    values = {each.name: getattr(sums, each.name) for each in fields(sums)}
    granted = values.pop("granted")
    values |= {GRANTED + name: amount for name, amount in granted.items()}
    return {name: _encoded(name, value) for name, value in values.items() if value}


def sums_of(parts: Mapping[str, int]) -> ConversationSums:
    """Decode the sums of a store."""
    values = {name: _decoded(name, value) for name, value in parts.items()}
    granted = {
        name.removeprefix(GRANTED): value
        for name, value in values.items()
        if name.startswith(GRANTED)
    }
    known = {each.name for each in fields(ConversationSums)}
    sums = {name: value for name, value in values.items() if name in known}
    return ConversationSums(**sums, granted=granted)


def _encoded(name: str, value: Number) -> int:
    if name not in IN_USD:
        return int(value)
    # As shown, because a float is not exact.
    scaled = EXACT.multiply(Decimal(str(value)), PARTS_PER_USD)
    return int(scaled.to_integral_value(ROUND_CEILING, EXACT))


def _decoded(name: str, parts: int) -> Any:
    if name in FLAGS:
        return parts > 0
    return EXACT.divide(Decimal(parts), PARTS_PER_USD) if name in IN_USD else parts
