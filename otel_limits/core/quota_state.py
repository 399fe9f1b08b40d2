"""The state of one quota key, as shown to the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_limits.core.usage import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRefusal:
    """The state of a quota that refused a model call."""

    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    unit: str
    """Unit of `used`, `reserved` and `limit`, such as `tokens` or `USD`."""
    used: Number
    reserved: Number
    """Reserved by in-flight calls."""
    limit: Number
    """The limit, including grants."""
    resets_at: float
    """End of the window, in seconds since the epoch; without a window, when to retry."""
    retry_after_seconds: float
    """Seconds until a retry may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Remaining usage of one quota key in the current window. Reading it reserves nothing."""

    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    unit: str
    """Unit of the numbers: `tokens`, `USD` (as `Decimal`), `model calls`, `invocations` or
    `concurrent model calls`."""
    limit: Number
    """The limit, including grants."""
    used: Number
    reserved: Number
    """Reserved by in-flight calls."""
    left: Number
    """Usage that can still be reserved."""
    resets_at: float
    """End of the window, or when a token bucket is full, in seconds since the epoch.

    Now if there is no window.
    """
