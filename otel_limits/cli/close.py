"""The command `ledger close`: writes digests of days that are over."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentTypeError
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_limits.cli.command import file_name
from otel_limits.cli.ledger_options import add_ledger_command, open_query, with_exact_sums
from otel_limits.core.errors import LedgerError
from otel_limits.core.secrets import redact_url
from otel_limits.core.wording import pluralize

if TYPE_CHECKING:
    from argparse import Namespace

    from otel_limits.audit.question import AuditQuery
    from otel_limits.ledger.closing import Period

DAY = timedelta(days=1)

TEXT = """\
Write digests of past days, to prove later that their rows are unchanged.

Keep the output where the owner of the ledger cannot write. Compare with it: otel-limits audit
verify --against FILE.
"""


def add(group: Any) -> None:
    """Add `close` to the commands of `ledger`."""
    parser = add_ledger_command(group, "close", TEXT, write_close)
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
        raise ArgumentTypeError(f"must be like 2026-11-01, got {redact_url(text)!r}") from None


def _month(text: str) -> tuple[date, date]:
    try:
        begin = date.fromisoformat(f"{text}-01")
    except ValueError:
        raise ArgumentTypeError(f"must be like 2026-10, got {redact_url(text)!r}") from None
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
    return 0


def _period(arguments: Namespace) -> tuple[Period, str | None]:
    """Return the days, and the digest of the previous close.

    Raises:
        LedgerError: They are not over, or do not follow the previous close.
    """
    from otel_limits.ledger.closing import Period, read_close

    since, until = arguments.month or (None, arguments.until_day)
    today = datetime.now(timezone.utc).date()
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
