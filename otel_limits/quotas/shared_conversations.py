"""The sums of conversations in a store that processes share.

A process reads the record of a conversation before the first model call of an invocation, and adds
to it after each call. The reply to an addition has the sums of all processes, so a process is
behind by the calls in flight at most. During an outage it counts on from what it knows, and what it
adds is sent afterwards.
"""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import ROUND_CEILING, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.usage import EXACT
from otel_limits.quotas.store import CountConversation
from otel_limits.runs.conversations import ConversationSums

if TYPE_CHECKING:
    from concurrent.futures import Future

    from otel_limits.core.usage import Number
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.store import Reply
    from otel_limits.runs.clock import Clock

PARTS_PER_USD: Final = Decimal(10**12)
"""Stores add integers: USD are counted in 10⁻¹² USD, as in the ledger."""

GRANTED: Final = "granted:"
"""Prefix of the sums that raise a limit, whose name follows."""

IN_USD: Final = ("cost", "cost_at_most", GRANTED + "max_cost_usd")
FLAGS: Final = ("has_wrapped_up", "has_asked")
"""Sums of which only matters whether anything was added."""

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
