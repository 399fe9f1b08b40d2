"""Charts of a report: spend over time, by agent and model, stops, turns, and bills."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import UNFINISHED, CellKind, Chart, ChartSeries, Mark
from otel_limits.audit.sums import Groups, SummedCalls, Sums, fold
from otel_limits.core.events import CUT_SHORT, HALTED
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import caps_in

if TYPE_CHECKING:
    from otel_limits.audit.question import AuditQuery

COLOURED: Final = 5
"""Series with their own color; the rest are combined."""
LONGEST: Final = 12
"""Bars per chart; the rest are combined."""
OTHERS: Final = "others"
SINGLE_TURNS: Final = 40
"""Up to this many turns, a distribution has one bar per number."""
MAX_MARKS: Final = 3
ENDS: Final = (("finished", ""), ("halted", "halted"), ("killed", "killed"))
"""How an invocation ended, and the tone of its bar."""
UNITS: Final[Mapping[CellKind, str]] = {"money": "USD", "count": "tokens"}
"""Units of spend."""


def overview(inquiry: AuditQuery) -> list[Chart]:
    """Build the charts of a report: spend, stops and turns; none if they are not shown."""
    from otel_limits.ledger import queries, spending, whole_tasks

    # They need additional queries, and only the HTML report shows them.
    if not inquiry.has_charts:
        return []
    connection, selection = inquiry.connection, inquiry.selection
    return [
        *spend_charts(
            spending.spend(connection, ("day", "agent", "model"), selection), selection.zone
        ),
        stops_chart(queries.stops(connection, selection)),
        turns_chart(whole_tasks.tasks(connection, selection)),
    ]


def spend_charts(rows: SummedCalls, zone: tzinfo) -> list[Chart]:
    """Build charts of spend per day by agent, and by agent and by model; in tokens without prices.

    `rows` are grouped at least by day, agent and model.
    """
    rows = list(rows)
    days = fold(rows, ("day", "agent"), zone)
    agents, models = fold(rows, ("agent",)), fold(rows, ("model",))
    # One unit for all charts of a page: USD next to tokens would mislead.
    kind: CellKind = "money" if any(sums.has_price for sums in days.values()) else "count"
    return [
        over_time(days, leading(agents, kind), kind, f"day ({zone})"),
        by_name("agents", "Spend by agent", agents, kind),
        by_name("models", "Spend by model", models, kind),
    ]


def over_time(days: Groups, agents: Sequence[str], kind: CellKind, axis: str) -> Chart:
    """Build a chart with one column per day from the first to the last, colored by agent.

    `agents` get one color each; the last may be `OTHERS`.
    """
    # Unpriced tokens would be bars of zero height, as if they were free.
    unpriced = sum(sums.unpriced_tokens for sums in days.values()) if kind == "money" else 0
    labels = every_day(sorted({str(day) for day, _ in days}))
    values: dict[str, list[float]] = {name: [0.0] * len(labels) for name in agents}
    index = {label: position for position, label in enumerate(labels)}
    for (day, agent), sums in days.items():
        # Agents beyond the available colors are one series.
        name = agent if agent in values else OTHERS
        values[name][index[str(day)]] += size(sums, kind)
    lost = pluralize(unpriced, "token without a known price is", "tokens without a known price are")
    return Chart(
        name="over_time",
        title=f"Spend per day, in {UNITS[kind]}",
        labels=labels,
        series=[ChartSeries(name, values[name]) for name in agents],
        kind=kind,
        wide=True,
        axis=axis,
        note=f"{lost} not shown." if unpriced else "",
    )


def by_name(name: str, title: str, groups: Groups, kind: CellKind) -> Chart:
    """Build a chart with one bar per name, the largest first."""
    # Unpriced names are listed in the note: a bar would show 0.
    known = {str(key[0]): sums for key, sums in groups.items() if sums.has_price or kind == "count"}
    unknown = sorted(str(key[0]) for key in groups if str(key[0]) not in known)
    ranked = sorted(
        ((label, size(sums, kind)) for label, sums in known.items()),
        key=lambda each: (-each[1], each[0]),
    )
    rest = sum(value for _, value in ranked[LONGEST:])
    left = len(ranked) - LONGEST
    shown = ranked[:LONGEST] + ([(f"{left} {OTHERS}", rest)] if left > 0 else [])
    return Chart(
        name=name,
        title=f"{title}, in {UNITS[kind]}",
        labels=[label for label, _ in shown],
        series=[ChartSeries("spend", [value for _, value in shown])],
        kind=kind,
        horizontal=True,
        note=f"Without a known price: {', '.join(unknown)}." if unknown else "",
    )


def stops_chart(rows: Iterable[Any]) -> Chart:
    """Build a chart with one bar per stop reason, by how these invocations ended."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        of_reason = counts.setdefault(row.reason or UNFINISHED, [0] * len(ENDS))
        of_reason[_end(row.action)] += row.invocations
    ranked = sorted(counts.items(), key=lambda each: (-sum(each[1]), each[0]))
    return Chart(
        name="stops",
        title="Finished invocations by stop reason",
        labels=[reason for reason, _ in ranked],
        series=[
            ChartSeries(name, [float(by_end[part]) for _, by_end in ranked], tone)
            for part, (name, tone) in enumerate(ENDS)
        ],
        horizontal=True,
    )


def _end(action: str) -> int:
    """Return the index in `ENDS` of an invocation's end."""
    return 1 if action in HALTED else 2 if action in CUT_SHORT else 0


def turns_chart(rows: Iterable[Any], cap: int | None = None) -> Chart:
    """Chart the distribution of turns, marking `cap`, or each agent's latest cap."""
    turns: dict[int, list[int]] = {}
    latest: dict[str, tuple[int, int | None]] = {}
    for row in rows:
        # A task in progress has not made all of its turns.
        if row.ended_us is not None:
            turns.setdefault(row.turns, [0] * len(ENDS))[_end(row.action)] += 1
        seen = latest.get(row.agent, (-1, None))
        if row.started_us > seen[0]:
            latest[row.agent] = (row.started_us, caps_in(row.limits).get("max_turns"))
    # Only the latest: caps change, and old lines would look current.
    caps = [cap] if cap else [each for _, each in latest.values() if each]
    return distribution(turns, caps)


def distribution(turns: Mapping[int, Sequence[int]], caps: Iterable[int]) -> Chart:
    """Chart how many tasks had how many turns, with the configured caps marked.

    `turns` has, by number of turns, the invocations by how they ended, in the order of `ENDS`.
    """
    marks = sorted(set(caps))[:MAX_MARKS]
    highest = max([*turns, *marks], default=0)
    # At most forty bars: one for each turn of a runaway would be unreadable.
    width = max(1, -(-highest // SINGLE_TURNS))
    lowest = 0 if 0 in turns else 1
    bins = [range(low, low + width) for low in range(lowest, highest + 1, width)]
    return Chart(
        name="turns",
        title="Turns per task",
        labels=[str(each[0]) if width == 1 else f"{each[0]}-{each[-1]}" for each in bins],
        series=[
            ChartSeries(
                name,
                [float(sum(turns[n][part] for n in each if n in turns)) for each in bins],
                tone,
            )
            for part, (name, tone) in enumerate(ENDS)
        ],
        axis="turns",
        marks=[Mark(cap, f"max_turns {cap}") for cap in marks],
    )


def bill_charts(costs: Iterable[Sequence[Any]], parts: Iterable[Sequence[Any]]) -> list[Chart]:
    """Build charts of a bill: what agrees with the ledger per day, and differences by cause.

    Args:
        costs: Rows of the table of costs, as in `reconcile_bill.py`.
        parts: Rows of the table of the parts of differences.
    """
    days: dict[str, list[float]] = {}
    for _, day, _, recorded, billed, difference, _, unexplained, _ in costs:
        sums = days.setdefault(day, [0.0, 0.0, 0.0])
        sums[0] += float(min(recorded, billed))
        sums[1] += float(abs(difference - unexplained))
        sums[2] += float(abs(unexplained))
    labels = every_day(sorted(days))
    names = (("as in the ledger", ""), ("other, with a cause", ""), ("unexplained", "halted"))
    causes: dict[str, float] = {}
    for vendor, _, _, cause, _, _, cost in parts:
        causes[f"{vendor}: {cause}"] = causes.get(f"{vendor}: {cause}", 0.0) + float(abs(cost))
    ranked = sorted(causes.items(), key=lambda each: (-each[1], each[0]))[:LONGEST]
    return [
        Chart(
            name="bill",
            title="Bill per day, in USD",
            labels=labels,
            series=[
                ChartSeries(name, [days.get(day, (0.0, 0.0, 0.0))[part] for day in labels], tone)
                for part, (name, tone) in enumerate(names)
            ],
            kind="money",
            wide=True,
            axis="day of the bill",
            note="Differences are shown without their sign.",
        ),
        Chart(
            name="causes",
            title="Differences by cause, in USD",
            labels=[cause for cause, _ in ranked],
            series=[ChartSeries("difference", [amount for _, amount in ranked])],
            kind="money",
            horizontal=True,
        ),
    ]


def leading(groups: Groups, kind: CellKind) -> list[str]:
    """List the names with the highest spend, and `others` if there are more."""
    totals = {str(name): size(sums, kind) for (name,), sums in groups.items()}
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return ranked if len(ranked) <= COLOURED else [*ranked[:COLOURED], OTHERS]


def every_day(days: Sequence[str]) -> list[str]:
    """List all days from the first to the last, so that a day without spend leaves a gap."""
    if not days:
        return []
    first, last = date.fromisoformat(days[0]), date.fromisoformat(days[-1])
    return [(first + timedelta(days=n)).isoformat() for n in range((last - first).days + 1)]


def size(sums: Sums, kind: CellKind) -> float:
    """Return the size of a bar in USD or tokens."""
    return float(sums.cost or 0) if kind == "money" else float(sums.tokens)
