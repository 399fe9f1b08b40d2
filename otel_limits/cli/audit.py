"""The commands `audit` and `ledger`: what they accept, and what they do with it."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import asking
from otel_limits.core.errors import LedgerError
from otel_limits.settings import environment as config

if TYPE_CHECKING:
    from otel_limits.audit.answers import Answer
    from otel_limits.audit.questions import Inquiry
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.database import Database

USAGE_ERROR: Final = 2

AUDIT_HELP: Final = """\
Ask the spend ledger.

The ledger is the one that --ledger or OTEL_LIMITS_LEDGER names, or else the one that
otel-limits run keeps in your data directory. Times are UTC.
"""

LEDGER_HELP: Final = """\
Keep the spend ledger: prune it, export it, import spans from before there was one.
"""

QUESTIONS: Final = {
    "spend": "Calls, tokens and money, by any property.",
    "stops": "How invocations ended, and the halted ones that had cost most.",
    "show": "One budget tree, with tokens and money per branch, and where it was halted.",
    "reconcile": "The ledger against Prometheus counters; exit status 1 above the tolerance.",
    "backtest": "What other limits would have halted, and what that would have saved.",
    "grants": "What people changed in quotas: who, when, how much, and until when.",
    "suggest": "A policy file with limits from what successful invocations needed.",
}


def add_commands(commands: Any) -> None:
    """Add `audit` and `ledger` to the subparsers of the command line."""
    questions = _group(commands, "audit", AUDIT_HELP)
    _add_spend(_question(questions, "spend", spend))
    _add_stops(_question(questions, "stops", stops))
    _add_show(_question(questions, "show", show))
    _add_reconcile(_question(questions, "reconcile", reconcile))
    _add_backtest(_question(questions, "backtest", backtest))
    _add_suggest(_question(questions, "suggest", suggest))
    _add_window(_question(questions, "grants", grants))
    keeping = _group(commands, "ledger", LEDGER_HELP)
    _add_prune(keeping)
    _add_export(keeping)
    _add_import(keeping)


def _group(commands: Any, name: str, text: str) -> Any:
    parser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=text,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(call=_print_help(parser))
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def _print_help(parser: ArgumentParser) -> Callable[[Namespace], int]:
    def call(_options: Namespace) -> int:
        parser.print_help(sys.stderr)
        return USAGE_ERROR

    return call


def _command(commands: Any, name: str, text: str, call: Callable[..., int]) -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.add_argument(
        "--ledger", metavar="ADDRESS", help="a path, sqlite:///PATH or postgresql://…"
    )
    parser.set_defaults(call=call)
    return parser


# --- questions ------------------------------------------------------------------------------------


def _question(commands: Any, name: str, ask: Callable[..., Answer]) -> ArgumentParser:
    parser = _command(commands, name, QUESTIONS[name], _asks(ask))
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv", "html"),
        default="table",
        help="how the answer is shown (default: table)",
    )
    return parser


def _asks(ask: Callable[[Namespace, Inquiry], Answer]) -> Callable[[Namespace], int]:
    """Make the command that asks a question and shows the answer."""

    def call(options: Namespace) -> int:
        try:
            with _inquiring(options) as inquiry:
                answer = ask(options, inquiry)
        except LedgerError as error:
            return _refuse(str(error))
        _show(answer, options.format)
        return answer.status

    return call


@contextlib.contextmanager
def _inquiring(options: Namespace) -> Iterator[Inquiry]:
    """Open the ledger for questions; rows that wait in spill files are taken back first."""
    from otel_limits.audit.questions import Inquiry
    from otel_limits.cli.progress import working
    from otel_limits.ledger.queries import Selection

    selection = Selection(
        since_us=getattr(options, "since", None),
        until_us=getattr(options, "until", None),
        where=tuple(getattr(options, "where", ()) or ()),
    )
    with (
        _opened(options) as database,
        database.reading() as connection,
        working("Asking the ledger") as work,
    ):
        yield Inquiry(
            connection=connection, ledger=str(database.address), selection=selection, work=work
        )


def _show(answer: Answer, form: str) -> None:
    if form == "table":
        from otel_limits.cli.show.text import show as show_text

        show_text(answer)
        return
    from otel_limits.cli.show.data import as_csv, as_json
    from otel_limits.cli.show.page import as_page

    make = {"json": as_json, "csv": as_csv, "html": as_page}[form]
    sys.stdout.write(make(answer))


def _add_window(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--since", type=asking.moment, metavar="TIME", help="7d, 2026-11-01 or 2026-11-01T12:00"
    )
    parser.add_argument("--until", type=asking.moment, metavar="TIME", help="the same; excluded")


def _add_selection(parser: ArgumentParser) -> None:
    _add_window(parser)
    parser.add_argument(
        "--where",
        type=asking.condition,
        action="append",
        metavar="NAME=VALUE",
        help="only these, such as tenant.id=acme or agent='research-*'; can be repeated",
    )


def _add_spend(parser: ArgumentParser) -> None:
    _add_selection(parser)
    parser.add_argument(
        "--by",
        type=asking.properties,
        default=("agent", "model"),
        metavar="NAMES",
        help="agent, model, provider, state, session, reason, hour, day, week, month, or any audit "
        "key, separated by commas (default: agent,model)",
    )


def spend(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit spend`."""
    from otel_limits.audit import questions

    return questions.spend(inquiry, options.by, with_charts=options.format == "html")


def _add_stops(parser: ArgumentParser) -> None:
    _add_selection(parser)
    parser.add_argument(
        "--top", type=asking.cap, default=10, metavar="N", help="halted invocations to list"
    )


def stops(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit stops`."""
    from otel_limits.audit import questions

    return questions.stops(inquiry, options.top, with_charts=options.format == "html")


def _add_show(parser: ArgumentParser) -> None:
    parser.add_argument(
        "identity",
        type=asking.identity,
        metavar="TRACE_ID",
        help="a trace id, an invocation id, or the first 8 or more digits of one",
    )


def show(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit show`."""
    from otel_limits.audit import questions

    return questions.show(inquiry, options.identity)


def _add_reconcile(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prometheus", required=True, metavar="URL", help="such as http://localhost:9090"
    )
    parser.add_argument(
        "--since", type=asking.moment, metavar="TIME", help="begin of the window (default: 1d)"
    )
    parser.add_argument("--until", type=asking.moment, metavar="TIME", help="its end; now if unset")
    parser.add_argument(
        "--tolerance",
        type=asking.share,
        default=0.01,
        metavar="SHARE",
        help="difference that is still accepted, as a share of the ledger (default: 1%%)",
    )


def reconcile(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit reconcile`."""
    from otel_limits.audit import reconcile as question

    return question.reconcile(inquiry, options.prometheus, options.tolerance)


def _add_backtest(parser: ArgumentParser) -> None:
    _add_selection(parser)
    _add_agent(parser)
    limits = parser.add_argument_group("limits to try")
    for name in ("iterations", "turns", "token-budget", "input-tokens", "output-tokens"):
        limits.add_argument(f"--max-{name}", type=asking.cap, metavar="N")
    limits.add_argument("--max-cost-usd", type=asking.usd, metavar="USD")


def _add_agent(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--agent",
        dest="where",
        type=lambda text: ("agent", text),
        action="append",
        metavar="GLOB",
        help="the same as --where agent=GLOB",
    )


def backtest(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit backtest`."""
    from otel_limits.audit import questions
    from otel_limits.audit.backtest import Caps

    caps = Caps(
        max_iterations=options.max_iterations,
        max_turns=options.max_turns,
        max_token_budget=options.max_token_budget,
        max_input_tokens=options.max_input_tokens,
        max_output_tokens=options.max_output_tokens,
        max_cost_usd=options.max_cost_usd,
    )
    if not caps.totals:
        raise LedgerError("There is no limit to try. Give one, such as --max-turns 20.")
    return questions.test_limits(inquiry, caps, with_charts=options.format == "html")


def _add_suggest(parser: ArgumentParser) -> None:
    _add_selection(parser)
    _add_agent(parser)
    parser.add_argument(
        "--percentile",
        type=asking.share,
        default=0.99,
        metavar="SHARE",
        help="share of the successful invocations to keep (default: 99%%)",
    )
    parser.add_argument(
        "--head-room",
        type=asking.share,
        default=0.2,
        metavar="SHARE",
        help="added on top (default: 20%%)",
    )
    parser.add_argument(
        "--enough",
        type=asking.cap,
        default=20,
        metavar="N",
        help="successful invocations without which an agent gets no suggestion (default: 20)",
    )


def suggest(options: Namespace, inquiry: Inquiry) -> Answer:
    """Answer `audit suggest`."""
    from otel_limits.audit import questions

    return questions.suggest_limits(
        inquiry, share=options.percentile, head_room=options.head_room, enough=options.enough
    )


def grants(options: Namespace, inquiry: Inquiry) -> Answer:  # noqa: ARG001  as all questions
    """Answer `audit grants`."""
    from otel_limits.audit import questions

    return questions.grants(inquiry)


# --- the ledger itself ----------------------------------------------------------------------------


def _add_prune(commands: Any) -> None:
    parser = _command(commands, "prune", "Delete what ended long ago.", prune)
    parser.add_argument(
        "--older-than", type=asking.duration, required=True, metavar="AGE", help="such as 90d"
    )


def prune(options: Namespace) -> int:
    """Delete invocations that ended long ago, with everything that belongs to them."""
    from datetime import datetime, timezone

    from otel_limits.cli.progress import working
    from otel_limits.ledger.retention import prune as delete_older

    before = asking.to_microseconds(datetime.now(timezone.utc) - options.older_than)
    try:
        with _opened(options) as database, working("Pruning") as work:
            gone = sum(work.through(delete_older(database, before)))
    except LedgerError as error:
        return _refuse(str(error))
    sys.stdout.write(f"{gone:,} invocations deleted from {database.address}.\n")
    return 0


def _add_export(commands: Any) -> None:
    parser = _command(commands, "export", "Write the ledger to a file.", export)
    _add_selection(parser)
    parser.add_argument("--format", choices=("parquet", "csv", "jsonl"), required=True)
    parser.add_argument(
        "--what",
        choices=("calls", "invocations", "tools"),
        default="calls",
        help="which rows (default: calls)",
    )
    parser.add_argument("--output", metavar="FILE", help="standard output if unset")


def export(options: Namespace) -> int:
    """Write rows to a file."""
    from otel_limits.ledger.export import Export, write

    if options.format == "parquet" and options.output is None:
        return _refuse("parquet needs a file. Name one with --output.")
    try:
        with _inquiring(options) as inquiry:
            inquiry.require_known(name for name, _ in inquiry.selection.where)
            chosen = Export(options.what, options.format, options.output)
            write(inquiry.connection, inquiry.selection, chosen, inquiry.work)
    except LedgerError as error:
        return _refuse(str(error))
    return 0


def _add_import(commands: Any) -> None:
    text = "Import spans from OTLP JSON lines, as the collector's file exporter writes them."
    parser = _command(commands, "import", text, import_spans)
    parser.add_argument("files", nargs="+", metavar="FILE")


def import_spans(options: Namespace) -> int:
    """Import spans; what is recorded already is not counted again."""
    from otel_limits.cli.progress import working
    from otel_limits.core.pricing import Prices
    from otel_limits.ledger.imports import import_files
    from otel_limits.settings.policy import PolicyFile

    settings = config.read().settings
    listed = PolicyFile(settings.policy_path).document.prices
    prices = Prices({glob: entry.value for glob, entry in listed.items()})
    try:
        with _opened(options, create=True) as database, working("Importing") as work:
            done = import_files(database, options.files, settings.audit_keys, prices, work)
    except (LedgerError, OSError) as error:
        return _refuse(str(error))
    sys.stdout.write(f"{done}\n")
    return 0


# --- opening --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(options: Namespace, *, create: bool = False) -> Iterator[Database]:
    """Open the ledger that is asked for, and take back what waits in spill files.

    Raises:
        LedgerError: There is none, or it cannot be read.
    """
    from otel_limits.ledger.database import Database, DatabaseError
    from otel_limits.ledger.spill import SpillFiles
    from otel_limits.ledger.writer import reason_of, taking_back

    address = _address(options.ledger)
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


def _address(text: str | None) -> Address:
    """Find the ledger: the option, the environment, or the user's data directory."""
    try:
        return config.audited_ledger(text)
    except ValueError as error:
        raise LedgerError(str(error)) from None


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"otel-limits: {sentence}\n")
    return USAGE_ERROR
