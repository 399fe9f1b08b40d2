"""Says in the log which agent reached which limit, and once why a model has no price."""

from __future__ import annotations

import logging

from otel_limits.core.events import Halt, LimitWarning, ModelCall
from otel_limits.core.labels import clean
from otel_limits.observers.protocol import BaseObserver

MOST_UNPRICED = 100
"""Models that it is said of at each level; of the rest the metric tells."""

MORE_UNPRICED = (
    "More than %d models have no price. The same holds for further ones, which are named in the "
    "metric otel_limits_unpriced_tokens_total only."
)
UNPRICED_EFFECT = {
    logging.INFO: "Its tokens are counted as unpriced.",
    logging.WARNING: "The cap on cost, max_cost_usd, does not hold for it: its calls count as 0 "
    "USD. OTEL_LIMITS_UNPRICED=halt would halt the agent.",
}
"""What follows for a model without a price."""

logger = logging.getLogger("otel_limits")


class LogObserver(BaseObserver):
    """Logs halts, soft thresholds, and calls that a limit on cost lets pass, as warnings."""

    component = "log"

    def __init__(self) -> None:
        """Subscribe to all three."""
        self._unpriced: dict[int, dict[str, object]] = {logging.INFO: {}, logging.WARNING: {}}
        self.subscribes_to = {
            Halt: _log_halt,
            LimitWarning: _log_threshold,
            ModelCall: self._log_unpriced,
        }

    def _log_unpriced(self, event: ModelCall) -> None:
        """Say once for each model that its price is unknown, and why.

        A warning, for the model, where a limit on cost lets its calls pass.
        """
        if event.unpriced is None:
            return
        level = logging.WARNING if event.cost_is_limited else logging.INFO
        told, mine = self._unpriced[level], object()
        # Bounded, as the names of models can come from outside. In one step, as two agents may
        # call a model at once.
        if len(told) > MOST_UNPRICED or told.setdefault(event.model, mine) is not mine:
            return
        if len(told) > MOST_UNPRICED:
            logger.log(level, MORE_UNPRICED, MOST_UNPRICED)
            return
        logger.log(
            level,
            "The price of model %r is unknown: %s. %s Give its price in the policy file under "
            "models.",
            clean(event.model),
            event.unpriced,
            UNPRICED_EFFECT[level],
        )


def _log_threshold(event: LimitWarning) -> None:
    logger.warning(
        "Agent %r has used %.0f%% of %s: %s of %s.",
        event.invocation.agent,
        event.level.ratio * 100,
        event.level.limit,
        event.level.observed,
        event.level.cap,
    )


def _log_halt(event: Halt) -> None:
    logger.warning("%s", event.sentence)
