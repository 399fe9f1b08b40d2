"""The question `verify`: whether the ledger is complete, with evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.completeness import completeness
from otel_limits.audit.formatting import ranges
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.reconcile import AUTHORIZATION_FILE, reconcile
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import MICROSECONDS, dollars

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from otel_limits.core.secrets import Secret
    from otel_limits.ledger.proof import Balance

OK: Final = "ok"
WAITING: Final = "waiting"
FAILED: Final = "FAILED"

MAX_EXAMPLES: Final = 20
"""Examples per kind of problem."""

Check = tuple[str, int, str, str]
"""Title of the check, number of findings, state, and an explanation."""
Trouble = tuple[str, str, str]
"""Kind of problem, the invocation or file, and details."""

CHECKS: Final = (
    Column("check", "Check", "sentence", is_key=True),
    Column("found", "Found", "count", is_key=True),
    Column("state", "State", is_key=True),
    Column("why", "Details", "sentence", is_key=True),
)

TROUBLES: Final = (
    Column("trouble", "Problem", "sentence", is_key=True),
    Column("invocation_id", "Invocation", "id", is_key=True),
    Column("rows", "Details", "sentence", is_key=True),
)


def verify(
    inquiry: AuditQuery,
    stale: timedelta,
    prometheus: str | None,
    authorization_file: Secret | None = None,
) -> Answer:
    """Answer whether the ledger is complete.

    Raises:
        LedgerError: Prometheus cannot be queried.
    """
    from otel_limits.ledger import proof

    calls, suspects = proof.scan_totals(inquiry.connection)
    balance = proof.balance(inquiry.connection, calls)
    findings = Findings()
    _look(inquiry, balance, suspects, findings)
    oldest = (time.time() - stale.total_seconds()) * MICROSECONDS
    checks = [
        _totals(balance, findings.found[DIFFERS]),
        _found(GAP, findings, "Every call of a finished invocation has its number"),
        _found(TWICE, findings, "No call is counted twice or dropped"),
        *_waiting(inquiry, oldest),
        _open(balance, oldest),
        *_unknown(balance),
    ]
    if prometheus is not None:
        # Last, as it queries a server: the ledger's own problems are reported even if that is
        # unavailable.
        about = _compare(reconcile(inquiry, prometheus, TOLERANCE, authorization_file), findings)
        checks.append(_found(METRICS, findings, about))
    return Answer(
        question="verify",
        title="Ledger verification",
        about=inquiry.about,
        tables=[_checks_table(checks), _troubles_table(findings)],
        status=int(any(check[2] == FAILED for check in checks)),
        complete=completeness(inquiry, balance, sum(findings.found.values())),
    )


TOLERANCE: Final = 0.01
DIFFERS: Final = "totals differ"
GAP: Final = "gap in the numbers"
TWICE: Final = "counted twice"
METRICS: Final = "metrics differ"
KINDS: Final = (DIFFERS, GAP, TWICE, METRICS)


class Findings:
    """Problems by kind, with examples.

    Attributes:
        found: Number of problems, by kind.
        named: The first of them, in full.
    """

    def __init__(self) -> None:
        """Start without problems."""
        self.found: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.named: dict[str, list[Trouble]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, name: str, describe: Callable[..., str], *of: Any) -> None:
        """Count a problem; only the first ones are described in full."""
        self.found[kind] += 1
        # A description queries the ledger again, up to a million times for a damaged one.
        if len(self.named[kind]) < MAX_EXAMPLES:
            self.named[kind].append((kind, name, describe(*of)))


def _look(inquiry: AuditQuery, balance: Balance, suspects: int, findings: Findings) -> None:
    """Find inconsistent rows; `suspects` is the number of inconsistent invocations."""
    from otel_limits.ledger import proof

    connection = inquiry.connection
    # Only if the sums indicate any: listing them reads every call.
    for row in proof.suspects(connection) if suspects else ():
        _suspect(connection, row, findings)
    # Only then: finding invocations without calls reads all of them.
    if findings.found[DIFFERS] or not balance.is_balanced:
        for row in proof.without_calls(connection):
            findings.add(DIFFERS, row.id, _none_there, row.model_calls)
    for row in proof.counted_twice(connection):
        detail = "imported row {} is the same as row {}".format
        findings.add(TWICE, row.invocation_id, detail, row.id, row.live_id)


def _suspect(connection: Connection, row: Any, findings: Findings) -> None:
    """Find the problems of an invocation and its calls."""
    name, is_live = str(row.invocation_id), row.source == "live"
    if row.id is None:
        findings.add(DIFFERS, name, _ownerless, row.calls)
        return
    if is_live and row.numbered != row.calls:
        findings.add(TWICE, name, _doubles, connection, name)
    # An invocation in progress may have gaps and differing sums.
    if row.ended_us is None:
        return
    if is_live and row.last != row.numbered:
        findings.add(GAP, name, _gaps, connection, name)
    totals = (row.model_calls, row.input_tokens, row.output_tokens, row.price_pico)
    expected = [each or 0 for each in totals]
    actual = [row.calls, int(row.input), int(row.output), int(row.pico)]
    # The sum of rounded prices may differ from the rounded sum by one picodollar for each call.
    if actual[:3] != expected[:3] or abs(actual[3] - expected[3]) > row.calls:
        detail = "recorded totals {}; sums of its calls {}".format
        findings.add(DIFFERS, name, detail, _amounts(*expected), _amounts(*actual))


def _none_there(calls: int) -> str:
    return f"0 of {pluralize(calls, 'call')} found"


def _ownerless(calls: int) -> str:
    return f"{pluralize(calls, 'call has', 'calls have')} no invocation"


def _amounts(calls: int, sent: int, received: int, pico: int) -> str:
    tokens = pluralize(sent + received, "token")
    return f"{pluralize(calls, 'call')}, {tokens} ({sent:,} of input), ${dollars(pico)}"


def _doubles(connection: Connection, name: str) -> str:
    from otel_limits.ledger.proof import unnumbered

    found = unnumbered(connection, name)
    rows = ", ".join(map(str, found))
    have = "row {} has" if len(found) == 1 else "rows {} have"
    return f"{have.format(rows)} the number of another call"


def _gaps(connection: Connection, name: str) -> str:
    from otel_limits.ledger.proof import numbers

    return f"existing: {ranges(numbers(connection, name))}"


def _compare(compared: Answer, findings: Findings) -> str:
    """Add differences between ledger and metrics; returns what was compared."""
    detail = "{}: {} in the ledger, {} to {} in Prometheus".format
    figures = 0
    for table in compared.tables:
        names = [column.name for column in table.columns]
        for values in table.rows:
            figures += 1
            row = dict(zip(names, values, strict=True))
            if row["accepted"] == "no":
                of = f"{row['agent']}, {row.get('model', row.get('reason'))}"
                both = (row["ledger"], row["prometheus"], row["prometheus_most"])
                findings.add(METRICS, of, detail, row.get("measure", table.name), *both)
    return f"Prometheus agrees for the last day: {pluralize(figures, 'figure')}"


# --- checks ---------------------------------------------------------------------------------------


def _totals(balance: Balance, differing: int) -> Check:
    is_even = balance.is_balanced and not differing
    calls, tokens = pluralize(balance.calls.calls, "call"), pluralize(balance.calls.tokens, "token")
    sums = f"{calls}, {tokens} on both sides"
    return (
        "Invocation totals match the sums of their calls",
        differing or int(not is_even),
        OK if is_even else FAILED,
        sums if is_even else "they differ",
    )


def _found(kind: str, findings: Findings, title: str) -> Check:
    found = findings.found[kind]
    return (title, found, FAILED if found else OK, "")


def _waiting(inquiry: AuditQuery, oldest: float) -> Iterator[Check]:
    from otel_limits.ledger.spill import find_orphans

    waiting = inquiry.waiting
    # By the oldest row: new ones are added to files all the time.
    is_stale = waiting.rows > 0 and (waiting.oldest_us or oldest) < oldest
    where = ", ".join(str(path) for path in waiting.files[:MAX_EXAMPLES])
    why = f"{waiting.unseen or 'included in answers'}: {where}" if waiting.rows else ""
    # Not a failure yet: a live process restores its rows automatically.
    state = FAILED if is_stale else WAITING if waiting.rows else OK
    yield ("Rows pending in spill files", waiting.rows, state, why)
    if waiting.damaged:
        yield ("Damaged lines in spill files", waiting.damaged, FAILED, where)
    left = find_orphans(inquiry.address)
    is_stale = any(each.written * MICROSECONDS < oldest for each in left)
    state = FAILED if is_stale else WAITING if left else OK
    why = "; ".join(
        f"{each.path} of {each.owner}: otel-limits ledger adopt {each.path} --into LEDGER"
        for each in left[:MAX_EXAMPLES]
    )
    yield ("Spill files without a ledger", len(left), state, why)


def _open(balance: Balance, oldest: float) -> Check:
    # By the oldest: running agents have no end yet, and killed ones never will.
    is_stale = balance.oldest_open_us is not None and balance.oldest_open_us < oldest
    state = FAILED if is_stale else WAITING if balance.open_invocations else OK
    why = (
        f"started longer ago than --stale, with {pluralize(balance.open.tokens, 'token')}"
        if is_stale
        else ""
    )
    return ("Invocations without an end", balance.open_invocations, state, why)


def _unknown(balance: Balance) -> Iterator[Check]:
    calls, tokens = balance.calls.calls, balance.calls.tokens
    share = f"{balance.unmeasured_calls / calls:.1%} of all" if calls else ""
    # Never a failure: the provider reported nothing.
    yield ("Unmeasured calls", balance.unmeasured_calls, OK, share)
    share = f"{balance.unpriced_tokens / tokens:.1%} of all" if tokens else ""
    yield ("Unpriced tokens", balance.unpriced_tokens, OK, share)


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


VERIFY: Final = Question(
    name="verify",
    help="Verify that the ledger is complete (exit status 1 if not).",
    answer=verify,
    tables={"verify": CHECKS, "rows": TROUBLES},
    options=(
        Option(
            "--stale",
            "AGE",
            parsing.duration,
            "age after which pending rows and open invocations count as errors (default: 1h)",
            default=timedelta(hours=1),
        ),
        Option(
            "--prometheus", "URL", str, "also compare with this server's counters for the last day"
        ),
        AUTHORIZATION_FILE,
    ),
    selection=(),
)
