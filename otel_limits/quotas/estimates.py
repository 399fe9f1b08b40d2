"""Estimates how much a model call may take at most, from its request and from earlier calls."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from otel_limits.core.usage import Usage

# The most that a Claude 3 model answers with. Most answers are far shorter, and the rest of a
# reservation is given back when its call ends.
FIRST_OUTPUT: Final = 4096
"""Output tokens assumed of a model without a known cap that has not shown yet what it does."""

ENOUGH_CALLS: Final = 20
"""Calls after which the highest output seen is taken for the highest to come."""

REMEMBERED_CALLS: Final = 100
MAX_MODELS: Final = 256


@dataclass(frozen=True, slots=True)
class WorstCase:
    """What a call is expected to take at most."""

    usage: Usage
    certain: bool
    """True when the provider will not return more output."""


@dataclass(slots=True)
class Lessons:
    """What the last calls of one model taught."""

    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))
    shortfalls: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))
    """Input tokens by which each projection was too low."""


class Estimates:
    """Learns per model, in this process. Whoever has it holds a lock while asking."""

    def __init__(self) -> None:
        """Begin without experience."""
        self._models: OrderedDict[str, Lessons] = OrderedDict()

    def worst_case(self, model: str, projected_input: int, output_cap: int | None) -> WorstCase:
        """Estimate a call that is about to go out."""
        lessons = self._lessons(model)
        usage = Usage(
            # By the worst of the last calls and not their mean: a reservation that is too low lets
            # a fleet pass its quota, one that is too high only waits a little.
            input=projected_input + max(lessons.shortfalls, default=0),
            output=_highest(lessons) if output_cap is None else output_cap,
        )
        return WorstCase(usage, certain=output_cap is not None)

    def learn(self, model: str, projected_input: int, usage: Usage) -> None:
        """A call took `usage`, where this input had been projected."""
        lessons = self._lessons(model)
        lessons.outputs.append(usage.output)
        lessons.shortfalls.append(max(0, usage.input - projected_input))

    def _lessons(self, model: str) -> Lessons:
        lessons = self._models.setdefault(model, Lessons())
        # The one that is forgotten is the one that was asked for the longest time ago.
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return lessons


def _highest(lessons: Lessons) -> int:
    seen = max(lessons.outputs, default=0)
    # A few short answers say little about the next one.
    return seen if len(lessons.outputs) >= ENOUGH_CALLS else max(seen, FIRST_OUTPUT)
