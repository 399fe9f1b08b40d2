"""Says in the log, once per halt, which agent reached which limit."""

from __future__ import annotations

import logging

from otel_limits.core.facts import Fact, Halt, Warned

logger = logging.getLogger("otel_limits")

CONSEQUENCES = {
    "observed": "it goes on, because the action is observe",
    "halted": "it was halted",
    "wrapped_up": "it wrote a last answer without tools",
    "raised": "it was halted and the call raises",
}


def log(fact: Fact) -> None:
    """Log a halt and a soft threshold as warnings; other facts are metrics' business."""
    if isinstance(fact, Halt):
        _log_halt(fact)
    elif isinstance(fact, Warned):
        logger.warning(
            "%s is used to %.0f %% by agent %r: %s of %s.",
            fact.level.limit,
            fact.level.ratio * 100,
            fact.invocation.agent,
            fact.level.observed,
            fact.level.cap,
        )


log.component = "log"  # type: ignore[attr-defined]  # what its faults are counted under
log.subscribes_to = (Halt, Warned)  # type: ignore[attr-defined]


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
