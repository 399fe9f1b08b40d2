"""Halts over A2A: reported by the server of an agent, and put into the result of its client.

A client would otherwise see a completed task.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import wrapt

from otel_limits.bindings.span_writer import json_value
from otel_limits.bindings.strands.marks import mark
from otel_limits.core.events import MARKER, Stop, breach_from_json
from otel_limits.core.halt_texts import for_operator
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.limits import STOP_REASONS
from otel_limits.core.policy import Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from strands.agent.a2a_agent import A2AAgent

    from otel_limits.runs.run import Run


# --- the server -----------------------------------------------------------------------------------

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
def attach_stop(run: Run) -> None:
    """Attach the stop of a client's invocation to its request, if it was halted."""
    stops, verdict = STOPS.get(), run.verdict
    # Agents called by this one end within the same request.
    if stops is None or verdict is None or run.parent is not None or run.action == "observed":
        return
    breach = verdict.breach
    stops.append(
        {
            "reason": verdict.reason,
            "action": run.action,
            "limit": breach and breach.limit,
            "cap": breach and json_value(breach.cap),
            "observed": breach and json_value(breach.observed),
            "synthetic": run.synthetic,
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


# --- the client -----------------------------------------------------------------------------------

HALTS: Final = ("halted", "wrapped_up", "raised", "killed")
"""Actions of a halt at the other end of A2A."""


def track_client(
    original: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap the stream of an A2A client, whose server may report a halt."""

    @functools.wraps(original)
    async def stream_async(
        client: A2AAgent, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        report, events = None, original(client, *args, **kwargs)
        try:
            async for event in events:
                report = _report_in(event) or report
                if report is not None and "result" in event:
                    _put_remote(client, event["result"], report)
                yield event
        finally:
            await events.aclose()

    return stream_async


@suppress_errors("binding")
def _report_in(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the report of a halt in an event of the protocol: an update, or its task."""
    found = event.get("event")
    for each in found if isinstance(found, tuple) else (found,):
        metadata = getattr(each, "metadata", None)
        report = metadata.get(MARKER) if isinstance(metadata, dict) else None
        if isinstance(report, dict) and report.get("action") in HALTS:
            return report if report.get("reason") in STOP_REASONS else None
    return None


@suppress_errors("binding")
def _put_remote(client: A2AAgent, result: Any, report: Mapping[str, Any]) -> None:
    """Write the halt that a server reports into the result of its client."""
    agent, reason, action = client.name or "", report["reason"], report["action"]
    known = {name: report.get(name) for name in ("limit", "cap", "observed")}
    breach = breach_from_json({**known, "reason": reason}) if known["limit"] else None
    breaches = () if breach is None else (breach,)
    sentence = for_operator(agent, Verdict(reason, breaches), action)
    stop = Stop(
        reason=reason,
        action=action,
        breach=breach,
        breaches=breaches,
        sentence=sentence,
        agent=agent,
        synthetic=report.get("synthetic") is True,
    )
    mark(result.message, stop, synthetic=stop.synthetic)
