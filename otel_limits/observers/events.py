"""Emits each halt as an OpenTelemetry log event, which trace sampling does not touch."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context

from otel_limits.core.facts import Halt
from otel_limits.observers.context import context_of
from otel_limits.otel import semconv

if TYPE_CHECKING:
    from opentelemetry.util.types import AnyValue

    from otel_limits.core.facts import Fact, Invocation
    from otel_limits.core.usage import Number


class EventObserver:
    """Emits the event `otel_limits.halt`.

    Args:
        logger: Where it goes; without an SDK behind it, nowhere.
    """

    component = "events"
    subscribes_to = (Halt,)

    def __init__(self, logger: Logger) -> None:
        """Keep the logger."""
        self._logger = logger

    def __call__(self, fact: Fact) -> None:
        """Emit a halt, observed ones included; other facts are no events."""
        if not isinstance(fact, Halt):
            return
        self._logger.emit(
            LogRecord(
                timestamp=time.time_ns(),
                context=context_of_invocation(fact.invocation),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                event_name=semconv.HALT_EVENT,
                body=f"Agent {fact.invocation.agent!r}: {fact.reason} ({fact.action}).",
                attributes=attributes_of(fact),
            )
        )


def attributes_of(halt: Halt) -> dict[str, AnyValue]:
    """What the event says: the same as the live span does, and whose halt it was."""
    attributes: dict[str, AnyValue] = {
        semconv.AGENT_NAME: halt.invocation.agent,
        semconv.INVOCATION_ID: halt.invocation.id,
        semconv.STOP_REASON: halt.reason,
        semconv.STOP_ACTION: halt.action,
    }
    if halt.breach is not None:
        attributes |= {
            semconv.LIMIT_NAME: halt.breach.limit,
            semconv.LIMIT_VALUE: as_number(halt.breach.cap),
            semconv.LIMIT_CONSUMED: as_number(halt.breach.observed),
        }
    return attributes


def context_of_invocation(invocation: Invocation) -> Context:
    """Tie the event to the agent's span, sampled or not."""
    if invocation.trace_id is None or invocation.span_id is None:
        return Context()
    ids = {"trace_id": invocation.trace_id, "span_id": invocation.span_id}
    return context_of(ids, sampled=invocation.sampled)


def as_number(number: Number) -> int | float:
    """Return a number that an attribute can hold: exact amounts of money are none."""
    return float(number) if isinstance(number, Decimal) else number
