"""The commands `ledger accept` and `ledger end-lost`: interventions that the ledger records."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_limits.audit import parsing
from otel_limits.cli.command import file_name
from otel_limits.cli.ledger_options import add_ledger_command, open_ledger
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize

if TYPE_CHECKING:
    from argparse import Namespace


def add(group: Any) -> None:
    """Add both to the commands of `ledger`."""
    text = "Accept the loss of damaged lines of a spill file."
    parser = add_ledger_command(group, "accept", text, accept)
    parser.add_argument(
        "file", type=file_name, metavar="FILE", help="as listed by otel-limits audit verify"
    )
    parser.add_argument(
        "--reason", required=True, type=_reason, metavar="TEXT", help="recorded and always listed"
    )
    text = "End invocations as lost if their process vanished, e.g. after SIGKILL."
    parser = add_ledger_command(group, "end-lost", text, end_lost)
    parser.add_argument(
        "--older-than",
        type=parsing.duration,
        required=True,
        metavar="AGE",
        help="time without any record of their budget tree, e.g. 1d",
    )


def _reason(text: str) -> str:
    if not text.strip():
        raise ArgumentTypeError("must not be empty")
    return text.strip()


def accept(arguments: Namespace) -> int:
    """Record that the damaged lines of a spill file are given up."""
    from otel_limits.ledger.maintenance import accepted_row, damages
    from otel_limits.ledger.rows import MAINTENANCE

    with open_ledger(arguments) as database:
        with database.reading() as connection:
            lost = [each for each in damages(connection) if each.accepted is None]
        # By its name alone as well: the ledger may have been moved with its files.
        names = {arguments.file, str(Path(arguments.file).absolute())}
        chosen = [each for each in lost if each.file in names]
        chosen = chosen or [each for each in lost if Path(each.file).name == arguments.file]
        if not chosen:
            raise LedgerError(
                f"{arguments.file} has no lost lines to accept. otel-limits audit verify lists "
                "the files that have."
            )
        database.write([(MAINTENANCE, accepted_row(each, arguments.reason)) for each in chosen])
        lines = pluralize(sum(each.lines for each in chosen), "lost line")
        sys.stdout.write(f"{lines} of {chosen[0].file} accepted.\n")
    return 0


def end_lost(arguments: Namespace) -> int:
    """End invocations without an end."""
    from otel_limits.ledger import maintenance

    age = arguments.older_than // timedelta(microseconds=1)
    before = parsing.to_microseconds(datetime.now(timezone.utc)) - age
    with open_ledger(arguments) as database, working("Ending") as work:
        ended = sum(work.through(maintenance.end_lost(database, before)))
        sys.stdout.write(f"{pluralize(ended, 'invocation')} ended as lost in {database.address}.\n")
    return 0
