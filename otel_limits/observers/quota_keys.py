"""Chooses which keys of a quota metrics show: those that are nearest to their end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from otel_limits.core.events import QuotaUse

MAX_KEYS: Final = 50
"""Keys of one quota that are shown at a time."""

MAX_EVER: Final = 1000
"""Keys of one quota that have a series at some time, where none can be taken back."""


class Nearness(NamedTuple):
    """How near a key is to its end, of those that are shown."""

    resets: float
    share: float


class QuotaKeys:
    """The keys that are shown, by quota. Every user can be a key: there is no end to them."""

    def __init__(self, limit: int = MAX_KEYS, ever: int | None = MAX_EVER) -> None:
        """Show none yet, and no more than `ever` in all; `None` where series can be taken back."""
        self._limit = limit
        self._ever = ever
        self._count: Counter[str] = Counter()
        self._shown: dict[str, dict[str, Nearness]] = {}

    def admit(self, use: QuotaUse, now: float) -> tuple[bool, str | None]:
        """Tell whether a key is to be shown, and which one has to make room for it.

        Args:
            use: How the key stands.
            now: Wall clock time; a key whose window has ended by then is the first to go.
        """
        shown = self._shown.setdefault(use.quota, {})
        nearness = _nearness(use)
        # Whatever it is worth now: to change places at every use would make series come and go.
        if use.key in shown:
            shown[use.key] = nearness
            return True, None
        # Where no series can be taken back, one that made room would go on counting in every
        # scrape.
        if self._ever is not None and self._count[use.quota] >= self._ever:
            return False, None
        if len(shown) < self._limit:
            return self._show(use, nearness), None
        # Over at most fifty keys, once for each use: not worth a heap that has to be kept in order.
        furthest = min(shown, key=lambda key: _share_at(shown[key], now))
        if _share_at(shown[furthest], now) >= _share_at(nearness, now):
            return False, None
        del shown[furthest]
        return self._show(use, nearness), furthest

    def _show(self, use: QuotaUse, nearness: Nearness) -> bool:
        self._shown[use.quota][use.key] = nearness
        self._count[use.quota] += 1
        return True


def _nearness(use: QuotaUse) -> Nearness:
    # A quota of nothing is at its end from the start.
    used = float(use.used) + float(use.reserved)
    return Nearness(use.resets, used / float(use.limit) if use.limit else float("inf"))


def _share_at(nearness: Nearness, now: float) -> float:
    # Below every share, so that it is the first to make room.
    return nearness.share if nearness.resets > now else -1.0
