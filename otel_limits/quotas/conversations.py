"""The sums of conversations in a store that processes share.

A process reads the record of a conversation before the first model call of an invocation, and adds
to it after each call. The reply to an addition has the sums of all processes, so a process is
behind by the calls in flight at most. During an outage it counts on from what it knows, and what it
adds is sent afterwards.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.quotas.store import CountConversation, ReadConversation

if TYPE_CHECKING:
    from concurrent.futures import Future

    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.store import Reply
    from otel_limits.runs.clock import Clock

MAX_KNOWN: Final = 10_000
"""Conversations that a process knows at most: those it used last."""


@dataclass(slots=True)
class KnownConversation:
    """What a process knows of a conversation."""

    stored: Counter[str] = field(default_factory=Counter)
    """The sums in the store's last reply."""
    unanswered: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """Additions that were sent, by their operation."""
    unsent: Counter[str] = field(default_factory=Counter)
    """Additions of an outage: the store has them when it answers again."""
    until: float = 0.0
    """When it is idle for too long, in monotonic seconds."""

    def sums(self) -> Counter[str]:
        """Return the sums with what the store has yet to add."""
        sums = self.stored + self.unsent
        for parts in self.unanswered.values():
            sums.update(parts)
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
        self._lock = threading.Lock()
        # New in a child: a reused operation ID would not be applied.
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._known: OrderedDict[str, KnownConversation] = OrderedDict()

    async def refresh(self, key: str, idle_seconds: float) -> None:
        """Read the record of a conversation.

        Raises:
            StoreError: The store did not answer.
        """
        with self._lock:
            self._find(key, idle_seconds)
        await self._client.converse(ReadConversation(key), partial(self._answer, key, ""))

    def add(self, key: str, agent: str, parts: Mapping[str, int], idle_seconds: float) -> None:
        """Add to the record of a conversation, without waiting."""
        operation = f"{self._owner}-{next(self._numbers)}"
        with self._lock:
            self._find(key, idle_seconds).unanswered[operation] = parts
        addition = CountConversation(operation, key, agent, parts, idle_seconds)
        future = self._client.executor.send(addition)
        future.add_done_callback(partial(self._answer, key, operation))

    def sums(self, key: str) -> Mapping[str, int]:
        """Return what is known of a conversation now, without asking the store."""
        with self._lock:
            known = self._known.get(key)
            return {} if known is None else known.sums()

    @suppress_errors("quotas")
    def _answer(self, key: str, operation: str, future: Future[Reply]) -> None:
        """Take over the reply to an operation. In the order of replies: the last one is right."""
        has_failed = future.cancelled() or future.exception() is not None
        with self._lock:
            known = self._known.get(key)
            if known is None:  # it was forgotten in the meantime
                return
            parts = known.unanswered.pop(operation, {})
            if has_failed:
                known.unsent.update(parts)
                return
            record = future.result().conversation
            # What an outage has kept was sent before any later operation.
            known.stored, known.unsent = Counter(record.sums if record else {}), Counter()

    def _find(self, key: str, idle_seconds: float) -> KnownConversation:
        """Return what is known of a conversation, which is now the one used last."""
        now = self._clock.now()
        known = self._known.pop(key, None)
        if known is None or known.until <= now:
            known = KnownConversation()
        known.until = now + idle_seconds
        self._known[key] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known
