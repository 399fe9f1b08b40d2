"""Which live invocation a span belongs to, by the spans that it hangs under."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_limits.runs.run import Run


MOST_RESPONSES: Final = 10_000
"""Ids of responses that are remembered of one invocation."""


class Spans:
    """The open spans of live invocations, and the agent spans that wait for theirs to begin.

    Args:
        max_waiting: Agent spans that may wait: one whose invocation never begins is forgotten.
    """

    def __init__(self, max_waiting: int) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._max_waiting = max_waiting
        self._owners: dict[int, tuple[Run, bool]] = {}
        self._of_run: dict[str, set[int]] = {}
        self._parents: dict[int, int] = {}
        self._booked: set[int] = set()
        """Open spans around a model call that was booked: they show that same call."""
        self._responses: dict[str, set[str]] = {}
        """Ids of the responses that were booked, by invocation."""
        self._waiting: OrderedDict[int, None] = OrderedDict()

    def sight(self, span_id: int) -> None:
        """The span of an invocation reached the span processor; the invocation begins after it."""
        with self._lock:
            # Bounded, as a span that is named like an agent's may be anybody's, and its invocation
            # never come.
            self._waiting[span_id] = None
            if len(self._waiting) > self._max_waiting:
                self._waiting.popitem(last=False)

    def take(self, span_id: int) -> bool:
        """Tell whether the span of an invocation that begins was sighted, and forget that."""
        with self._lock:
            if span_id not in self._waiting:
                return False
            del self._waiting[span_id]
            return True

    def own(self, run: Run, span_id: int, *, in_call: bool = False) -> None:
        """What hangs under this span belongs to `run`."""
        with self._lock:
            self._owners[span_id] = (run, in_call)
            self._of_run.setdefault(run.invocation.id, set()).add(span_id)

    def begin(self, span_id: int, parent_id: int, *, is_call: bool) -> Run | None:
        """A span began under `parent_id`; returns the run that both belong to, if one does."""
        # Handed down, as an instrumentation of the provider's client hangs its own span of the same
        # call under the `chat` span: it is one model call, not two.
        run, in_call = self.owner(parent_id)
        if run is not None:
            self.own(run, span_id, in_call=in_call or is_call)
            with self._lock:
                self._parents[span_id] = parent_id
        return run

    def book(self, run: Run, span_id: int, response_id: str | None) -> bool:
        """Tell whether a model call that a span shows has not been booked, and note that it is.

        It has been where a span within this one showed it, or another one the same response.
        """
        with self._lock:
            responses = self._responses.setdefault(run.invocation.id, set())
            is_known = span_id in self._booked or response_id in responses
            if response_id is not None and len(responses) < MOST_RESPONSES:
                responses.add(response_id)
            around = self._parents.get(span_id)
            # Up to the span of the invocation, which has none above it here.
            while around is not None and around not in self._booked:
                if around in self._parents:
                    self._booked.add(around)
                around = self._parents.get(around)
            return not is_known

    def end(self, span_id: int) -> None:
        """A span ended: nothing will hang under it any more."""
        with self._lock:
            run, _ = self._owners.pop(span_id, (None, False))
            self._parents.pop(span_id, None)
            self._booked.discard(span_id)
            if run is not None:
                self._of_run.get(run.invocation.id, set()).discard(span_id)

    def owner(self, span_id: int) -> tuple[Run | None, bool]:
        """The live run that a span belongs to, and whether it is within the span of a call."""
        # Without the lock: one look-up is atomic, and this is asked for every span that the process
        # makes.
        return self._owners.get(span_id, (None, False))

    def forget(self, run: Run) -> None:
        """The invocation is over; spans of it that never end are forgotten with it."""
        with self._lock:
            for span_id in self._of_run.pop(run.invocation.id, ()):
                self._owners.pop(span_id, None)
                self._parents.pop(span_id, None)
                self._booked.discard(span_id)
            self._responses.pop(run.invocation.id, None)

    def after_fork(self) -> None:
        """Start afresh in a child: the parent's spans end in the parent."""
        self.__init__(self._max_waiting)  # type: ignore[misc]
