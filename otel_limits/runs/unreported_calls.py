"""Model calls that spans show without their tokens: counted once nobody else can tell those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.core.usage import UsageRecord
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run
    from otel_limits.runs.span_tree import SpanNode

MOST: Final = 1_000
"""Calls of one invocation that wait; the oldest is counted when there is one more."""


@dataclass(slots=True, eq=False)
class UnreportedCall:
    """What a span shows of a call of which it does not know the tokens."""

    call: InFlightCall
    record: UsageRecord
    node: SpanNode
    scope: str
    """The instrumentation that made the span."""
    response_id: str | None
    failed: bool
    """True when the span says that the call failed."""

    def merge(self, within: UnreportedCall) -> None:
        """Take over the texts of a span within this one, which shows the same call."""
        mine, other = self.call, within.call
        mine.input_estimate = max(mine.input_estimate, other.input_estimate)
        mine.answer_estimate = max(mine.answer_estimate, other.answer_estimate)


class UnreportedCalls:
    """Those of one invocation that wait for other spans.

    Of two instrumentations that show one call, one may know its tokens and the other not, and the
    span that knows them may end later. So they wait until the invocation is judged or ends, and
    for what is open around and within them.
    """

    def __init__(self, run: Run) -> None:
        """Begin with none."""
        self._run = run
        self._waiting: list[UnreportedCall] = []

    @suppress_errors("runs")
    def add(self, silent: UnreportedCall) -> None:
        """Note what a span has shown that has just ended."""
        with self._run.services.lock:
            self._waiting.append(silent)
            oldest = self._waiting.pop(0) if len(self._waiting) > MOST else None
        if oldest is not None:
            untold, still_waiting = self._run.services.spans.split_unreported([oldest])
            self._count(untold + still_waiting)

    @suppress_errors("runs")
    def settle(self) -> None:
        """Count those whose tokens no other span has told, or can still tell."""
        if not self._waiting:  # as good as always
            return
        with self._run.services.lock:
            waiting, self._waiting = self._waiting, []
        untold, still_waiting = self._run.services.spans.split_unreported(waiting)
        with self._run.services.lock:
            self._waiting[:0] = still_waiting
        self._count(untold)

    def _count(self, untold: list[UnreportedCall]) -> None:
        for each in untold:
            self._run.calls.settle(each.call, each.record, failed=each.failed)
