"""Spans of an invocation and their nesting: nested spans of one model call count once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from otel_limits.runs.responses import SeenResponses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.events import Invocation
    from otel_limits.core.usage import UsageRecord
    from otel_limits.runs.calls import InFlightCall

MOST_ENDED: Final = 1_000
"""Ended spans of one invocation that are kept, the latest ones."""


class Owner(Protocol):
    """An invocation, as its spans know it."""

    invocation: Invocation
    finished: bool


RunT = TypeVar("RunT", bound="Owner")


@dataclass(slots=True, eq=False)
class InvocationSpans(Generic[RunT]):
    """The spans of one invocation."""

    run: RunT
    open: set[int] = field(default_factory=set)
    ended: list[SpanNode[RunT]] = field(default_factory=list)
    """Oldest first."""
    responses: SeenResponses = field(default_factory=SeenResponses)
    """The responses of counted model calls that spans have shown."""
    is_over: bool = False
    """True once the invocation has ended."""

    def keep(self, ended: SpanNode[RunT]) -> SpanNode[RunT] | None:
        """Keep an ended span; return the one dropped to make room, if any."""
        self.ended.append(ended)
        if len(self.ended) <= MOST_ENDED:
            return None
        oldest = self.ended.pop(0)
        # Otherwise spans that each begin within the previous one would form an endless chain.
        oldest.above = None
        return oldest


@dataclass(slots=True, eq=False, repr=False)
class SpanNode(Generic[RunT]):
    """A span and the span around it; kept while anything within it is open.

    Guarded by the lock of `Spans`.
    """

    span_id: int
    spans: InvocationSpans[RunT]
    above: SpanNode[RunT] | None = None
    """The span around it, ended or not."""
    in_call: bool = False
    """True within a model call of the loop, which is counted where its response passes."""
    call: InFlightCall | None = None
    """The side call within which the span began, and which it therefore shows."""
    is_third_party: bool = False
    """True for a span of an instrumentation other than the agent framework's."""
    is_boundary: bool = False
    """True for a tool or an agent, which makes its own calls: spans around it show others."""
    is_open: bool = True
    is_counted: bool = False
    """True once the model call that it shows was counted, here or for another span."""
    has_counted: bool = False
    """True once a model call was counted that it shows, or that ended within it."""
    unreported: UnreportedCall | None = None
    """The model call that it shows without its tokens."""

    @property
    def run(self) -> RunT:
        """The invocation that it belongs to."""
        return self.spans.run

    def enclosing_spans(self) -> Iterator[SpanNode[RunT]]:
        """Yield the spans that may show the same call, nearest first, up to a tool or an agent."""
        node = self
        while not node.is_boundary and node.above is not None:
            node = node.above
            yield node

    def propagate(self) -> None:
        """Mark the enclosing spans as having counted a call, up to the first open one.

        That one does the same when it ends: only then is its kind certain.
        """
        for each in self.enclosing_spans():
            if each.has_counted:
                return
            each.has_counted = True
            if each.is_open:
                return


@dataclass(slots=True, eq=False)
class UnreportedCall:
    """A model call that a span shows without its tokens."""

    call: InFlightCall
    record: UsageRecord
    node: SpanNode[Any]
    instrumentation: str
    """The instrumentation scope of the span."""
    response_id: str | None
    failed: bool
    """True if the span reports that the call failed."""

    def merge(self, within: UnreportedCall) -> None:
        """Adopt the estimates of a span within this one, which shows the same call."""
        mine, other = self.call, within.call
        mine.input_estimate = max(mine.input_estimate, other.input_estimate)
        mine.answer_estimate = max(mine.answer_estimate, other.answer_estimate)
