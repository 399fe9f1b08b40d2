"""Says in the log, once per halt, which agent reached which limit."""

from __future__ import annotations

import logging

from otel_limits.core.facts import Halt, Warned
from otel_limits.observers.protocol import OwnObserver

logger = logging.getLogger("otel_limits")

CONSEQUENCES = {
    "observed": "it goes on, because the action is observe",
    "halted": "it was halted",
    "wrapped_up": "it wrote a last answer without tools",
    "raised": "it was halted and the call raises",
}


class LogObserver(OwnObserver):
    """Logs a halt and a soft threshold as warnings."""

    component = "log"

    def __init__(self) -> None:
        """Subscribe to both."""
        self.subscribes_to = {Halt: _log_halt, Warned: _log_threshold}


def _log_threshold(fact: Warned) -> None:
    logger.warning(
        "%s is used to %.0f %% by agent %r: %s of %s.",
        fact.level.limit,
        fact.level.ratio * 100,
        fact.invocation.agent,
        fact.level.observed,
        fact.level.cap,
    )


def _log_halt(fact: Halt) -> None:
    consequence = CONSEQUENCES.get(fact.action, fact.action)
    if fact.breach is None:
        logger.warning("%s: agent %r; %s.", fact.reason, fact.invocation.agent, consequence)
        return
    if fact.breach.note:
        logger.warning("agent %r: %s; %s.", fact.invocation.agent, fact.breach.note, consequence)
        return
    logger.warning(
        "%s cap reached by agent %r: %s of %s %s used%s; %s.",
        fact.breach.limit,
        fact.invocation.agent,
        fact.breach.observed,
        fact.breach.cap,
        fact.breach.unit,
        f" by tool {fact.breach.subject!r}" if fact.breach.subject else "",
        consequence,
    )


log = LogObserver()
