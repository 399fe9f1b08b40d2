"""The date of the price list in use."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Final

from otel_limits.core.catalogue import LIST, PACKAGE, installed_version

RELEASED: Final[Mapping[str, date]] = {
    "0.2.0": date(2026, 10, 29),
    "0.2.1": date(2026, 10, 30),
    "0.2.2": date(2026, 11, 10),
    "0.2.3": date(2026, 11, 10),
}
"""https://pypi.org/project/genai-prices/#history, looked up on 2026-11-26. Later releases have the
newest date on their list."""

PRICE_CHANGE: Final = re.compile(r"start_date=datetime\.date\((\d+), (\d+), (\d+)\)")
"""The start of a price, in the source of the list."""

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
        f"The price list {PACKAGE} {version} of {listed} is {days} days old, so prices of newer "
        f"models are unknown, and others may have changed. Run: pip install --upgrade {PACKAGE}"
    )


def list_date(version: str) -> date | None:
    """Return the date of a release, or the newest date on its list that is not in the future."""
    if version in RELEASED:
        return RELEASED[version]
    # As text: an import of the package would take longer, and more memory, than most commands.
    source = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(LIST.replace(".", "/"))))
    try:
        text = source.with_suffix(".py").read_text(encoding="utf-8")
    except OSError:
        return None  # in a frozen application
    dates = (date(*map(int, found)) for found in set(PRICE_CHANGE.findall(text)))
    return max((each for each in dates if each <= today()), default=None)
