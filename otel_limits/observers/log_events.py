"""Emits each halt as an OpenTelemetry log event, independent of trace sampling."""

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
        logger: Emits the event; without an SDK, it does nothing.
    """

    component = "events"

    def __init__(self, logger: Logger) -> None:
        """Subscribe to halts, including would-be halts."""
        self._logger = logger
        self.subscribes_to = {Halt: self._emit}

    def _emit(self, halt: Halt) -> None:
        self._logger.emit(
            LogRecord(
                # Because the SDK sets only the observed timestamp.
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
    """Return the attributes of the halted span, with agent and invocation ID."""
    attributes: dict[str, AnyValue] = {
        semconv.AGENT_NAME: halt.invocation.agent,
        semconv.INVOCATION_ID: halt.invocation.id,
        semconv.TASK_ID: halt.invocation.task_id,
        semconv.STOP_REASON: halt.reason,
        semconv.STOP_ACTION: halt.action,
    }
    # A kill has no limit.
    if halt.breach is not None:
        attributes |= {
            semconv.LIMIT_NAME: halt.breach.limit,
            semconv.LIMIT_VALUE: as_number(halt.breach.cap),
            semconv.LIMIT_CONSUMED: as_number(halt.breach.observed),
        }
    return attributes


def context_of_invocation(invocation: Invocation) -> Context:
    """Return a context with the agent's span, sampled or not."""
    if invocation.trace_id is None or invocation.span_id is None:
        return Context()
    ids = {"trace_id": invocation.trace_id, "span_id": invocation.span_id}
    return context_of(ids, sampled=invocation.sampled)


def as_number(number: Number) -> int | float:
    """Convert an exact amount to a float, because attributes cannot hold a `Decimal`."""
    # The ledger has the exact amount.
    return float(number) if isinstance(number, Decimal) else number
