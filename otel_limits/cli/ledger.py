"""The command `ledger`: keeps the spend ledger, and moves rows out of it and into it."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.question import SELECTION
from otel_limits.cli import reprice
from otel_limits.cli.command import add_command, add_group, file_name
from otel_limits.cli.opening import (
    add_ledger_command,
    add_option,
    inquiring,
    named,
    opened,
    refusing,
)
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.settings import environment as config
from otel_limits.settings.policy import PolicyFile

HELP: Final = """\
Maintain the ledger: prune, export, import, reprice, upgrade, adopt, salvage.
"""


def add(commands: Any) -> None:
    """Add `ledger` to the subparsers of the command line."""
    group = add_group(commands, "ledger", HELP)
    parser = add_ledger_command(group, "prune", "Delete what ended long ago.", prune)
    parser.add_argument(
        "--older-than", type=asking.duration, required=True, metavar="AGE", help="such as 90d"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="copy what is left, so that PostgreSQL gives the space back to the disk, too; nobody "
        "else can use the ledger meanwhile, and rows wait in files (a ledger in a file gives it "
        "back without)",
    )
    parser = add_ledger_command(group, "export", "Write the ledger to a file.", export)
    for option in SELECTION:
        add_option(parser, option)
    parser.add_argument("--format", choices=("parquet", "csv", "jsonl"), required=True)
    parser.add_argument(
        "--what",
        choices=("calls", "invocations", "tools"),
        default="calls",
        help="which rows (default: calls)",
    )
    parser.add_argument("--output", type=file_name, metavar="FILE", help="standard output if unset")
    text = "Import spans from OTLP JSON lines, as the collector's file exporter writes them."
    parser = add_ledger_command(group, "import", text, import_spans)
    parser.add_argument("files", nargs="+", type=file_name, metavar="FILE")
    reprice.add(group)
    text = "Bring a ledger of an earlier version up to date, in place."
    add_ledger_command(group, "upgrade", text, upgrade)
    text = "Take in the rows of a spill file whose ledger is gone, or has another address now."
    parser = add_ledger_command(group, "adopt", text, adopt, option="--into")
    parser.add_argument("file", type=file_name, metavar="FILE")
    text = "Read what can be read of a damaged SQLite ledger into a new one."
    parser = add_command(group, "salvage", text, refusing(salvage))
    parser.add_argument("damaged", type=file_name, metavar="CORRUPT")
    parser.add_argument(
        "--output", required=True, type=file_name, metavar="NEW.db", help="the new ledger"
    )


def prune(arguments: Namespace) -> int:
    """Delete invocations that ended long ago, with everything that belongs to them."""
    from otel_limits.ledger import retention

    # Once, before the first portion: what ends while it runs is judged by the same age.
    # As numbers: an age may lead to before the year 1, where no date is.
    age = arguments.older_than // timedelta(microseconds=1)
    before = asking.to_microseconds(datetime.now(timezone.utc)) - age
    with opened(arguments) as database:
        with working("Pruning") as work:
            gone = sum(work.through(retention.prune(database, before)))
        # At once: they are gone, whatever happens to their space.
        sys.stdout.write(f"{pluralize(gone, 'invocation')} deleted from {database.address}.\n")
        with working("Giving their space back"):
            refused = retention.give_back(database, is_full=arguments.full)
        if refused and arguments.full:
            raise LedgerError(
                f"PostgreSQL did not give their space back to the disk: {refused[0]}. "
                "Prune as the role that owns the tables."
            )
        if database.address.file is None and not arguments.full:
            sys.stdout.write("New rows use their space; --full gives it back to the disk.\n")
    return 0


def export(arguments: Namespace) -> int:
    """Write rows to a file."""
    from otel_limits.ledger.export import Export, write

    # It ends with its table of contents, and is of no use on a terminal.
    if arguments.format == "parquet" and arguments.output is None:
        raise LedgerError("parquet needs a file. Name one with --output.")
    with inquiring(arguments) as inquiry:
        inquiry.require_known()
        chosen = Export(arguments.what, arguments.format, arguments.output)
        write(inquiry.connection, inquiry.selection, chosen, inquiry.work)
    return 0


def import_spans(arguments: Namespace) -> int:
    """Import spans; what is recorded already is not counted again."""
    from otel_limits.core.pricing import Prices
    from otel_limits.ledger.imports import import_files

    # By the prices that are in force, as calls of imported spans bring none along.
    settings = config.read().settings
    prices = Prices(PolicyFile(settings.policy_path).document.price_list())
    with opened(arguments, create=True) as database, working("Importing") as work:
        done = import_files(database, arguments.files, settings.audit_keys, prices, work)
    # On standard error where nothing was imported: a script sees the exit status, a person the
    # reason.
    (sys.stderr if done.has_no_call else sys.stdout).write(f"{done}\n")
    return int(done.has_no_call)


def upgrade(arguments: Namespace) -> int:
    """Bring a ledger up to date."""
    from otel_limits.ledger.upgrades import CURRENT

    with opened(arguments) as database, working("Upgrading"):
        # To open it is what upgrades it.
        database.engine()
        sys.stdout.write(f"{database.address} has schema version {CURRENT}.\n")
    return 0


def adopt(arguments: Namespace) -> int:
    """Take in the rows of a spill file; it is deleted once the ledger has them."""
    from otel_limits.ledger.spill import is_spill_file, taking

    path = Path(arguments.file)
    if not path.exists():
        raise LedgerError(f"There is no file {path}. otel-limits audit verify lists them.")
    if not is_spill_file(path):
        raise LedgerError(f"{path} is not a spill file. otel-limits audit verify lists them.")
    with opened(arguments) as database, working("Adopting") as work:
        # Opening a ledger takes in its own files; only those of others have to be adopted.
        if not path.exists():
            sys.stdout.write(f"{path} was of {database.address}, which has its rows now.\n")
            return 0
        moved = sum(work.through(taking(database, path)))
        rows = pluralize(moved, f"row of {path} is", f"rows of {path} are")
        # It is deleted with its last row, unless somebody holds it and may still append to it.
        if path.exists():
            raise LedgerError(f"{path} is in use by the process that writes it.")
        sys.stdout.write(f"{rows} in {database.address} now.\n")
    return 0


def salvage(arguments: Namespace) -> int:
    """Read what can be read of a damaged file."""
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.salvage import salvage as read

    damaged, output = Path(arguments.damaged), Path(arguments.output)
    # Looked at before a new file is made: a mistyped name must not leave an empty ledger.
    if not damaged.is_file():
        raise LedgerError(f"There is no file {damaged}.")
    # Never into one that is there: what was read of a damaged file must not mix with good rows.
    if output.exists():
        raise LedgerError(f"{output} is there already. Name a new file with --output.")
    arguments.ledger = str(output)
    with named(arguments) as address, contextlib.closing(Database(address)) as database:
        with working("Salvaging"):
            done = read(damaged, database)
        sys.stdout.write(f"{done} What was read is in {output}.\n")
    # A script that salvages has to know that some of it is gone.
    return int(not done.is_whole)
