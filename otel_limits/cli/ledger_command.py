"""The command `ledger`: maintains the spend ledger, imports and exports."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.question import SELECTION
from otel_limits.cli import close, ledger_amendments, reprice
from otel_limits.cli.command import add_group, file_name
from otel_limits.cli.ledger_options import (
    add_ledger_command,
    add_option,
    errors_of,
    open_ledger,
    open_query,
)
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.settings.policy.file import valid_document
from otel_limits.settings.settings_reader import settings_with

HELP: Final = """\
Maintain the ledger: prune, export, import, reprice, merge.
"""


def add(commands: Any) -> None:
    """Add `ledger` to the command line."""
    group = add_group(commands, "ledger", HELP)
    parser = add_ledger_command(group, "prune", "Delete old budget trees.", prune)
    parser.add_argument(
        "--older-than",
        type=parsing.duration,
        required=True,
        metavar="AGE",
        help="minimum age, e.g. 90d",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="copy the remaining rows to return disk space from PostgreSQL; locks the ledger "
        "(SQLite returns space automatically)",
    )
    parser = add_ledger_command(
        group, "export", "Export ledger rows to a file or standard output.", export
    )
    for option in SELECTION:
        add_option(parser, option)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        help="output format (default with --focus: csv)",
    )
    parser.add_argument(
        "--focus",
        action="store_true",
        help="export charges per UTC day, agent, model and meter as FOCUS 1.2",
    )
    parser.add_argument(
        "--what",
        choices=("calls", "invocations", "tools", "uncounted"),
        default="calls",
        help="rows to export (default: calls)",
    )
    parser.add_argument(
        "--output", type=file_name, metavar="FILE", help="output file (default: standard output)"
    )
    text = "Import spans from JSON (OTLP, Tempo, Jaeger, Phoenix and others), or logs of LiteLLM."
    parser = add_ledger_command(group, "import", text, import_spans)
    parser.add_argument(
        "files", nargs="+", type=file_name, metavar="FILE", help="spans or spend logs"
    )
    reprice.add(group)
    text = "Import a spill file whose ledger was moved or deleted."
    parser = add_ledger_command(group, "adopt", text, adopt, option="--into")
    parser.add_argument("file", type=file_name, metavar="FILE", help="the spill file")
    text = "Copy the rows of other ledgers into a ledger, e.g. to move it to PostgreSQL."
    parser = add_ledger_command(group, "merge", text, merge, option="--into")
    parser.add_argument(
        "others", nargs="+", metavar="OTHER", help="a path, sqlite:///PATH or postgresql://…"
    )
    close.add(group)
    ledger_amendments.add(group)


def prune(arguments: Namespace) -> int:
    """Delete old invocations, with everything that belongs to them."""
    from otel_limits.ledger import maintenance

    # Computed once, so that all portions use the same cutoff. As integers: dates do not reach
    # before the year 1.
    age = arguments.older_than // timedelta(microseconds=1)
    before = parsing.to_microseconds(datetime.now(timezone.utc)) - age
    with open_ledger(arguments) as database:
        with working("Pruning") as work:
            gone = sum(work.through(maintenance.prune(database, before)))
        # Immediately, as freeing the space may fail.
        sys.stdout.write(f"{pluralize(gone, 'invocation')} deleted from {database.address}.\n")
        with working("Freeing disk space"):
            refused = maintenance.reclaim_space(database, is_full=arguments.full)
        if refused and arguments.full:
            raise LedgerError(
                f"PostgreSQL did not free disk space: {refused[0]}. Prune as the role that owns "
                "the tables."
            )
        if database.address.file is None and not arguments.full:
            sys.stdout.write("New rows reuse the space; --full returns it to the disk.\n")
    return 0


def export(arguments: Namespace) -> int:
    """Write rows to a file."""
    from otel_limits.ledger.file_export import Export, write

    if arguments.focus:
        return export_focus(arguments)
    if arguments.format is None:
        raise LedgerError("Set an output format, e.g. --format csv")
    with open_query(arguments) as inquiry:
        inquiry.require_known()
        chosen = Export(arguments.what, arguments.format, arguments.output)
        write(inquiry.connection, inquiry.selection, chosen, inquiry.work)
    return 0


def export_focus(arguments: Namespace) -> int:
    """Write charges as FOCUS; calls that are left out or not divided are counted on stderr."""
    from otel_limits.core.pricing import Prices
    from otel_limits.ledger import focus
    from otel_limits.ledger.file_export import PORTION, Export, write_rows
    from otel_limits.ledger.rows import portions

    arguments.format = arguments.format or "csv"
    if arguments.format == "jsonl" or arguments.what != "calls":
        raise LedgerError("--focus exports charges as csv. Remove the other options.")
    settings = settings_with("billing_account", "sub_account_key")
    if not settings.billing_account:
        raise LedgerError(
            "FOCUS needs a billing account. Set its ID, e.g. "
            "OTEL_LIMITS_BILLING_ACCOUNT=123456789012"
        )
    prices = Prices(valid_document().price_list())
    with open_query(arguments) as inquiry:
        inquiry.require_known()
        found = focus.Charges()
        added = focus.add_calls(found, inquiry.connection, inquiry.selection, prices)
        for _ in inquiry.work.through(added):
            pass
        rows = focus.rows_of(found, settings.billing_account, settings.sub_account_key)
        chosen = Export("calls", arguments.format, arguments.output)
        write_rows(focus.FIELDS, portions(rows, PORTION), chosen)
    if found.unpriced:
        sys.stderr.write(
            f"{pluralize(found.unpriced, 'call')} without a price left out. To price them, run: "
            "otel-limits ledger reprice\n"
        )
    if found.undivided:
        sys.stderr.write(
            f"{pluralize(found.undivided, 'call')} recorded at other prices than the current ones; "
            f"their cost has the meter {focus.UNDIVIDED}. To use current prices, run: otel-limits "
            "ledger reprice --all\n"
        )
    return 0


def import_spans(arguments: Namespace) -> int:
    """Import spans; recorded calls are not counted again."""
    from otel_limits.core.pricing import Prices
    from otel_limits.ledger.imports import import_files

    audit_keys = settings_with("audit_keys").audit_keys
    # By the current price list, as imported calls have no prices.
    prices = Prices(valid_document().price_list())
    with open_ledger(arguments, create=True) as database, working("Importing") as work:
        done = import_files(database, arguments.files, audit_keys, prices, work)
    # On standard error if nothing was imported: scripts see the exit status, people the reason.
    (sys.stderr if done.has_no_call else sys.stdout).write(f"{done}\n")
    return int(done.has_no_call)


def adopt(arguments: Namespace) -> int:
    """Import a spill file, which is deleted once the ledger contains its rows."""
    from otel_limits.ledger.files import is_forbidden
    from otel_limits.ledger.spill import is_spill_file, restore_file

    path = Path(arguments.file)
    if not path.exists():
        raise LedgerError(f"File {path} not found. otel-limits audit verify lists spill files.")
    if is_forbidden(path):
        raise LedgerError(f"{path} cannot be read by this user. Run it as the owner of the file.")
    if not is_spill_file(path):
        raise LedgerError(
            f"{path} is not a spill file. otel-limits audit verify lists spill files."
        )
    with open_ledger(arguments) as database, working("Adopting") as work:
        # Opening a ledger restores its own spill files; only others are adopted.
        if not path.exists():
            sys.stdout.write(f"{path} belonged to {database.address}, which now has its rows.\n")
            return 0
        moved = sum(work.through(restore_file(database, path)))
        rows = pluralize(moved, "row")
        # It is deleted with its last row, unless a process may still append to it.
        if path.exists():
            raise LedgerError(f"{path} is in use by another process.")
        sys.stdout.write(f"Imported {rows} of {path} into {database.address}.\n")
    return 0


def merge(arguments: Namespace) -> int:
    """Copy the rows of other ledgers, which are unchanged, and say which rows are new."""
    from otel_limits.ledger.merging import merge as copied
    from otel_limits.ledger.rows import INVOCATIONS, MODEL_CALLS, TOOL_CALLS

    def write(rows: Any) -> dict[str, int]:
        with errors_of(database.address):  # rather than of the ledger that is read
            return database.write(rows)

    with open_ledger(arguments, create=True) as database:
        for other in arguments.others:
            chosen = Namespace(ledger=other, ledger_option="OTHER", format="table")
            with open_query(chosen) as inquiry:
                if inquiry.address.name == database.address.name:
                    raise LedgerError(f"{inquiry.ledger} cannot be merged into itself.")
                if inquiry.waiting.is_partial:
                    raise LedgerError(
                        f"Not merged: {inquiry.waiting}. Run it as a user who may write "
                        f"{inquiry.ledger}, while no other program locks it."
                    )
                new: Counter[str] = sum(
                    inquiry.work.through(copied(inquiry.connection, write)), Counter()
                )
            counts = (
                pluralize(new[INVOCATIONS], "invocation"),
                pluralize(new[MODEL_CALLS], "model call"),
                pluralize(new[TOOL_CALLS], "tool call"),
            )
            sys.stdout.write(f"{inquiry.ledger}: {', '.join(counts)} new in {database.address}.\n")
    return 0
