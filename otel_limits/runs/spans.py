"""Which invocation a span belongs to: that of the span above it, or of the task that began it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from otel_limits.runs.responses import Responses

if TYPE_CHECKING:
    from otel_limits.runs.calls import OpenCall
    from otel_limits.runs.run import Run


@dataclass(slots=True, eq=False)
class Trail:
    """The spans of one invocation."""

    run: Run
    open: set[int] = field(default_factory=set)
    responses: Responses = field(default_factory=Responses)
    """Those that spans have shown, and that were booked."""
    is_over: bool = False
    """True when the invocation has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an open span hangs."""

    trail: Trail
    parent: int = 0
    in_call: bool = False
    """True within a model call of the loop, which is counted where its response passes."""
    call: OpenCall | None = None
    """The request of something else within which it began: it shows that same call."""
    is_foreign: bool = False
    """True for what another instrumentation shows than that of the agent's framework."""

    @property
    def run(self) -> Run:
        """What it belongs to."""
        return self.trail.run


class Spans:
    """The open spans of invocations, and the agent spans that wait for theirs to begin.

    Args:
        most: Agent spans that may wait, as one whose invocation never begins is forgotten; and
            spans that outlive their invocation, as one of them may never end.
    """

    def __init__(self, most: int) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._most = most
        self._places: dict[int, Place] = {}
        self._trails: dict[str, Trail] = {}
        """Those of live invocations, by their ids."""
        self._booked: set[int] = set()
        """Open spans around a model call that was booked, or within it: they show that same one."""
        self._showing: set[int] = set()
        """Open spans of which a model call was booked."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._late: OrderedDict[int, None] = OrderedDict()

    def sight(self, span_id: int) -> None:
        """The span of an invocation reached the span processor; the invocation begins after it."""
        with self._lock:
            # Bounded, as a span that is named like an agent's may be anybody's, and its invocation
            # never come.
            self._waiting[span_id] = None
            if len(self._waiting) > self._most:
                self._waiting.popitem(last=False)

    def take(self, span_id: int) -> bool:
        """Tell whether the span of an invocation that begins was sighted, and forget that."""
        with self._lock:
            if span_id not in self._waiting:
                return False
            del self._waiting[span_id]
            return True

    def place(self, span_id: int) -> Place | None:
        """Where a span hangs that is open; `None` for what belongs to no invocation."""
        # Without the lock: one look-up is atomic, and this is asked for every span that the process
        # makes.
        return self._places.get(span_id)

    def begin(
        self,
        span_id: int,
        run: Run,
        *,
        parent: int = 0,
        in_call: bool = False,
        call: OpenCall | None = None,
        is_foreign: bool = False,
    ) -> None:
        """A span of `run` began: what hangs under it belongs to that, too."""
        with self._lock:
            trail = self._trail_of(run, parent)
            self._places[span_id] = Place(trail, parent, in_call, call, is_foreign)
            if trail.is_over:
                self._keep_late(span_id)
            else:
                trail.open.add(span_id)

    def book(self, span_id: int, response_id: str | None, scope: str, tokens: int) -> bool:
        """Tell whether a model call that a span shows has not been booked, and note that it is.

        It has been where a span within this one showed it, or another one the same response.
        """
        with self._lock:
            place = self._places[span_id]
            is_known = span_id in self._booked
            if response_id is not None:
                response = (response_id, scope, tokens)
                is_known |= place.trail.responses.has(*response)
                place.trail.responses.add(*response)
            self._booked.add(span_id)
            if not is_known:
                self._showing.add(span_id)
            return not is_known

    def end(self, span_id: int, *, is_boundary: bool = False) -> None:
        """A span ended: nothing will hang under it any more.

        Args:
            span_id: Which one.
            is_boundary: It is of a tool or an agent: what is around it asks by itself, so that a
                model call within it is not one that is around it.
        """
        with self._lock:
            place = self._places.pop(span_id, None)
            if place is None:
                return
            place.trail.open.discard(span_id)
            self._late.pop(span_id, None)
            if span_id in self._showing:
                # It may end before what is within it, such as a stream that its client reads on.
                self._showing.discard(span_id)
                self._booked.update(self._within(span_id, place.trail))
            if span_id in self._booked:
                self._booked.discard(span_id)
                if not is_boundary and place.parent in self._places:
                    self._booked.add(place.parent)

    def forget(self, run: Run) -> None:
        """The invocation is over; its own spans that never end are forgotten with it.

        What others show may end later, such as a stream that somebody still reads.
        """
        with self._lock:
            trail = self._trails.pop(run.invocation.id, None)
            if trail is None:
                return
            trail.is_over = True
            for span_id in trail.open:
                place = self._places[span_id]
                if place.is_foreign and not place.in_call:
                    self._keep_late(span_id)
                else:
                    self._drop(span_id)
            trail.open.clear()

    def after_fork(self) -> None:
        """Start afresh in a child: the parent's spans end in the parent."""
        self.__init__(self._most)  # type: ignore[misc]

    # --- all of it under the lock -----------------------------------------------------------------

    def _trail_of(self, run: Run, parent: int) -> Trail:
        around = self._places.get(parent)
        if around is not None and around.run is run:
            return around.trail
        if run.finished:  # nobody will forget it
            return Trail(run, is_over=True)
        return self._trails.setdefault(run.invocation.id, Trail(run))

    def _within(self, span_id: int, trail: Trail) -> list[int]:
        """Open spans that hang under a span; not those below them, which a tool may have begun."""
        still_open = self._late if trail.is_over else trail.open
        return [each for each in still_open if self._places[each].parent == span_id]

    def _keep_late(self, span_id: int) -> None:
        self._late[span_id] = None
        if len(self._late) > self._most:
            self._drop(self._late.popitem(last=False)[0])

    def _drop(self, span_id: int) -> None:
        self._places.pop(span_id, None)
        self._booked.discard(span_id)
        self._showing.discard(span_id)
