"""The command `audit`: asks the questions that `otel_limits.audit.questions` lists."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.completeness import completeness
from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli.command import add_command, add_group
from otel_limits.cli.opening import add_ledger_command, add_option, exactly, inquiring
from otel_limits.cli.show.data import as_csv, as_json, beside
from otel_limits.cli.show.page import as_page
from otel_limits.cli.show.schema import schema_of
from otel_limits.core.errors import LedgerMovedError

if TYPE_CHECKING:
    from otel_limits.audit.answers import Answer
    from otel_limits.audit.question import Inquiry, Question

HELP: Final = """\
Ask the spend ledger.

The ledger is the one that --ledger or OTEL_LIMITS_LEDGER names; otherwise the one that
otel-limits run keeps in your data directory. Times are UTC; days, weeks and months are those of
--time-zone or OTEL_LIMITS_TIME_ZONE.
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
        parser.add_argument(
            "--wide",
            action="store_true",
            help="whole values and every column in tables, however narrow the terminal is",
        )
        parser.add_argument(
            "--time-zone",
            metavar="ZONE",
            help="whose days, weeks and months are meant, and times without an offset, such as "
            "Europe/Berlin (default: OTEL_LIMITS_TIME_ZONE, otherwise UTC)",
        )
        groups: dict[str, Any] = {"": parser}
        for option in (*question.selection, *question.options):
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            add_option(groups[option.group], option)
    parser = add_command(group, "schema", "Print the JSON Schema of an answer.", print_schema)
    names = [question.name for question in QUESTIONS]
    parser.add_argument("question", metavar="QUESTION", choices=names, help=", ".join(names))


def print_schema(arguments: Namespace) -> int:
    """Print what `--format json` gives for a question, as JSON Schema."""
    (question,) = (each for each in QUESTIONS if each.name == arguments.question)
    sys.stdout.write(json.dumps(schema_of(question), indent=2) + "\n")
    return 0


def ask(question: Question, arguments: Namespace) -> int:
    """Ask a question and show the answer.

    Raises:
        LedgerError: The ledger cannot answer it.
    """
    with _uncollected():
        try:
            answer = _ask(question, arguments)
        except LedgerMovedError:
            answer = _ask(question, arguments)  # by the way for a ledger that is in use
    # On standard error: standard output is one table, or a policy file, for another program.
    if arguments.format == "csv" or (answer.text and arguments.format == "table"):
        for line in beside(answer):
            sys.stderr.write(f"{line}\n")
    if arguments.format == "table":
        # Only a table needs `rich`, which takes longer to import than all the rest.
        from otel_limits.cli.show.text import show

        show(answer, wide=arguments.wide)
    else:
        sys.stdout.write(WRITERS[arguments.format](answer))
    return answer.status


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage alone: rows have no cycles, and looking for some takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _ask(question: Question, arguments: Namespace) -> Answer:
    values = {option.name: getattr(arguments, option.name) for option in question.options}
    with inquiring(arguments) as inquiry:
        # Within the ledger, as an answer may still read rows while it is put together.
        return exactly(inquiry, lambda: _answered(question, inquiry, values))


def _answered(question: Question, inquiry: Inquiry, values: dict[str, Any]) -> Answer:
    answer = question.answer(inquiry, **values)
    return answer if answer.complete else replace(answer, complete=completeness(inquiry))
