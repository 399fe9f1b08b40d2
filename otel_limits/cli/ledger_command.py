"""The command `ledger`: import, export, close, reprice and amend the spend ledger."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.completeness import pruned_clause
from otel_limits.audit.question import SELECTION
from otel_limits.cli.command import add_group, file_name
from otel_limits.cli.ledger_options import (
    add_ledger_command,
    add_option,
    errors_of,
    open_ledger,
    open_query,
    selection_of,
    with_exact_sums,
)
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.core.secrets import quote_value, redact_url
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import MICROSECONDS
from otel_limits.settings.policy.file import valid_document
from otel_limits.settings.settings_reader import settings_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_limits.audit.question import AuditQuery
    from otel_limits.core.price_lookup import Prices
    from otel_limits.ledger.closing import Period
    from otel_limits.ledger.focus import Cause
    from otel_limits.ledger.repricing import Repriced


# --- ledger: prune, export, import, adopt, merge --------------------------------------------------

HELP: Final = """\
Maintain the ledger: prune, export, import, reprice, merge.

Set the ledger with --ledger or OTEL_LIMITS_LEDGER. The default is the ledger of otel-limits run in
your data directory.
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
    add_reprice(group)
    text = "Import a spill file whose ledger was moved or deleted."
    parser = add_ledger_command(group, "adopt", text, adopt, option="--into")
    parser.add_argument("file", type=file_name, metavar="FILE", help="the spill file")
    text = "Copy the rows of other ledgers into a ledger, e.g. to move it to PostgreSQL."
    parser = add_ledger_command(group, "merge", text, merge, option="--into")
    parser.add_argument(
        "others", nargs="+", metavar="OTHER", help="a path, sqlite:///PATH or postgresql://…"
    )
    add_close(group)
    add_amendments(group)


def prune(arguments: Namespace) -> int:
    """Delete old invocations, with everything that belongs to them."""
    from otel_limits.ledger import maintenance

    # Computed once, so that all portions use the same cutoff. As integers: dates do not reach
    # before the year 1.
    age = arguments.older_than // timedelta(microseconds=1)
    before = round(time.time() * MICROSECONDS) - age
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
        replaces = replaces_file(arguments.output)
        written = write(inquiry.connection, inquiry.selection, chosen, inquiry.work)
        _report_pruned_rows(inquiry)
    report_export(written, arguments.output, replaces=replaces)
    return 0


def _report_pruned_rows(inquiry: AuditQuery) -> None:
    """Say on stderr which rows of an exported period were pruned."""
    if clause := pruned_clause(inquiry):
        sys.stderr.write(f"otel-limits: {clause}, and are not exported.\n")


def replaces_file(output: str | None) -> bool:
    """Return whether an export replaces the content of a file, which no pipe or device keeps."""
    return output is not None and Path(output).is_file()


def report_export(rows: int, output: str | None, *, replaces: bool) -> None:
    """Print on stderr what was written to a file."""
    if output is not None:
        before = ", replacing its content" if replaces else ""
        sys.stderr.write(f"Wrote {pluralize(rows, 'row')} to {output}{before}.\n")


def export_focus(arguments: Namespace) -> int:
    """Write charges as FOCUS; calls that are left out or not divided are counted on stderr."""
    from otel_limits.core.price_lookup import Prices
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
        replaces = replaces_file(arguments.output)
        written = write_rows(focus.FIELDS, portions(rows, PORTION), chosen)
        _report_pruned_rows(inquiry)
    report_export(written, arguments.output, replaces=replaces)
    if found.unpriced:
        sys.stderr.write(
            f"{pluralize(found.unpriced, 'call')} without a price left out. To price them, run: "
            "otel-limits ledger reprice\n"
        )
    for cause, number in sorted(found.undivided.items()):
        calls = pluralize(number, "call")
        sys.stderr.write(f"{calls} with the meter {focus.UNDIVIDED}: {UNDIVIDED_CAUSES[cause]}\n")
    return 0


UNDIVIDED_CAUSES: Final[Mapping[Cause, str]] = {
    "policy": "priced by a policy file, at other prices than the current ones. To divide them, set "
    "OTEL_LIMITS_POLICY to that file. To replace them, run: otel-limits ledger reprice --all "
    "--policy FILE",
    "changed": "recorded at other prices than the current ones. To use current prices, run: "
    "otel-limits ledger reprice --all",
    "unlisted": "their models have no current price. To divide their cost, set OTEL_LIMITS_POLICY "
    "to a policy file with the prices.",
    "stated": "the response stated their cost, without rates.",
}


def import_spans(arguments: Namespace) -> int:
    """Import spans; recorded calls are not counted again."""
    from otel_limits.core.price_lookup import Prices
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
    from otel_limits.ledger.rows import INVOCATIONS, MODEL_CALLS, RECORDED_LIVE, TOOL_CALLS

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
            known = new[RECORDED_LIVE]
            one, more = "imported model call was", "imported model calls were"
            rest = f" {pluralize(known, one, more)} already recorded live." if known else ""
            sys.stdout.write(
                f"{inquiry.ledger}: {', '.join(counts)} new in {database.address}.{rest}\n"
            )
    return 0


# --- ledger reprice -------------------------------------------------------------------------------

REPRICE_TEXT = "Price unpriced calls with the policy file and the current price list."


def add_reprice(group: Any) -> None:
    """Add `reprice` to the commands of `ledger`."""
    parser = add_ledger_command(group, "reprice", REPRICE_TEXT, reprice)
    for option in SELECTION:
        add_option(parser, option)
    parser.add_argument(
        "--policy",
        type=file_name,
        metavar="FILE",
        help="policy file with prices (default: OTEL_LIMITS_POLICY)",
    )
    parser.add_argument("--all", action="store_true", help="include calls that have a price")
    parser.add_argument("--dry-run", action="store_true", help="only show what would change")


def reprice(arguments: Namespace) -> int:
    """Reprice calls, and print what changed."""
    from otel_limits.ledger.repricing import reprice as price_again

    prices = _present_prices(arguments.policy)
    chosen = selection_of(arguments)
    with open_ledger(arguments) as database, working("Pricing") as work:
        done = price_again(
            database, prices, chosen, work, every=arguments.all, writes=not arguments.dry_run
        )
    sys.stdout.write(_account_of(done, is_dry=arguments.dry_run, is_all=arguments.all))
    return 0


def _present_prices(policy: str | None) -> Prices:
    """Read the current prices.

    Raises:
        ConfigurationError: The policy file contains mistakes.
        LedgerError: There are no prices.
    """
    from otel_limits.core.price_lookup import Prices, missing_prices

    prices = Prices(valid_document(policy).price_list())
    if not prices.available:
        raise LedgerError(f"Pricing {missing_prices()}")
    return prices


def _account_of(done: Repriced, *, is_dry: bool, is_all: bool) -> str:
    """Describe the changes by model."""
    from otel_limits.audit.answer import money

    verbs = ("would be", "would be") if is_dry else ("was", "were")
    seen = pluralize(done.seen, f"model call {verbs[0]}", f"model calls {verbs[1]}")
    lines = [f"{done.changed:,} of {seen} repriced."]
    for model, change in sorted(done.by_model.items()):
        lines.append(
            f"{model}: {pluralize(change.calls, 'call')}, {change.was_unpriced:,} without a price; "
            f"{money(change.former)} before, {money(change.now)} now."
        )
    if not done.changed:
        lines += _unchanged(done, is_all=is_all)
    if done.kept:
        kept = pluralize(
            done.kept.total(), "model call keeps its price", "model calls keep their prices"
        )
        models = "; ".join(f"{each} ({done.reasons[each]})" for each in sorted(done.kept))
        lines.append(f"{kept}, as they have no current price: {models}. {USE_POLICY}")
    if done.still_unpriced:
        calls = done.still_unpriced.total()
        still = pluralize(calls, "model call still has", "model calls still have")
        models = "; ".join(f"{each} ({done.reasons[each]})" for each in sorted(done.still_unpriced))
        lines.append(f"{still} no price: {models}.")
        lines.append(
            "Set their prices in USD per million tokens in the policy file, and run this again "
            "with --policy: models: {NAME: {price: {input: 1, output: 2}}}"
        )
    return "".join(f"{line}\n" for line in lines)


USE_POLICY: Final = (
    "If they were priced by a policy file, name it with --policy or OTEL_LIMITS_POLICY."
)


def _unchanged(done: Repriced, *, is_all: bool) -> Iterator[str]:
    """Say why no price changed, except for calls without a current price."""
    same = done.seen - done.still_unpriced.total() - done.kept.total()
    if not done.seen:
        yield (
            "No selected call has tokens."
            if is_all
            else "No selected call lacks a price. To replace prices, add --all."
        )
    elif same:
        yield f"{pluralize(same, 'model call has', 'model calls have')} the current price already."


# --- ledger close ---------------------------------------------------------------------------------

DAY = timedelta(days=1)

CLOSE_TEXT = """\
Write digests of past days, to prove later that their rows are unchanged.

Keep the output where the owner of the ledger cannot write. Compare with it: otel-limits audit
verify --against FILE.
"""


def add_close(group: Any) -> None:
    """Add `close` to the commands of `ledger`."""
    parser = add_ledger_command(group, "close", CLOSE_TEXT, write_close)
    period = parser.add_mutually_exclusive_group(required=True)
    period.add_argument("--month", type=_month, metavar="MONTH", help="UTC month, e.g. 2026-10")
    period.add_argument(
        "--until",
        # Not in the time zone of queries.
        dest="until_day",
        type=_day,
        metavar="DAY",
        help="end (exclusive), e.g. 2026-11-01; starts at the end of --after, otherwise at the "
        "first row",
    )
    parser.add_argument(
        "--after", type=file_name, metavar="FILE", help="previous close, whose digest is included"
    )
    parser.add_argument(
        "--with-open",
        action="store_true",
        help="close without rows in spill files and unfinished invocations, which are listed",
    )
    parser.add_argument(
        "--tenant-key",
        metavar="KEY",
        default="tenant.id",
        help="audit key by which sums are grouped (default: tenant.id)",
    )
    parser.set_defaults(format="json")


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"must be like 2026-11-01, got {quote_value(text)}") from None


def _month(text: str) -> tuple[date, date]:
    try:
        begin = date.fromisoformat(f"{text}-01")
    except ValueError:
        raise ArgumentTypeError(f"must be like 2026-10, got {quote_value(text)}") from None
    return begin, date(begin.year + begin.month // 12, begin.month % 12 + 1, 1)


def write_close(arguments: Namespace) -> int:
    """Write a close to standard output."""
    from otel_limits.ledger.closing import as_text, close

    period, after = _period(arguments)
    with open_query(arguments) as inquiry:
        if not arguments.with_open:
            _require_finished(inquiry, period)
        pending = inquiry.waiting.rows
        document = with_exact_sums(
            inquiry,
            lambda: close(inquiry.connection, period, arguments.tenant_key, after, pending),
        )
    sys.stdout.write(as_text(document))
    if not document["days"]:
        begin = "" if period.since is None else f" from {period.since}"
        sys.stderr.write(
            f"The close has no day: the ledger has no rows{begin} before {period.until}. It "
            "proves nothing about rows.\n"
        )
    return 0


def _period(arguments: Namespace) -> tuple[Period, str | None]:
    """Return the days, and the digest of the previous close.

    Raises:
        LedgerError: They are not over, or do not follow the previous close.
    """
    from otel_limits.ledger.closing import Period, read_close

    since, until = arguments.month or (None, arguments.until_day)
    today = datetime.fromtimestamp(time.time(), timezone.utc).date()
    if until > today:
        words = ["--until", str(today)]
        words += ["--after", arguments.after] if arguments.after else []
        words += ["--ledger", redact_url(arguments.ledger)] if arguments.ledger else []
        raise LedgerError(
            f"Days can be closed when they are over, and {until - DAY} is not. Close those before "
            f"{today}: otel-limits ledger close {shlex.join(words)}"
        )
    after = None
    if arguments.after is not None:
        previous = read_close(Path(arguments.after))
        if not previous.is_close:
            raise LedgerError(
                f"{arguments.after} is not a close. otel-limits ledger close writes one."
            )
        after, end = previous.sha256, previous.period.until
        if since not in (None, end):
            raise LedgerError(
                f"{arguments.after} ends before {end}, but the month begins on {since}. Close the "
                f"days between them, or start at its end: --until {until}"
            )
        since = end
    if since is not None and since >= until:
        raise LedgerError(f"--until must be later than {since}, got {until}.")
    return Period(since=since, until=until), after


def _require_finished(inquiry: AuditQuery, period: Period) -> None:
    """Check that no row of these days is missing as far as this host can see.

    Raises:
        LedgerError: Rows wait, or invocations are open.
    """
    from otel_limits.ledger.closing import unfinished

    _, until_us = period.microseconds(inquiry.connection)
    waiting = inquiry.waiting
    opened, _ = unfinished(inquiry.connection, until_us)
    problems = []
    if waiting.unreadable or (waiting.rows and (waiting.oldest_us or 0) < until_us):
        problems.append(str(waiting))
    if opened:
        problems.append(pluralize(len(opened), "invocation has no end", "invocations have no end"))
    if problems:
        raise LedgerError(
            f"Not closed: {'; '.join(problems)}. otel-limits audit verify lists what to do; "
            "--with-open closes anyway."
        )


# --- ledger accept, ledger end-lost ---------------------------------------------------------------


def add_amendments(group: Any) -> None:
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
    before = round(time.time() * MICROSECONDS) - age
    with open_ledger(arguments) as database, working("Ending") as work:
        ended = sum(work.through(maintenance.end_lost(database, before)))
        sys.stdout.write(f"{pluralize(ended, 'invocation')} ended as lost in {database.address}.\n")
    return 0
