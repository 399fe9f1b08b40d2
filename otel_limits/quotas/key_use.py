"""Reads from the store how every key of every quota stands, for people to see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_limits.quotas.keys import EVERYTHING, Key
from otel_limits.quotas.quota import Quota, in_unit, unit_name
from otel_limits.quotas.store import Count, QuotaStore

if TYPE_CHECKING:
    from otel_limits.core.usage import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """How one key of a quota stands."""

    quota: str
    key: str
    unit: str
    used: Number
    reserved: Number
    remaining: Number
    limit: Number
    """What is permitted, grants included."""
    resets: float
    """When the next window begins, in seconds since the epoch."""


def read_use(store: QuotaStore, quotas: Iterable[Quota]) -> list[KeyUse]:
    """Read the keys that were used in the present window; a quota that was not used has one row.

    Raises:
        StoreError: The store does not answer.
    """
    now = store.now()
    pairs = [(quota, count) for quota in quotas for count in _counts(store, quota, now)]
    standings = store.look([(count, quota.amount) for quota, count in pairs])
    return [
        KeyUse(
            quota=quota.name,
            key=count.shown,
            unit=unit_name(quota.unit),
            used=in_unit(quota.unit, standing.used),
            reserved=in_unit(quota.unit, standing.reserved),
            remaining=in_unit(quota.unit, standing.remaining),
            limit=in_unit(quota.unit, standing.limit),
            resets=count.window.end,
        )
        for (quota, count), standing in zip(pairs, standings, strict=True)
    ]


def find_key(store: QuotaStore, quota: Quota, text: str) -> Key:
    """Find the key that a person wrote, in the form of the template or as it is shown.

    Raises:
        StoreError: The store does not answer.
        ValueError: The quota has no such keys.
    """
    for listed in store.keys(quota.name):
        if listed.shown == text:
            return listed
    return quota.key.key_of_text(quota.name, text)


def _counts(store: QuotaStore, quota: Quota, now: float) -> list[Count]:
    window = quota.windows.at(now)
    # The store lists keys and no counts, so that this is one question per quota, not one per key.
    listed = {each.id: each.shown for each in store.keys(quota.name)}
    if not quota.key.sources:
        listed = {quota.key.key_of_text(quota.name, EVERYTHING).id: EVERYTHING}
    if not listed:
        return [Count(quota.name, "", window, f"no {quota.key.text} yet")]
    return [Count(quota.name, key, window, shown) for key, shown in sorted(listed.items())]
