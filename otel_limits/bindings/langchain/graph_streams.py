"""The stream of a graph: what its reader asked for, and what we read along.

A halted graph ends with one more message. To put it where it belongs, the last values of the state
and the updates since have to be known, so both modes are always requested, and only what the reader
asked for is passed on. `invoke` requests both itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.langchain.halt_marks import messages_of
from otel_limits.bindings.langchain.private_graph_names import TASK
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
        return [*messages_of(self.values), *self.updates]

    def values_with(self, messages: Sequence[Any]) -> Any:
        """Return the state with the messages of a halt."""
        every = [*self.messages, *messages]
        if isinstance(self.values, dict):
            return {**self.values, "messages": every}
        return self.values.model_copy(update={"messages": every})

    def of_halt(self, messages: Sequence[Any], place: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the messages of a halt in each mode that the reader asked for.

        Args:
            messages: The messages that the halt adds to the state.
            place: Metadata of the model call that was refused.
        """
        values = self.values_with(messages)
        payloads: dict[str, list[Any]] = {
            "messages": [(message, dict(place)) for message in messages],
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
