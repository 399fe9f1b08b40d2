"""Which ledger is meant: an option's, the environment's, or the user's own."""

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

VARIABLE: Final = "OTEL_LIMITS_LEDGER"
ZONE_VARIABLE: Final = "OTEL_LIMITS_TIME_ZONE"


def ledger_address(name: str, text: str) -> Address | None:
    """Read the address of a ledger; `none` means that there is to be none.

    Raises:
        ValueError: It is not an address, or the driver of its server is not installed.
    """
    # In any case of letters, as environments shout.
    if text.lower() == "none":
        return None
    # a process without a ledger does without it
    from otel_limits.ledger.address import parse

    return parse(name, text, _data_directory())


LEDGER: Final = TextKind(read=ledger_address)
LEDGER_GROUP: Final = TextKind(read=group_id)


def default_ledger() -> str:
    """The ledger of `otel-limits run` and of the questions, where none is named.

    Raises:
        ValueError: Nobody knows where this user's data is.
    """
    directory = _data_directory()
    if directory is None:
        raise ValueError(
            "There is no home directory for a ledger. Set HOME, or name a ledger: "
            "OTEL_LIMITS_LEDGER=/path/to/ledger.db"
        )
    return str(directory / "ledger.db")


def _data_directory() -> Path | None:
    """Where this user's data is; a user whom the machine does not know may have no home."""
    try:
        return data_directory()
    except RuntimeError:
        return None


def audited_zone(option: str | None) -> tzinfo:
    """Return the time zone whose days questions mean.

    Raises:
        ValueError: The option, or the environment, names one that the time zone database lacks.
    """
    name = option or environment().get(ZONE_VARIABLE, "").strip() or "UTC"
    zone_name("--time-zone" if option else ZONE_VARIABLE, name)
    return timezone.utc if name == "UTC" else zone_of(name)


def zone_name(name: str, text: str) -> str:
    """Read the name of a time zone.

    Raises:
        ValueError: The time zone database has no such name.
    """
    return zone_of(text, name).key


TIME_ZONE: Final = TextKind(read=zone_name)


def audited_ledger(option: str | None) -> Address:
    """The ledger that questions go to.

    Raises:
        ValueError: The option, or the environment, names one that cannot be used.
    """
    from otel_limits.ledger.address import parse

    named = _named()
    # An option was typed for this one command, so that it wins over the environment.
    if option is not None:
        return parse("--ledger", option, _data_directory())
    # "none" keeps programs from recording; a question still goes to what was recorded before.
    if named and named.lower() != "none":
        return parse(VARIABLE, named, _data_directory())
    return parse("The ledger", default_ledger(), _data_directory())


def recorded_ledger() -> Address | None:
    """The ledger that commands record to: where questions go, or `None` where there is to be none.

    Raises:
        ValueError: The environment names one that cannot be used.
    """
    return None if _named().lower() == "none" else audited_ledger(None)


def _named() -> str:
    return environment().get(VARIABLE, "").strip()
