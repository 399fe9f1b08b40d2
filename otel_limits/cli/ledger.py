"""The command `ledger`: prunes the spend ledger, exports it, and imports spans into it."""

from __future__ import annotations

import sys
from argparse import Namespace
from datetime import datetime, timezone
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.question import SELECTION
from otel_limits.cli.command import add_group
from otel_limits.cli.opening import add_ledger_command, add_option, inquiring, opened
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.settings import environment as config
from otel_limits.settings.policy import PolicyFile

HELP: Final = """\
Keep the spend ledger: prune it, export it, import spans from before there was one.
"""


def add(commands: Any) -> None:
    """Add `ledger` to the subparsers of the command line."""
    group = add_group(commands, "ledger", HELP)
    parser = add_ledger_command(group, "prune", "Delete what ended long ago.", prune)
    parser.add_argument(
        "--older-than", type=asking.duration, required=True, metavar="AGE", help="such as 90d"
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
    parser.add_argument("--output", metavar="FILE", help="standard output if unset")
    text = "Import spans from OTLP JSON lines, as the collector's file exporter writes them."
    parser = add_ledger_command(group, "import", text, import_spans)
    parser.add_argument("files", nargs="+", metavar="FILE")


def prune(arguments: Namespace) -> int:
    """Delete invocations that ended long ago, with everything that belongs to them."""
    from otel_limits.ledger import retention

    before = asking.to_microseconds(datetime.now(timezone.utc) - arguments.older_than)
    with opened(arguments) as database, working("Pruning") as work:
        gone = sum(work.through(retention.prune(database, before)))
    sys.stdout.write(f"{gone:,} invocations deleted from {database.address}.\n")
    return 0


def export(arguments: Namespace) -> int:
    """Write rows to a file."""
    from otel_limits.ledger.export import Export, write

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

    settings = config.read().settings
    listed = PolicyFile(settings.policy_path).document.prices
    prices = Prices({glob: entry.value for glob, entry in listed.items()})
    with opened(arguments, create=True) as database, working("Importing") as work:
        done = import_files(database, arguments.files, settings.audit_keys, prices, work)
    sys.stdout.write(f"{done}\n")
    return 0
