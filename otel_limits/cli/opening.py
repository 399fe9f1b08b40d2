"""What the commands about a ledger have in common: an option, the opening, refusals."""

from __future__ import annotations

import contextlib
import sqlite3
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from otel_limits.audit.question import Inquiry, Option
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.settings import ledgers

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.selection import Selection


T = TypeVar("T")


def add_ledger_command(
    commands: Any,
    name: str,
    text: str,
    call: Callable[[Namespace], int],
    option: str = "--ledger",
) -> ArgumentParser:
    """Add a command about a ledger; what it cannot do because of the ledger it says on stderr."""
    parser = add_command(commands, name, text, refusing(call))
    about = "a path, sqlite:///PATH or postgresql://…"
    parser.add_argument(option, dest="ledger", metavar="ADDRESS", help=about)
    return parser


def refusing(call: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """Make a command that says on stderr what it cannot do because of the ledger."""

    def call_or_refuse(arguments: Namespace) -> int:
        try:
            return call(arguments)
        except LedgerError as error:
            return refuse([str(error)])

    return call_or_refuse


def add_option(parser: Any, option: Option) -> None:
    """Add an option to a command, or to a group of its options."""
    described: dict[str, Any] = {
        "type": option.read,
        "metavar": option.metavar,
        "help": option.help.replace("%", "%%"),
        "default": option.default,
    }
    if option.flag.startswith("-"):
        described |= {"dest": option.name, "required": option.is_required}
    if option.is_repeated:
        described["action"] = "extend"
    parser.add_argument(option.flag, **described)


def selected(arguments: Namespace) -> Selection:
    """Return which part of the ledger the options ask for.

    Raises:
        LedgerError: The time zone has no such name, or the calendar ends before a time.
    """
    from otel_limits.ledger.rows import time_of
    from otel_limits.ledger.selection import Selection

    try:
        zone = ledgers.audited_zone(getattr(arguments, "time_zone", None))
    except ValueError as error:
        raise LedgerError(str(error)) from None
    since, until = getattr(arguments, "since", None), getattr(arguments, "until", None)
    try:
        since_us, until_us = (each and each.microseconds(zone) for each in (since, until))
    except OverflowError:
        raise LedgerError(
            f"--since and --until of {zone} must lie in the years 1 to 9999 of UTC, too."
        ) from None
    # Answered with nothing, it would look like a quiet week.
    if since_us is not None and until_us is not None and until_us <= since_us:
        begin, end = (time_of(each).isoformat(" ", "seconds") for each in (since_us, until_us))
        raise LedgerError(f"--until must be later than --since, which is {begin}, got {end}.")
    return Selection(
        since_us=since_us,
        until_us=until_us,
        where=tuple(getattr(arguments, "where", None) or ()),
        zone=zone,
    )


@contextlib.contextmanager
def inquiring(arguments: Namespace) -> Iterator[Inquiry]:
    """Open the ledger for questions about the part of it that is selected; nothing is written.

    Raises:
        LedgerError: There is none, or it cannot be read.
    """
    from otel_limits.ledger.reading import asking

    selection = selected(arguments)
    with (
        named(arguments) as address,
        asking(address) as (connection, waiting),
        working("Asking the ledger") as work,
    ):
        yield Inquiry(
            connection=connection,
            ledger=str(address),
            address=address,
            waiting=waiting,
            selection=selection,
            work=work,
            has_charts=arguments.format == "html",
        )


@contextlib.contextmanager
def opened(arguments: Namespace, *, create: bool = False) -> Iterator[Database]:
    """Open the ledger that is asked for to change it, and take back what waits in spill files.

    Raises:
        LedgerError: There is none, or it cannot be used.
    """
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.reading import require_ledger
    from otel_limits.ledger.spill import SpillFiles, taking_back

    with named(arguments) as address:
        if not create:
            require_ledger(address)
        # What waits in spill files belongs to the ledger: a change that passed it by would miss it.
        with contextlib.closing(Database(address)) as database:
            for _ in taking_back(database, SpillFiles(address)):
                pass
            yield database


@contextlib.contextmanager
def named(arguments: Namespace) -> Iterator[Address]:
    """Find the ledger that is asked for, and say in a sentence what its database refuses with.

    Raises:
        LedgerError: It cannot be used.
    """
    from otel_limits.ledger.database import DatabaseError, reason_of
    from otel_limits.ledger.reading import is_damaged

    try:  # the option, otherwise the environment, otherwise the user's data directory
        address = ledgers.audited_ledger(arguments.ledger)
    except ValueError as error:
        raise LedgerError(str(error)) from None
    try:
        yield address
    except BrokenPipeError:  # of standard output: no database fails so
        raise
    except (DatabaseError, sqlite3.Error, OSError) as error:
        reason = reason_of(error)
        has_damage = "malformed" in reason or "not a database" in reason
        raise _unusable(address, reason, has_damage=has_damage) from None
    except (TypeError, ValueError, MemoryError):
        # What stands in a damaged file may be of any kind: that is its fault, and not ours.
        if not is_damaged(address):
            raise
        raise _unusable(address, "the file is damaged", has_damage=True) from None


def _unusable(address: Address, reason: str, *, has_damage: bool) -> LedgerError:
    advice = f" Run: otel-limits ledger salvage {address} --output NEW.db" if has_damage else ""
    return LedgerError(f"The ledger {address} cannot be used: {reason}.{advice}")


def exactly(inquiry: Inquiry, answer: Callable[[], T]) -> T:
    """Answer, and again with exact sums where a sum of SQLite's leaves 64 bits."""
    from otel_limits.ledger.database import DatabaseError
    from otel_limits.ledger.reading import add_up_exactly

    try:
        return answer()
    except DatabaseError as error:
        # Exact sums are slower, and almost no ledger needs them: they are made only after the quick
        # ones have failed.
        if "integer overflow" not in str(error):
            raise
    add_up_exactly(inquiry.connection)
    return answer()
