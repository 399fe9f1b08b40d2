"""What the charts of a report show: spend over time, by agent and model, stops, and turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answers import CellKind, Chart, ChartSeries, Mark
from otel_limits.audit.formatting import UNFINISHED
from otel_limits.audit.sums import Groups, SummedCalls, Sums, fold
from otel_limits.core.events import HALTED
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import caps_in

if TYPE_CHECKING:
    from otel_limits.audit.question import Inquiry

COLOURED: Final = 5
"""ChartSeries with a colour of their own; the others are shown together."""
LONGEST: Final = 12
"""Bars of a chart; the others are shown together."""
OTHERS: Final = "others"
SINGLE_TURNS: Final = 40
"""Up to so many turns, a distribution has one bar for each number."""
MAX_MARKS: Final = 3
UNITS: Final[Mapping[CellKind, str]] = {"money": "USD", "count": "tokens"}
"""What spend is counted in."""


def overview(inquiry: Inquiry) -> list[Chart]:
    """The charts of a report, spend, stops and turns; none where they are not shown."""
    from otel_limits.ledger import queries, spending

    # They cost queries of their own, and only a page shows them.
    if not inquiry.has_charts:
        return []
    connection, selection = inquiry.connection, inquiry.selection
    return [
        *spend_charts(
            spending.spend(connection, ("day", "agent", "model"), selection), selection.zone
        ),
        stops_chart(queries.stops(connection, selection)),
        turns_chart(queries.invocations(connection, selection)),
    ]


def spend_charts(rows: SummedCalls, zone: tzinfo) -> list[Chart]:
    """Spend per day by agent, and in all by agent and by model; in tokens where no price is known.

    `rows` are grouped by at least day, agent and model.
    """
    rows = list(rows)
    days = fold(rows, ("day", "agent"), zone)
    agents, models = fold(rows, ("agent",)), fold(rows, ("model",))
    # One kind for all charts of a page: bars in USD and in tokens beside each other mislead.
    kind: CellKind = "money" if any(sums.has_price for sums in days.values()) else "count"
    return [
        over_time(days, leading(agents, kind), kind, f"day ({zone})"),
        by_name("agents", "Spend by agent", agents, kind),
        by_name("models", "Spend by model", models, kind),
    ]


def over_time(days: Groups, agents: Sequence[str], kind: CellKind, axis: str) -> Chart:
    """One column per day, every day between the first and the last, coloured by agent.

    `agents` have a colour each; the last of them may be `OTHERS`.
    """
    # Tokens without a price would be bars of no height, as if they had cost nothing.
    unpriced = sum(sums.unpriced_tokens for sums in days.values()) if kind == "money" else 0
    labels = every_day(sorted({str(day) for day, _ in days}))
    values: dict[str, list[float]] = {name: [0.0] * len(labels) for name in agents}
    index = {label: position for position, label in enumerate(labels)}
    for (day, agent), sums in days.items():
        # Agents beyond the colours that can be told apart are one series.
        name = agent if agent in values else OTHERS
        values[name][index[str(day)]] += size(sums, kind)
    lost = pluralize(unpriced, "token has", "tokens have")
    return Chart(
        name="over_time",
        title=f"Spend per day, in {UNITS[kind]}",
        labels=labels,
        series=[ChartSeries(name, values[name]) for name in agents],
        kind=kind,
        wide=True,
        axis=axis,
        note=f"{lost} no known price, and no place in the chart." if unpriced else "",
    )


def by_name(name: str, title: str, groups: Groups, kind: CellKind) -> Chart:
    """One bar per name, the largest first."""
    # A name without a price is left out and named below: its bar would say 0.
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
        note=f"Without any known price: {', '.join(unknown)}." if unknown else "",
    )


def stops_chart(rows: Iterable[Any]) -> Chart:
    """One bar per reason, in two colours: halted by a limit, and ended otherwise."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        of_reason = counts.setdefault(row.reason or UNFINISHED, [0, 0])
        # A boolean as an index: ended by itself, or halted.
        of_reason[row.action in HALTED] += row.invocations
    ranked = sorted(counts.items(), key=lambda each: (-sum(each[1]), each[0]))
    return Chart(
        name="stops",
        title="Stops by reason, in invocations",
        labels=[reason for reason, _ in ranked],
        series=[
            ChartSeries("ended by itself", [float(ended) for _, (ended, _) in ranked]),
            ChartSeries(
                "halted by a limit", [float(halted) for _, (_, halted) in ranked], "halted"
            ),
        ],
        horizontal=True,
    )


def turns_chart(rows: Iterable[Any], cap: int | None = None) -> Chart:
    """The distribution of turns, with `cap` drawn in, or the latest cap of each agent."""
    turns: dict[int, list[int]] = {}
    latest: dict[str, tuple[int, int | None]] = {}
    for row in rows:
        # One under way has fewer turns than it is going to have.
        if row.ended_us is not None:
            turns.setdefault(row.turns, [0, 0])[row.action in HALTED] += 1
        seen = latest.get(row.agent, (-1, None))
        if row.started_us > seen[0]:
            latest[row.agent] = (row.started_us, caps_in(row.limits).get("max_turns"))
    # The latest only: caps change, and lines of long ago would be taken for what holds now.
    caps = [cap] if cap else [each for _, each in latest.values() if each]
    return distribution(turns, caps)


def distribution(turns: Mapping[int, Sequence[int]], caps: Iterable[int]) -> Chart:
    """How many invocations had how many turns, with the caps that were in force drawn in.

    `turns` has, by number of turns, the invocations that ended by themselves and the halted ones.
    """
    marks = sorted(set(caps))[:MAX_MARKS]
    highest = max([*turns, *marks], default=0)
    # Bars as wide as it takes for forty of them: one for each turn of a runaway cannot be read.
    width = max(1, -(-highest // SINGLE_TURNS))
    lowest = 0 if 0 in turns else 1
    bins = [range(low, low + width) for low in range(lowest, highest + 1, width)]
    return Chart(
        name="turns",
        title="Turns per invocation",
        labels=[str(each[0]) if width == 1 else f"{each[0]}-{each[-1]}" for each in bins],
        series=[
            ChartSeries(
                name, [float(sum(turns.get(n, (0, 0))[part] for n in each)) for each in bins], tone
            )
            for part, (name, tone) in enumerate(
                (("ended by itself", ""), ("halted by a limit", "halted"))
            )
        ],
        axis="turns",
        marks=[Mark(cap, f"max_turns {cap}") for cap in marks],
    )


def leading(groups: Groups, kind: CellKind) -> list[str]:
    """The names that spent most, and `others` where there are more."""
    totals = {str(name): size(sums, kind) for (name,), sums in groups.items()}
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return ranked if len(ranked) <= COLOURED else [*ranked[:COLOURED], OTHERS]


def every_day(days: Sequence[str]) -> list[str]:
    """All days from the first to the last, so that a day without spend leaves a gap."""
    if not days:
        return []
    first, last = date.fromisoformat(days[0]), date.fromisoformat(days[-1])
    return [(first + timedelta(days=n)).isoformat() for n in range((last - first).days + 1)]


def size(sums: Sums, kind: CellKind) -> float:
    """What a bar stands for: USD, or tokens."""
    return float(sums.cost or 0) if kind == "money" else float(sums.tokens)
