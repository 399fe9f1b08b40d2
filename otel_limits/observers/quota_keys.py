"""Selects the quota keys that have metrics: those closest to their limit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from otel_limits.core.events import QuotaUse

MAX_KEYS: Final = 50
"""Maximum number of keys per quota with metrics at a time."""

MAX_EVER: Final = 1000
"""Maximum number of keys per quota that ever get metrics, if series cannot be removed."""


class KeyUtilization(NamedTuple):
    """The utilization of a shown key, and when its window resets."""

    resets: float
    share: float


class QuotaKeys:
    """The keys with metrics, by quota. Bounded, because every user may be a key."""

    def __init__(self, ever: int | None) -> None:
        """Show at most `MAX_KEYS` keys at a time and `ever` in total; `None` for no total."""
        self._ever = ever
        self._count: Counter[str] = Counter()
        self._shown: dict[str, dict[str, KeyUtilization]] = {}

    def admit(self, use: QuotaUse, now: float) -> tuple[bool, str | None]:
        """Return whether to show a key, and the key that it replaces.

        Args:
            use: Current usage of the key.
            now: Wall clock time; a key whose window has ended is replaced first.
        """
        shown = self._shown.setdefault(use.quota, {})
        used = float(use.used) + float(use.reserved)
        # A quota of 0 is always exhausted.
        share = used / float(use.limit) if use.limit else float("inf")
        utilization = KeyUtilization(use.resets, share)
        # A shown key stays, even if others are now closer: series must not come and go.
        if use.key in shown:
            shown[use.key] = utilization
            return True, None
        # If series cannot be removed, a replaced one would stay in every scrape.
        if self._ever is not None and self._count[use.quota] >= self._ever:
            return False, None
        if len(shown) < MAX_KEYS:
            return self._show(use, utilization), None
        # A scan of at most fifty keys; a heap would not be faster.
        furthest = min(shown, key=lambda key: _share_at(shown[key], now))
        if _share_at(shown[furthest], now) >= _share_at(utilization, now):
            return False, None
        del shown[furthest]
        return self._show(use, utilization), furthest

    def _show(self, use: QuotaUse, utilization: KeyUtilization) -> bool:
        self._shown[use.quota][use.key] = utilization
        self._count[use.quota] += 1
        return True


def _share_at(utilization: KeyUtilization, now: float) -> float:
    # Below every share, so that it is replaced first.
    return utilization.share if utilization.resets > now else -1.0
