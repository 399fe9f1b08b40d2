"""Estimates how much a model call may take, from its request and from earlier calls."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from otel_limits.core.usage import Usage

# The most that a Claude 3 model answers with. Most answers are far shorter, and the rest of a
# reservation is given back when its call ends.
FIRST_OUTPUT: Final = 4096
"""Output tokens assumed of a model without a known cap that has not shown yet what it does."""

ENOUGH_CALLS: Final = 20
"""Calls after which the highest output seen is taken for the highest to come."""

REMEMBERED_CALLS: Final = 100
MAX_MODELS: Final = 256

# Only admitted calls teach. Without forgetting, one long answer would refuse every later call, and
# nothing could ever show that answers are short again.
HALF_LIFE_SECONDS: Final = 600.0
"""Time after which half of what an unusually long answer added to the estimate is forgotten."""

LEAST_EXPECTED: Final = 1024
"""Output tokens that are set aside at least where a quota reserves what is expected."""

Reserved = Literal["worst_case", "expected"]
RESERVED: Final[tuple[Reserved, ...]] = ("worst_case", "expected")


@dataclass(frozen=True, slots=True)
class CallEstimate:
    """What a call is taken to need."""

    usage: Usage
    certain: bool
    """True when the provider will not return more output."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of tokens that a call showed."""

    tokens: int
    at: float

    def faded(self, now: float, floor: int = 0) -> float:
        """Return what still counts of it: all of it up to `floor`, and less and less above."""
        left = math.pow(2, (self.at - now) / HALF_LIFE_SECONDS)
        return min(self.tokens, floor) + max(0, self.tokens - floor) * left


class DecayingMax:
    """The highest of the last calls, each of which counts less and less.

    Args:
        floor: Tokens of each that are not forgotten.
    """

    def __init__(self, floor: int = 0) -> None:
        """Begin with none."""
        self._floor = floor
        self._calls = 0
        # All fade alike: what is below a later one once stays below it. Without those that are,
        # the first is the highest, and no call has to go through a hundred.
        self._falling: deque[tuple[int, Sample]] = deque()

    def add(self, tokens: int, now: float) -> None:
        """Note the next call, and forget the one that is too long ago."""
        while self._falling and self._falling[-1][1].faded(now, self._floor) <= tokens:
            self._falling.pop()
        self._calls += 1
        self._falling.append((self._calls, Sample(tokens, now)))
        if self._falling[0][0] <= self._calls - REMEMBERED_CALLS:
            self._falling.popleft()

    def at(self, now: float) -> int:
        """Return the highest as it counts now; 0 where there is none."""
        return round(self._falling[0][1].faded(now, self._floor)) if self._falling else 0


@dataclass(slots=True)
class ModelHistory:
    """What the last calls of one model taught."""

    outputs: deque[Sample] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))
    # What the first call of an unknown model is given in any case keeps nobody out: only what
    # goes beyond it has to be forgotten.
    highest_output: DecayingMax = field(default_factory=lambda: DecayingMax(FIRST_OUTPUT))
    # By the worst of the last calls and not their mean: a reservation that is too low lets a
    # fleet pass its quota, one that is too high only waits a little.
    highest_shortfall: DecayingMax = field(default_factory=DecayingMax)
    """Input tokens by which each projection was too low."""

    def record(self, output: int, shortfall: int, now: float) -> None:
        """Note what a call took, and by how much its input exceeded its projection."""
        self.outputs.append(Sample(output, now))
        self.highest_output.add(output, now)
        self.highest_shortfall.add(shortfall, now)

    def shortfall(self, now: float) -> int:
        """Return by how much an input may exceed its projection."""
        return self.highest_shortfall.at(now)

    def highest(self, now: float) -> int:
        """Return the most output to be reckoned with."""
        seen = self.highest_output.at(now)
        # A few short answers say little about the next one.
        return seen if len(self.outputs) >= ENOUGH_CALLS else max(seen, FIRST_OUTPUT)

    def expected(self, now: float) -> int:
        """Return twice what answers needed lately."""
        needed = [each.faded(now, FIRST_OUTPUT) for each in self.outputs]
        return max(LEAST_EXPECTED, round(2 * sum(needed) / len(needed)) if needed else 0)


class Estimates:
    """Learns per model, in this process. Whoever has it holds a lock while asking.

    Args:
        clock: Seconds, from whenever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without experience."""
        self._clock = clock
        self._models: OrderedDict[str, ModelHistory] = OrderedDict()

    def estimate(
        self, what: Reserved, model: str, projected_input: int, output_cap: int | None
    ) -> CallEstimate:
        """CallEstimate a call that is about to go out: the worst case, or what is expected."""
        lessons, now = self._history(model), self._clock()
        if what == "expected":
            expected = lessons.expected(now)
            output = expected if output_cap is None else min(expected, output_cap)
        else:
            output = lessons.highest(now) if output_cap is None else output_cap
        usage = Usage(input=projected_input + lessons.shortfall(now), output=output)
        return CallEstimate(usage, certain=output == output_cap)

    def record(self, model: str, projected_input: int, usage: Usage) -> None:
        """A call took `usage`, where this input had been projected."""
        lessons, now = self._history(model), self._clock()
        lessons.record(usage.output, max(0, usage.input - projected_input), now)

    def _history(self, model: str) -> ModelHistory:
        lessons = self._models.get(model)
        if lessons is None:
            lessons = self._models[model] = ModelHistory()
        # The one that is forgotten is the one that was asked for the longest time ago.
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return lessons
