"""Compares loops on a noisy machine: interleaved, shuffled and paired.

A round gives each loop a new process. A lap runs each loop once, in random order, one family after
the other, so a ratio compares runs that are close in time.
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
from typing import IO, Literal, NamedTuple, TypeAlias

from tests.paths import ROOT

Clock: TypeAlias = Literal["cpu", "wall"]
Lap: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by loop and by clock."""
Round: TypeAlias = Sequence[Lap]
"""The laps of the same processes."""


class Spread(NamedTuple):
    """A median with its quartiles."""

    low: float
    median: float
    high: float


class Mean(NamedTuple):
    """A mean with its standard error, which is NaN for a single value."""

    mean: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The number of turns per lap and of laps per round."""

    turns: int
    laps: int


def command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a benchmark module in a separate process."""
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]


def apart(module: str, *arguments: int) -> dict[str, float]:
    """Run a benchmark module in a new process and return its measurements."""
    done = subprocess.run(
        command(module, *arguments), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


class Worker(NamedTuple):
    """A process that times one loop."""

    ask: IO[str]
    answer: IO[str]

    def time(self, turns: int) -> Mapping[str, float]:
        """Time one run."""
        self.ask.write(f"{turns}\n")
        self.ask.flush()
        times: Mapping[str, float] = json.loads(self.answer.readline())
        return times


@contextmanager
def start(loop: str) -> Iterator[Worker]:
    """Start a process for `loop`, and end it after the block."""
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
    """Run a round and return its laps by number of turns."""
    shuffle = random.Random(seed)  # noqa: S311  not a secret
    with ExitStack() as stack:
        workers = {loop: stack.enter_context(start(loop)) for family in families for loop in family}
        return {
            distance.turns: [
                {loop: workers[loop].time(distance.turns) for loop in shuffled(families, shuffle)}
                for _ in range(distance.laps)
            ]
            for distance in distances
        }


def shuffled(families: Sequence[Sequence[str]], shuffle: random.Random) -> list[str]:
    """Return the loops in random order, family by family."""
    return [
        loop
        for family in shuffle.sample(families, len(families))
        for loop in shuffle.sample(family, len(family))
    ]


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles. All three are the same for a single value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(rounds: Sequence[Round], loop: str, bare: str, clock: Clock) -> Spread:
    """Return the time of `loop` as a multiple of `bare`, paired by lap."""
    return spread([ratio_in(lap, loop, bare, clock) for laps in rounds for lap in laps])


def mean_ratio(rounds: Sequence[Round], loop: str, bare: str, clock: Clock) -> Mean:
    """Return the same ratio as a mean of the rounds, because processes differ most."""
    found = [statistics.median(ratio_in(lap, loop, bare, clock) for lap in laps) for laps in rounds]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Mean(statistics.fmean(found), error)


def ratio_in(lap: Lap, loop: str, bare: str, clock: Clock) -> float:
    """Return the ratio of two loops in one lap."""
    return lap[loop][clock] / lap[bare][clock]


def fastest(rounds: Sequence[Round], loop: str) -> float:
    """Return the CPU seconds of the fastest run."""
    return min(lap[loop]["cpu"] for laps in rounds for lap in laps)
