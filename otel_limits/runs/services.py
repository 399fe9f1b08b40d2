"""The services that all invocations of a process share: lock, clock, observers, prices."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from otel_limits.core import events
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.price import NO_QUOTE, Quote
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.conversations import Conversations
from otel_limits.runs.dispatcher import EventDispatcher
from otel_limits.runs.failure_rows import FailureRows
from otel_limits.runs.tasks import InterruptedTasks

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation
    from otel_limits.core.price_lookup import Prices
    from otel_limits.core.terms import BillableCall


class Services:
    """Shared by all invocations of a registry: lock, clock, observers and prices."""

    def __init__(self) -> None:
        """Create the services, without observers or prices."""
        # Also guards every budget, because several invocations add to the same tree. Held for
        # additions and comparisons only, never while third-party code runs. Reentrant, because the
        # garbage collector can close a forgotten coroutine at any moment, which ends an invocation.
        self.lock = threading.RLock()
        self.observers = EventDispatcher()
        self.prices: Prices | None = None
        self.tool_log: ToolLogWriter | None = None
        self.keeps_fingerprints = False
        """True while an observer needs the hashes of tool calls, even without a loop limit."""
        self.clock = CLOCK
        self.now = CLOCK.now
        self.interrupted = InterruptedTasks(self.now, report=self._report_forgotten)
        self.failures = FailureRows(self.now)
        self.conversations = Conversations(self.now)

    def _report_forgotten(self, interrupts: int) -> None:
        self.observers.publish(events.TaskLost(cause="forgotten", interrupts=interrupts))

    def quote(self, call: BillableCall) -> Quote:
        """Return the price of a model call and its source; none for a call without tokens."""
        if self.prices is None or not call.usage.total:
            return NO_QUOTE
        try:
            return self.prices.quote(call)
        except Exception as error:  # noqa: BLE001  errors must not reach the agent
            report_suppressed("prices", error)
            return NO_QUOTE


class ToolLogWriter(Protocol):
    """Records tool calls with their contents."""

    def write(
        self,
        invocation: Invocation,
        number: int,
        tool: str,
        arguments: object,
        result_text: str,
        *,
        trigger: bool,
    ) -> None:
        """Record one finished call; `trigger` marks the one that caused the halt."""
