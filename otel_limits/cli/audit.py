"""The command `audit`: asks the questions that `otel_limits.audit.questions` lists."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli.command import add_group
from otel_limits.cli.opening import add_ledger_command, add_option, inquiring
from otel_limits.cli.show.data import as_csv, as_json
from otel_limits.cli.show.page import as_page

if TYPE_CHECKING:
    from otel_limits.audit.question import Question

HELP: Final = """\
Ask the spend ledger.

The ledger is the one that --ledger or OTEL_LIMITS_LEDGER names; otherwise the one that
otel-limits run keeps in your data directory. Times are UTC.
"""

WRITERS: Final = {"json": as_json, "csv": as_csv, "html": as_page}
FORMATS: Final = ("table", *WRITERS)


def add(commands: Any) -> None:
    """Add `audit`, with a command per question, to the subparsers of the command line."""
    group = add_group(commands, "audit", HELP)
    for question in QUESTIONS:
        call = functools.partial(ask, question)
        parser = add_ledger_command(group, question.name, question.help, call)
        parser.add_argument(
            "--format",
            choices=FORMATS,
            default="table",
            help="how the answer is shown (default: table)",
        )
        groups: dict[str, Any] = {"": parser}
        for option in (*question.selection, *question.options):
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            add_option(groups[option.group], option)


def ask(question: Question, arguments: Namespace) -> int:
    """Ask a question and show the answer.

    Raises:
        LedgerError: The ledger cannot answer it.
    """
    values = {option.name: getattr(arguments, option.name) for option in question.options}
    with inquiring(arguments) as inquiry:
        answer = question.answer(inquiry, **values)
    if arguments.format == "table":
        # Only a table needs `rich`, which takes longer to import than all the rest.
        from otel_limits.cli.show.text import show

        show(answer)
    else:
        sys.stdout.write(WRITERS[arguments.format](answer))
    return answer.status
