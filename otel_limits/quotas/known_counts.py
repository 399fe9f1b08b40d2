"""Counts that a process has seen, for a store that has lost them.

A server that restarts without its last data, or a replica that takes over, has smaller counts than
before. Every process then sends the last usage that it saw, and the greatest of each count wins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from otel_limits.quotas.store import (
    Count,
    CountName,
    CountState,
    KnownCount,
    Operation,
    ReadCounts,
    Reply,
    Reserve,
    Settle,
)

MAX_KNOWN: Final = 10_000
"""Counts that a process remembers at most: those it saw last."""


class KnownCounts:
    """The last seen usage of counts. Not thread-safe."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: OrderedDict[CountName, KnownCount] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether any count is known."""
        return bool(self._known)

    def observe(self, operation: Operation, reply: Reply) -> None:
        """Remember the counts in a reply."""
        # Not strict: an operation that changed nothing has no counts in its reply.
        for count, state in zip(_counts_of(operation), reply.states, strict=False):
            known = self._known.get(count.name, KnownCount(count, 0))
            last = latest(CountState(known.used, 0, 0, reset=known.reset), state)
            # A concurrency quota, for one, has no usage.
            if not last.used and not last.reset:
                continue
            # A rule may have changed: the store keeps the count for its longest window.
            longest = max(count, known.count, key=lambda each: each.window.end)
            self._known[count.name] = KnownCount(longest, last.used, last.reset)
            self._known.move_to_end(count.name)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def of_windows_at(self, now: float) -> list[KnownCount]:
        """Return what is known of windows that contain a time, the store's, or begin later."""
        return [each for each in self._known.values() if each.count.window.end > now]


def latest(known: CountState, found: CountState) -> CountState:
    """Return a state that was found, but never with less usage than was known since its reset."""
    # The usage of a token bucket flows back.
    if found.full_at:
        return found
    if (found.reset, found.used) < (known.reset, known.used):
        return replace(found, used=known.used, reset=known.reset)
    return found


def _counts_of(operation: Operation) -> list[Count]:
    if isinstance(operation, Reserve):
        return [each.count for each in operation.demands]
    if isinstance(operation, Settle):
        return [each.count for each in operation.charges]
    if isinstance(operation, ReadCounts):
        return [count for count, _ in operation.counts]
    return []
