"""Reports halts to A2A clients, which would otherwise see a completed task."""

from __future__ import annotations

import contextvars
import functools
from typing import TYPE_CHECKING, Any, Final

import wrapt

from otel_limits.bindings.span_writer import json_value
from otel_limits.bindings.strands.marks import marker_of
from otel_limits.core.events import MARKER
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_limits.runs.run import Run

STOPS: Final[contextvars.ContextVar[list[Mapping[str, Any]] | None]] = contextvars.ContextVar(
    "otel_limits_a2a_stops", default=None
)
"""Stops of the request that the current task serves."""


def track_execute(original: Any) -> Any:
    """Wrap the `execute` method of Strands' A2A executor."""

    @functools.wraps(original)
    async def execute(executor: Any, context: Any, event_queue: Any) -> Any:
        stops: list[Mapping[str, Any]] = []
        token = STOPS.set(stops)
        try:
            return await original(executor, context, _AnnotatingQueue(event_queue, stops))
        finally:
            STOPS.reset(token)

    return execute


@suppress_errors("binding")
def attach_stop(run: Run, result: object) -> None:
    """Attach the stop of a client's invocation to its request, if it was halted."""
    stops, verdict = STOPS.get(), run.verdict
    # Agents called by this one end within the same request.
    if stops is None or verdict is None or run.parent is not None or run.action == "observed":
        return
    marker = marker_of(result)
    breach = verdict.breach
    stops.append(
        {
            "reason": verdict.reason,
            "action": run.action,
            "limit": breach and breach.limit,
            "cap": breach and json_value(breach.cap),
            "observed": breach and json_value(breach.observed),
            "synthetic": marker is None or marker["synthetic"],  # where it was raised, too
        }
    )


class _AnnotatingQueue(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A proxy of a request's event queue that adds the stop to the last event.

    A2A keeps the metadata of a status update as the metadata of the task (`TaskManager`, a2a-sdk
    0.3).
    """

    def __init__(self, queue: Any, stops: list[Mapping[str, Any]]) -> None:
        super().__init__(queue)
        self._self_stops = stops

    async def enqueue_event(self, event: Any) -> Any:
        """Pass an event on."""
        self._self_add(event)
        return await self.__wrapped__.enqueue_event(event)

    @suppress_errors("binding")
    def _self_add(self, event: Any) -> None:
        if self._self_stops and getattr(event, "final", False):
            event.metadata = {**(event.metadata or {}), MARKER: self._self_stops[-1]}
