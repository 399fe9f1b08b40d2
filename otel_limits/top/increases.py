"""Counts how much things went up over the last while."""

from __future__ import annotations

from collections import Counter
from typing import Final, TypeAlias

Key: TypeAlias = tuple[str, ...]
"""What went up, such as `("turns", "researcher")`."""


class Increases:
    """Increases, kept by the time in which they were seen.

    Args:
        seconds: For how long they are kept.
        step: Seconds of one bucket: as much longer or shorter may the time be.
    """

    def __init__(self, seconds: float, step: float) -> None:
        """Begin with none."""
        self.seconds: Final = seconds
        self._step = step
        self._buckets: dict[int, Counter[Key]] = {}

    def add(self, key: Key, amount: float, at: float, since: float | None = None) -> None:
        """Count an increase that was seen at a time.

        Args:
            key: What went up.
            amount: How much.
            at: When it was seen, in seconds since the epoch.
            since: When one looked before that: it came at some time between the two, and is
                taken for equally much at each. Otherwise it is taken for as late as it was seen.
        """
        last = int(at // self._step)
        # The bucket after the last look, or an increase would begin before it could have happened.
        first = last if since is None else min(last, int(since // self._step) + 1)
        for place in range(first, last + 1):
            # Money is not a whole number, which a Counter does not mind.
            self._buckets.setdefault(place, Counter())[key] += amount / (last + 1 - first)  # type: ignore[assignment]

    def over(self, now: float, seconds: float) -> dict[Key, float]:
        """Return what came in over the last `seconds`."""
        # When somebody asks, and not by a timer: the window moves only where it is looked at.
        forgotten = int((now - self.seconds) // self._step)
        for place in [place for place in self._buckets if place <= forgotten]:
            del self._buckets[place]
        summed: dict[Key, float] = {}
        for place, bucket in self._buckets.items():
            if place > (now - seconds) // self._step:
                for key, amount in bucket.items():
                    summed[key] = summed.get(key, 0) + amount
        return summed
