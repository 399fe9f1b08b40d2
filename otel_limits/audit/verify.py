"""The question `verify`: whether the ledger is complete, with evidence."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, Column, Table, written
from otel_limits.audit.completeness import completeness, pruned_us
from otel_limits.audit.findings import (
    AGENT,
    DIFFERS,
    GAP,
    KINDS,
    MAX_EXAMPLES,
    METRICS,
    TOOLS,
    TWICE,
    Findings,
    add_differences,
    command_on,
    find_all,
)
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.reconcile import AUTHORIZATION_FILE, reconcile
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import MICROSECONDS

if TYPE_CHECKING:
    from otel_limits.core.secrets import Secret
    from otel_limits.ledger.closing import Close, Difference
    from otel_limits.ledger.maintenance import Damage
    from otel_limits.ledger.proof import Balance


# --- the question ---------------------------------------------------------------------------------

OK: Final = "ok"
WAITING: Final = "waiting"
FAILED: Final = "FAILED"
NOT_COMPARED: Final = "not compared"
"""The state of rows of which each given close was edited."""

TOLERANCE: Final = 0.01
INTEGRITY: Final = "Every row of the database is readable"


class Check(NamedTuple):
    """One line of the first table."""

    title: str
    found: int
    state: str
    why: str = ""
    command: str = ""
    """Looks at what was found, or mends it."""


COMMAND: Final = Column("command", "Command", "command", is_key=True)

CHECKS: Final = (
    Column("check", "Check", "sentence", is_key=True),
    Column("found", "Affected", "count", is_key=True),
    Column("state", "State", is_key=True),
    Column("why", "Details", "sentence", is_key=True),
    COMMAND,
)

TROUBLES: Final = (
    Column("trouble", "Problem", "sentence", is_key=True),
    Column("invocation_id", "Invocation", "id", is_key=True),
    Column("rows", "Details", "sentence", is_key=True),
    COMMAND,
)


def verify(
    inquiry: AuditQuery,
    stale: timedelta,
    against: Sequence[Path] | None,
    prometheus: str | None,
    authorization_file: Secret | None = None,
) -> Answer:
    """Answer whether the ledger is complete.

    Raises:
        LedgerError: Prometheus cannot be queried, or a close cannot be read.
    """
    from otel_limits.ledger import proof

    findings = Findings(inquiry)
    errors = proof.damage(inquiry.connection)
    closes = None
    if against and not errors:
        closes = Closes(inquiry, against)
        errors = closes.errors
    if errors:
        # Nothing else is worth comparing, and PostgreSQL answers no more in this transaction.
        integrity = _integrity(inquiry, errors)
        return _answer(inquiry, [integrity], findings, f"NOT complete: {integrity.why}")
    calls, suspects = proof.scan_totals(inquiry.connection)
    balance = proof.balance(inquiry.connection, calls)
    find_all(inquiry, balance, suspects, findings)
    oldest = (time.time() - stale.total_seconds()) * MICROSECONDS
    checks = [
        _integrity(inquiry, errors),
        _totals(inquiry, balance, findings),
        _found(GAP, findings, "Calls of finished invocations are numbered without gaps"),
        _found(TWICE, findings, "No call is counted twice or dropped"),
        _found(TOOLS, findings, "Every tool call of a finished invocation exists"),
        _found(AGENT, findings, "Every call has the agent of its invocation"),
        *_waiting(inquiry, oldest),
        *_damaged(inquiry),
        _open(inquiry, balance, oldest),
        *_unknown(inquiry, balance),
    ]
    if closes is not None:
        checks += _closed(inquiry, closes)
    if prometheus is not None:
        # Last, as it queries a server: the ledger's own problems are reported even if that is
        # unavailable.
        about = add_differences(
            reconcile(inquiry, prometheus, TOLERANCE, authorization_file), prometheus, findings
        )
        checks.append(_found(METRICS, findings, about))
    failed = [check.title for check in checks if check.state == FAILED]
    proven = "" if closes is None else closes.proven
    last = completeness(inquiry, balance, failed, proven)
    answer = _answer(inquiry, checks, findings, last, closes)
    return replace(answer, pruned_us=pruned_us(inquiry))


def _answer(
    inquiry: AuditQuery,
    checks: list[Check],
    findings: Findings,
    last: str,
    closes: Closes | None = None,
) -> Answer:
    tables = [_checks_table(checks), _troubles_table(findings)]
    # One table, so with each finding as a further row.
    found = [Check(each[0], 1, FAILED, f"{each[1]}: {each[2]}", each[3]) for each in tables[1].rows]
    differing = [] if closes is None else list(_differing(closes))
    # Status, verdict and last line have the same source.
    passed = all(check.state != FAILED for check in checks)
    return Answer(
        question="verify",
        title="Ledger verification",
        about=inquiry.about,
        tables=tables if closes is None else [*tables, closes.table()],
        csv=_checks_table([*checks, *found, *differing]),
        status=int(not passed),
        passed=passed,
        complete=last,
    )


# --- closes kept elsewhere ------------------------------------------------------------------------

CLOSED_DAYS: Final = (
    Column("close", "Close", is_key=True),
    Column("day", "Day", "date", is_key=True),
    Column("table", "Table", is_key=True),
    Column("difference", "Difference", is_key=True),
    Column("rows", "Rows", "count", is_key=True),
    Column("command", "Command", "command", is_key=True),
)

UNCHANGED: Final = "Closed rows are unchanged"
CHAIN: Final = "Each close follows the one before it"
ORIGINAL: Final = "Each close is as it was written"
EDITED: Final = "differs from its digest"
DAMAGED: Final = "is damaged, or not a close,"
LACKS_FORM: Final = "is not a close, although its digest is right,"


def _damage_of(close: Close) -> str:
    """Describe why a file cannot be compared."""
    if close.is_original:
        return LACKS_FORM
    return EDITED if close.is_close else DAMAGED


LOOKS: Final = {
    "calls": "audit spend --by agent,model --where day={} --time-zone UTC",
    "invocations": "audit stops --where day={} --time-zone UTC",
    "attributes": "ledger export --format csv --where day={}",
    "uncounted": "ledger export --format csv --what uncounted --where day={}",
    "tools": "audit spend --by tool --where day={} --time-zone UTC",
    "grants": "audit grants --since {} --time-zone UTC",
    "maintenance": "audit verify",
    "sums": "audit spend --by agent,model --where day={} --time-zone UTC",
}
"""Commands that show what a table has of a day. Days are closed in UTC."""


class Closes:
    """The differences between a ledger and some closes."""

    def __init__(self, inquiry: AuditQuery, files: Sequence[Path]) -> None:
        """Compare.

        Raises:
            LedgerError: A file cannot be read.
        """
        # Here, as most commands of `otel-limits` need no database.
        import sqlite3

        from otel_limits.ledger.closing import broken_links, compare, read_close
        from otel_limits.ledger.database import DatabaseError, reason_of

        closes = [read_close(path) for path in files]
        self.files = files
        self.names = [close.path.name for close in closes if close.is_comparable]
        self.broken = broken_links(closes)
        self.edited = [
            f"{close.path} {_damage_of(close)} and was not compared"
            for close in closes
            if not close.is_comparable
        ]
        self._inquiry = inquiry
        self._days = {day for each in closes if each.is_comparable for day in each.document["days"]}
        self._found: list[tuple[str, Difference]] = []
        self.errors: list[str] = []
        """Why rows cannot be compared: SQLite stores values of any type."""
        try:
            for close in (each for each in closes if each.is_comparable):
                differences = compare(inquiry.connection, close)
                self._found += [(close.path.name, each) for each in differences]
        except (DatabaseError, sqlite3.Error) as error:
            self.errors.append(reason_of(error))

    @property
    def failures(self) -> int:
        """Days and tables with rows that are missing or changed."""
        from otel_limits.ledger.closing import FAILING

        return sum(bool({*FAILING} & {*each.counts}) for _, each in self._found)

    @property
    def details(self) -> str:
        """Summarize the differences in one line."""
        days = Counter(kind for _, difference in self._found for kind in difference.counts)
        counts = ", ".join(f"{kind} on {number}" for kind, number in sorted(days.items()))
        return f"{counts} (days and tables)" if counts else ", ".join(self.names)

    @property
    def proven(self) -> str:
        """Describe which days, if any, are as they were closed, provided that no check failed."""
        from otel_limits.ledger.closing import GONE

        if not self._days:
            return ""
        pruned = {difference.day for _, difference in self._found if GONE in difference.counts}
        days = f"{pluralize(len(self._days), 'closed day')} as in {', '.join(self.names)}"
        gone = f", but {len(pruned):,} were pruned and not verified" if pruned else ""
        return f"{days}{gone}, other days not compared"

    def table(self) -> Table:
        """Build a table with a row per close, day, table and kind of difference."""
        return Table(
            name="closed_days",
            title="Differences from the closes",
            columns=CLOSED_DAYS,
            rows=[row for name, each in self._found for row in self._rows(name, each)],
            note="Missing and changed rows fail. Retention prunes, reprice changes prices, and "
            "imports or spill files of other hosts add rows late.",
        )

    def _rows(self, name: str, difference: Difference) -> Iterator[tuple[str | int | None, ...]]:
        day = difference.day
        command = command_on(self._inquiry, LOOKS[difference.table].format(day))
        for kind, rows in difference.counts.items():
            yield (name, day, difference.table, kind, rows or None, command)


# --- checks ---------------------------------------------------------------------------------------


def _integrity(inquiry: AuditQuery, errors: Sequence[str]) -> Check:
    from otel_limits.ledger.proof import has_checksums

    file = inquiry.address.file
    if errors:
        check = f"pg_amcheck --install-missing --heapallindexed {shlex.quote(inquiry.address.name)}"
        command = check if file is None else inquiry.address.recovery
        return Check(INTEGRITY, len(errors), FAILED, "; ".join(errors), command)
    why = "without checksums, a changed value is not recognized"
    return Check(INTEGRITY, 0, OK, "" if has_checksums(inquiry.connection) else why)


def _totals(inquiry: AuditQuery, balance: Balance, findings: Findings) -> Check:
    differing = findings.found[DIFFERS]
    is_even = balance.is_balanced and not differing
    calls, tokens = pluralize(balance.calls.calls, "call"), pluralize(balance.calls.tokens, "token")
    sums = f"{calls}, {tokens} on both sides"
    look = findings.command_for(DIFFERS) or command_on(inquiry, "audit stops")
    return Check(
        "Invocation totals match the sums of their calls",
        differing or int(not is_even),
        OK if is_even else FAILED,
        sums if is_even else "they differ",
        "" if is_even else look,
    )


def _found(kind: str, findings: Findings, title: str) -> Check:
    found = findings.found[kind]
    return Check(title, found, FAILED if found else OK, "", findings.command_for(kind))


def _waiting(inquiry: AuditQuery, oldest: float) -> Iterator[Check]:
    from otel_limits.ledger.spill import find_orphans

    waiting = inquiry.waiting
    # By the oldest row: new ones are added to files all the time.
    is_stale = waiting.rows > 0 and (waiting.oldest_us or oldest) < oldest
    why = f"not included ({waiting.reason}): {waiting.places}" if waiting.rows else ""
    adopt = "".join(f"ledger adopt {shlex.quote(str(path))}" for path in waiting.files[:1])
    adopt = command_on(inquiry, adopt, "--into")
    # Not a failure yet: a process that may write takes them in.
    state = FAILED if is_stale else WAITING if waiting.rows else OK
    yield Check(
        "Rows pending in spill files", waiting.rows, state, why, adopt if waiting.rows else ""
    )
    if waiting.damaged:
        yield Check("Damaged lines in spill files", waiting.damaged, FAILED, waiting.places, adopt)
    if waiting.unreadable:
        why = f"unreadable for this user: {waiting.unreadable_places}"
        written = [path.stat().st_mtime for path in waiting.unreadable if path.exists()]
        is_stale = any(each * MICROSECONDS < oldest for each in written)
        state = FAILED if is_stale else WAITING
        yield Check("Spill files of other users", len(waiting.unreadable), state, why)
    left = find_orphans(inquiry.address)
    is_stale = any(each.written * MICROSECONDS < oldest for each in left)
    state = FAILED if is_stale else WAITING if left else OK
    why = "; ".join(f"{each.path} of {each.owner}" for each in left[:MAX_EXAMPLES])
    commands = (
        command_on(inquiry, f"ledger adopt {shlex.quote(str(each.path))}", "--into")
        for each in left[:MAX_EXAMPLES]
    )
    yield Check("Spill files without a ledger", len(left), state, why, "; ".join(commands))


def _damaged(inquiry: AuditQuery) -> Iterator[Check]:
    from otel_limits.ledger.maintenance import damages

    found = damages(inquiry.connection)
    lost = Counter[str]()
    for each in found:
        lost[each.file] += each.lines if each.accepted is None else 0
    # A file may have been restored several times, and all its losses are accepted together.
    lost = +lost
    commands = [
        command_on(inquiry, f"ledger accept {shlex.quote(file)} --reason REASON")
        for file in [*lost][:MAX_EXAMPLES]
    ]
    yield Check(
        "Lost lines of restored spill files",
        lost.total(),
        FAILED if lost else OK,
        "; ".join(f"{pluralize(lines, 'line')} of {file}" for file, lines in lost.items()),
        "; ".join(commands),
    )
    accepted = [each for each in found if each.accepted is not None]
    if accepted:
        yield Check(
            "Accepted losses of spill files",
            sum(each.lines for each in accepted),
            OK,
            "; ".join(_acceptance(each) for each in accepted),
        )


def _acceptance(damage: Damage) -> str:
    by = damage.accepted
    when = f"by {by.changed_by} at {written(by.at_us, 'time')}"
    return f"{pluralize(damage.lines, 'line')} of {damage.file}, {when}: {by.reason}"


def _open(inquiry: AuditQuery, balance: Balance, oldest: float) -> Check:
    # By the oldest: running agents have no end yet, and killed ones never will.
    is_stale = balance.oldest_open_us is not None and balance.oldest_open_us < oldest
    state = FAILED if is_stale else WAITING if balance.open_invocations else OK
    why = (
        f"started longer ago than --stale, with {pluralize(balance.open.tokens, 'token')}"
        if is_stale
        else ""
    )
    command = command_on(inquiry, "ledger end-lost --older-than 1d") if state != OK else ""
    return Check("Invocations without an end", balance.open_invocations, state, why, command)


def _unknown(inquiry: AuditQuery, balance: Balance) -> Iterator[Check]:
    from otel_limits.ledger.queries import uncounted_sums

    calls, tokens = balance.calls.calls, balance.calls.tokens
    unknown = {"Estimated": balance.estimated_calls, "Unmeasured": balance.unmeasured_calls}
    for word, found in unknown.items():
        share = f"{found / calls:.1%} of all" if calls else ""
        command = command_on(inquiry, "audit unmeasured") if found else ""
        # Never a failure: the provider reported nothing.
        yield Check(f"{word} calls", found, OK, share, command)
    found = balance.unpriced_tokens
    share = f"{found / tokens:.1%} of all" if tokens else ""
    look = "ledger reprice --dry-run"
    yield Check("Unpriced tokens", found, OK, share, command_on(inquiry, look) if found else "")
    found, tokens = uncounted_sums(inquiry.connection, inquiry.selection)
    share, look = pluralize(tokens, "token"), "ledger export --format csv --what uncounted"
    said = (share, command_on(inquiry, look)) if found else ("", "")
    yield Check("Imported spans that are not counted", found, OK, *said)


def _closed(inquiry: AuditQuery, closes: Closes) -> Iterator[Check]:
    state = FAILED if closes.failures else OK if closes.names else NOT_COMPARED
    command = command_on(inquiry, "ledger export --format csv") if closes.failures else ""
    yield Check(UNCHANGED, closes.failures, state, closes.details, command)
    for title, problems in ((ORIGINAL, closes.edited), (CHAIN, closes.broken)):
        state = FAILED if problems else OK
        command = shlex.join(["sha256sum", *map(str, closes.files)]) if problems else ""
        yield Check(title, len(problems), state, "; ".join(problems), command)


def _differing(closes: Closes) -> Iterator[Check]:
    """Return each difference from a close as a line."""
    from otel_limits.ledger.closing import FAILING

    for close, day, table, kind, rows, command in closes.table().rows:
        state = FAILED if kind in FAILING else OK
        yield Check(UNCHANGED, rows or 0, state, f"{close}: {table} of {day} {kind}", command)


def _checks_table(checks: list[Check]) -> Table:
    return Table(
        name="verify",
        title="Checks",
        columns=CHECKS,
        rows=checks,
        note="Pending rows and unfinished invocations only fail if older than --stale.",
    )


def _troubles_table(findings: Findings) -> Table:
    named = [each for kind in KINDS for each in findings.named[kind]]
    # Counted, so that fixing the listed ones does not look complete.
    left_out = sum(findings.found.values()) - len(named)
    return Table(
        name="rows",
        title="Inconsistent rows",
        columns=TROUBLES,
        rows=named,
        note=f"{left_out:,} more not shown." if left_out else "",
    )


# --- the definition -------------------------------------------------------------------------------

VERIFY: Final = Question(
    name="verify",
    help="Verify that the ledger is complete (exit status 1 if not).",
    answer=verify,
    tables={"verify": CHECKS, "rows": TROUBLES, "closed_days": CLOSED_DAYS},
    optional=frozenset({"closed_days"}),
    has_verdict=True,
    options=(
        Option(
            "--stale",
            "AGE",
            parsing.duration,
            "age after which pending rows and unfinished invocations count as errors (default: 1h)",
            default=timedelta(hours=1),
        ),
        Option(
            "--against",
            "FILE",
            lambda text: [Path(text)],
            "compare with a close that was kept elsewhere; may be repeated",
            is_repeated=True,
        ),
        Option(
            "--prometheus", "URL", str, "also compare with this server's counters for the last day"
        ),
        AUTHORIZATION_FILE,
    ),
    selection=(),
)
