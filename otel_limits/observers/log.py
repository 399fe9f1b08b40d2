"""Says in the log, once per halt, which agent reached which limit."""

from __future__ import annotations

import logging

from otel_limits.facts import Fact, Halt
from otel_limits.limits import KIND

logger = logging.getLogger("otel_limits")

CONSEQUENCES = {
    "observed": "it goes on, because the action is observe",
    "halted": "it was halted",
    "raised": "it was halted and the call raises",
}


def log(fact: Fact) -> None:
    """Log a halt as a warning; other facts are metrics' business."""
    if isinstance(fact, Halt):
        logger.warning(
            "%s cap reached by agent %r: %s of %s %s used; %s.",
            fact.breach.limit,
            fact.invocation.agent,
            fact.breach.observed,
            fact.breach.cap,
            KIND[fact.breach.limit].unit,
            CONSEQUENCES.get(fact.action, fact.action),
        )
