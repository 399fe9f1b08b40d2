"""How one key of a quota stands, as whoever is refused or asks is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_limits.core.usage import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRefusal:
    """What a model call that a quota refused can know of it."""

    quota: str
    key: str
    """Whose share of the quota; what came from outside appears as a hash."""
    unit: str
    """What `used`, `reserved` and `limit` count, such as `tokens` or `USD`."""
    used: Number
    reserved: Number
    """Set aside for calls that are under way."""
    limit: Number
    """What is permitted, grants included."""
    resets_at: float
    """When the window ends, in seconds since the epoch; without one, when to ask again."""
    retry_after_seconds: float
    """Seconds after which asking again is worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is left of one key of a quota in the present window. Nothing was reserved to tell it."""

    quota: str
    key: str
    """Whose share of the quota; what came from outside appears as a hash."""
    unit: str
    """What the numbers count: `tokens`, `USD` (as `Decimal`), `model calls`, `invocations` or
    `model calls at once`."""
    limit: Number
    """What is permitted, grants included."""
    used: Number
    reserved: Number
    """Set aside for calls that are under way."""
    left: Number
    """What could still be reserved."""
    resets_at: float
    """When the window ends, in seconds since the epoch; without one, now."""
