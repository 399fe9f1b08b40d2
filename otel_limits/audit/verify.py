"""The question `verify`: is this ledger complete, and how is that known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.completeness import completeness
from otel_limits.audit.formatting import ranges
from otel_limits.audit.question import Inquiry, Option, Question
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

FACES: Final = 20
"""Rows that are named for each kind of trouble."""

Check = tuple[str, int, str, str]
"""What was looked at, how many were found, what that means, and why."""
Trouble = tuple[str, str, str]
"""What is wrong, with which invocation or file, and how."""

CHECKS: Final = (
    Column("check", "Check", "sentence", is_key=True),
    Column("found", "Found", "count", is_key=True),
    Column("state", "State", is_key=True),
    Column("why", "Why", "sentence", is_key=True),
)

TROUBLES: Final = (
    Column("trouble", "Trouble", "sentence", is_key=True),
    Column("invocation_id", "Invocation", "id", is_key=True),
    Column("rows", "How", "sentence", is_key=True),
)


def verify(
    inquiry: Inquiry,
    stale: timedelta,
    prometheus: str | None,
    authorization_file: Secret | None = None,
) -> Answer:
    """Answer whether the ledger is complete.

    Raises:
        LedgerError: Prometheus cannot be asked.
    """
    from otel_limits.ledger import proof

    calls, suspects = proof.looked_through(inquiry.connection)
    balance = proof.balance(inquiry.connection, calls)
    troubles = Troubles()
    _look(inquiry, balance, suspects, troubles)
    oldest = (time.time() - stale.total_seconds()) * MICROSECONDS
    checks = [
        _totals(balance, troubles.found[DIFFERS]),
        _found(GAP, troubles, "Every call of an ended invocation has its number"),
        _found(TWICE, troubles, "No call is there twice, none was dropped"),
        *_waiting(inquiry, oldest),
        _open(balance, oldest),
        *_unknown(balance),
    ]
    if prometheus is not None:
        # Last, as it asks a server: a ledger that is wrong by itself is told even where that is
        # away.
        about = _compare(reconcile(inquiry, prometheus, TOLERANCE, authorization_file), troubles)
        checks.append(_found(METRICS, troubles, about))
    return Answer(
        question="verify",
        title="Proof of the ledger",
        about=inquiry.about,
        tables=[_checks_table(checks), _troubles_table(troubles)],
        status=int(any(check[2] == FAILED for check in checks)),
        complete=completeness(inquiry, balance, sum(troubles.found.values())),
    )


TOLERANCE: Final = 0.01
DIFFERS: Final = "totals differ"
GAP: Final = "gap in the numbers"
TWICE: Final = "counted twice"
METRICS: Final = "metrics differ"
KINDS: Final = (DIFFERS, GAP, TWICE, METRICS)


class Troubles:
    """What is wrong: how much of each kind, and the first of each, which are named.

    Attributes:
        found: How many there are, by kind.
        named: The first of them, in full.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.found: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.named: dict[str, list[Trouble]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, name: str, describe: Callable[..., str], *of: Any) -> None:
        """Count one; only of the first it is found out in full what is wrong with it."""
        self.found[kind] += 1
        # To describe one asks the ledger again, which a damaged one would have to answer a million
        # times.
        if len(self.named[kind]) < FACES:
            self.named[kind].append((kind, name, describe(*of)))


def _look(inquiry: Inquiry, balance: Balance, suspects: int, troubles: Troubles) -> None:
    """Look for what does not agree, row by row; `suspects` is how many invocations do not."""
    from otel_limits.ledger import proof

    connection = inquiry.connection
    # Only where the sums say that there are some: to name them reads every call.
    for row in proof.suspects(connection) if suspects else ():
        _suspect(connection, row, troubles)
    # Only then: to look for invocations without any call goes through all of them.
    if troubles.found[DIFFERS] or not balance.is_even:
        for row in proof.without_calls(connection):
            troubles.add(DIFFERS, row.id, _none_there, row.model_calls)
    for row in proof.counted_twice(connection):
        told = "row {} was imported, row {} is the same".format
        troubles.add(TWICE, row.invocation_id, told, row.id, row.live_id)


def _suspect(connection: Connection, row: Any, troubles: Troubles) -> None:
    """Find out what is wrong with an invocation and its calls."""
    name, is_live = str(row.invocation_id), row.source == "live"
    if row.id is None:
        troubles.add(DIFFERS, name, _ownerless, row.calls)
        return
    if is_live and row.numbered != row.calls:
        troubles.add(TWICE, name, _doubles, connection, name)
    # An invocation under way has gaps and sums that do not agree yet.
    if row.ended_us is None:
        return
    if is_live and row.last != row.numbered:
        troubles.add(GAP, name, _gaps, connection, name)
    totals = (row.model_calls, row.input_tokens, row.output_tokens, row.price_pico)
    says = [each or 0 for each in totals]
    has = [row.calls, int(row.input), int(row.output), int(row.pico)]
    # The sum of rounded prices may differ from the rounded sum by one picodollar for each call.
    if has[:3] != says[:3] or abs(has[3] - says[3]) > row.calls:
        told = "its row says {}; its calls are {}".format
        troubles.add(DIFFERS, name, told, _amounts(*says), _amounts(*has))


def _none_there(calls: int) -> str:
    return f"0 of {pluralize(calls, 'call')} are there"


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
    return f"{have.format(rows)} a number that another call had"


def _gaps(connection: Connection, name: str) -> str:
    from otel_limits.ledger.proof import numbers

    return f"there are {ranges(numbers(connection, name))}"


def _compare(compared: Answer, troubles: Troubles) -> str:
    """Add what the metrics count otherwise; returns what was compared."""
    told = "{}: the ledger has {}, Prometheus {} to {}".format
    figures = 0
    for table in compared.tables:
        names = [column.name for column in table.columns]
        for values in table.rows:
            figures += 1
            row = dict(zip(names, values, strict=True))
            if row["accepted"] == "no":
                of = f"{row['agent']}, {row.get('model', row.get('reason'))}"
                both = (row["ledger"], row["prometheus"], row["prometheus_most"])
                troubles.add(METRICS, of, told, row.get("measure", table.name), *both)
    return f"Prometheus counted the same in the last day: {pluralize(figures, 'figure')}"


# --- checks ---------------------------------------------------------------------------------------


def _totals(balance: Balance, differing: int) -> Check:
    is_even = balance.is_even and not differing
    calls, tokens = pluralize(balance.calls.calls, "call"), pluralize(balance.calls.tokens, "token")
    says = f"{calls}, {tokens} on both sides"
    return (
        "Totals of invocations against the sums of their calls",
        differing or int(not is_even),
        OK if is_even else FAILED,
        says if is_even else "they differ",
    )


def _found(kind: str, troubles: Troubles, title: str) -> Check:
    found = troubles.found[kind]
    return (title, found, FAILED if found else OK, "")


def _waiting(inquiry: Inquiry, oldest: float) -> Iterator[Check]:
    from otel_limits.ledger.spill import orphans

    waiting = inquiry.waiting
    # By the oldest row: new ones join a file all the time, and say nothing about it.
    is_stale = waiting.rows > 0 and (waiting.oldest_us or oldest) < oldest
    where = ", ".join(str(path) for path in waiting.files[:FACES])
    why = f"{waiting.unseen or 'they are in every answer'}: {where}" if waiting.rows else ""
    # Waiting is not a failure for an hour: a live process takes its rows back by itself.
    state = FAILED if is_stale else WAITING if waiting.rows else OK
    yield ("Rows that wait in spill files", waiting.rows, state, why)
    if waiting.damaged:
        yield ("Lines of spill files that are not rows", waiting.damaged, FAILED, where)
    left = orphans(inquiry.address)
    is_stale = any(each.written * MICROSECONDS < oldest for each in left)
    state = FAILED if is_stale else WAITING if left else OK
    why = "; ".join(
        f"{each.path} of {each.owner}: otel-limits ledger adopt {each.path} --into LEDGER"
        for each in left[:FACES]
    )
    yield ("Spill files whose ledger is not there", len(left), state, why)


def _open(balance: Balance, oldest: float) -> Check:
    # By the oldest: an agent at work has no end yet, and one that was killed never will.
    is_stale = balance.oldest_open_us is not None and balance.oldest_open_us < oldest
    state = FAILED if is_stale else WAITING if balance.open_invocations else OK
    why = (
        "they began before the time that --stale permits, and hold "
        f"{pluralize(balance.open.tokens, 'token')}"
        if is_stale
        else ""
    )
    return ("Invocations without an end", balance.open_invocations, state, why)


def _unknown(balance: Balance) -> Iterator[Check]:
    calls, tokens = balance.calls.calls, balance.calls.tokens
    share = f"{balance.unmeasured_calls / calls:.1%} of all" if calls else ""
    # Never a failure: the ledger has everything, and it is the provider who said nothing.
    yield ("Unmeasured calls", balance.unmeasured_calls, OK, share)
    share = f"{balance.unpriced_tokens / tokens:.1%} of all" if tokens else ""
    yield ("Unpriced tokens", balance.unpriced_tokens, OK, share)


def _checks_table(checks: list[Check]) -> Table:
    return Table(
        name="verify",
        title="Is it complete?",
        columns=CHECKS,
        rows=checks,
        note="What waits or is still open fails only when it is older than --stale.",
    )


def _troubles_table(troubles: Troubles) -> Table:
    named = [each for kind in KINDS for each in troubles.named[kind]]
    # Said in numbers: who mends the twenty that are named would take it for done.
    left_out = sum(troubles.found.values()) - len(named)
    return Table(
        name="rows",
        title="Rows that are not as they should be",
        columns=TROUBLES,
        rows=named,
        note=f"{left_out:,} more are left out." if left_out else "",
    )


VERIFY: Final = Question(
    name="verify",
    help="Check that the ledger is complete, and say how; exit status 1 if it is not.",
    answer=verify,
    tables={"verify": CHECKS, "rows": TROUBLES},
    options=(
        Option(
            "--stale",
            "AGE",
            asking.duration,
            "age from which waiting rows and open invocations are errors (default: 1h)",
            default=timedelta(hours=1),
        ),
        Option("--prometheus", "URL", str, "compare with its counters too, of the last day"),
        AUTHORIZATION_FILE,
    ),
    selection=(),
)
