"""What the labels of metrics say, and how many names each of them tells apart.

Capped is what a model, a user or an application can make up: agents, models, tools, keys of
quotas. What is finite (limits, quotas, reasons, our own components) is told apart always.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Final

from otel_limits.bindings import known
from otel_limits.core.labels import OTHER, LabelLimiter, Names
from otel_limits.core.limits import STOP_REASONS

logger = logging.getLogger("otel_limits")

TOOLS_PER_AGENT: Final = 5

MAX_FOREIGN: Final = 100
"""Names of what an application makes up and what is few by nature: its observers, its reasons."""

OWN_ENDINGS: Final = ("error", "aborted", "evicted")
"""How an invocation ends that got no stop reason, from a framework or from a limit."""


class MetricLabels:
    """Makes label values out of names.

    Args:
        max_agents: Distinct names of agents, and of models, beside those that the policy file
            gives; five times as many tools.
        named: Returns the names of the policy file that is in force.
        folded: Called with the name of the label each time that a name is counted as `_other`.
    """

    def __init__(
        self, max_agents: int, named: Callable[[], Names], folded: Callable[[str], None]
    ) -> None:
        """Have seen no name yet."""
        self._max_agents = max_agents
        self._folded = folded
        self._is_told: set[str] = set()
        # Asked again for each new name: the policy file may be another one by then.
        self.agent = self._capped("agent", max_agents, lambda: named().agents)
        self.model = self._capped("model", max_agents, lambda: named().models)
        self.tool = self._capped("tool", max_agents * TOOLS_PER_AGENT, lambda: named().tools)
        self.reason = self._capped("reason", MAX_FOREIGN, known_reasons)
        self.provider = self._capped("provider", MAX_FOREIGN, frozenset)
        self.component = self._capped("observer", MAX_FOREIGN, frozenset)

    def _capped(self, label: str, limit: int, always: Callable[[], frozenset[str]]) -> LabelLimiter:
        fold = functools.partial(self._fold, label, limit)
        return LabelLimiter(limit, always=always, folded=fold)

    def _fold(self, label: str, limit: int) -> None:
        # Once for each label: the metric counts all of them, and a log that repeats itself is not
        # read.
        if label not in self._is_told:
            self._is_told.add(label)
            logger.warning(
                "otel-limits: more than %d names for the label %s; metrics count the rest as %s. "
                "Give each agent a name of its own that does not change, name what matters in the "
                "policy file, or set OTEL_LIMITS_METRICS_MAX_AGENTS (now %d) to tell more apart.",
                limit,
                label,
                OTHER,
                self._max_agents,
            )
        self._folded(label)


def known_reasons() -> frozenset[str]:
    """How an invocation can end, by all that is known."""
    return frozenset((*STOP_REASONS, *framework_reasons()))


def framework_reasons() -> Iterator[str]:
    """How an invocation ends without us, whichever framework runs it."""
    for framework in known.FRAMEWORKS:
        yield from framework.stop_reasons
    # These come from us whatever the framework, so that no framework has to name them.
    yield from OWN_ENDINGS
