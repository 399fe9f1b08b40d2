"""Times loops against each other on a noisy machine: interleaved, shuffled, and paired.

A round gives every loop a fresh process. A lap runs every loop once, in a new random order in
which those of one family follow each other, so that a ratio compares neighbours in time.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple, TypeAlias

Clock: TypeAlias = Literal["cpu", "wall"]
Lap: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by loop and by clock."""

ROOT: Final = Path(__file__).parents[2]


class Spread(NamedTuple):
    """A median with its quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How many turns a lap has, and how many laps a round has."""

    turns: int
    laps: int


def command(module: str, *arguments: object) -> list[str]:
    """Command line that runs one of our modules in a process of its own, from `ROOT`."""
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]


def apart(module: str, *arguments: int) -> dict[str, float]:
    """Run one of our modules in a fresh process and read what it measured."""
    done = subprocess.run(
        command(module, *arguments), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


class Worker(NamedTuple):
    """The two ends of a process that times one loop."""

    ask: IO[str]
    answer: IO[str]

    def time(self, turns: int) -> Mapping[str, float]:
        """Time one run of that many turns."""
        self.ask.write(f"{turns}\n")
        self.ask.flush()
        times: Mapping[str, float] = json.loads(self.answer.readline())
        return times


@contextmanager
def start(loop: str) -> Iterator[Worker]:
    """Start a process for `loop`, and end it afterwards."""
    with subprocess.Popen(
        command("worker", loop),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Worker(process.stdin, process.stdout)


def run_round(
    families: Sequence[Sequence[str]], distances: Sequence[Distance], seed: int
) -> Iterator[tuple[int, Lap]]:
    """Run one round of families of loops; yields each lap with its number of turns."""
    shuffle = random.Random(seed)  # noqa: S311  an order, no secret
    with ExitStack() as stack:
        workers = {loop: stack.enter_context(start(loop)) for family in families for loop in family}
        for distance in distances:
            for _ in range(distance.laps):
                order = [
                    loop
                    for family in shuffle.sample(families, len(families))
                    for loop in shuffle.sample(family, len(family))
                ]
                yield distance.turns, {loop: workers[loop].time(distance.turns) for loop in order}


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of `values`; of a single one, itself."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(laps: Sequence[Lap], loop: str, bare: str, clock: Clock) -> Spread:
    """What `loop` costs as a multiple of `bare`, paired lap by lap."""
    return spread([lap[loop][clock] / lap[bare][clock] for lap in laps])


def fastest(laps: Sequence[Lap], loop: str) -> float:
    """CPU seconds of the least disturbed run."""
    return min(lap[loop]["cpu"] for lap in laps)
