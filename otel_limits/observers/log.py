"""Logs halts and soft limits, and once each a missing price, unknown usage and a lost task."""

from __future__ import annotations

import logging

from otel_limits.core.events import Halt, LimitWarning, ModelCall, RepeatedFailures, TaskLost
from otel_limits.core.labels import clean, quoted
from otel_limits.core.limits import over_resumes
from otel_limits.core.wording import shortest
from otel_limits.observers.protocol import BaseObserver

MOST_UNPRICED = 100
"""Models logged at each level; the others are only in the metric."""
MOST_UNKNOWN = 100
"""Names in usages that are logged; calls with others are only in the metric."""

MORE_UNPRICED = (
    "More than %d models have no price. Further models are only counted in the metric "
    "otel_limits_unpriced_tokens_total."
)
BOUND_EFFECT = "Limits and quotas in USD count its upper bound."
UNPRICED_EFFECT = {
    logging.INFO: "Its tokens are counted as unpriced.",
    logging.WARNING: "max_cost_usd does not cover it: its calls count as 0 USD. Set "
    "OTEL_LIMITS_UNPRICED=halt to halt the agent instead.",
}
"""The effect of a missing price."""

MOST_AGENTS = 100
"""Agents whose lost tasks are logged; the others are only in the metric."""

LOST_TASK = (
    "Agent %s continues after an interrupt, but its usage before it is not known, so its limits "
    "start from zero. It was interrupted before a restart, in another process or more than seven "
    "days ago, and the framework did not keep its usage. Further ones are only counted in the "
    "metric otel_limits_lost_tasks_total."
)

logger = logging.getLogger("otel_limits")


class LogObserver(BaseObserver):
    """Logs halts, reached soft limits, failures in a row, missing prices and lost tasks."""

    component = "log"

    def __init__(self) -> None:
        """Subscribe to halts, warnings, failures in a row, model calls and lost tasks."""
        self._with_lost_tasks: dict[str, object] = {}
        self._unpriced: dict[int, dict[str, object]] = {logging.INFO: {}, logging.WARNING: {}}
        self._unknown: set[str] = set()
        self._refused: set[str] = set()
        self.subscribes_to = {
            Halt: _log_halt,
            LimitWarning: _log_threshold,
            RepeatedFailures: _log_repeated_failures,
            ModelCall: self._log_call,
            TaskLost: self._log_lost_task,
        }

    def _log_lost_task(self, event: TaskLost) -> None:
        """Log once per agent that an answer to an interrupt begins a new task, and why."""
        if event.invocation is None:
            return
        agent, logged, mine = event.invocation.agent, self._with_lost_tasks, object()
        if len(logged) < MOST_AGENTS and logged.setdefault(agent, mine) is mine:
            logger.warning(LOST_TASK, quoted(agent))

    def _log_call(self, event: ModelCall) -> None:
        for each in event.unknown_usage:
            self._log_unknown(each, event.model)
        if event.stated_refused:
            self._log_refused(event)
        self._log_unpriced(event)

    def _log_unknown(self, name: str, model: str) -> None:
        """Log once what a usage contains that no rule understands."""
        if name in self._unknown or len(self._unknown) >= MOST_UNKNOWN:
            return
        self._unknown.add(name)
        logger.warning(
            "The usage of model %r has tokens with an unknown meaning: %s. The price of such calls "
            "is unknown, and limits in USD count its upper bound.",
            clean(model),
            clean(name),
        )

    def _log_refused(self, event: ModelCall) -> None:
        """Log once per vendor that a stated amount is not a cost."""
        vendor = str(event.stated_by)
        if vendor in self._refused or len(self._refused) >= MOST_UNKNOWN:
            return
        self._refused.add(vendor)
        logger.warning(
            "The cost that %s states for a call of model %r is not used: it is %s. The price list "
            "applies, where it has a price.",
            clean(vendor),
            clean(event.model),
            event.stated_refused,
        )

    def _log_unpriced(self, event: ModelCall) -> None:
        """Log once per model and level why it has no price; a warning if cost is limited."""
        if event.unpriced is None:
            return
        is_bounded = event.price_at_most is not None
        level = logging.WARNING if event.cost_is_limited and not is_bounded else logging.INFO
        logged, mine = self._unpriced[level], object()
        # Bounded, because model names may come from user input. `setdefault`, because two agents
        # may call a model concurrently.
        if len(logged) > MOST_UNPRICED or logged.setdefault(event.model, mine) is not mine:
            return
        if len(logged) > MOST_UNPRICED:
            logger.log(level, MORE_UNPRICED, MOST_UNPRICED)
            return
        logger.log(
            level,
            "Cannot price model %r: %s. %s Add a price under models in the policy file.",
            clean(event.model),
            event.unpriced,
            BOUND_EFFECT if is_bounded else UNPRICED_EFFECT[level],
        )


def _log_threshold(event: LimitWarning) -> None:
    logger.warning(
        "Agent %s has used %.0f%% of %s: %s of %s%s.",
        quoted(event.invocation.agent),
        event.level.ratio * 100,
        event.level.limit,
        f"{'at most ' if event.level.at_most else ''}{shortest(event.level.observed)}",
        event.level.cap,
        over_resumes(event.level, "in"),
    )


def _log_repeated_failures(event: RepeatedFailures) -> None:
    logger.warning(
        "Agent %s has failed %d times in a row with the same input, last error: %r. Set "
        "max_repeated_failures to refuse further attempts.",
        quoted(event.invocation.agent),
        event.failures,
        event.error,
    )


def _log_halt(event: Halt) -> None:
    logger.warning("%s", event.sentence)
