"""Where a span hangs, and what is around it: of spans within one another, one call is booked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from otel_limits.runs.responses import SeenResponses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run
    from otel_limits.runs.unreported_calls import UnreportedCall

MOST_ENDED: Final = 1_000
"""Spans of one invocation that are remembered when they have ended, the latest ones."""


@dataclass(slots=True, eq=False)
class InvocationSpans:
    """The spans of one invocation."""

    run: Run
    open: set[int] = field(default_factory=set)
    ended: list[SpanNode] = field(default_factory=list)
    """The oldest first."""
    responses: SeenResponses = field(default_factory=SeenResponses)
    """Those that spans have shown, and that were booked."""
    is_over: bool = False
    """True when the invocation has ended."""

    def keep(self, ended: SpanNode) -> SpanNode | None:
        """Remember a span that has ended; returns the one that makes room, if one has to."""
        self.ended.append(ended)
        if len(self.ended) <= MOST_ENDED:
            return None
        oldest = self.ended.pop(0)
        # Otherwise spans that each begin within the one before would keep each other for ever.
        oldest.above = None
        return oldest


@dataclass(slots=True, eq=False, repr=False)
class SpanNode:
    """Where a span hangs; it stays for as long as anything within it is open.

    What can change is changed under the lock of `Spans`.
    """

    span_id: int
    spans: InvocationSpans
    above: SpanNode | None = None
    """The span around it, ended or not."""
    in_call: bool = False
    """True within a model call of the loop, which is counted where its response passes."""
    call: InFlightCall | None = None
    """The request of something else within which it began: it shows that same call."""
    is_third_party: bool = False
    """True for what another instrumentation shows than that of the agent's framework."""
    is_boundary: bool = False
    """True for a tool or an agent, which asks by itself: what is around it shows other calls."""
    is_open: bool = True
    is_counted: bool = False
    """True when the model call that it shows was booked, or another span has shown it."""
    has_counted: bool = False
    """True when a model call was booked that it shows, or one that has ended within it."""
    unreported: UnreportedCall | None = None
    """The model call that it shows without its tokens."""

    @property
    def run(self) -> Run:
        """What it belongs to."""
        return self.spans.run

    def enclosing_spans(self) -> Iterator[SpanNode]:
        """Yield what may show the same model call, the nearest first: up to a tool or an agent."""
        place = self
        while not place.is_boundary and place.above is not None:
            place = place.above
            yield place

    def propagate(self) -> None:
        """Let what is around it know that it has booked a call.

        That goes up to the first span that is open, which does the same when it ends: only then is
        it certain what it is.
        """
        for each in self.enclosing_spans():
            if each.has_counted:
                return
            each.has_counted = True
            if each.is_open:
                return
