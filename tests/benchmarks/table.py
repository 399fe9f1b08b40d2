"""Puts what was measured into a Markdown table, each measure beside its bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tests.benchmarks.rounds import Mean, Round, Spread, fastest, mean_ratio, ratio, spread

Cells = tuple[str, ...]

KIB: Final = 1024


class Pair(NamedTuple):
    """A loop, the one that it is compared with, what that shows, and the bar."""

    loop: str
    bare: str
    title: str
    bar: str


PAIRS: Final = (
    Pair("strands_traced_limited", "strands_traced", "SDK provider: otel-limits", "≤ 1.05 CPU"),
    Pair("strands_traced_recorded", "strands_traced_limited", "otel-limits: the ledger", "≤ 1.02"),
    Pair("strands_limited", "strands", "no SDK provider: otel-limits", "≤ 1.05 CPU"),
    Pair("strands_doors", "strands", "no SDK provider: as many hooks and stages, all empty", ""),
    Pair("strands_native", "strands", "no SDK provider: Strands' own `limits`", ""),
    Pair(
        "strands_served_limited",
        "strands_served",
        "a model server that streams an answer in 250 ms: otel-limits",
        "≤ 1.01 wall",
    ),
    Pair("langchain_limited", "langchain", "LangChain: `ModelCallLimitMiddleware`", ""),
)

LOOP_HEADER: Final = (
    "over its bare loop",
    "turns",
    "CPU: mean ratio of the rounds ± its error",
    "CPU: median ratio (quartiles)",
    "wall: median ratio (quartiles)",
    "bare loop, CPU per turn",
    "bar",
)
COST_HEADER: Final = ("measure", "median (quartiles)", "bar")


def loop_rows(found: Mapping[int, Sequence[Round]]) -> list[Cells]:
    """One row per pair of loops and number of turns that were run."""
    return [
        loop_row(pair, turns, rounds)
        for pair in PAIRS
        for turns, rounds in found.items()
        if pair.loop in rounds[0][0]
    ]


def loop_row(pair: Pair, turns: int, rounds: Sequence[Round]) -> Cells:
    """Compare one pair of loops over the same laps."""
    return (
        pair.title,
        str(turns),
        with_error(mean_ratio(rounds, pair.loop, pair.bare, "cpu"), ".3f"),
        shown(ratio(rounds, pair.loop, pair.bare, "cpu"), ".3f"),
        shown(ratio(rounds, pair.loop, pair.bare, "wall"), ".3f"),
        f"{fastest(rounds, pair.bare) / turns * 1_000:.2f} ms",
        pair.bar,
    )


def callback_rows(costs: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Cells]:
    """One row per span callback and number of live invocations."""
    return [
        (
            f"span callback: {name}, {live:,} live",
            f"{shown(spread([cost[name] for cost in times]), '.1f')} µs",
            "≤ 20 µs, flat",
        )
        for name in next(iter(costs.values()))[0]
        for live, times in costs.items()
    ]


def startup_rows(costs: Sequence[Mapping[str, float]]) -> list[Cells]:
    """Import and `enable()`, in CPU time."""
    return [
        (title, f"{shown(spread([cost[name] for cost in costs]), '.0f')} ms", bar)
        for name, title, bar in (
            ("import", "`import otel_limits` after Strands and the SDK", "≤ 60 ms"),
            ("enable", "`enable()`", "≤ 100 ms"),  # the binding is imported, to probe what it needs
        )
    ]


def memory_rows(weight: Mapping[str, float], finished: int) -> list[Cells]:
    """Weight of a live invocation, and growth by finished ones."""
    return [
        ("memory per live invocation", f"{weight['live'] / KIB:.2f} KiB", "≤ 4 KiB"),
        (
            f"memory after {finished:,} finished, over that after {finished // 10:,}",
            f"{weight['growth'] / KIB:+.2f} KiB",
            "flat",
        ),
    ]


def shown(values: Spread, form: str) -> str:
    """Write a median with its quartiles."""
    low, median, high = (format(value, form) for value in values)
    return f"{median} ({low}-{high})"


def with_error(value: Mean, form: str) -> str:
    """Write a mean with its error."""
    return f"{value.mean:{form}} ± {value.error:{form}}"


def markdown(header: Cells, rows: Iterable[Cells]) -> str:
    """Write a table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
