"""Invocations of a budget tree: turn by turn, and tool by tool."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.audit.repeats import group_repeats
from otel_limits.ledger.rows import known_cost

if TYPE_CHECKING:
    from otel_limits.audit.question import AuditQuery

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

Tools = Mapping[str, Sequence[Any]]
"""Tool calls by invocation."""


def tool_calls(inquiry: AuditQuery, ids: Sequence[str]) -> Tools:
    """Read the tool calls of some invocations."""
    from otel_limits.ledger import queries

    rows = queries.tool_calls_of(inquiry.connection, ids)
    grouped = itertools.groupby(rows, operator.attrgetter("invocation_id"))
    return {identity: list(group) for identity, group in grouped}


def turns_table(inquiry: AuditQuery, runs: Iterable[Any], tools: Tools) -> Table:
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
    """Format tool calls, e.g. `2 search, fetch error`."""
    # In the order of their first request.
    counts = Counter(
        (row.tool, "" if row.status == "success" else f" {row.status}") for row in rows
    )
    return ", ".join(
        f"{count} {tool}{status}" if count > 1 else tool + status
        for (tool, status), count in counts.items()
    )


def tools_table(runs: Iterable[Any], tools: Tools) -> Table:
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
        "reveals neither.",
    )
