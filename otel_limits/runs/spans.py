"""Which invocation a span belongs to: that of the span above it, or of the task that began it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from otel_limits.runs.responses import SeenResponses
from otel_limits.runs.span_tree import InvocationSpans, SpanNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run
    from otel_limits.runs.unreported_calls import UnreportedCall


class Spans:
    """The spans of invocations, and the agent spans that wait for theirs to begin.

    One that has ended stays for as long as its invocation lives, as what began within it may end
    later, or even begin later.

    Args:
        most: Agent spans that may wait, as one whose invocation never begins is forgotten; spans
            that outlive their invocation, as one of them may never end; and model calls that are
            known by their spans when their invocation is over.
    """

    def __init__(self, most: int) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._most = most
        self._places: dict[int, SpanNode] = {}
        self._trails: dict[str, InvocationSpans] = {}
        """Those of live invocations, by their ids."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._late: OrderedDict[int, None] = OrderedDict()
        """Open spans whose invocation is over."""
        self._asked: OrderedDict[int, None] = OrderedDict()
        """Spans of model calls of invocations that are over."""

    def register_span(self, span_id: int) -> None:
        """The span of an invocation reached the span processor; the invocation begins after it."""
        with self._lock:
            # Bounded, as a span that is named like an agent's may be anybody's, and its invocation
            # never come.
            self._waiting[span_id] = None
            if len(self._waiting) > self._most:
                self._waiting.popitem(last=False)

    def claim(self, span_id: int) -> bool:
        """Tell whether the span of an invocation that begins was sighted, and forget that."""
        with self._lock:
            if span_id not in self._waiting:
                return False
            del self._waiting[span_id]
            return True

    def node(self, span_id: int) -> SpanNode | None:
        """Where a span hangs; `None` for what belongs to no live invocation."""
        # Without the lock: one look-up is atomic, and this is asked for every span that the process
        # makes.
        return self._places.get(span_id)

    def was_model_call(self, span_id: int) -> bool:
        """Tell whether a span was of a model call of the loop of an invocation that is over."""
        return span_id in self._asked

    def begin(  # noqa: PLR0913  what is known when a span begins
        self,
        span_id: int,
        run: Run,
        *,
        parent: int = 0,
        in_call: bool = False,
        call: InFlightCall | None = None,
        is_foreign: bool = False,
        is_boundary: bool = False,
    ) -> None:
        """A span of `run` began: what hangs under it belongs to that, too."""
        with self._lock:
            above = self._places.get(parent)
            trail = self._trail_of(run, above)
            self._places[span_id] = SpanNode(
                span_id, trail, above, in_call, call, is_foreign, is_boundary
            )
            if trail.is_over:
                self._keep_late(span_id)
            else:
                trail.open.add(span_id)

    def claim_call(self, span_id: int, response_id: str | None, scope: str, tokens: int) -> bool:
        """Tell whether a model call that a span shows has not been booked, and note that it is.

        It has been where a span within this one showed it, or one around it, or another one the
        same response.
        """
        with self._lock:
            place = self._places[span_id]
            is_counted = any(each.is_counted for each in place.enclosing_spans())
            if response_id is not None:
                response = (response_id, scope, tokens)
                is_counted |= place.spans.responses.has(*response)
                place.spans.responses.add(*response)
            is_counted_within = place.has_counted or self._is_booked_within(place)
            # What is within a call that was counted is that call. Where what is within it was
            # counted, there may be more of it: such as a second attempt.
            place.is_counted = not is_counted_within
            place.has_counted = True
            return not (is_counted or is_counted_within)

    def mark_counted_within(self, span_id: int) -> None:
        """A call that is counted without any span goes out within a span, which may show it."""
        with self._lock:
            place = self._places.get(span_id)
            if place is not None and place.is_third_party and not place.is_boundary:
                place.has_counted = True
                place.propagate()

    def split_unreported(
        self, silent: Sequence[UnreportedCall]
    ) -> tuple[list[UnreportedCall], list[UnreportedCall]]:
        """Return those of some calls that no other span tells, and those that one still may."""
        shown, untold, waiting = SeenResponses(), [], []
        with self._lock:
            for each in silent:
                if self._may_be_told(each.node):
                    waiting.append(each)
                elif not self._is_told(each, shown):
                    untold.append(each)
        return untold, waiting

    def end(self, span_id: int, *, is_boundary: bool = False) -> None:
        """A span ended.

        Args:
            span_id: Which one.
            is_boundary: It is of a tool or an agent: what is around it asks by itself, so that a
                model call within it is not one that is around it.
        """
        with self._lock:
            place = self._places.get(span_id)
            if place is None or not place.is_open:
                return
            place.is_open, place.is_boundary = False, place.is_boundary or is_boundary
            if place.has_counted:
                place.propagate()
            trail = place.spans
            trail.open.discard(span_id)
            if trail.is_over:
                self._late.pop(span_id, None)
                del self._places[span_id]
            if (dropped := trail.keep(place)) is not None:
                self._drop(dropped.span_id)

    def forget(self, run: Run) -> None:
        """The invocation is over; its own spans that never end are forgotten with it.

        What others show may end later, such as a stream that somebody still reads.
        """
        with self._lock:
            trail = self._trails.pop(run.invocation.id, None)
            if trail is None:
                return
            trail.is_over = True
            for place in trail.ended:
                self._drop(place.span_id)
            for span_id in trail.open:
                place = self._places[span_id]
                if place.is_third_party and not place.in_call:
                    self._keep_late(span_id)
                else:
                    self._drop(span_id)
            trail.open.clear()

    def after_fork(self) -> None:
        """Start afresh in a child: the parent's spans end in the parent."""
        self.__init__(self._most)  # type: ignore[misc]

    # --- all of it under the lock -----------------------------------------------------------------

    def _trail_of(self, run: Run, above: SpanNode | None) -> InvocationSpans:
        if above is not None and above.run is run:
            return above.spans
        if run.finished:  # nobody will forget it
            return InvocationSpans(run, is_over=True)
        return self._trails.setdefault(run.invocation.id, InvocationSpans(run))

    def _is_booked_within(self, place: SpanNode) -> bool:
        """Tell whether a call was booked of which a span is open that passes it on when it ends."""
        trail = place.spans
        still_open = map(self._places.get, self._late if trail.is_over else trail.open)
        return any(
            each is not None and each.has_counted and place in each.enclosing_spans()
            for each in still_open
        )

    def _may_be_told(self, place: SpanNode) -> bool:
        """Tell whether anything around a span, or within it, is open that may know its tokens."""
        trail = place.spans
        # What the framework shows is not a call of others, and may end with the invocation only.
        around = (
            each for each in place.enclosing_spans() if each.is_third_party and each.spans is trail
        )
        if any(each.is_open and not each.is_boundary for each in around):
            return True
        still_open = map(self._places.get, self._late if trail.is_over else trail.open)
        return any(each is not None and place in each.enclosing_spans() for each in still_open)

    def _is_told(self, silent: UnreportedCall, shown: SeenResponses) -> bool:
        """Tell whether another span shows the call of one that does not know its tokens."""
        place = silent.node
        outer = [each.unreported for each in place.enclosing_spans() if each.unreported is not None]
        if outer:  # the outermost is the whole call
            outer[-1].merge(silent)
            return True
        if place.has_counted or any(each.is_counted for each in place.enclosing_spans()):
            return True
        if silent.response_id is None:
            return False
        response = (silent.response_id, silent.scope, 0)
        if shown.has(*response) or place.spans.responses.has(*response):
            return True
        # Not with those that were booked: whoever tells its tokens later is to be believed.
        shown.add(*response)
        return False

    def _keep_late(self, span_id: int) -> None:
        self._late[span_id] = None
        if len(self._late) > self._most:
            self._drop(self._late.popitem(last=False)[0])

    def _drop(self, span_id: int) -> None:
        place = self._places.pop(span_id, None)
        if place is None or not place.in_call:
            return
        # An instrumentation may tell of a call when all is over, such as LiteLLM's by a callback.
        self._asked[span_id] = None
        if len(self._asked) > self._most:
            self._asked.popitem(last=False)
