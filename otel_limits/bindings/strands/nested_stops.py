"""Stops of the agents within a result: of a graph, a swarm, a delegation or an A2A client.

Such a result looks like any other, although an agent within it was halted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.strands.marks import INNER, mark, stops_of
from otel_limits.bindings.tool_call import is_text_of_halt
from otel_limits.core.events import MARKER, Stop, breach_from_json, stop_to_json
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.limits import STOP_REASONS
from otel_limits.core.policy import Verdict
from otel_limits.core.texts import for_operator

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence

    from strands.agent.a2a_agent import A2AAgent
    from strands.hooks import AfterToolsEvent

    from otel_limits.bindings.strands.invocations import StrandsInvocation

HALTS: Final = ("halted", "wrapped_up", "raised", "killed")
"""Actions of a halt at the other end of A2A."""


# --- graphs and swarms ----------------------------------------------------------------------------


class GroupStops:
    """Collects the stops within a graph or swarm while it runs."""

    def __init__(self, group: Any) -> None:
        """Create an empty collection."""
        self._group = group
        self.interrupts: list[str] = []
        """IDs of the interrupts with which the group waits for a human."""
        self._ended: set[str] = set()
        """The nodes that have ended in this run."""
        self._stops: list[Stop] = []
        """In the order in which nodes ended, also those that are visited again."""
        self._interrupted: list[Stop] = []
        """Within groups that are nodes and wait for a human: they will be noted once more."""

    @suppress_errors("binding")
    def note(self, event: Mapping[str, Any]) -> None:
        """Note an event of the group, and put all stops into its result."""
        inner = event.get("event")
        if (node := event.get("node_result")) is not None:
            self._ended.add(event["node_id"])
            self._stops.extend(stops_of(node.result))
        elif isinstance(inner, dict) and _is_interrupted(inner.get("result")):
            self._interrupted.extend(stops_of(inner["result"]))
        elif (result := event.get("result")) is not None:
            stops = (*self._before(result), *self._stops)
            setattr(result, INNER, (*stops, *self._interrupted))
            self.interrupts = [each.id for each in result.interrupts]
            if _is_interrupted(result):  # the same state object continues when it is resumed
                setattr(self._group.state, INNER, stops)

    def _before(self, result: Any) -> Sequence[Stop]:
        """Return the stops before the interrupt that this run resumes."""
        kept: Sequence[Stop] | None = getattr(self._group.state, INNER, None)
        if kept is not None:
            return kept
        # Another process was interrupted: its session has the last result of each node.
        nodes = ((name, node) for name, node in result.results.items() if name not in self._ended)
        return [stop for _, node in nodes for stop in stops_of(node.result)]


def _is_interrupted(result: Any) -> bool:
    """Return whether a result is that of a graph or swarm that waits for a human."""
    from strands.multiagent.base import Status

    return getattr(result, "status", None) is Status.INTERRUPTED


# --- delegation -----------------------------------------------------------------------------------


@suppress_errors("binding")
def note_delegation(invocation: StrandsInvocation, event: AfterToolsEvent) -> None:
    """Keep the stops of an agent whose answer becomes that of its caller."""
    if not event.end_turn or invocation.leg.batch is None:
        return
    tools = event.agent.tool_registry.registry
    requested = [tools.get(each["name"]) for each in invocation.leg.batch.requests]
    if any(getattr(each, "delegate", False) is True for each in requested):
        invocation.leg.delegated = invocation.leg.inner_stops


@suppress_errors("binding")
def put_delegated(invocation: StrandsInvocation, message: MutableMapping[str, Any]) -> None:
    """Write the stops of a delegation into the message with its answer."""
    stops, invocation.leg.delegated = invocation.leg.delegated, ()
    if stops:
        metadata = message.get("metadata", {})
        text = "".join(block.get("text", "") for block in message["content"])
        halts = invocation.run.halted.values()
        inner: dict[str, Any] = {INNER: [stop_to_json(each) for each in stops]}
        if any(is_text_of_halt(text, child, verdict) for child, verdict in halts):
            inner["synthetic"] = True
        message["metadata"] = {**metadata, "custom": {**metadata.get("custom", {}), **inner}}


# --- A2A ------------------------------------------------------------------------------------------


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
    )
    mark(result.message, stop, synthetic=report.get("synthetic") is True)
