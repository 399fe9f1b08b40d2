"""The question `verify`: is this ledger complete, and how is that known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.completeness import completeness
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.reconcile import reconcile
from otel_limits.ledger.rows import MICROSECONDS

if TYPE_CHECKING:
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


def verify(inquiry: Inquiry, stale: timedelta, prometheus: str | None) -> Answer:
    """Answer whether the ledger is complete."""
    from otel_limits.ledger import proof

    balance = proof.balance(inquiry.connection)
    troubles = list(_troubles(inquiry))
    oldest = (time.time() - stale.total_seconds()) * MICROSECONDS
    checks = [
        _totals(balance, [each for each in troubles if each[0] == DIFFERS]),
        _found(GAP, troubles, "Every call of an ended invocation has its number"),
        _found(TWICE, troubles, "No call is there twice, none was dropped"),
        *_waiting(inquiry, oldest),
        _open(balance, oldest),
        *_unknown(balance),
    ]
    tables = [_checks_table(checks), _troubles_table(troubles)]
    status = int(any(check[2] == FAILED for check in checks))
    if prometheus is not None:
        compared = reconcile(inquiry, prometheus, TOLERANCE)
        tables += compared.tables
        status |= compared.status
    return Answer(
        question="verify",
        title="Proof of the ledger",
        about=inquiry.about,
        tables=tables,
        status=status,
        complete=completeness(inquiry),
    )


TOLERANCE: Final = 0.01
DIFFERS: Final = "totals differ"
GAP: Final = "gap in the numbers"
TWICE: Final = "counted twice"


def _troubles(inquiry: Inquiry) -> Iterator[Trouble]:
    from otel_limits.ledger import proof

    connection = inquiry.connection
    for row in proof.suspects(connection):
        yield from _troubles_of(inquiry, row)
    for row in proof.without_calls(connection):
        yield DIFFERS, row.id, f"0 of {row.model_calls:,} calls are there"
    for row in proof.counted_twice(connection):
        yield TWICE, row.invocation_id, f"row {row.id} was imported, row {row.live_id} is the same"


def _troubles_of(inquiry: Inquiry, row: Any) -> Iterator[Trouble]:
    from otel_limits.ledger import proof

    name = str(row.invocation_id)
    if row.id is None:
        yield DIFFERS, name, f"{row.calls:,} calls have no invocation"
        return
    if row.source == "live" and row.numbered != row.calls:
        rows = ", ".join(map(str, proof.unnumbered(inquiry.connection, name)))
        yield TWICE, name, f"rows {rows} have a number that another call had"
    if row.ended_us is None:
        return
    if row.source == "live" and row.last != row.numbered:
        yield GAP, name, f"there are {_spans(proof.numbers(inquiry.connection, name))}"
    says = (row.model_calls, row.total_tokens, row.price_pico or 0)
    has = (row.calls, int(row.tokens), int(row.pico))
    if has[:2] != says[:2] or abs(has[2] - says[2]) > row.calls:
        yield (
            DIFFERS,
            name,
            (
                f"its row says {says[0]:,} calls, {says[1]:,} tokens; "
                f"its calls are {has[0]:,}, {has[1]:,} tokens"
            ),
        )


def _spans(numbers: list[int]) -> str:
    """Write numbers as ranges: 1-3, 5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)


# --- checks ---------------------------------------------------------------------------------------


def _totals(balance: Balance, differing: list[Trouble]) -> Check:
    is_even = balance.is_even and not differing
    says = f"{balance.calls.calls:,} calls, {balance.calls.tokens:,} tokens on both sides"
    return (
        "Totals of invocations against the sums of their calls",
        len(differing) or int(not is_even),
        OK if is_even else FAILED,
        says if is_even else "they differ",
    )


def _found(kind: str, troubles: list[Trouble], title: str) -> Check:
    found = sum(each[0] == kind for each in troubles)
    return (title, found, FAILED if found else OK, "")


def _waiting(inquiry: Inquiry, oldest: float) -> Iterator[Check]:
    from otel_limits.ledger.spill import orphans

    waiting = inquiry.waiting
    is_stale = waiting.rows > 0 and (waiting.oldest_us or oldest) < oldest
    where = ", ".join(str(path) for path in waiting.files[:FACES])
    why = f"{waiting.unseen or 'they are in every answer'}: {where}" if waiting.rows else ""
    state = FAILED if is_stale else WAITING if waiting.rows else OK
    yield ("Rows that wait in spill files", waiting.rows, state, why)
    if waiting.damaged:
        yield ("Lines of spill files that are not rows", waiting.damaged, FAILED, where)
    left = orphans(inquiry.address)
    is_stale = any(each.written * MICROSECONDS < oldest for each in left)
    state = FAILED if is_stale else WAITING if left else OK
    why = "; ".join(
        f"{each.path} of {each.owner or 'an earlier version'}: "
        f"otel-limits ledger adopt {each.path} --into LEDGER"
        for each in left[:FACES]
    )
    yield ("Spill files whose ledger is not there", len(left), state, why)


def _open(balance: Balance, oldest: float) -> Check:
    is_stale = balance.oldest_open_us is not None and balance.oldest_open_us < oldest
    state = FAILED if is_stale else WAITING if balance.open_invocations else OK
    why = (
        f"they began before the time that --stale permits, and hold {balance.open.tokens:,} tokens"
        if is_stale
        else ""
    )
    return ("Invocations without an end", balance.open_invocations, state, why)


def _unknown(balance: Balance) -> Iterator[Check]:
    calls, tokens = balance.calls.calls, balance.calls.tokens
    share = f"{balance.unmeasured_calls / calls:.1%} of all" if calls else ""
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


def _troubles_table(troubles: list[Trouble]) -> Table:
    named: list[Trouble] = []
    for kind in (DIFFERS, GAP, TWICE):
        named += [each for each in troubles if each[0] == kind][:FACES]
    left_out = len(troubles) - len(named)
    return Table(
        name="rows",
        title="Rows that are not as they should be",
        columns=TROUBLES,
        rows=named,
        note=f"{left_out:,} more are left out." if left_out else "",
    )  # fmt: skip


VERIFY: Final = Question(
    name="verify",
    help="Is the ledger complete, and how is that known; exit status 1 if it is not.",
    answer=verify,
    tables={"verify": CHECKS, "rows": TROUBLES},
    options=(
        Option(
            "--stale",
            "AGE",
            asking.duration,
            "age at which what waits or is still open is an error (default: 1h)",
            default=timedelta(hours=1),
        ),
        Option("--prometheus", "URL", str, "compare with its counters too, of the last day"),
    ),
    selection=(),
)
