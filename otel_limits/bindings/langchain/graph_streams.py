"""The stream of a graph: what its reader asked for, and what we read along.

A halted graph ends with one more message. To put it where it belongs, the last values of the state
and the updates since have to be known, so both modes are always requested, and only what the reader
asked for is passed on. `invoke` requests both itself.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessageChunk, BaseMessage, RemoveMessage
from langgraph.channels import LastValue
from langgraph.graph import add_messages
from pydantic import BaseModel

from otel_limits.bindings.langchain.halt_marks import markers_of, messages_of
from otel_limits.bindings.langchain.private_graph_names import TASK
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MESSAGES: Final = "messages"
"""The channel of a graph's state that holds its conversation."""

MESSAGE: Final = (BaseMessage, tuple, dict)
"""Forms of messages. A state without `add_messages` keeps them as they were given."""

CARRIERS: Final = frozenset({"messages", "updates", "values"})
"""Modes in which a reader gets the message of a halt."""

OURS: Final = ("updates", "values")

INTERRUPT: Final = "__interrupt__"


class GraphStream:
    """Reads a graph's stream along.

    Args:
        graph: The graph.
        config: The configuration of the call.
        options: The other arguments of `stream`, with the modes.
    """

    def __init__(
        self, graph: Any, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        """Request what the reader asks for and what we need."""
        asked = options.get("stream_mode")
        if asked is None:
            is_within = config is not None and TASK in config.get("configurable", {})
            asked = "values" if is_within else graph.stream_mode
        self._is_single = isinstance(asked, str)
        self._asked: tuple[str, ...] = (asked,) if isinstance(asked, str) else tuple(asked)
        self._has_subgraphs = bool(options.get("subgraphs"))
        self._is_v2 = options.get("version") == "v2"
        keys = options.get("output_keys")
        self._keys = graph.stream_channels_asis if keys is None else keys
        self._has_channel = MESSAGES in graph.channels
        self._is_replaced = isinstance(graph.channels.get(MESSAGES), LastValue)
        reducer = getattr(graph.channels.get(MESSAGES), "operator", None)
        self._is_merged = reducer is add_messages
        modes = list(dict.fromkeys((*self._asked, *OURS)))
        self.options = {**options, "stream_mode": modes}
        self.values: Any = {}
        """The last values of the state."""
        self.updates: list[Any] = []
        """Messages of nodes that ended since."""
        self.is_interrupted = False
        """True if the graph waits for a human."""

    def passed(self, chunk: Any) -> Iterator[Any]:
        """Note a chunk, and yield it as the reader asked for it, if at all."""
        space, mode, payload = self._parts_of(chunk)
        if not space:
            self._note(mode, payload)
        if mode not in self._asked:
            return
        if self._is_v2 or not self._is_single:
            yield chunk
        else:
            yield (space, payload) if self._has_subgraphs else payload

    def _parts_of(self, chunk: Any) -> tuple[tuple[str, ...], str, Any]:
        # Releases before 1.1 have no second format, and ignore a request for it.
        self._is_v2 = self._is_v2 and isinstance(chunk, dict)
        if self._is_v2:
            return chunk["ns"], chunk["type"], chunk["data"]
        if self._has_subgraphs:
            space, mode, payload = chunk
            return space, mode, payload
        mode, payload = chunk
        return (), mode, payload

    @suppress_errors("binding")
    def _note(self, mode: str, payload: Any) -> None:
        if mode == "values":
            self.values, self.updates = payload, []
        elif mode == "updates" and isinstance(payload, dict):
            self.is_interrupted = self.is_interrupted or INTERRUPT in payload
            for update in payload.values():
                self.updates += messages_of(update)

    @property
    def messages(self) -> list[Any]:
        """The messages of the state, with those of nodes that ended since."""
        if self._is_replaced and self.updates:
            return [*self.updates]
        return [*messages_of(self.values), *self.updates]

    @property
    def has_conversation(self) -> bool:
        """True if the state has a list of messages, to which one can be added."""
        values = self.values
        found = values.get(MESSAGES, ()) if isinstance(values, dict) else messages_of(values)
        is_list = isinstance(found, (list, tuple))
        return self._has_channel and is_list and all(isinstance(each, MESSAGE) for each in found)

    @property
    def can_carry(self) -> bool:
        """True if its reader gets that list, and so the message of a halt."""
        is_kept = not isinstance(self._keys, str) and MESSAGES in self._keys
        return self.has_conversation and is_kept and not CARRIERS.isdisjoint(self._asked)

    def carries(self, invocation: str) -> bool:
        """Return whether the result shows the stop of an invocation."""
        return any(each["invocation_id"] == invocation for each in markers_of(self.values))

    @property
    def shows_only_parts(self) -> bool:
        """True if its reader gets parts of answers, but neither states nor updates."""
        return CARRIERS.intersection(self._asked) == {"messages"}

    def conversation_with(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages of the state with those of a halt, which replace any of their ID."""
        ours = {each.id for each in messages} - {None}
        kept = [each for each in self.messages if getattr(each, "id", None) not in ours]
        return [*kept, *messages]

    def updates_with(self, messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield the updates that add the messages of a halt to the end of the state."""
        if self._is_replaced:
            yield {MESSAGES: self.conversation_with(messages)}
            return
        # `add_messages` keeps the position of a message with the same ID.
        ours = {each.id for each in messages} - {None}
        moved = [each.id for each in self.messages if getattr(each, "id", None) in ours]
        if moved and self._is_merged and self.messages[-1].id not in moved:
            yield {MESSAGES: [RemoveMessage(each) for each in moved]}
        yield {MESSAGES: [*messages]}

    def values_with(self, messages: Sequence[Any]) -> Any:
        """Return the state with the messages of a halt."""
        every = {MESSAGES: self.conversation_with(messages)}
        if isinstance(self.values, dict):
            return {**self.values, **every}
        if isinstance(self.values, BaseModel):
            return self.values.model_copy(update=every)
        return dataclasses.replace(self.values, **every)

    def of_halt(
        self, messages: Sequence[Any], place: Mapping[str, Any], *, is_streamed: bool
    ) -> Iterator[Any]:
        """Yield the messages of a halt in each mode that the reader asked for.

        Args:
            messages: The messages that the halt adds to the state.
            place: Metadata of the model call that was refused.
            is_streamed: The reader got the text in parts, and now gets the mark.
        """
        if not messages:
            return
        values = self.values_with(messages)
        payloads: dict[str, list[Any]] = {
            "messages": [(_mark_of(each) if is_streamed else each, {**place}) for each in messages],
            "updates": [{place.get("langgraph_node", "otel_limits"): {"messages": [*messages]}}],
            "values": [values],
        }
        for mode in self._asked:
            for payload in payloads.get(mode, ()):
                yield self._shaped(mode, payload)

    def _shaped(self, mode: str, payload: Any) -> Any:
        if self._is_v2:
            extra = {"interrupts": ()} if mode == "values" else {}
            return {"type": mode, "ns": (), "data": payload, **extra}
        parts = (*(((),) if self._has_subgraphs else ()), *(() if self._is_single else (mode,)))
        return (*parts, payload) if parts else payload


def _mark_of(message: Any) -> AIMessageChunk:
    """Return the last part of a message, which adds its mark to those before."""
    metadata = message.response_metadata
    return AIMessageChunk(content="", id=message.id, response_metadata=metadata)
