"""The question `loops`: repeated tool calls and failures, and their cost.

A call is repeated if an earlier call of the invocation had the same tool, arguments and result. An
invocation is if the one before, in its conversation, had the same input and failure. This needs no
loop limit: ledgers always contain the hashes of calls, and the number of each failure in a row.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import UNFINISHED, Answer, Column, Table, ranges
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.core.events import HALTED
from otel_limits.core.limits import LOOP_DETECTED_STOP_REASON
from otel_limits.ledger.rows import MICROSECONDS, dollars, known_cost, portions

# --- the question ---------------------------------------------------------------------------------

PORTION: Final = 500

REPEATED: Final = (
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("repeats", "Repeated calls", "count", is_key=True),
    Column("repeated_share", "Share of calls", "share"),
    Column("invocations", "Invocations", "count"),
    Column("halted", "Loop halts", "count"),
    Column("most", "Longest loop", "count"),
    Column("seconds", "Tool time", "seconds"),
    Column("tokens", "Tokens caused", "count"),
    Column("cost_usd", "Cost caused", "money", is_key=True),
)

WORST: Final = (
    Column("trace_id", "Trace", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("fingerprint", "Fingerprint", "id"),
    Column("calls", "Identical calls", "count", is_key=True),
    Column("turns", "In turns", "sentence"),
    Column("reason", "Stop reason"),
    Column("tokens", "Tokens caused", "count"),
    Column("cost_usd", "Cost caused", "money", is_key=True),
)


FAILURES: Final = (
    Column("agent", "Agent", is_key=True),
    Column("reason", "Stop reason", is_key=True),
    Column("repeats", "Repeated failures", "count", is_key=True),
    Column("most", "Most in a row", "count", is_key=True),
    Column("tokens", "Tokens", "count"),
    Column("cost_usd", "Cost", "money", is_key=True),
)


@dataclass(frozen=True, slots=True)
class Loop:
    """Identical calls of one invocation, and the model usage that they caused."""

    run: Any
    calls: RepeatGroup
    tokens: int
    pico: int
    has_price: bool

    @property
    def cost(self) -> Any:
        """Cost in USD, if known."""
        return dollars(self.pico) if self.has_price else None


@dataclass(slots=True)
class Repeating:
    """Repeated calls of one tool of an agent."""

    repeats: int = 0
    micros: int = 0
    tokens: int = 0
    pico: int = 0
    has_price: bool = False
    most: int = 0
    runs: set[str] = field(default_factory=set)
    halted: set[str] = field(default_factory=set)
    """Invocations, as in `runs`, that a loop limit halted."""

    def add(self, loop: Loop) -> None:
        """Add a loop."""
        self.repeats += loop.calls.repeats
        self.micros += loop.calls.repeated_micros
        self.tokens += loop.tokens
        self.pico += loop.pico
        self.has_price |= loop.has_price
        self.most = max(self.most, loop.calls.calls)
        self.runs.add(loop.run.id)
        # A halt for another reason was not caused by the loop.
        if loop.run.reason == LOOP_DETECTED_STOP_REASON and loop.run.action in HALTED:
            self.halted.add(loop.run.id)

    def figures(self, calls: int | None) -> tuple[Any, ...]:
        """The values of `REPEATED` after its names; `calls` is the total of the tool."""
        return (
            self.repeats,
            self.repeats / calls if calls else None,
            len(self.runs),
            len(self.halted),
            self.most,
            self.micros / MICROSECONDS,
            self.tokens,
            dollars(self.pico) if self.has_price else None,
        )


def loops(inquiry: AuditQuery, top: int) -> Answer:
    """Answer which agents and tools repeat calls, and which agents repeat failures."""
    from otel_limits.ledger import queries

    inquiry.require_known()
    # All calls, as the share of repeated ones needs them.
    uses = queries.tool_uses(inquiry.connection, ("agent", "tool"), inquiry.selection)
    counts = {(keys["agent"], keys["tool"]): calls for keys, (calls, *_) in uses or ()}
    by_tool: dict[tuple[str, str], Repeating] = {}
    total, worst = Repeating(), list[Loop]()
    for loop in inquiry.work.through(found(inquiry)):
        by_tool.setdefault((loop.run.agent, loop.calls.tool), Repeating()).add(loop)
        total.add(loop)
        worst.append(loop)
        # Only the worst are shown, so that years of loops are not held in memory.
        if len(worst) > 10 * top:
            worst = _worst(worst, top)
    return Answer(
        question="loops",
        title="Loops",
        about=inquiry.about,
        tables=[
            loops_table(by_tool, total, counts),
            worst_table(_worst(worst, top)),
            failures_table(queries.repeated_failures(inquiry.connection, inquiry.selection)),
        ],
        totals=[
            ("Repeated calls", "count", total.repeats),
            ("Invocations with loops", "count", len(total.runs)),
            ("Cost caused", "money", dollars(total.pico) if total.has_price else None),
        ],
    )


def found(inquiry: AuditQuery) -> Iterator[Loop]:
    """Iterate over the groups of identical calls of every invocation."""
    from otel_limits.ledger import queries

    connection = inquiry.connection
    # In portions, as the tool calls of years do not fit in memory.
    for ids in portions(queries.repeating(connection, inquiry.selection), PORTION):
        turns: dict[str, dict[int, Any]] = {}
        for row in queries.turns_of(connection, ids, inquiry.selection):
            turns.setdefault(row.invocation_id, {})[row.turn] = row
        runs = {row.id: row for row in queries.invocations_of(connection, ids)}
        calls = queries.tool_calls_of(connection, ids, inquiry.selection)
        for identity, rows in itertools.groupby(calls, operator.attrgetter("invocation_id")):
            of_run = list(rows)
            counts = Counter(row.turn for row in of_run if row.turn is not None)
            for group in group_repeats(row for row in of_run if row.is_selected):
                # Calls may precede the row of their invocation, which another process writes.
                if group.repeats and identity in runs:
                    used = _cost_after(group, counts, turns.get(identity, {}))
                    yield Loop(runs[identity], group, *used)


def _cost_after(
    group: RepeatGroup, counts: Mapping[int, int], turns: Mapping[int, Any]
) -> tuple[int, int, bool]:
    """Return the usage of the model calls that received the results of repeated calls.

    A request with the results of several tool calls is split among them.

    Args:
        group: Identical calls.
        counts: Tool calls of each turn of the invocation.
        turns: Usage of the model calls of each turn.

    Returns:
        Tokens, picodollars, and whether any price is known.
    """
    tokens = pico = 0
    is_known = False
    # The first call was useful, so the turn after it is not a cost of the loop.
    for turn in group.turns[1:] if group.repeats else ():
        # The next turn received the results.
        following = turns.get(turn + 1) if turn is not None else None
        if turn is not None and following is not None:
            tokens += int(following.tokens) // counts[turn]
            pico += int(following.price_pico or 0) // counts[turn]
            is_known |= following.price_pico is not None
    return tokens, pico, is_known


def _worst(loops: Sequence[Loop], top: int) -> list[Loop]:
    # By ID last, so that the order of equal ones is stable.
    order = operator.attrgetter("pico", "tokens", "calls.repeats", "run.id")
    return sorted(loops, key=order, reverse=True)[:top]


def loops_table(
    by_tool: Mapping[tuple[str, str], Repeating],
    total: Repeating,
    counts: Mapping[tuple[str, str], int],
) -> Table:
    """Build a table with one row per agent and tool, the costliest first."""
    # Repeats decide if prices are unknown, then names.
    in_order = sorted(by_tool.items(), key=lambda item: (-item[1].pico, -item[1].repeats, item[0]))
    return Table(
        name="loops",
        title="Repeated tool calls by agent and tool",
        columns=REPEATED,
        rows=[(*key, *each.figures(counts.get(key))) for key, each in in_order],
        total=("total", "", *total.figures(sum(counts.values()))),
        note="A repeated call had the same arguments and result as an earlier one of its "
        "invocation; intentional polling is included. Tokens and cost are those of the model "
        "calls that received the results, split among the tools of the turn. Only selected calls "
        "count, so the first one of a period repeats none.",
    )


def worst_table(loops: Sequence[Loop]) -> Table:
    """Build a table of the costliest loops, with what identifies them in a trace."""
    return Table(
        name="worst",
        title="Most expensive loops",
        columns=WORST,
        rows=[
            (
                loop.run.trace_id or loop.run.id,
                loop.run.agent,
                loop.calls.tool,
                loop.calls.fingerprint,
                loop.calls.calls,
                loop.calls.in_turns,
                loop.run.reason or UNFINISHED,
                loop.tokens,
                loop.cost,
            )
            for loop in loops
        ],
    )


def failures_table(rows: Iterable[Any]) -> Table:
    """Build a table of the invocations that failed like the one before, the most first."""
    return Table(
        name="repeated_failures",
        title="Invocations that failed in a row",
        columns=FAILURES,
        rows=[
            (
                row.agent,
                row.reason,
                row.repeats,
                row.most,
                int(row.tokens or 0),
                known_cost(int(row.price_pico or 0), int(row.unpriced_calls or 0)),
            )
            for row in rows
        ],
        note="Each of these invocations had the same input and failed in the same way as the one "
        "before in its conversation: an application called the agent again. Imported spans do not "
        "show that. With a selected tool, the table is empty.",
    )


# --- repeated calls of an invocation --------------------------------------------------------------


@dataclass(slots=True)
class RepeatGroup:
    """Identical tool calls of one invocation, or all calls of a tool without hashes."""

    tool: str
    fingerprint: str | None
    calls: int = 0
    errors: int = 0
    micros: int = 0
    repeated_micros: int = 0
    """Duration of all calls but the first."""
    turns: list[int | None] = field(default_factory=list)
    """Turn of each call."""

    @property
    def repeats(self) -> int:
        """Calls that repeated an earlier one."""
        # Without a hash it is unknown whether two calls were identical.
        return self.calls - 1 if self.fingerprint is not None else 0

    @property
    def seconds(self) -> float:
        """Total duration in seconds."""
        return self.micros / MICROSECONDS

    def add(self, row: Any) -> None:
        """Add a call."""
        micros = int(row.duration_us or 0)
        # The first call was useful.
        self.repeated_micros += micros if self.calls else 0
        self.calls += 1
        self.errors += row.status == "error"
        self.micros += micros
        self.turns.append(row.turn)

    @property
    def in_turns(self) -> str | None:
        """The turns, e.g. `2-5, 9`; `None` if they were not recorded."""
        known = sorted({turn for turn in self.turns if turn is not None})
        return ranges(known) or None


def group_repeats(rows: Iterable[Any]) -> list[RepeatGroup]:
    """Group identical calls of one invocation; those without a hash by tool."""
    found: dict[tuple[str, str | None], RepeatGroup] = {}
    for row in rows:
        key = (row.tool, row.fingerprint)
        found.setdefault(key, RepeatGroup(*key)).add(row)
    return sorted(found.values(), key=lambda each: (-each.repeats, -each.calls, each.tool))


# --- the definition -------------------------------------------------------------------------------

LOOPS: Final = Question(
    name="loops",
    help="Find repeated tool calls, and invocations that fail in a row, with their cost.",
    answer=loops,
    tables={"loops": REPEATED, "worst": WORST, "repeated_failures": FAILURES},
    options=(Option("--top", "N", parsing.cap, "loops to list (default: 10)", default=10),),
)
