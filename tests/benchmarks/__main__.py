"""Measures what otel-limits costs and prints it: `python -m tests.benchmarks [--quick]`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Final

from tests.benchmarks import table
from tests.benchmarks.loops import FAMILIES, SERVED, has_langchain
from tests.benchmarks.rounds import Distance, Round, apart, run_round


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured in one go."""

    distances: tuple[Distance, ...]
    served: Distance
    """The same against a model server, which takes a quarter of a second for each turn."""
    live: tuple[int, ...]
    finished: int


FULL: Final = Plan(
    distances=(Distance(turns=50, laps=5), Distance(turns=200, laps=2)),
    served=Distance(turns=8, laps=2),
    live=(1, 10_000),
    finished=100_000,
)
"""Few laps in many rounds: two processes differ by more than two laps of one do."""

QUICK: Final = Plan(
    distances=(Distance(turns=5, laps=2),),
    served=Distance(turns=2, laps=1),
    live=(1, 100),
    finished=100,
)


def main(arguments: list[str] | None = None) -> None:
    """Run every measure, saying on standard error what is under way."""
    options = parse(arguments)
    plan = QUICK if options.quick else FULL
    header = f"Python {platform.python_version()}, {platform.machine()}, rounds: {options.rounds}"
    sections = (loops(plan, options.rounds), costs(plan, options.rounds))
    sys.stdout.write("\n\n".join((header, *sections)) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns and laps: a smoke test")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of fresh processes")
    return parser.parse_args(arguments)


def loops(plan: Plan, rounds: int) -> str:
    """Time the agent loops against each other."""
    families = [family for family in FAMILIES if has_langchain() or "langchain" not in family]
    found: dict[int, list[Round]] = defaultdict(list)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}: {', '.join(chain(*families))}")
        served = run_round([SERVED], [plan.served], seed=number)
        for turns, laps in (run_round(families, plan.distances, seed=number) | served).items():
            found[turns].append(laps)
    return table.markdown(table.LOOP_HEADER, table.loop_rows(found))


def costs(plan: Plan, rounds: int) -> str:
    """Measure callbacks, memory and the start of a program, each in a process of its own."""
    say("span callbacks, memory, start")
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


def say(what: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{what}\n")


if __name__ == "__main__":
    main()
