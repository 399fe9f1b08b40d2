"""Shared parts of the commands on a ledger: options, opening, errors."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from otel_limits.audit.question import AuditQuery, Option
from otel_limits.cli.command import add_command
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
    """Add a command on a ledger."""
    parser = add_command(commands, name, text, call)
    about = "a path, sqlite:///PATH or postgresql://…"
    parser.add_argument(option, dest="ledger", metavar="ADDRESS", help=about)
    parser.set_defaults(ledger_option=option)
    return parser


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
    if option.is_list:
        described |= {"action": "extend", "nargs": "+"}
    parser.add_argument(option.flag, **described)


def selection_of(arguments: Namespace) -> Selection:
    """Return the part of the ledger that the options select.

    Raises:
        LedgerError: The time zone is unknown, or a time is out of range.
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
            f"--since and --until of {zone} must be in the years 1 to 9999 UTC."
        ) from None
    # An empty answer would look like a quiet week.
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
def open_query(arguments: Namespace) -> Iterator[AuditQuery]:
    """Open the ledger for a query of the selected part, and say on stderr which rows it lacks.

    Raises:
        LedgerError: There is none, or it cannot be read.
    """
    from otel_limits.ledger.reading import open_for_query

    selection = selection_of(arguments)
    with (
        ledger_address(arguments) as address,
        open_for_query(address) as (connection, waiting),
        working("Querying the ledger") as work,
    ):
        if waiting.is_partial:
            sys.stderr.write(f"otel-limits: {waiting}.\n")
        yield AuditQuery(
            connection=connection,
            ledger=str(address),
            address=address,
            waiting=waiting,
            selection=selection,
            work=work,
            has_charts=arguments.format == "html",
        )


@contextlib.contextmanager
def open_ledger(arguments: Namespace, *, create: bool = False) -> Iterator[Database]:
    """Open the ledger for changes, and restore its spill files.

    Raises:
        LedgerError: There is none, or it cannot be used.
    """
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.reading import require_ledger
    from otel_limits.ledger.spill import SpillFiles, restore_spilled

    with ledger_address(arguments) as address:
        if not create:
            require_ledger(address)
        # Spilled rows belong to the ledger: a change must not miss them.
        with contextlib.closing(Database(address)) as database:
            for _ in restore_spilled(database, SpillFiles(address)):
                pass
            yield database


@contextlib.contextmanager
def ledger_address(arguments: Namespace) -> Iterator[Address]:
    """Find the ledger, and turn database errors into sentences.

    Raises:
        LedgerError: It cannot be used.
    """
    try:  # the option, otherwise the environment, otherwise the user's data directory
        address = ledgers.audited_ledger(arguments.ledger, arguments.ledger_option)
    except ValueError as error:
        raise LedgerError(str(error)) from None
    with errors_of(address):
        yield address


@contextlib.contextmanager
def errors_of(address: Address) -> Iterator[None]:
    """Turn database errors into sentences that name this ledger.

    Raises:
        LedgerError: It cannot be used.
    """
    from otel_limits.ledger.database import DatabaseError, reason_of
    from otel_limits.ledger.reading import is_damaged

    try:
        yield
    except BrokenPipeError:  # from standard output, not from a database
        raise
    except (DatabaseError, sqlite3.Error, OSError) as error:
        reason = reason_of(error)
        # Python 3.10 leaves out a message of SQLite that quotes damaged text.
        is_left_out = reason == type(error).__name__
        has_damage = address.file is not None and (
            is_left_out or "malformed" in reason or "not a database" in reason
        )
        raise _unusable(address, reason, has_damage=has_damage) from None
    except (TypeError, ValueError, MemoryError):
        # A damaged file may contain values of any type.
        if not is_damaged(address):
            raise
        raise _unusable(address, "the file is damaged", has_damage=True) from None


def _unusable(address: Address, reason: str, *, has_damage: bool) -> LedgerError:
    mend = f" Run: {address.recovery} (see: otel-limits docs ledger)" if has_damage else ""
    return LedgerError(f"The ledger {address} cannot be used: {reason}.{mend}")


def with_exact_sums(inquiry: AuditQuery, answer: Callable[[], T]) -> T:
    """Answer; and again with exact sums if a SQLite sum exceeds 64 bits."""
    from otel_limits.ledger.database import DatabaseError
    from otel_limits.ledger.spending import add_up_exactly

    try:
        return answer()
    except DatabaseError as error:
        # Exact sums are slower, and almost never needed: only after the quick ones have failed.
        if "integer overflow" not in str(error):
            raise
    add_up_exactly(inquiry.connection)
    return answer()
