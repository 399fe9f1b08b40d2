"""What invocations in progress have used so far, from metrics that say it nowhere.

A turn is counted when it is taken, and once more in the histogram of finished invocations when its
invocation has ended. What is in the one count and not in the other is of those in progress. The
same holds for tokens. For money, time and calls there is no such pair of metrics.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from otel_limits.observers import instruments as table

if TYPE_CHECKING:
    from otel_limits.top.scrapes import Labels, Scrape

ADDED: Final = {table.TURNS.name: "turns", table.TOKENS.name: "tokens"}
TAKEN: Final = {
    f"{table.INVOCATION_TURNS.name}_sum": "turns",
    f"{table.INVOCATION_TOKENS.name}_sum": "tokens",
}
MEASURED: Final = {"max_turns": "turns", "max_iterations": "turns", "max_token_budget": "tokens"}
"""Which of them a limit caps. A leg is taken for an invocation: most have only one."""


class InProgress:
    """The invocations in progress of one feed."""

    def __init__(self) -> None:
        """Know of none."""
        self.counts: dict[str, float] = {}
        """Invocations in progress, by agent."""
        self.used: dict[tuple[str, str], float] = {}
        """Turns and tokens of all of them, by agent and what is counted."""
        self._idle: dict[tuple[Labels, str, str], float] = {}
        """What an agent without any invocation had left over when it was last looked at."""
        self._lost: dict[tuple[Labels, str, str], float] = {}
        """What belongs to invocations that will never end, as their process was killed."""

    def take(self, scrape: Scrape) -> None:
        """Look at what there is now."""
        counts: dict[tuple[Labels, str], float] = defaultdict(float)
        over: dict[tuple[Labels, str, str], float] = defaultdict(float)
        for sample in scrape.samples:
            if sample.name == table.IN_PROGRESS.name:
                counts[sample.process(), sample.agent] += sample.value
            elif (what := ADDED.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] += sample.value
            elif (what := TAKEN.get(sample.name)) is not None:
                over[sample.process(), sample.agent, what] -= sample.value
        # Made anew with every scrape: an agent whose process is gone is in progress nowhere.
        self.counts, self.used = defaultdict(float), defaultdict(float)
        for (_, agent), count in counts.items():
            self.counts[agent] += count
        for key, left in over.items():
            process, agent, what = key
            if counts.get((process, agent), 0.0) > 0:
                # Below 0 where a scrape fell between the two counts.
                self.used[agent, what] += max(0.0, left - self._lost.get(key, 0.0))
            else:
                self._settle(key, left)

    def _settle(self, key: tuple[Labels, str, str], left: float) -> None:
        """Forget what is left over of an agent that has nothing in progress."""
        # Twice the same, as a scrape may fall between the last turn and the end of an invocation.
        if self._idle.get(key) == left:
            self._lost[key] = left
        self._idle[key] = left
