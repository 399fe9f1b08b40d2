"""Model calls shown by spans without tokens: counted once no other span can report the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.runs.scope import Scope
    from otel_limits.runs.span_tree import UnreportedCall
    from otel_limits.runs.spans import Spans

MOST: Final = 1_000
"""Pending calls of one invocation; beyond that the oldest is counted."""


class UnreportedCalls:
    """The calls of one invocation that wait for other spans.

    If two instrumentations trace one call, only one may report its tokens, and its span may end
    later. So the calls wait until the invocation is checked or ends,
    and as long as a span around or within theirs is open.
    """

    def __init__(self, scope: Scope, spans: Spans[Any], settle: Callable[..., None]) -> None:
        """Create an empty list."""
        self._scope = scope
        self._spans = spans
        self._settle_call = settle
        self._waiting: list[UnreportedCall] = []

    @suppress_errors("runs")
    def add(self, unreported: UnreportedCall) -> None:
        """Add the call of a span that has just ended."""
        with self._scope.services.lock:
            self._waiting.append(unreported)
            oldest = self._waiting.pop(0) if len(self._waiting) > MOST else None
        if oldest is not None:
            ready, still_waiting = self._spans.split_unreported([oldest])
            self._count(ready + still_waiting)

    @suppress_errors("runs")
    def settle(self) -> None:
        """Count the calls whose tokens no other span has reported or can still report."""
        if not self._waiting:  # nearly always
            return
        with self._scope.services.lock:
            waiting, self._waiting = self._waiting, []
        ready, still_waiting = self._spans.split_unreported(waiting)
        with self._scope.services.lock:
            self._waiting[:0] = still_waiting
        self._count(ready)

    def _count(self, ready: list[UnreportedCall]) -> None:
        for each in ready:
            self._settle_call(each.call, each.record, failed=each.failed)
