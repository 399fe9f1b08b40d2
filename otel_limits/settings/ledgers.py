"""Which ledger is meant: an option's, the environment's, or the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.core.values import TextKind
from otel_limits.settings.variables import data_directory, environment

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address

VARIABLE: Final = "OTEL_LIMITS_LEDGER"


def ledger_address(name: str, text: str) -> Address | None:
    """Read the address of a ledger; `none` means that there is to be none.

    Raises:
        ValueError: It is not an address, or the driver of its server is not installed.
    """
    if text.lower() == "none":
        return None
    # a process without a ledger does without it
    from otel_limits.ledger.address import parse

    return parse(name, text, data_directory())


LEDGER: Final = TextKind(read=ledger_address)


def default_ledger() -> str:
    """The ledger of `otel-limits run` and of the questions, where none is named."""
    return str(data_directory() / "ledger.db")


def audited_ledger(option: str | None) -> Address:
    """The ledger that questions go to.

    Raises:
        ValueError: The option, or the environment, names one that cannot be used.
    """
    from otel_limits.ledger.address import parse

    named = _named()
    if option is not None:
        return parse("--ledger", option, data_directory())
    if named and named.lower() != "none":
        return parse(VARIABLE, named, data_directory())
    return parse("The ledger", default_ledger(), data_directory())


def recorded_ledger() -> Address | None:
    """The ledger that commands record to: where questions go, or `None` where there is to be none.

    Raises:
        ValueError: The environment names one that cannot be used.
    """
    return None if _named().lower() == "none" else audited_ledger(None)


def _named() -> str:
    return environment().get(VARIABLE, "").strip()
