"""The command `audit`, with a subcommand for each of `otel_limits.audit.questions`."""

from __future__ import annotations

import functools
import json
import sys
import time
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.completeness import completeness, pruned_us
from otel_limits.audit.questions import QUESTIONS
from otel_limits.cli.command import add_command, add_group, uncollected
from otel_limits.cli.ledger_options import (
    add_ledger_command,
    add_option,
    open_query,
    with_exact_sums,
)
from otel_limits.cli.show.data import additional_lines, as_csv, as_json, schema_of
from otel_limits.cli.show.page import as_page
from otel_limits.core.errors import LedgerMovedError

if TYPE_CHECKING:
    from otel_limits.audit.answer import Answer
    from otel_limits.audit.question import AuditQuery, Question

HELP: Final = """\
Query the spend ledger.

Set the ledger with --ledger or OTEL_LIMITS_LEDGER. The default is the ledger of otel-limits run in
your data directory. Times are UTC; days, weeks and months follow --time-zone or
OTEL_LIMITS_TIME_ZONE.
"""

WRITERS: Final = {"json": as_json, "csv": as_csv, "html": as_page}
FORMATS: Final = ("table", *WRITERS)


def add(commands: Any) -> None:
    """Add `audit`, with a subcommand per question, to the command line."""
    group = add_group(commands, "audit", HELP)
    for question in QUESTIONS:
        call = functools.partial(ask, question)
        parser = add_ledger_command(group, question.name, question.help, call)
        parser.add_argument(
            "--format",
            choices=FORMATS,
            default="table",
            # An answer without tables is a file.
            help=f"output format (default: {'table' if question.tables else 'YAML'})",
        )
        parser.add_argument(
            "--wide",
            action="store_true",
            help="never truncate values or hide columns",
        )
        parser.add_argument(
            "--time-zone",
            metavar="ZONE",
            help="time zone for dates and periods, e.g. Europe/Berlin (default: "
            "OTEL_LIMITS_TIME_ZONE, otherwise UTC)",
        )
        groups: dict[str, Any] = {"": parser}
        for option in (*question.selection, *question.options):
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            add_option(groups[option.group], option)
    parser = add_command(group, "schema", "Print the JSON Schema of a query result.", print_schema)
    names = [question.name for question in QUESTIONS]
    parser.add_argument("question", metavar="QUESTION", choices=names, help=", ".join(names))


def print_schema(arguments: Namespace) -> int:
    """Print the JSON Schema of `--format json` for a question."""
    (question,) = (each for each in QUESTIONS if each.name == arguments.question)
    sys.stdout.write(json.dumps(schema_of(question), indent=2) + "\n")
    return 0


def ask(question: Question, arguments: Namespace) -> int:
    """Answer a question and show the answer.

    Raises:
        LedgerError: It cannot be answered.
    """
    with uncollected():
        try:
            answer = _ask(question, arguments)
        except LedgerMovedError:
            answer = _ask(question, arguments)  # now the ledger is in use, and read as such
        _show(answer, arguments)
    return answer.status


def _show(answer: Answer, arguments: Namespace) -> None:
    # On standard error, as standard output is one table or policy file for another program.
    if arguments.format == "csv" or (answer.text and arguments.format == "table"):
        for line in additional_lines(answer):
            sys.stderr.write(f"{line}\n")
    if arguments.format == "table":
        # Only tables need `rich`, which takes longer to import than everything else.
        from otel_limits.cli.show.terminal_answer import show

        show(answer, wide=arguments.wide)
    else:
        sys.stdout.write(WRITERS[arguments.format](answer))


def _ask(question: Question, arguments: Namespace) -> Answer:
    values = {option.name: getattr(arguments, option.name) for option in question.options}
    with open_query(arguments) as inquiry:
        # With the ledger open, as an answer may be read lazily.
        answer = with_exact_sums(inquiry, lambda: _answered(question, inquiry, values))
        if arguments.format == "html":
            answer = replace(answer, made=inquiry.made_at(time.time()))
        return answer


def _answered(question: Question, inquiry: AuditQuery, values: dict[str, Any]) -> Answer:
    answer = question.answer(inquiry, **values)
    # Before the tables: a misspelled agent would look like one that was never halted.
    hint = inquiry.unknown_values
    if not any(table.rows for table in answer.tables):
        hint += inquiry.recorded_period
    summary = f"{hint}{answer.summary}".strip()
    answer = replace(answer, summary=summary)
    if answer.complete:  # it has asked this itself, unless the ledger is damaged
        return answer
    if answer.since_us is not None:
        inquiry = replace(inquiry, selection=replace(inquiry.selection, since_us=answer.since_us))
    return replace(answer, complete=completeness(inquiry), pruned_us=pruned_us(inquiry))
