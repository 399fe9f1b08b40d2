"""Measures the overhead of otel-limits: `python -m tests.benchmarks [--quick] [--write]`."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Final

from tests.benchmarks import table
from tests.benchmarks.loops import OTHERS, SERVED, STRANDS, installed
from tests.benchmarks.rounds import Distance, Round, apart, run_round
from tests.paths import ROOT

PAGE: Final = ROOT / "otel_limits/docs/overhead.md"
LAST_MARKER: Final = "<!-- /benchmarks -->"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a measurement."""

    strands: tuple[Distance, ...]
    others: tuple[Distance, ...]
    served: Distance
    """For loops with a model server, which takes a quarter of a second per turn."""
    live: tuple[int, ...]
    finished: int


FULL: Final = Plan(
    strands=(Distance(turns=50, laps=5), Distance(turns=200, laps=2)),
    others=(Distance(turns=10, laps=20), Distance(turns=150, laps=3)),
    served=Distance(turns=8, laps=2),
    live=(1, 10_000),
    finished=100_000,
)
"""Few laps in many rounds, because processes differ more than laps of one process."""

QUICK: Final = Plan(
    strands=(Distance(turns=5, laps=2),),
    others=(Distance(turns=6, laps=2),),
    served=Distance(turns=2, laps=1),
    live=(1, 100),
    finished=100,
)


def main(arguments: list[str] | None = None) -> None:
    """Run all measurements and print or write their tables. Progress goes to standard error."""
    options = parse(arguments)
    plan = QUICK if options.quick else FULL
    header = (
        f"Python {platform.python_version()} on {platform.machine()}, one core, "
        f"{time.strftime('%B %Y', time.gmtime())}, {options.rounds} rounds of new processes:"
    )
    sections = [loops(plan, options.rounds)]
    if not options.write:
        sections.append(costs(plan, options.rounds))
    text = "\n\n".join((header, *sections)) + "\n"
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        start, end = page.index("\n", page.index("<!-- benchmarks:")) + 1, page.index(LAST_MARKER)
        PAGE.write_text(page[:start] + text + page[end:], encoding="utf-8")
    else:
        sys.stdout.write(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns and laps: a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table of docs/overhead.md")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of fresh processes")
    return parser.parse_args(arguments)


def loops(plan: Plan, rounds: int) -> str:
    """Compare the agent loops."""
    measured = (
        (STRANDS, plan.strands),
        (installed(OTHERS), plan.others),
        (installed(SERVED), (plan.served,)),
    )
    found: dict[int, list[Round]] = defaultdict(list)
    for number in range(rounds):
        for families, distances in measured:
            log(f"round {number + 1} of {rounds}: {', '.join(chain(*families))}")
            for turns, laps in run_round(families, distances, seed=number).items():
                found[turns].append(laps)
    return table.markdown(table.LOOP_HEADER, table.loop_rows(found))


def costs(plan: Plan, rounds: int) -> str:
    """Measure callbacks, memory and startup, each in a separate process."""
    log("span callbacks, memory, start")
    callbacks: dict[int, list[dict[str, float]]] = defaultdict(list)
    startups = []
    for _ in range(rounds):
        for live in plan.live:
            callbacks[live].append(apart("callbacks", live))
        startups.append(apart("startup"))
    weight = apart("memory", max(plan.live), plan.finished)
    rows = (
        *table.callback_rows(callbacks),
        *table.memory_rows(weight, plan.finished),
        *table.startup_rows(startups),
    )
    return table.markdown(table.COST_HEADER, rows)


def log(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
