"""The streams of a graph: what its reader asked for, and the halt among its events.

A halted graph ends with one more message. To put it where it belongs, the last values of the state
and the updates since have to be known, so both modes are always requested, and only what the reader
asked for is passed on. `invoke` requests both itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessageChunk, BaseMessage, RemoveMessage
from langgraph.channels import LastValue
from langgraph.errors import InvalidUpdateError
from langgraph.graph import add_messages
from pydantic import BaseModel

from otel_limits.bindings.followed_runs import owned
from otel_limits.bindings.langchain.halt_marks import markers_of, messages_of
from otel_limits.bindings.langchain.langchain_probe import TASK
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence


MESSAGES: Final = "messages"
"""The channel of a graph's state that holds its conversation."""

MESSAGE: Final = (BaseMessage, tuple, dict)
"""Forms of messages. A state without `add_messages` keeps them as they were given."""

CARRIERS: Final = frozenset({"messages", "updates", "values"})
"""Modes in which a reader gets the message of a halt."""

OURS: Final = ("updates", "values")

INTERRUPT: Final = "__interrupt__"

NONE: Final = object()
"""The value of a channel that the state does not have."""

ABOUT: Final = frozenset({INTERRUPT, "__metadata__"})
"""Keys of a chunk of `updates` next to its nodes."""


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
        self._channels = graph.channels
        self._has_channel = MESSAGES in graph.channels
        self._is_replaced = isinstance(graph.channels.get(MESSAGES), LastValue)
        reducer = getattr(graph.channels.get(MESSAGES), "operator", None)
        self._is_merged = reducer is add_messages
        modes = list(dict.fromkeys((*self._asked, *OURS)))
        self.options = {**options, "stream_mode": modes}
        self.values: Any = {}
        """The last values of the state."""
        self.updates: list[Mapping[str, Any]] = []
        """Updates of nodes that ended since."""
        self.has_more = False
        """True if the values have changed since the reader got them."""
        self.is_interrupted = False
        """True if the graph waits for a human."""
        self.interrupts: list[str] = []
        """IDs of the interrupts with which it waits."""

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
            self.interrupts += [each.id for each in payload.get(INTERRUPT) or ()]
            for node, written in payload.items():
                each = written if isinstance(written, list) else [written]
                if node not in ABOUT:
                    self.updates += [update for update in each if isinstance(update, dict)]

    @suppress_errors("binding")
    def end_step(self, stored: Mapping[str, Any]) -> None:
        """Take what nodes wrote in the halted step into the state.

        Args:
            stored: Values of its checkpoint, which has the order of the nodes.
        """
        if isinstance(self._keys, str):  # its values are those of one channel
            return
        ended = {**self._changed(), **stored}
        shown = {key: ended[key] for key in ended if key in self._keys}
        self.values, self.updates = self._values_with(shown), []
        self.has_more = bool(shown)

    def _changed(self) -> dict[str, Any]:
        """Return the values that updates have changed, by the reducers of the graph."""
        changed = {}
        for name, channel in self._channels.items():
            writes = [update[name] for update in self.updates if name in update]
            if not writes:
                continue
            value = self.values
            value = value.get(name, NONE) if isinstance(value, dict) else getattr(value, name, NONE)
            # A copy, as some channels change what they begin with.
            now = channel.copy() if value is NONE else channel.from_checkpoint(copy.copy(value))
            with contextlib.suppress(InvalidUpdateError):  # of a key that branches may not share
                now.update(writes)
                changed[name] = now.get()
        return changed

    @property
    def messages(self) -> list[Any]:
        """The messages of the state."""
        return messages_of(self.values)

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
        return self._values_with({MESSAGES: self.conversation_with(messages)})

    def _values_with(self, changed: dict[str, Any]) -> Any:
        if isinstance(self.values, dict):
            return {**self.values, **changed}
        if isinstance(self.values, BaseModel):
            return self.values.model_copy(update=changed)
        return dataclasses.replace(self.values, **changed)

    def of_halt(
        self, messages: Sequence[Any], metadata: Mapping[str, Any], *, is_streamed: bool
    ) -> Iterator[Any]:
        """Yield the messages of a halt in each mode that the reader asked for.

        Args:
            messages: The messages that the halt adds to the state.
            metadata: Metadata of the model call that was refused.
            is_streamed: The reader got the text in parts, and now gets the mark.
        """
        payloads: dict[str, list[Any]] = {}
        if messages:
            node = metadata.get("langgraph_node", "otel_limits")
            shown = [_mark_of(each) for each in messages] if is_streamed else messages
            payloads["messages"] = [(each, {**metadata}) for each in shown]
            payloads["updates"] = [{node: {"messages": [*messages]}}]
            payloads["values"] = [self.values_with(messages)]
        elif self.has_more:
            payloads["values"] = [self.values]
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


# --- the halt in `astream_events` -----------------------------------------------------------------
# LangChain makes these events from its callbacks. Those see the end of a halted graph as an error,
# for which there is no event.

ENDS: Final[contextvars.ContextVar[list[Any] | None]] = contextvars.ContextVar(
    "otel_limits_graph_ends", default=None
)
"""Receives the last state of the next graph of this task, if that is halted."""


@suppress_errors("binding")
def ends_of_task() -> list[Any] | None:
    """Return the list for this graph's end, which is not for the graphs within it."""
    if (ends := ENDS.get()) is not None:
        ENDS.set(None)
    return ends


VERSION: Final = "v2"
"""The first version is deprecated, and shows only its chunks; the third is read from `astream`."""


def track_astream_events(original: Any) -> Any:
    """Wrap `Pregel.astream_events`."""

    @functools.wraps(original)
    def astream_events(graph: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        events = original(graph, input, config, **options)
        return _with_end(owned(events)) if options.get("version", VERSION) == VERSION else events

    return astream_events


async def _with_end(events: Any) -> AsyncIterator[Any]:
    ends: list[Any] = []
    token = ENDS.set(ends)
    try:
        first = await anext(events, None)  # begins the task that runs the graph
    finally:
        ENDS.reset(token)
    if first is None:
        return
    async with aclosing(events):  # a reader that leaves ends the graph
        yield first
        async for event in events:
            yield event
    if ends:
        kept = ("name", "run_id", "tags", "metadata", "parent_ids")
        shown = {key: first[key] for key in kept if key in first}
        yield {**shown, "event": "on_chain_end", "data": {"output": ends[-1]}}
