"""Ledger locations: from an option, the environment or the user's data directory."""

from __future__ import annotations

from datetime import timezone, tzinfo
from typing import TYPE_CHECKING, Final

from otel_limits.core.values import TextKind
from otel_limits.ledger.files import group_id
from otel_limits.quotas.windows import zone_of
from otel_limits.settings.variables import data_directory, environment

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address

LEDGER_VARIABLE: Final = "OTEL_LIMITS_LEDGER"
ZONE_VARIABLE: Final = "OTEL_LIMITS_TIME_ZONE"


def ledger_address(name: str, text: str) -> Address | None:
    """Parse the address of a ledger, or `none`.

    Raises:
        ValueError: It is not an address, or the driver of its server is not installed.
    """
    return None if text.lower() == "none" else _parse(name, text)


def _parse(name: str, text: str) -> Address:
    # Imported here, because most processes don't have a ledger.
    from otel_limits.ledger.address import parse

    return parse(name, text, _data_directory())


def _absolute(text: str) -> str:
    """Return the address of a ledger with an absolute path; what is none is returned as it is."""
    try:
        address = ledger_address(LEDGER_VARIABLE, text)
    except ValueError:
        return text
    if address is None or address.file is None:
        return text
    return address.url if "://" in text else str(address.file)


LEDGER: Final = TextKind(read=ledger_address, place=_absolute)
LEDGER_GROUP: Final = TextKind(read=group_id)


def default_ledger() -> str:
    """Return the default ledger of `otel-limits run` and of queries.

    Raises:
        ValueError: The user has no data directory.
    """
    directory = _data_directory()
    if directory is None:
        raise ValueError(
            "No home directory for the default ledger. Set HOME, or a location: "
            "OTEL_LIMITS_LEDGER=/path/to/ledger.db"
        )
    return str(directory / "ledger.db")


def _data_directory() -> Path | None:
    """Return the user's data directory; a user unknown to the system may not have one."""
    try:
        return data_directory()
    except RuntimeError:
        return None


def audited_zone(option: str | None) -> tzinfo:
    """Return the time zone for ledger queries.

    Raises:
        ValueError: The option, or the environment, names an unknown time zone.
    """
    name = option or environment().get(ZONE_VARIABLE, "").strip() or "UTC"
    zone_name("--time-zone" if option else ZONE_VARIABLE, name)
    return timezone.utc if name == "UTC" else zone_of(name)


def zone_name(name: str, text: str) -> str:
    """Parse the name of a time zone.

    Raises:
        ValueError: It is not in the time zone database.
    """
    return zone_of(text, name).key


TIME_ZONE: Final = TextKind(read=zone_name)


def audited_ledger(option: str | None, name: str = "--ledger") -> Address:
    """Return the ledger to query, by an option of this name if it is given.

    Raises:
        ValueError: The option, or the environment, has an invalid location.
    """
    if option is not None:
        return _parse(name, option)
    named = _named()
    # "none" disables recording; queries still use the default ledger.
    if named and named.lower() != "none":
        return _parse(LEDGER_VARIABLE, named)
    return _parse("The ledger", default_ledger())


def recorded_ledger() -> Address | None:
    """Return the ledger that commands record to, or `None`.

    Raises:
        ValueError: The environment has an invalid location.
    """
    return None if _named().lower() == "none" else audited_ledger(None)


def _named() -> str:
    return environment().get(LEDGER_VARIABLE, "").strip()
