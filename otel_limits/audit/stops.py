"""The question `stops`: stop reasons, refused tool calls, and the costliest halts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import UNFINISHED, Answer, Column, Table
from otel_limits.audit.charts import overview
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.ledger.rows import known_cost


@dataclass(slots=True)
class Ended:
    """Invocations grouped by outcome."""

    invocations: int = 0
    tokens: int = 0
    pico: int = 0
    unpriced: int = 0
    synthetic: int = 0
    zero_calls: int = 0
    estimated_calls: int = 0
    unmeasured_calls: int = 0


COLUMNS: Final = (
    Column("reason", "Stop reason", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("action", "Action", is_key=True),
    Column(
        "would_be",
        "Would-be halt",
        is_key=True,
        note="A would-be halt is the limit that would have halted an agent whose action is "
        "observe; metrics count the invocation under this reason.",
    ),
    Column("invocations", "Invocations", "count", is_key=True),
    Column(
        "synthetic_halts",
        "Synthetic halts",
        "count",
        is_detail=True,
        note="A synthetic halt added a message that no model wrote.",
    ),
    # `is_key` keeps it if each row has 0: that no call had zero tokens is an answer, too. It says
    # whether an invocation without tokens was a synthetic halt or such a call.
    Column(
        "zero_token_calls",
        "Zero-token calls",
        "count",
        is_key=True,
        note="For a zero-token call the provider reported zero tokens.",
    ),
    Column(
        "estimated_calls",
        "Estimated calls",
        "count",
        is_detail=True,
        note="For an estimated call the provider reported nothing, or the stream ended before "
        "that.",
    ),
    Column(
        "unmeasured_calls",
        "Unmeasured calls",
        "count",
        is_detail=True,
        note="An unmeasured call has no reported usage, and counts no estimate.",
    ),
    Column("tokens", "Tokens", "count"),
    Column("cost_usd", "Cost", "money", note="Cost covers calls with a known price."),
    Column("unpriced_calls", "Unpriced calls", "count", is_detail=True),
)

KEYS: Final = sum(column.kind == "text" for column in COLUMNS)
"""Number of the columns that identify a row."""

REFUSALS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("tool", "Tool", is_key=True),
    Column("limit", "Limit", is_key=True),
    Column("refused_calls", "Refused calls", "count", is_key=True),
    Column("would_be_refusals", "Would-be refusals", "count", is_key=True),
)

COSTLIEST: Final = (
    Column("trace_id", "Trace", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("started", "Started", "time"),
    Column("reason", "Stop reason", is_key=True),
    Column("limit", "Limit", is_key=True),
    Column("cap", "Cap"),
    Column("observed", "Observed"),
    Column("unit", "Unit", is_key=True),
    Column("turns", "Turns", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cost_usd", "Cost", "money", is_key=True),
)


def stops(inquiry: AuditQuery, top: int) -> Answer:
    """Answer how invocations ended."""
    # Imported here, as the parser imports every question, and SQLAlchemy is only needed to answer
    # one.
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
        tables=[
            table,
            refusals_table(queries.refused_tools(connection, selection)),
            costliest_table(queries.costliest_halted(connection, selection, top)),
        ],
        charts=overview(inquiry),
        totals=[
            (column.title, column.kind, value)
            for column, value in list(zip(table.columns, table.total or (), strict=True))[KEYS:]
        ],
    )


def stops_table(stops: Iterable[Any], odd_calls: Iterable[Any]) -> Table:
    """Build a table by reason, agent, action and would-be halt, the most frequent first."""
    groups: dict[tuple[str, str, str, str], Ended] = {}
    for row in stops:
        ended = groups.setdefault(_key(row), Ended())
        ended.invocations += row.invocations
        # A sum is a Decimal in PostgreSQL, and null over no rows.
        ended.tokens += int(row.tokens or 0)
        ended.pico += int(row.price_pico or 0)
        ended.unpriced += int(row.unpriced_calls or 0)
        ended.synthetic += row.synthetic
    for row in odd_calls:
        ended = groups.setdefault(_key(row), Ended())
        if row.state == "zero":
            ended.zero_calls += row.calls
        elif row.estimated:
            ended.estimated_calls += row.calls
        else:
            ended.unmeasured_calls += row.calls
    # By name for equal counts, so that the order is stable.
    in_order = sorted(groups.items(), key=lambda item: (-item[1].invocations, item[0]))
    rows = [(*key, *_figures(ended)) for key, ended in in_order]
    # From the rows rather than another query, so that the total matches them.
    figures = [sum(row[index] for row in rows) for index in range(KEYS, KEYS + 6)]
    unpriced = sum(ended.unpriced for ended in groups.values())
    # Unknown if no call has a price: a sum of nothing is not $0.00.
    cost = known_cost(sum(ended.pico for ended in groups.values()), unpriced)
    return Table(
        name="stops",
        title="Stops by reason and agent",
        columns=COLUMNS,
        rows=rows,
        total=("total", "", "", "", *figures, cost, unpriced),
        note=_own_limits({reason for reason, *_ in groups}),
    )


def _own_limits(reasons: Collection[str]) -> str:
    """Name the stop reasons that are limits of an agent framework, not of otel-limits."""
    from otel_limits.bindings.known import own_limits

    return " ".join(
        f"{reason} is the framework's own limit: {where}."
        for reason, where in own_limits().items()
        if reason in reasons
    )


def _key(row: Any) -> tuple[str, str, str, str]:
    # Unfinished invocations are a separate group.
    return (row.reason or UNFINISHED, row.agent, row.action or "", row.would_be)


def _figures(ended: Ended) -> tuple[Any, ...]:
    return (
        ended.invocations,
        ended.synthetic,
        ended.zero_calls,
        ended.estimated_calls,
        ended.unmeasured_calls,
        ended.tokens,
        known_cost(ended.pico, ended.unpriced),
        ended.unpriced,
    )


def refusals_table(rows: Iterable[Any]) -> Table:
    """Build a table of the tool calls that a limit refused, or would have refused."""
    return Table(
        name="refused_tool_calls",
        title="Refused tool calls",
        columns=REFUSALS,
        rows=[(row.agent, row.tool, row.breach_limit, row.refused, row.would_be) for row in rows],
        note="A limit refused these calls. The agent continued, unless its halt is listed above. "
        "A would-be refusal is a call that was made, as the action is observe. Imported spans show "
        "neither.",
    )


def costliest_table(rows: Iterable[Any]) -> Table:
    """Build a table of the costliest halted invocations, with what identifies them in a trace."""
    return Table(
        name="costliest_halted",
        title="Most expensive halted invocations",
        columns=COSTLIEST,
        rows=[
            (
                # The invocation ID if untraced: `show` accepts both.
                row.trace_id or row.id,
                row.agent,
                row.started_us,
                row.reason,
                row.breach_limit,
                row.breach_cap,
                row.breach_observed,
                row.breach_unit,
                row.turns,
                row.input_tokens + row.output_tokens,
                known_cost(row.cost_pico, row.unpriced_calls),
            )
            for row in rows
        ],
        note="An invocation without a trace has its own ID here; `otel-limits audit show` accepts "
        "both. Observed includes what a refused call needed beyond the cap.",
    )


STOPS: Final = Question(
    name="stops",
    help="Show stop reasons, refused tool calls and the costliest halts.",
    answer=stops,
    tables={"stops": COLUMNS, "refused_tool_calls": REFUSALS, "costliest_halted": COSTLIEST},
    options=(
        Option("--top", "N", parsing.cap, "halted invocations to list (default: 10)", default=10),
    ),
)
