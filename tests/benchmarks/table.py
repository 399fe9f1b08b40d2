"""Formats measurements as Markdown tables, with the bounds that must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tests.benchmarks.rounds import Mean, Round, Spread, fastest, mean_ratio, ratio, spread

Cells = tuple[str, ...]

KIB: Final = 1024


class Choice(NamedTuple):
    """A loop that a reader may choose, and the bare loop it is compared with."""

    loop: str
    bare: str
    title: str
    bounds: Mapping[int, str] = {}
    """Bounds by number of turns."""


CPU_BOUNDS: Final = {50: "CPU ≤ 1.25", 200: "CPU ≤ 1.12"}
OTHER_BOUNDS: Final = dict.fromkeys((10, 150), "0.5 ms more")
WALL_BOUNDS: Final = dict.fromkeys((2, 8), "wall ≤ 1.01")
CHOICES: Final = (
    Choice("strands", "strands", "Strands"),
    Choice("strands_native", "strands", "Strands with its own `limits=`"),
    Choice("strands_limited", "strands", "Strands with otel-limits", CPU_BOUNDS),
    Choice("strands_traced", "strands", "Strands with an SDK provider"),
    Choice("strands_traced_limited", "strands", "Strands with an SDK provider and otel-limits"),
    Choice(
        "strands_traced_recorded",
        "strands",
        "Strands with an SDK provider, otel-limits and its ledger",
    ),
    Choice("langchain", "langchain", "LangChain"),
    Choice("langchain_native", "langchain", "LangChain with `ModelCallLimitMiddleware`"),
    Choice("langchain_limited", "langchain", "LangChain with otel-limits", OTHER_BOUNDS),
    Choice(
        "langchain_unmeasured_limited",
        "langchain",
        "LangChain with otel-limits, usage estimated",
        OTHER_BOUNDS,
    ),
    Choice("strands_served", "strands_served", "Strands, answers in 250 ms"),
    Choice(
        "strands_served_limited",
        "strands_served",
        "Strands with otel-limits, answers in 250 ms",
        WALL_BOUNDS,
    ),
    Choice("langchain_served", "langchain_served", "LangChain, answers in 250 ms"),
    Choice(
        "langchain_served_limited",
        "langchain_served",
        "LangChain with otel-limits, answers in 250 ms",
        WALL_BOUNDS,
    ),
    Choice("openai_agents", "openai_agents", "OpenAI Agents SDK"),
    Choice("openai_agents_native", "openai_agents", "OpenAI Agents SDK with its own `max_turns`"),
    Choice(
        "openai_agents_limited", "openai_agents", "OpenAI Agents SDK with otel-limits", OTHER_BOUNDS
    ),
    Choice(
        "openai_agents_unmeasured_limited",
        "openai_agents",
        "OpenAI Agents SDK with otel-limits, usage estimated",
        OTHER_BOUNDS,
    ),
    Choice("openai_agents_served", "openai_agents_served", "OpenAI Agents SDK, answers in 250 ms"),
    Choice(
        "openai_agents_served_limited",
        "openai_agents_served",
        "OpenAI Agents SDK with otel-limits, answers in 250 ms",
        WALL_BOUNDS,
    ),
)

LOOP_HEADER: Final = (
    "program",
    "turns",
    "CPU per turn",
    "CPU, times the bare loop",
    "wall time, times the bare loop",
    "must hold",
)
COST_HEADER: Final = ("measure", "median (quartiles)", "must hold")


def loop_rows(found: Mapping[int, Sequence[Round]]) -> list[Cells]:
    """Return a row for each measured loop and number of turns."""
    return [
        loop_row(choice, turns, rounds)
        for turns, rounds in found.items()
        for choice in CHOICES
        if choice.loop in rounds[0][0]
    ]


def loop_row(choice: Choice, turns: int, rounds: Sequence[Round]) -> Cells:
    """Compare a loop with its bare loop over the same laps."""
    is_bare = choice.loop == choice.bare
    wall = shown(ratio(rounds, choice.loop, choice.bare, "wall"), ".3f")
    return (
        choice.title,
        str(turns),
        f"{fastest(rounds, choice.loop) / turns * 1_000:.2f} ms",
        "1" if is_bare else with_error(mean_ratio(rounds, choice.loop, choice.bare, "cpu"), ".3f"),
        "" if "served" not in choice.bare else "1" if is_bare else wall,
        choice.bounds.get(turns, ""),
    )


def callback_rows(costs: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Cells]:
    """Return a row for each span callback and number of active invocations."""
    return [
        (
            f"span callback: {name}, {live:,} active",
            f"{shown(spread([cost[name] for cost in times]), '.1f')} µs",
            "≤ 20 µs, flat",
        )
        for name in next(iter(costs.values()))[0]
        for live, times in costs.items()
    ]


def startup_rows(costs: Sequence[Mapping[str, float]]) -> list[Cells]:
    """Return the CPU times of the import and of `enable()`."""
    return [
        (title, f"{shown(spread([cost[name] for cost in costs]), '.0f')} ms", bar)
        for name, title, bar in (
            ("import", "`import otel_limits` after Strands and the SDK", "≤ 60 ms"),
            ("enable", "`enable()`", "≤ 100 ms"),  # the binding is imported, to probe what it needs
        )
    ]


def memory_rows(weight: Mapping[str, float], finished: int) -> list[Cells]:
    """Return the memory of an active invocation, and the growth with finished ones."""
    return [
        ("memory per active invocation", f"{weight['live'] / KIB:.2f} KiB", "≤ 4 KiB"),
        (
            f"memory after {finished:,} finished, over that after {finished // 10:,}",
            f"{weight['growth'] / KIB:+.2f} KiB",
            "flat",
        ),
    ]


def shown(values: Spread, form: str) -> str:
    """Format a median with its quartiles."""
    low, median, high = (format(value, form) for value in values)
    return f"{median} ({low}-{high})"


def with_error(value: Mean, form: str) -> str:
    """Format a mean with its standard error."""
    return f"{value.mean:{form}} ± {value.error:{form}}"


def markdown(header: Cells, rows: Iterable[Cells]) -> str:
    """Format a table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
