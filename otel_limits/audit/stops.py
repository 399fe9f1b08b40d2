"""The question `stops`: how invocations ended, and the halted ones that had cost most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.charts import overview
from otel_limits.audit.formatting import UNFINISHED
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.core.events import SYNTHETIC
from otel_limits.ledger.rows import known_cost


@dataclass(slots=True)
class Ended:
    """Invocations that ended alike."""

    invocations: int = 0
    tokens: int = 0
    pico: int = 0
    unpriced: int = 0
    synthetic: int = 0
    zero_calls: int = 0
    unmeasured_calls: int = 0


COLUMNS: Final = (
    Column("reason", "Reason", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("action", "Action", is_key=True),
    Column("would_be", "Would be", is_key=True),
    Column("invocations", "Invocations", "count", is_key=True),
    Column("synthetic_halts", "Synthetic halts", "count"),
    Column("zero_token_calls", "Zero-token calls", "count"),
    Column("unmeasured_calls", "Unmeasured calls", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost_usd", "Cost", "money"),
    Column("unpriced_calls", "Unpriced calls", "count"),
)

KEYS: Final = sum(column.kind == "text" for column in COLUMNS)
"""Columns that say of which invocations a row is."""

COSTLIEST: Final = (
    Column("trace_id", "Trace", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("started", "Started", "time"),
    Column("reason", "Reason", is_key=True),
    Column("limit", "Limit"),
    Column("cap", "Cap"),
    Column("observed", "Observed"),
    Column("turns", "Turns", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost_usd", "Cost", "money", is_key=True),
)


def stops(inquiry: Inquiry, top: int) -> Answer:
    """Answer how invocations ended."""
    # Not above, as the parser reads every question: SQLAlchemy is imported to ask one.
    from otel_limits.ledger import queries

    inquiry.require_known()
    connection, selection = inquiry.connection, inquiry.selection
    table = stops_table(
        inquiry.work.through(queries.stops(connection, selection)),
        queries.odd_calls(connection, selection),
    )
    return Answer(
        question="stops",
        title="Stops",
        about=inquiry.about,
        tables=[table, costliest_table(queries.costliest_halted(connection, selection, top))],
        charts=overview(inquiry),
        totals=[
            (column.title, column.kind, value)
            for column, value in list(zip(table.columns, table.total or (), strict=True))[KEYS:]
        ],
    )


def stops_table(stops: Iterable[Any], odd_calls: Iterable[Any]) -> Table:
    """One row per reason, agent, action and would-be halt, the most frequent first."""
    groups: dict[tuple[str, str, str, str], Ended] = {}
    for row in stops:
        ended = groups.setdefault(_key(row), Ended())
        ended.invocations += row.invocations
        # A sum is a Decimal in PostgreSQL, and nothing at all where there is no row.
        ended.tokens += int(row.tokens or 0)
        ended.pico += int(row.price_pico or 0)
        ended.unpriced += int(row.unpriced_calls or 0)
        ended.synthetic += row.invocations if row.action in SYNTHETIC else 0
    for row in odd_calls:
        ended = groups.setdefault(_key(row), Ended())
        if row.state == "zero":
            ended.zero_calls += row.calls
        else:
            ended.unmeasured_calls += row.calls
    # Names decide between equal counts, so that the same question has the same answer.
    in_order = sorted(groups.items(), key=lambda item: (-item[1].invocations, item[0]))
    rows = [(*key, *_figures(ended)) for key, ended in in_order]
    # Of the rows and not by another query, so that the total is that of what is shown above it.
    figures = [sum(row[index] for row in rows) for index in range(KEYS, KEYS + 5)]
    unpriced = sum(ended.unpriced for ended in groups.values())
    # Unknown where no call has a price: a sum of nothing is not $0.00.
    cost = known_cost(sum(ended.pico for ended in groups.values()), unpriced)
    return Table(
        name="stops",
        title="Stops by reason and agent",
        columns=COLUMNS,
        rows=rows,
        total=("total", "", "", "", *figures, cost, unpriced),
        note="Would be is the reason of a halt that the action observe left out, under which "
        "metrics count the invocation. A synthetic halt left a message that no model wrote. A "
        "zero-token call is a real one for which the provider reported zero; an unmeasured call is "
        "one for which it reported nothing. Cost is that of the calls with a known price.",
    )


def _key(row: Any) -> tuple[str, str, str, str]:
    # What is still running is a group of its own, and not one without a reason.
    return (row.reason or UNFINISHED, row.agent, row.action or "", row.would_be)


def _figures(ended: Ended) -> tuple[Any, ...]:
    return (
        ended.invocations,
        ended.synthetic,
        ended.zero_calls,
        ended.unmeasured_calls,
        ended.tokens,
        known_cost(ended.pico, ended.unpriced),
        ended.unpriced,
    )


def costliest_table(rows: Iterable[Any]) -> Table:
    """The halted invocations that had cost most, with what it takes to find them in a trace."""
    return Table(
        name="costliest_halted",
        title="Most expensive halted invocations",
        columns=COSTLIEST,
        rows=[
            (
                # Its own id where nothing traced it: `show` takes either.
                row.trace_id or row.id,
                row.agent,
                row.started_us,
                row.reason,
                row.breach_limit,
                row.breach_cap,
                row.breach_observed,
                row.turns,
                row.input_tokens + row.output_tokens,
                known_cost(row.cost_pico, row.unpriced_calls),
            )
            for row in rows
        ],
        note="An invocation without a trace id stands with its own id; audit show takes both.",
    )


STOPS: Final = Question(
    name="stops",
    help="How invocations ended, and which halted ones cost most.",
    answer=stops,
    tables={"stops": COLUMNS, "costliest_halted": COSTLIEST},
    options=(
        Option("--top", "N", asking.cap, "halted invocations to list (default: 10)", default=10),
    ),
)
