"""Label values of metrics, with a maximum number of names per label.

Names from models, users or applications are capped: agents, models, tools, stop reasons, providers
and observers. Finite sets (limits, quotas, built-in stop reasons) are not.
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

MAX_THIRD_PARTY: Final = 100
"""Maximum number of third-party observers, providers and stop reasons."""

OWN_STOP_REASONS: Final = ("error", "aborted", "evicted")
"""Stop reasons of invocations for which neither a framework nor a limit gave one."""


class MetricLabels:
    """Converts names to label values.

    Args:
        max_agents: Maximum number of agents, and of models, in addition to those named in the
            policy file; five times as many tools.
        named: Returns the names in the current policy file.
        folded: Called with the name of the label whenever a name is counted as `_other`.
    """

    def __init__(
        self, max_agents: int, named: Callable[[], Names], folded: Callable[[str], None]
    ) -> None:
        """Create an empty set of names for each label."""
        self._max_agents = max_agents
        self._folded = folded
        self._reported: set[str] = set()
        # Called for each new name, because the policy file may have changed.
        self.agent = self._capped("agent", max_agents, lambda: named().agents)
        self.model = self._capped("model", max_agents, lambda: named().models)
        self.tool = self._capped("tool", max_agents * TOOLS_PER_AGENT, lambda: named().tools)
        self.reason = self._capped("reason", MAX_THIRD_PARTY, known_reasons)
        self.provider = self._capped("provider", MAX_THIRD_PARTY, frozenset)
        self.component = self._capped("observer", MAX_THIRD_PARTY, frozenset)

    def _capped(self, label: str, limit: int, always: Callable[[], frozenset[str]]) -> LabelLimiter:
        fold = functools.partial(self._fold, label, limit)
        return LabelLimiter(limit, always=always, folded=fold)

    def _fold(self, label: str, limit: int) -> None:
        # Once per label; the metric counts every occurrence.
        if label not in self._reported:
            self._reported.add(label)
            logger.warning(
                "otel-limits: more than %d names for the label %s; metrics count the rest as %s. "
                "Use stable agent names, list important names in the policy file, or raise "
                "OTEL_LIMITS_METRICS_MAX_AGENTS (now %d).",
                limit,
                label,
                OTHER,
                self._max_agents,
            )
        self._folded(label)


def known_reasons() -> frozenset[str]:
    """Return all known stop reasons."""
    return frozenset((*STOP_REASONS, *framework_reasons()))


def framework_reasons() -> Iterator[str]:
    """Yield the stop reasons that are not limits, of all frameworks."""
    for framework in known.FRAMEWORKS:
        yield from framework.stop_reasons
    # Independent of the framework, so no framework has to list them.
    yield from OWN_STOP_REASONS
