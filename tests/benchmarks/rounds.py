"""Times loops against each other on a noisy machine: interleaved, shuffled, and paired.

A round gives every loop a fresh process. A lap runs every loop once, in a new random order in
which those of one family follow each other, so that a ratio compares neighbours in time.
"""

from __future__ import annotations

import json
import math
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
Round: TypeAlias = Sequence[Lap]
"""The laps of the same processes."""

ROOT: Final = Path(__file__).parents[2]


class Spread(NamedTuple):
    """A median with its quartiles."""

    low: float
    median: float
    high: float


class Mean(NamedTuple):
    """A mean with its standard error; of a single value, that is not known."""

    mean: float
    error: float


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
) -> dict[int, Round]:
    """Run one round of families of loops; returns its laps by their number of turns."""
    shuffle = random.Random(seed)  # noqa: S311  an order, no secret
    with ExitStack() as stack:
        workers = {loop: stack.enter_context(start(loop)) for family in families for loop in family}
        return {
            distance.turns: [
                {loop: workers[loop].time(distance.turns) for loop in an_order(families, shuffle)}
                for _ in range(distance.laps)
            ]
            for distance in distances
        }


def an_order(families: Sequence[Sequence[str]], shuffle: random.Random) -> list[str]:
    """Return the loops in a random order in which those of one family follow each other."""
    return [
        loop
        for family in shuffle.sample(families, len(families))
        for loop in shuffle.sample(family, len(family))
    ]


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of `values`; of a single one, itself."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(rounds: Sequence[Round], loop: str, bare: str, clock: Clock) -> Spread:
    """What `loop` costs as a multiple of `bare`, paired lap by lap."""
    return spread([ratio_in(lap, loop, bare, clock) for laps in rounds for lap in laps])


def mean_ratio(rounds: Sequence[Round], loop: str, bare: str, clock: Clock) -> Mean:
    """Return the same as the mean of the medians of the rounds, as processes are what differs."""
    found = [statistics.median(ratio_in(lap, loop, bare, clock) for lap in laps) for laps in rounds]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Mean(statistics.fmean(found), error)


def ratio_in(lap: Lap, loop: str, bare: str, clock: Clock) -> float:
    """Compare two loops in one lap."""
    return lap[loop][clock] / lap[bare][clock]


def fastest(rounds: Sequence[Round], loop: str) -> float:
    """CPU seconds of the least disturbed run."""
    return min(lap[loop]["cpu"] for laps in rounds for lap in laps)
