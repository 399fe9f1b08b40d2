"""The command `audit`: asks the questions that `otel_limits.audit.questions` lists."""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli.command import add_group
from otel_limits.cli.opening import add_ledger_command, add_option, inquiring

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.audit.answers import Answer
    from otel_limits.audit.question import Question

HELP: Final = """\
Ask the spend ledger.

The ledger is the one that --ledger or OTEL_LIMITS_LEDGER names; otherwise the one that
otel-limits run keeps in your data directory. Times are UTC.
"""


def add(commands: Any) -> None:
    """Add `audit`, with a command per question, to the subparsers of the command line."""
    group = add_group(commands, "audit", HELP)
    for question in QUESTIONS:
        call = functools.partial(ask, question)
        _add_options(add_ledger_command(group, question.name, question.help, call), question)


def _add_options(parser: ArgumentParser, question: Question) -> None:
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
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
    FORMATS[arguments.format](answer)
    return answer.status


def _show_table(answer: Answer) -> None:
    from otel_limits.cli.show.text import show

    show(answer)


def _show_json(answer: Answer) -> None:
    from otel_limits.cli.show.data import as_json

    sys.stdout.write(as_json(answer))


def _show_csv(answer: Answer) -> None:
    from otel_limits.cli.show.data import as_csv

    sys.stdout.write(as_csv(answer))


def _show_page(answer: Answer) -> None:
    from otel_limits.cli.show.page import as_page

    sys.stdout.write(as_page(answer))


FORMATS: Final[dict[str, Callable[[Answer], None]]] = {
    "table": _show_table,
    "json": _show_json,
    "csv": _show_csv,
    "html": _show_page,
}
