"""Stops of the agents within a result: of a graph, a swarm or a delegation.

Such a result looks like any other, although an agent within it was halted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.bindings.strands.marks import INNER, stops_of
from otel_limits.bindings.tool_call import is_text_of_halt
from otel_limits.core.events import Stop, stop_to_json
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from strands.hooks import AfterToolsEvent

    from otel_limits.bindings.strands.invocations import StrandsInvocation


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
