"""What the commands about a ledger have in common: an option, the opening, refusals."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from otel_limits.audit.question import Inquiry, Option
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.settings import ledgers

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database


def add_ledger_command(
    commands: Any, name: str, text: str, call: Callable[[Namespace], int]
) -> ArgumentParser:
    """Add a command about a ledger; what it cannot do because of the ledger it says on stderr."""

    def call_or_refuse(arguments: Namespace) -> int:
        try:
            return call(arguments)
        except LedgerError as error:
            return refuse([str(error)])

    parser = add_command(commands, name, text, call_or_refuse)
    parser.add_argument(
        "--ledger", metavar="ADDRESS", help="a path, sqlite:///PATH or postgresql://…"
    )
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
        described["action"] = "append"
    parser.add_argument(option.flag, **described)


@contextlib.contextmanager
def inquiring(arguments: Namespace) -> Iterator[Inquiry]:
    """Open the ledger for questions about the part of it that is selected.

    Raises:
        LedgerError: There is none, or it cannot be read.
    """
    from otel_limits.ledger.selection import Selection

    selection = Selection(
        since_us=getattr(arguments, "since", None),
        until_us=getattr(arguments, "until", None),
        where=tuple(getattr(arguments, "where", None) or ()),
    )
    with (
        opened(arguments) as database,
        database.reading() as connection,
        working("Asking the ledger") as work,
    ):
        yield Inquiry(
            connection=connection,
            ledger=str(database.address),
            selection=selection,
            work=work,
            has_charts=arguments.format == "html",
        )


@contextlib.contextmanager
def opened(arguments: Namespace, *, create: bool = False) -> Iterator[Database]:
    """Open the ledger that is asked for, and take back what waits in spill files.

    Raises:
        LedgerError: There is none, or it cannot be read.
    """
    from otel_limits.ledger.database import Database, DatabaseError, reason_of
    from otel_limits.ledger.spill import SpillFiles, taking_back

    try:  # the option, otherwise the environment, otherwise the user's data directory
        address = ledgers.audited_ledger(arguments.ledger)
    except ValueError as error:
        raise LedgerError(str(error)) from None
    database = Database(address)
    try:
        if not create:
            database.require_existing()
        for _ in taking_back(database, SpillFiles(address)):
            pass
        yield database
    except (DatabaseError, OSError) as error:
        raise LedgerError(f"The ledger {address} cannot be used: {reason_of(error)}.") from None
    finally:
        database.close()
