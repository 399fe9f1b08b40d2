"""Which invocation a span belongs to, and which nested spans show the same model call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_limits.core.usage import UsageRecord
    from otel_limits.runs.account import Account
    from otel_limits.runs.calls import InFlightCall


# --- spans of the same response -------------------------------------------------------------------

MAX_RESPONSES: Final = 10_000
"""Responses that are kept; later ones count as new."""


class SeenResponses:
    """The responses that the spans of one invocation, or of one trace, have shown.

    Two instrumentations show one response with one ID. An ID that appears again with other tokens
    is another response, because IDs of some servers repeat: songquanpeng/one-api,
    relay/adaptor/cohere/main.go, derives them from the second.
    """

    def __init__(self) -> None:
        """Create an empty set."""
        self._shown: dict[str, set[tuple[str, int]]] = {}
        self._number = 0

    def has(self, response_id: str, instrumentation: str, tokens: int) -> bool:
        """Return whether another span has shown a response.

        Args:
            response_id: Its ID, as sent by the vendor.
            instrumentation: The instrumentation scope of the span that shows it.
            tokens: Its input and output tokens.
        """
        shown = self._shown.get(response_id)
        if shown is None:
            return False
        return any(tokens == each for _, each in shown) or all(
            instrumentation != each for each, _ in shown
        )

    def add(self, response_id: str, instrumentation: str, tokens: int) -> None:
        """Add a response that a span has shown."""
        if self._number < MAX_RESPONSES:
            self._number += 1
            self._shown.setdefault(response_id, set()).add((instrumentation, tokens))


# --- spans of one invocation ----------------------------------------------------------------------
# Nested spans of one model call count once.

MAX_ENDED: Final = 1_000
"""Ended spans of one invocation that are kept, the latest ones."""


RunT = TypeVar("RunT", bound="Account")


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
        if len(self.ended) <= MAX_ENDED:
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


# --- the invocation of a span ---------------------------------------------------------------------


class Spans(Generic[RunT]):
    """The spans of active invocations, and agent spans whose invocation has not started yet.

    An ended span is kept as long as its invocation is active, because spans within it may end, or
    even start, later.

    Args:
        most: Maximum number of agent spans that are kept for an invocation that may never start,
            of spans that outlive their invocation, and of model call spans of past invocations.
    """

    def __init__(self, most: int) -> None:
        """Create an empty index."""
        self._lock = threading.RLock()
        self._most = most
        self._nodes: dict[int, SpanNode[RunT]] = {}
        self._by_invocation: dict[str, InvocationSpans[RunT]] = {}
        """Those of active invocations, by their IDs."""
        self._registered: OrderedDict[int, None] = OrderedDict()
        self._late: OrderedDict[int, None] = OrderedDict()
        """Open spans of invocations that have ended."""
        self._past_calls: OrderedDict[int, None] = OrderedDict()
        """Spans of model calls of invocations that have ended."""

    def register_span(self, span_id: int) -> None:
        """Register an agent span that reached the span processor, before its invocation starts."""
        with self._lock:
            # Bounded: any application may name a span like an agent's, without an invocation.
            self._registered[span_id] = None
            if len(self._registered) > self._most:
                self._registered.popitem(last=False)

    def claim(self, span_id: int) -> bool:
        """Remove the span of a starting invocation; False if it was not registered."""
        with self._lock:
            if span_id not in self._registered:
                return False
            del self._registered[span_id]
            return True

    def node(self, span_id: int) -> SpanNode[RunT] | None:
        """Return the node of a span; `None` if it belongs to no active invocation."""
        # Without the lock: one look-up is atomic, and it happens for every span of the process.
        return self._nodes.get(span_id)

    def was_model_call(self, span_id: int) -> bool:
        """Return whether a span was a loop's model call in an invocation that has ended."""
        return span_id in self._past_calls

    def begin(  # noqa: PLR0913  what is known when a span starts
        self,
        span_id: int,
        run: RunT,
        *,
        parent: int = 0,
        in_call: bool = False,
        call: InFlightCall | None = None,
        is_third_party: bool = False,
        is_boundary: bool = False,
    ) -> None:
        """Add a span of `run` that has started."""
        with self._lock:
            above = self._nodes.get(parent)
            spans = self._spans_of(run, above)
            self._nodes[span_id] = SpanNode(
                span_id, spans, above, in_call, call, is_third_party, is_boundary
            )
            if spans.is_over:
                self._keep_late(span_id)
            else:
                spans.open.add(span_id)

    def claim_call(
        self, span_id: int, response_id: str | None, instrumentation: str, tokens: int
    ) -> bool:
        """Mark the model call that a span shows as counted; False if it was counted already.

        It was if a span within or around this one, or another span of the same response, was
        counted.
        """
        with self._lock:
            node = self._nodes[span_id]
            is_counted = any(each.is_counted for each in node.enclosing_spans())
            if response_id is not None:
                response = (response_id, instrumentation, tokens)
                is_counted |= node.spans.responses.has(*response)
                node.spans.responses.add(*response)
            is_counted_within = node.has_counted or self._is_counted_within(node)
            # Everything within a counted call is that call. If something within it was counted,
            # there may be more of it, such as a second attempt.
            node.is_counted = not is_counted_within
            node.has_counted = True
            return not (is_counted or is_counted_within)

    def mark_counted_within(self, span_id: int) -> None:
        """Mark a span as showing a call that is counted without any span."""
        with self._lock:
            node = self._nodes.get(span_id)
            if node is not None and node.is_third_party and not node.is_boundary:
                node.has_counted = True
                node.propagate()

    def split_unreported(
        self, calls: Sequence[UnreportedCall]
    ) -> tuple[list[UnreportedCall], list[UnreportedCall]]:
        """Return the calls that no other span reports, and those that one may still report."""
        shown, ready, waiting = SeenResponses(), [], []
        with self._lock:
            for each in calls:
                if self._may_be_reported(each.node):
                    waiting.append(each)
                elif not self._is_reported(each, shown):
                    ready.append(each)
        return ready, waiting

    def end(self, span_id: int, *, is_boundary: bool = False) -> None:
        """Mark a span as ended.

        Args:
            span_id: The span.
            is_boundary: It turned out to be a tool or an agent, which makes its own calls.
        """
        with self._lock:
            node = self._nodes.get(span_id)
            if node is None or not node.is_open:
                return
            node.is_open, node.is_boundary = False, node.is_boundary or is_boundary
            if node.has_counted:
                node.propagate()
            spans = node.spans
            spans.open.discard(span_id)
            if spans.is_over:
                self._late.pop(span_id, None)
                del self._nodes[span_id]
            if (dropped := spans.keep(node)) is not None:
                self._drop(dropped.span_id)

    def forget(self, run: RunT) -> None:
        """Drop the spans of an invocation that has ended.

        Open spans of other instrumentations are kept: a stream may still be read, for example.
        """
        with self._lock:
            spans = self._by_invocation.pop(run.invocation.id, None)
            if spans is None:
                return
            spans.is_over = True
            for node in spans.ended:
                self._drop(node.span_id)
            for span_id in spans.open:
                node = self._nodes[span_id]
                if node.is_third_party and not node.in_call:
                    self._keep_late(span_id)
                else:
                    self._drop(span_id)
            spans.open.clear()

    def after_fork(self) -> None:
        """Reset in a child process: the parent's spans end in the parent."""
        self.__init__(self._most)  # type: ignore[misc]

    # --- under the lock ---------------------------------------------------------------------------

    def _spans_of(self, run: RunT, above: SpanNode[RunT] | None) -> InvocationSpans[RunT]:
        if above is not None and above.run is run:
            return above.spans
        if run.finished:  # `forget` has already run
            return InvocationSpans(run, is_over=True)
        return self._by_invocation.setdefault(run.invocation.id, InvocationSpans(run))

    def _is_counted_within(self, node: SpanNode[RunT]) -> bool:
        """Return whether an open span within this one has counted a call that it will propagate."""
        return any(
            each is not None and each.has_counted and node in each.enclosing_spans()
            for each in self._open_spans(node)
        )

    def _may_be_reported(self, node: SpanNode[Any]) -> bool:
        """Return whether an open related span may still report this span's tokens."""
        # The framework's own spans show other calls, and may end with the invocation only.
        around = (
            each
            for each in node.enclosing_spans()
            if each.is_third_party and each.spans is node.spans
        )
        if any(each.is_open and not each.is_boundary for each in around):
            return True
        return any(
            each is not None and node in each.enclosing_spans() for each in self._open_spans(node)
        )

    def _open_spans(self, node: SpanNode[Any]) -> map[SpanNode[RunT] | None]:
        return map(self._nodes.get, self._late if node.spans.is_over else node.spans.open)

    def _is_reported(self, unreported: UnreportedCall, shown: SeenResponses) -> bool:
        """Return whether another span shows the call of a span without tokens."""
        node = unreported.node
        around = [each.unreported for each in node.enclosing_spans() if each.unreported is not None]
        if around:  # the outermost is the whole call
            around[-1].merge(unreported)
            return True
        if node.has_counted or any(each.is_counted for each in node.enclosing_spans()):
            return True
        if unreported.response_id is None:
            return False
        response = (unreported.response_id, unreported.instrumentation, 0)
        if shown.has(*response) or node.spans.responses.has(*response):
            return True
        # Not added to the counted ones: a span that reports the tokens later still counts.
        shown.add(*response)
        return False

    def _keep_late(self, span_id: int) -> None:
        self._late[span_id] = None
        if len(self._late) > self._most:
            self._drop(self._late.popitem(last=False)[0])

    def _drop(self, span_id: int) -> None:
        node = self._nodes.pop(span_id, None)
        if node is None or not node.in_call:
            return
        # An instrumentation may report a call after the end, such as LiteLLM's in a callback.
        self._past_calls[span_id] = None
        if len(self._past_calls) > self._most:
            self._past_calls.popitem(last=False)
