"""The question `loops`: which agents and tools repeat themselves, how often, and what it cost.

A call repeats itself when an earlier call of the same invocation had the same tool, arguments and
result. It needs no limit on loops: the hashes of calls are kept wherever there is a ledger.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.formatting import UNFINISHED
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.repeats import Alike, alike, calls_by_turn, cost_after
from otel_limits.core.events import HALTED
from otel_limits.core.limits import LOOP_DETECTED_STOP_REASON
from otel_limits.ledger.rows import MICROSECONDS, dollars, portions

PORTION: Final = 500

LOOPS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("repeats", "Repeated calls", "count", is_key=True),
    Column("repeated_share", "Of its calls", "share"),
    Column("invocations", "Invocations", "count"),
    Column("halted", "Halted for it", "count"),
    Column("most", "Most alike", "count"),
    Column("seconds", "Tool time", "seconds"),
    Column("tokens", "Tokens after them", "count"),
    Column("cost_usd", "Cost after them", "money", is_key=True),
)

WORST: Final = (
    Column("trace_id", "Trace", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("fingerprint", "Fingerprint", "id"),
    Column("calls", "Calls alike", "count", is_key=True),
    Column("turns", "In turns", "sentence"),
    Column("reason", "Ended"),
    Column("tokens", "Tokens after them", "count"),
    Column("cost_usd", "Cost after them", "money", is_key=True),
)


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of one invocation that are alike, and what model calls used because of it."""

    run: Any
    calls: Alike
    tokens: int
    pico: int
    has_price: bool

    @property
    def cost(self) -> Any:
        """USD, where it is known."""
        return dollars(self.pico) if self.has_price else None


@dataclass(slots=True)
class Repeating:
    """What one tool of an agent repeated."""

    repeats: int = 0
    micros: int = 0
    tokens: int = 0
    pico: int = 0
    has_price: bool = False
    most: int = 0
    runs: set[str] = field(default_factory=set)
    halted: set[str] = field(default_factory=set)
    """Invocations, as `runs`, that a limit on loops ended."""

    def add(self, loop: Loop) -> None:
        """Add one."""
        self.repeats += loop.calls.repeats
        self.micros += loop.calls.repeated_micros
        self.tokens += loop.tokens
        self.pico += loop.pico
        self.has_price |= loop.has_price
        self.most = max(self.most, loop.calls.calls)
        self.runs.add(loop.run.id)
        # A halt for another reason did not come from the repetition, whatever was repeated.
        if loop.run.reason == LOOP_DETECTED_STOP_REASON and loop.run.action in HALTED:
            self.halted.add(loop.run.id)

    def figures(self, calls: int | None) -> tuple[Any, ...]:
        """The values of `LOOPS` behind its names; `calls` are all that the tool had."""
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


def loops(inquiry: Inquiry, top: int) -> Answer:
    """Answer who repeats itself."""
    from otel_limits.ledger import tooling

    inquiry.require_known()
    # Of all calls, also those that repeat nothing: the share of repeated ones needs both.
    uses = tooling.tool_uses(inquiry.connection, ("agent", "tool"), inquiry.selection)
    counts = {(keys["agent"], keys["tool"]): calls for keys, (calls, _, _) in uses or ()}
    by_tool: dict[tuple[str, str], Repeating] = {}
    total, worst = Repeating(), list[Loop]()
    for loop in inquiry.work.through(found(inquiry)):
        by_tool.setdefault((loop.run.agent, loop.calls.tool), Repeating()).add(loop)
        total.add(loop)
        worst.append(loop)
        # Only the worst are shown: a ledger of years would otherwise be held in memory.
        if len(worst) > 10 * top:
            worst = _worst(worst, top)
    return Answer(
        question="loops",
        title="Loops",
        about=inquiry.about,
        tables=[loops_table(by_tool, total, counts), worst_table(_worst(worst, top))],
        totals=[
            ("Repeated calls", "count", total.repeats),
            ("Invocations that repeat", "count", len(total.runs)),
            ("Cost after them", "money", dollars(total.pico) if total.has_price else None),
        ],
    )


def found(inquiry: Inquiry) -> Iterator[Loop]:
    """Every group of equal calls of every invocation, but for those that are alone."""
    from otel_limits.ledger import queries, tooling

    connection = inquiry.connection
    # By portions, as the tool calls of a ledger of years have no room in memory.
    for ids in portions(tooling.repeating(connection, inquiry.selection), PORTION):
        turns: dict[str, dict[int, Any]] = {}
        for row in tooling.turns_of(connection, ids):
            turns.setdefault(row.invocation_id, {})[row.turn] = row
        runs = {row.id: row for row in queries.invocations_of(connection, ids)}
        calls = tooling.tool_calls_of(connection, ids)
        for identity, rows in itertools.groupby(calls, operator.attrgetter("invocation_id")):
            groups = alike(rows)
            counts = calls_by_turn(groups)
            for group in groups:
                # Calls may be there before the row of their invocation, which another process
                # writes.
                if group.repeats and identity in runs:
                    used = cost_after(group, counts, turns.get(identity, {}))
                    yield Loop(runs[identity], group, *used)


def _worst(loops: Sequence[Loop], top: int) -> list[Loop]:
    # With the id, so that equal ones stand in the same order every time.
    order = operator.attrgetter("pico", "tokens", "calls.repeats", "run.id")
    return sorted(loops, key=order, reverse=True)[:top]


def loops_table(
    by_tool: Mapping[tuple[str, str], Repeating],
    total: Repeating,
    counts: Mapping[tuple[str, str], int],
) -> Table:
    """One row per agent and tool, what cost most first."""
    # Repeats decide where no price is known, and names where those are equal.
    in_order = sorted(by_tool.items(), key=lambda item: (-item[1].pico, -item[1].repeats, item[0]))
    return Table(
        name="loops",
        title="Repeated tool calls by agent and tool",
        columns=LOOPS,
        rows=[(*key, *each.figures(counts.get(key))) for key, each in in_order],
        total=("total", "", *total.figures(sum(counts.values()))),
        note="A repeated call had the same arguments and the same result as an earlier one of its "
        "invocation; what is asked again on purpose is among them. Tokens and cost are those of "
        "the model calls that got the results, shared with other tools of their turn.",
    )


def worst_table(loops: Sequence[Loop]) -> Table:
    """Where it cost most, with what it takes to find it in a trace."""
    return Table(
        name="worst",
        title="Most expensive repetitions",
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


LOOPS_QUESTION: Final = Question(
    name="loops",
    help="Which agents and tools repeat themselves, how often, and what it cost.",
    answer=loops,
    tables={"loops": LOOPS, "worst": WORST},
    options=(Option("--top", "N", asking.cap, "repetitions to list (default: 10)", default=10),),
)
