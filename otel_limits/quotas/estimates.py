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
class Lesson:
    """A number of tokens that a call showed."""

    tokens: int
    at: float

    def faded(self, now: float, floor: int = 0) -> float:
        """Return what still counts of it: all of it up to `floor`, and less and less above."""
        left = math.pow(2, (self.at - now) / HALF_LIFE_SECONDS)
        return min(self.tokens, floor) + max(0, self.tokens - floor) * left


@dataclass(slots=True)
class Lessons:
    """What the last calls of one model taught."""

    outputs: deque[Lesson] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))
    shortfalls: deque[Lesson] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))
    """Input tokens by which each projection was too low."""

    def shortfall(self, now: float) -> int:
        """Return by how much an input may exceed its projection."""
        # By the worst of the last calls and not their mean: a reservation that is too low lets a
        # fleet pass its quota, one that is too high only waits a little.
        return round(max((each.faded(now) for each in self.shortfalls), default=0))

    def highest(self, now: float) -> int:
        """Return the most output to be reckoned with."""
        # What the first call of an unknown model is given in any case keeps nobody out: only what
        # goes beyond it has to be forgotten.
        seen = round(max((each.faded(now, FIRST_OUTPUT) for each in self.outputs), default=0))
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
        self._models: OrderedDict[str, Lessons] = OrderedDict()

    def estimate(
        self, what: Reserved, model: str, projected_input: int, output_cap: int | None
    ) -> CallEstimate:
        """CallEstimate a call that is about to go out: the worst case, or what is expected."""
        lessons, now = self._lessons(model), self._clock()
        if what == "expected":
            expected = lessons.expected(now)
            output = expected if output_cap is None else min(expected, output_cap)
        else:
            output = lessons.highest(now) if output_cap is None else output_cap
        usage = Usage(input=projected_input + lessons.shortfall(now), output=output)
        return CallEstimate(usage, certain=output == output_cap)

    def learn(self, model: str, projected_input: int, usage: Usage) -> None:
        """A call took `usage`, where this input had been projected."""
        lessons, now = self._lessons(model), self._clock()
        lessons.outputs.append(Lesson(usage.output, now))
        lessons.shortfalls.append(Lesson(max(0, usage.input - projected_input), now))

    def _lessons(self, model: str) -> Lessons:
        lessons = self._models.setdefault(model, Lessons())
        # The one that is forgotten is the one that was asked for the longest time ago.
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return lessons
