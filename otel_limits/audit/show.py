"""The question `show`: one budget tree, what each branch spent, and where it was halted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.formatting import UNFINISHED, written
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.repeats import Alike, alike
from otel_limits.audit.sums import Sums
from otel_limits.audit.turns import (
    TOOLS,
    TURNS,
    Tools,
    in_words,
    tool_calls,
    tools_table,
    turns_table,
)
from otel_limits.core.errors import LedgerError
from otel_limits.core.halts import halt_sentence
from otel_limits.core.limits import LIMITS, LOOP_LIMITS, TREE_PREFIX, Breach
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import MICROSECONDS

HALTS: Final[Mapping[str, str]] = {
    "halted": "halted",
    "raised": "halted and raised",
    "wrapped_up": "halted after a last answer",
    "observed": "would have been halted",
}

COLUMNS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("reason", "Ended"),
    Column("halt", "Halt", "sentence"),
    Column("turns", "Turns", "count"),
    Column("calls", "Calls", "count"),
    Column("side_calls", "Side calls", "count"),
    Column("tokens", "Tokens", "count"),
    Column("branch_tokens", "Tokens of the branch", "count"),
    Column("branch_cost_usd", "Cost of the branch", "money"),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("tools", "Tools"),
    Column("seconds", "Duration", "seconds"),
    Column("started", "Started", "time"),
    Column("invocation_id", "Invocation", "id"),
    Column("trace_id", "Trace", "id"),
)


@dataclass(slots=True)
class Branch:
    """An invocation with everything below it."""

    row: Any
    own: Sums = field(default_factory=Sums)
    whole: Sums = field(default_factory=Sums)
    side_calls: int = 0
    tools: str = ""
    children: list[Branch] = field(default_factory=list)


def show(inquiry: Inquiry, identity: str) -> Answer:
    """Answer what a budget tree spent.

    Raises:
        LedgerError: The ledger does not have it.
    """
    from otel_limits.ledger import queries

    invocations = queries.tree(inquiry.connection, identity)
    if not invocations:
        raise LedgerError(f"The {inquiry.about} has no invocation with the trace or id {identity}.")
    ids = [row.id for row in invocations]
    tools = tool_calls(inquiry, ids)
    tops = grow(
        invocations,
        queries.calls_of(inquiry.connection, ids),
        tools,
        queries.side_calls_of(inquiry.connection, ids),
    )
    branches = [branch for top in tops for _, branch in walk(top)]
    runs = [branch.row for branch in branches]
    return Answer(
        question="show",
        title=f"Budget tree of {identity}",
        about=inquiry.about,
        tables=[tree_table(tops), turns_table(inquiry, runs, tools), tools_table(runs, tools)],
        summary=summary(branches, tools),
    )


def grow(
    invocations: Sequence[Any],
    calls: Iterable[Any],
    tools: Tools,
    side_calls: Iterable[Any],
) -> list[Branch]:
    """Build the trees; an invocation whose parent is not recorded stands at the top."""
    branches = {row.id: Branch(row) for row in invocations}
    for invocation_id, _model, *sums in calls:
        branches[invocation_id].own.add(sums)
    for identity, rows in tools.items():
        branches[identity].tools = in_words(rows)
    for row in side_calls:
        branches[row.invocation_id].side_calls = row.calls
    tops: list[Branch] = []
    for branch in branches.values():
        # A parent may be in another process whose rows are not there yet, or of before the
        # retention.
        parent = branches.get(branch.row.parent_id)
        (tops if parent is None else parent.children).append(branch)
    for top in tops:
        _sum_up(top)
    return tops


def _sum_up(branch: Branch) -> None:
    branch.whole.merge(branch.own)
    for child in branch.children:
        _sum_up(child)
        branch.whole.merge(child.whole)


def tree_table(tops: Sequence[Branch]) -> Table:
    """One row per invocation, below the one that started it."""
    rows = [(level, _row(branch)) for top in tops for level, branch in walk(top)]
    return Table(
        name="tree",
        title="Budget tree",
        columns=COLUMNS,
        rows=[row for _, row in rows],
        levels=[level for level, _ in rows],
        note="A branch is an invocation with everything that it started. Side calls are those of "
        "its calls that the agent's loop did not make, such as summaries.",
    )


def walk(branch: Branch, level: int = 0) -> Iterator[tuple[int, Branch]]:
    """Every branch from here on, with its depth."""
    yield level, branch
    for child in branch.children:
        yield from walk(child, level + 1)


def halt_of(row: Any) -> str | None:
    """Where and how an invocation was halted, in words."""
    # It ended by itself, or by an action that only a later version knows.
    taken = HALTS.get(row.action or "")
    if taken is None:
        return None
    if row.breach_limit is None:
        return taken
    return f"{taken} at {row.breach_limit} ({row.breach_observed} of {row.breach_cap})"


def summary(branches: Sequence[Branch], tools: Tools) -> str:
    """Say of the first halt of a tree what its message said, and what had been used by then."""
    # The first in the order of the tree is the outermost: what it halted, its children did not do.
    halted = [branch for branch in branches if branch.row.action in HALTS]
    if not halted:
        return _unhalted(branches[0])
    first = halted[0]
    said = first.row.halt or _sentence(first.row)
    if first.row.breach_limit in LOOP_LIMITS:
        said += _repeated(alike(tools.get(first.row.id, ())))
    # Of the whole branch, as what it spent is: turns of a parent alone would seem dear.
    turns = sum(branch.row.turns or 0 for _, branch in walk(first))
    who = "It and what it started" if first.children else "It"
    said += f" {who} had used {_spent(first)} in {pluralize(turns, 'turn')}"
    others = len(halted) - 1
    more = pluralize(others, "more of the tree was", "more of the tree were")
    return said + (f"; {more} halted." if others else ".")


def _sentence(row: Any) -> str:
    """Compose the sentence that an imported row lacks."""
    breach = None
    if row.breach_limit is not None:
        # An imported limit may be one that this version does not know.
        kind = LIMITS.get(row.breach_limit.removeprefix(TREE_PREFIX))
        unit = "" if kind is None else kind.unit
        reason = row.reason if kind is None else kind.reason
        breach = Breach(row.breach_limit, row.breach_cap, row.breach_observed, reason, unit)
    return halt_sentence(row.agent, row.reason, row.action, breach)


def _unhalted(branch: Branch) -> str:
    row = branch.row
    # A process that was killed never told how its invocations ended.
    if row.ended_us is None:
        return f"{row.agent} has no recorded end; it has used {_spent(branch)} so far."
    turns = pluralize(row.turns or 0, "turn")
    ended = f"{row.agent} ended with {row.reason} after {turns}"
    return f"{ended}, and no limit halted anything. It used {_spent(branch)}."


def _spent(branch: Branch) -> str:
    tokens = pluralize(branch.whole.tokens, "token")
    cost = branch.whole.cost
    return tokens if cost is None else f"{tokens} and {written(cost, 'money')}"


def _repeated(groups: Sequence[Alike]) -> str:
    """What it repeated, where that was recorded."""
    if not groups or not groups[0].repeats:
        return ""
    most = groups[0]
    return f" It called {most.tool} {most.calls:,} times with equal arguments and results."


def _row(branch: Branch) -> tuple[Any, ...]:
    row = branch.row
    ended = row.ended_us is not None
    return (
        row.agent,
        row.reason or UNFINISHED,
        halt_of(row),
        row.turns,
        branch.own.calls,
        branch.side_calls,
        branch.own.tokens,
        branch.whole.tokens,
        branch.whole.cost,
        branch.whole.unpriced_tokens,
        branch.tools,
        # Without an end there is no duration, and not one of 0 seconds.
        (row.ended_us - row.started_us) / MICROSECONDS if ended else None,
        row.started_us,
        row.id,
        row.trace_id,
    )


SHOW: Final = Question(
    name="show",
    help="One budget tree, with tokens and money per branch, and where it was halted.",
    answer=show,
    tables={"tree": COLUMNS, "turns": TURNS, "tools": TOOLS},
    options=(
        Option(
            "identity",
            "TRACE_ID",
            asking.identity,
            "a trace id, an invocation id, or the first 8 or more digits of one",
        ),
    ),
    selection=(),
)
