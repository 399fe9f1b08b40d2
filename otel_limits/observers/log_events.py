"""Emits each halt as an OpenTelemetry log event, which trace sampling does not touch."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context

from otel_limits.core.events import Halt, Invocation
from otel_limits.observers.context import context_of
from otel_limits.observers.protocol import BaseObserver
from otel_limits.otel import semconv

if TYPE_CHECKING:
    from opentelemetry.util.types import AnyValue

    from otel_limits.core.usage import Number


class EventObserver(BaseObserver):
    """Emits the event `otel_limits.halt`.

    Args:
        logger: Where it goes; without an SDK behind it, nowhere.
    """

    component = "events"

    def __init__(self, logger: Logger) -> None:
        """Subscribe to halts, observed ones included: other events are not events."""
        self._logger = logger
        self.subscribes_to = {Halt: self._emit}

    def _emit(self, halt: Halt) -> None:
        self._logger.emit(
            LogRecord(
                # As the SDK sets only the time at which it saw the record.
                timestamp=time.time_ns(),
                context=context_of_invocation(halt.invocation),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                event_name=semconv.HALT_EVENT,
                body=halt.sentence,
                attributes=attributes_of(halt),
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
    # A kill has no limit that could be named.
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
    """Return a number that an attribute can hold, which an exact amount of money is not."""
    # The digits beyond a float are for a ledger, which has them; an event is looked at.
    return float(number) if isinstance(number, Decimal) else number
