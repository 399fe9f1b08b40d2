"""The question `show`: one budget tree with its usage and halt, turn by turn."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import UNFINISHED, Answer, Column, Table, written
from otel_limits.audit.loop_report import RepeatGroup, group_repeats
from otel_limits.audit.policies import OF_AGENTS, limits_table
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.sums import TOOL_ERRORS, Sums
from otel_limits.core.errors import LedgerError
from otel_limits.core.events import CUT_SHORT
from otel_limits.core.halt_texts import for_operator
from otel_limits.core.limits import LOOP_LIMITS, STOP_REASONS, Breach, kind_of
from otel_limits.core.policy import Verdict
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import LOST, MICROSECONDS, known_cost

# --- the question ---------------------------------------------------------------------------------

HALTS: Final[Mapping[str, str]] = {
    "halted": "halted",
    "raised": "halted and raised",
    "wrapped_up": "wrapped up",
    "observed": "would-be halt",
    "killed": "killed",
}

TREE: Final = (
    Column("agent", "Agent", is_key=True),
    Column("reason", "Stop reason"),
    Column("halt", "Halt", "sentence"),
    Column("turns", "Turns", "count"),
    Column("calls", "Calls", "count"),
    Column("side_calls", "Side calls", "count"),
    Column("tokens", "Tokens", "count"),
    Column("branch_tokens", "Branch tokens", "count"),
    Column("branch_cost_usd", "Branch cost", "money"),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("tools", "Tools"),
    Column("seconds", "Duration", "seconds"),
    Column("started", "Started", "time"),
    Column("invocation_id", "Invocation", "id"),
    Column("trace_id", "Trace", "id"),
)

TASKS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("reason", "Stop reason", is_key=True),
    Column("turns", "Turns", "count"),
    Column("started", "Started", "time"),
    Column("invocation_id", "Invocation", "id", is_key=True),
    Column("trace_id", "Trace", "id"),
    Column("task_id", "Task", "id"),
)


@dataclass(slots=True)
class Branch:
    """An invocation and its descendants."""

    row: Any
    own: Sums = field(default_factory=Sums)
    whole: Sums = field(default_factory=Sums)
    side_calls: int = 0
    tools: str = ""
    children: list[Branch] = field(default_factory=list)


def show(inquiry: AuditQuery, identity: str) -> Answer:
    """Answer what a budget tree used.

    Raises:
        LedgerError: It is not in the ledger.
    """
    from otel_limits.ledger import queries, whole_tasks

    invocations = queries.tree(inquiry.connection, identity)
    if not invocations:
        raise LedgerError(f"The {inquiry.about} has no trace or invocation {identity}.")
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
    legs = whole_tasks.invocations_of(inquiry.connection, {run.task_id for run in runs})
    return Answer(
        question="show",
        title=f"Budget tree of {identity}",
        about=inquiry.about,
        tables=[
            tree_table(tops),
            turns_table(inquiry, runs, tools),
            tools_table(runs, tools),
            limits_table(runs),
            *([tasks_table(legs)] if legs else []),
        ],
        summary=summary(branches, tools) + _task_of(branches, legs),
        since_us=min(run.started_us for run in (*runs, *legs)),
    )


def grow(
    invocations: Sequence[Any],
    calls: Iterable[Any],
    tools: ToolCalls,
    side_calls: Iterable[Any],
) -> list[Branch]:
    """Build the trees; an invocation without a recorded parent is a root."""
    branches = {row.id: Branch(row) for row in invocations}
    for invocation_id, _model, *sums in calls:
        branches[invocation_id].own.add(sums)
    for identity, rows in tools.items():
        branches[identity].tools = in_words(rows)
    for row in side_calls:
        branches[row.invocation_id].side_calls = row.calls
    tops: list[Branch] = []
    for branch in branches.values():
        # The parent may be in another process whose rows are pending, or already pruned.
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
    """Build a table with one row per invocation, below its parent."""
    rows = [(level, _row(branch)) for top in tops for level, branch in walk(top)]
    return Table(
        name="tree",
        title="Budget tree",
        columns=TREE,
        rows=[row for _, row in rows],
        levels=[level for level, _ in rows],
        note="A branch is an invocation with its descendants. Side calls are model calls outside "
        "the agent loop, e.g. summaries.",
    )


def walk(branch: Branch, level: int = 0) -> Iterator[tuple[int, Branch]]:
    """Iterate over a branch and its descendants, with their depth."""
    yield level, branch
    for child in branch.children:
        yield from walk(child, level + 1)


def tasks_table(legs: Iterable[Any]) -> Table:
    """Build a table with one row per invocation of each task of several, also of other trees."""
    return Table(
        name="tasks",
        title="Tasks with answered interrupts",
        columns=TASKS,
        rows=[
            (
                leg.agent,
                leg.reason or UNFINISHED,
                leg.turns,
                leg.started_us,
                leg.id,
                leg.trace_id,
                leg.task_id,
            )
            for leg in legs
        ],
        note="Each answer to an interrupt is a further invocation of the same task.",
    )


def halt_of(row: Any) -> str | None:
    """Describe where and how an invocation was halted."""
    # It finished, or has an action of a later version.
    outcome = HALTS.get(row.action or "")
    if outcome is None or row.breach_limit is None:
        return outcome
    unit = f" {row.breach_unit}" if row.breach_unit else ""
    # Without it, an unspent amount looks overspent.
    call = " with this call," if _has_own_call(row) else ""
    return (
        f"{outcome} at {row.breach_limit} ({row.breach_observed}{call} of {row.breach_cap}{unit})"
    )


def _has_own_call(row: Any) -> bool:
    """Return whether the observed amount includes the call that was refused."""
    if (kind := kind_of(row.breach_limit)) is not None:
        return kind.is_refusal
    # Of a quota. A block refuses a call whatever it needs.
    if " is blocked" in (row.halt or ""):
        return False
    return Decimal(str(row.breach_observed)) > Decimal(str(row.breach_cap))


def summary(branches: Sequence[Branch], tools: ToolCalls) -> str:
    """Describe the first halt of a tree by its message, and the usage until then."""
    # The first in tree order is the outermost, which halted its descendants.
    halted = [branch for branch in branches if branch.row.action in HALTS]
    if not halted:
        return _unhalted(branches[0])
    first = halted[0]
    text = first.row.halt or _sentence(first.row)
    if first.row.breach_limit in LOOP_LIMITS:
        text += _repeated(group_repeats(tools.get(first.row.id, ())))
    text += _end_of(first.row)
    # Turns of the whole branch, as its usage is too.
    turns = sum(branch.row.turns or 0 for _, branch in walk(first))
    subject = "It and its sub-agents" if first.children else "It"
    text += f" {subject} had used {_spent(first)} in {pluralize(turns, 'turn')}"
    others = sum(branch.row.action in CUT_SHORT for branch in halted[1:])
    more = pluralize(others, "more invocation of the tree was", "more invocations of the tree were")
    return text + (f"; {more} halted." if others else ".")


def _task_of(branches: Sequence[Branch], legs: Iterable[Any]) -> str:
    """Describe the task of the invocation that the summary is about, if it has several."""
    halted = (branch.row for branch in branches if branch.row.action in HALTS)
    row = next(halted, branches[0].row)
    turns = [leg.turns or 0 for leg in legs if leg.task_id == row.task_id]
    if not turns:
        return ""
    invocations = pluralize(len(turns), "invocation")
    return f" Its task has {invocations}, with {pluralize(sum(turns), 'turn')}."


def _sentence(row: Any) -> str:
    """Compose the sentence that an imported row lacks."""
    breach = None
    if row.breach_limit is not None:
        # The limit of an imported row may be unknown to this version.
        kind = kind_of(row.breach_limit)
        reason = row.reason if kind is None else kind.reason
        breach = Breach(
            row.breach_limit, row.breach_cap, row.breach_observed, reason, row.breach_unit or ""
        )
    return for_operator(row.agent, Verdict(row.reason, (breach,) if breach else ()), row.action)


def _end_of(row: Any) -> str:
    """Describe an end other than by the halt, e.g. of an invocation that failed after it."""
    # No end yet, or a reason of otel-limits: the halt's own.
    if row.reason is None or row.reason in STOP_REASONS:
        return ""
    return f" The invocation ended with {row.reason}."


def _unhalted(branch: Branch) -> str:
    row = branch.row
    # A killed process records no end of its invocations.
    if row.ended_us is None or row.action == LOST:
        ended = f"{row.agent} has no recorded end, so a halt is unknown"
        return f"{ended}. Recorded usage: {_spent(branch)}."
    turns = pluralize(row.turns or 0, "turn")
    ended = f"{row.agent} ended with {row.reason} after {turns}"
    return f"{ended} without a halt. It used {_spent(branch)}."


def _spent(branch: Branch) -> str:
    tokens = pluralize(branch.whole.tokens, "token")
    cost = branch.whole.cost
    return tokens if cost is None else f"{tokens} and {written(cost, 'money')}"


def _repeated(groups: Sequence[RepeatGroup]) -> str:
    """Describe the most repeated call, if any."""
    if not groups or not groups[0].repeats:
        return ""
    most = groups[0]
    return f" It called {most.tool} {most.calls:,} times with identical arguments and results."


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
        # Null without an end, not 0 seconds.
        (row.ended_us - row.started_us) / MICROSECONDS if ended else None,
        row.started_us,
        row.id,
        row.trace_id,
    )


# --- turns and tools ------------------------------------------------------------------------------

TURNS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("turn", "Turn", "count", is_key=True),
    Column("model", "Model"),
    Column("model_calls", "Calls", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
    Column("cost_usd", "Cost", "money"),
    Column("tools", "Tools requested", "sentence", is_key=True),
    Column("at", "Answered", "time"),
    Column("invocation_id", "Invocation", "id"),
)

TOOLS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("calls", "Identical calls", "count", is_key=True),
    Column("errors", "Errors", "count"),
    Column("seconds", "Time", "seconds"),
    Column("turns", "In turns", "sentence"),
    Column("fingerprint", "Fingerprint", "id"),
    Column("invocation_id", "Invocation", "id"),
)

ToolCalls = Mapping[str, Sequence[Any]]
"""Tool calls by invocation."""


def tool_calls(inquiry: AuditQuery, ids: Sequence[str]) -> ToolCalls:
    """Read the tool calls of some invocations."""
    from otel_limits.ledger import queries

    rows = queries.tool_calls_of(inquiry.connection, ids)
    grouped = itertools.groupby(rows, operator.attrgetter("invocation_id"))
    return {identity: list(group) for identity, group in grouped}


def turns_table(inquiry: AuditQuery, runs: Iterable[Any], tools: ToolCalls) -> Table:
    """Build a table with one row per turn of every invocation, in tree order."""
    from otel_limits.ledger import queries

    runs = list(runs)
    turns: dict[str, list[Any]] = {}
    for row in queries.turns_of(inquiry.connection, [run.id for run in runs]):
        turns.setdefault(row.invocation_id, []).append(row)
    return Table(
        name="turns",
        title="Turns",
        columns=TURNS,
        rows=[
            (
                run.agent,
                row.turn,
                row.model,
                row.calls,
                int(row.tokens),
                known_cost(row.price_pico, row.unpriced),
                in_words(each for each in tools.get(run.id, ()) if each.turn == row.turn),
                row.at_us,
                run.id,
            )
            for run in runs
            for row in turns.get(run.id, ())
        ],
        note="The model calls of a turn are its answer and retries; side calls are only in the "
        "tree.",
    )


def in_words(rows: Iterable[Any]) -> str:
    """Format tool calls, e.g. `2 search, fetch (error)`."""
    # In the order of their first request.
    counts = Counter(
        (row.tool, "" if row.status == "success" else f" ({row.status})") for row in rows
    )
    return ", ".join(
        f"{count} {tool}{status}" if count > 1 else tool + status
        for (tool, status), count in counts.items()
    )


def tools_table(runs: Iterable[Any], tools: ToolCalls) -> Table:
    """Build a table with one row per distinct call of an invocation, the most repeated first."""
    rows = [(run, each) for run in runs for each in group_repeats(tools.get(run.id, ()))]
    # The sort is stable: ties stay in tree order.
    rows.sort(key=lambda pair: -pair[1].repeats)
    return Table(
        name="tools",
        title="Tools",
        columns=TOOLS,
        rows=[
            (
                run.agent,
                each.tool,
                each.calls,
                each.errors,
                each.seconds,
                each.in_turns,
                each.fingerprint,
                run.id,
            )
            for run, each in rows
        ],
        note="Identical calls have the same fingerprint of arguments and result, a hash that "
        f"reveals neither. {TOOL_ERRORS}",
    )


# --- the definition -------------------------------------------------------------------------------

SHOW: Final = Question(
    name="show",
    help="Show one budget tree with its usage and halt.",
    answer=show,
    tables={"tree": TREE, "turns": TURNS, "tools": TOOLS, "limits": OF_AGENTS, "tasks": TASKS},
    optional=frozenset({"tasks"}),
    options=(
        Option(
            "identity",
            "TRACE_ID",
            parsing.identity,
            "trace ID or invocation ID, or at least its first 8 digits",
        ),
    ),
    selection=(),
)
