"""The date of the price list in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Final

from otel_limits.core.catalogue import PACKAGE, bundled_catalog, installed_version

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo

RELEASED: Final[Mapping[str, date]] = {
    "0.2.0": date(2026, 10, 29),
    "0.2.1": date(2026, 10, 30),
    "0.2.2": date(2026, 11, 10),
    "0.2.3": date(2026, 11, 10),
}
"""https://pypi.org/project/genai-prices/#history, looked up on 2026-11-26. Later releases have the
newest date on their list."""

OLD: Final = 60
"""Days after which a list is reported as old: vendors release models every few weeks."""


def today() -> date:
    """Return the date in UTC."""
    return datetime.now(timezone.utc).date()


def list_in_use() -> str | None:
    """Name the installed price list with its date; `None` without one."""
    version = installed_version()
    if version is None:
        return None
    listed = list_date(version)
    return f"{PACKAGE} {version}" + (f" of {listed}" if listed is not None else "")


def old_list() -> str | None:
    """Return a warning if the installed price list is old."""
    version = installed_version()
    listed = None if version is None else list_date(version)
    days = 0 if listed is None else (today() - listed).days
    if days < OLD:
        return None
    return (
        f"The price list {PACKAGE} {version} is {days} days old, so prices of newer models are "
        f"unknown, and others may have changed. Run: pip install --upgrade {PACKAGE}"
    )


def list_date(version: str) -> date | None:
    """Return the date of a release, or the newest date on its list that is not in the future."""
    models = (model for provider in bundled_catalog().providers for model in provider.models)
    dates = [found for model in models for found in _dates_in(model) if found <= today()]
    released = RELEASED.get(version)
    return max((*dates, released) if released is not None else dates, default=None)


def _dates_in(model: ModelInfo) -> Iterator[date]:
    """Yield the dates on which prices of a model change."""
    prices = model.prices if isinstance(model.prices, list) else []
    for each in (*prices, *(model.price_variants or ())):
        found = getattr(each.constraint, "start_date", None)
        if isinstance(found, date):
            yield found
