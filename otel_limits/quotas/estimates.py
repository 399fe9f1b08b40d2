"""Estimates how much a model call may take, from its request and from earlier calls."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from otel_limits.core.usage import Usage
from otel_limits.runs.clock import CLOCK

# The most that a Claude 3 model answers with. Most answers are far shorter, and the rest of a
# reservation is given back when its call ends.
FIRST_OUTPUT: Final = 4096
"""Output tokens assumed of a model without a known cap that has not shown yet what it does."""

ENOUGH_CALLS: Final = 20
"""Calls after which the highest output seen is taken for the highest to come."""

SAMPLED_CALLS: Final = 100
MAX_MODELS: Final = 256

# Only admitted calls teach. Without forgetting, one long answer would refuse every later call, and
# nothing could ever show that answers are short again.
HALF_LIFE_SECONDS: Final = 600.0
"""Time after which half of what an unusually long answer added to the estimate is forgotten."""

LEAST_EXPECTED: Final = 1024
"""Minimum output tokens reserved with `reserve: expected`."""

Reserved = Literal["worst_case", "expected"]


@dataclass(frozen=True, slots=True)
class CallEstimate:
    """The estimated usage of a call."""

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
        if self._falling[0][0] <= self._calls - SAMPLED_CALLS:
            self._falling.popleft()

    def at(self, now: float) -> int:
        """Return the highest as it counts now; 0 where there is none."""
        return round(self._falling[0][1].faded(now, self._floor)) if self._falling else 0


@dataclass(slots=True)
class ModelHistory:
    """Recent output sizes of one model."""

    outputs: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLED_CALLS))
    # The floor for unknown models is always reserved: only the excess decays.
    highest_output: DecayingMax = field(default_factory=lambda: DecayingMax(FIRST_OUTPUT))
    # The worst of recent calls, not their mean: too low a reservation lets a fleet exceed its
    # quota, too high a one only delays calls.
    highest_shortfall: DecayingMax = field(default_factory=DecayingMax)
    """Input tokens by which each projection was too low."""

    def record(self, output: int, shortfall: int, now: float) -> None:
        """Record the output of a call and how far its input exceeded the projection."""
        self.outputs.append(Sample(output, now))
        self.highest_output.add(output, now)
        self.highest_shortfall.add(shortfall, now)

    def highest(self, now: float) -> int:
        """Return the highest output to expect."""
        seen = self.highest_output.at(now)
        # A few short answers do not predict the next one.
        return seen if len(self.outputs) >= ENOUGH_CALLS else max(seen, FIRST_OUTPUT)

    def expected(self, now: float) -> int:
        """Return twice the mean of recent outputs."""
        needed = [each.faded(now, FIRST_OUTPUT) for each in self.outputs]
        return max(LEAST_EXPECTED, round(2 * sum(needed) / len(needed)) if needed else 0)


class Estimates:
    """Estimates per model from recent calls of this process. Callers must hold a lock.

    Args:
        clock: Returns seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = CLOCK.now) -> None:
        """Create it without earlier calls."""
        self._clock = clock
        self._models: OrderedDict[str, ModelHistory] = OrderedDict()

    def estimate(
        self, what: Reserved, model: str, projected_input: int, output_cap: int | None
    ) -> CallEstimate:
        """Estimate the usage of a call before it is sent: the worst case, or what is expected."""
        history, now = self._history(model), self._clock()
        if what == "expected":
            expected = history.expected(now)
            output = expected if output_cap is None else min(expected, output_cap)
        else:
            output = history.highest(now) if output_cap is None else output_cap
        usage = Usage(input=projected_input + history.highest_shortfall.at(now), output=output)
        return CallEstimate(usage, certain=output == output_cap)

    def record(self, model: str, projected_input: int, usage: Usage) -> None:
        """Record the usage of a call, and what its input was projected to be."""
        history, now = self._history(model), self._clock()
        history.record(usage.output, max(0, usage.input - projected_input), now)

    def _history(self, model: str) -> ModelHistory:
        history = self._models.get(model)
        if history is None:
            history = self._models[model] = ModelHistory()
        # The least recently used one is forgotten.
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return history
