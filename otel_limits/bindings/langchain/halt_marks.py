"""Writes the stop of a halt into LangChain's messages, and reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import MARKER, marked_stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from otel_limits.core.events import Stop

INNER: Final = "otel_limits_inner"
"""Key of the stops of agents that a tool has called, in the tool's message."""

PAIR: Final = 2
"""Items of a part of a stream that names its mode, or has a message and its metadata."""


def mark(message: Any, stop: Stop, *, synthetic: bool) -> None:
    """Write `stop` into a message's `response_metadata`, which no client sends to its vendor."""
    message.response_metadata = {
        **message.response_metadata,
        MARKER: marked_stop(stop, synthetic=synthetic),
    }


def with_mark_of(message: Any, answer: Any) -> Any:
    """Return a copy of a message with the mark of another one."""
    kept = {**message.response_metadata, MARKER: answer.response_metadata[MARKER]}
    return message.model_copy(update={"response_metadata": kept})


def mark_inner(message: Any, stops: Iterable[Stop], *, synthetic: bool) -> None:
    """Write the stops of agents that a tool has called into its message.

    Args:
        message: The message.
        stops: The stops.
        synthetic: Its content is the text of a halt.
    """
    kept = [marked_stop(stop, synthetic=synthetic) for stop in stops]
    message.response_metadata = {**message.response_metadata, INNER: kept}


def marker_of(result: Any) -> Mapping[str, Any] | None:
    """Return what `mark` wrote into a message, or into the last message of a state."""
    messages = _conversation_in(result)
    message = messages[-1] if messages else result
    metadata = _metadata_of(message)
    # A tool whose result is the answer may have returned the text of a halt.
    inner = [each for each in metadata.get(INNER, ()) if each.get("synthetic") is True]
    found = metadata.get(MARKER, next(iter(inner), None))
    return found if isinstance(found, dict) else None


def markers_of(result: Any) -> Sequence[Mapping[str, Any]]:
    """Return what was written into the messages of a state, or into a message, in its order.

    Of a state only the messages since the last of the user: those before are of earlier calls. The
    stops of agents that a tool has called are those of the state only if the tool's result is its
    answer (`return_direct`).
    """
    messages = _conversation_in(result) or [result]
    kinds = [getattr(each, "type", None) for each in messages]
    since = max((n for n, kind in enumerate(kinds) if kind == "human"), default=-1)
    markers = [_metadata_of(message).get(MARKER) for message in messages[since + 1 :]]
    markers += _metadata_of(messages[-1]).get(INNER, ())
    return [each for each in markers if isinstance(each, dict)]


def _conversation_in(result: Any) -> list[Any]:
    """Return the messages in a result, which a function of the functional API may return alone.

    With a `stream_mode`, `invoke` returns a list of the parts of a stream.
    """
    result = _value_of(result)
    if not isinstance(result, (list, tuple)):
        return messages_of(result)
    return [message for part in result for message in _messages_in_part(part)]


def _messages_in_part(part: Any) -> list[Any]:
    """Return the messages in a part of a stream; anything else is a message itself."""
    if isinstance(part, tuple) and len(part) == PAIR:
        first, second = part
        if not isinstance(first, str):  # a message with its metadata
            return [first]
        part = second  # after the name of its mode
        if isinstance(part, tuple):
            return _messages_in_part(part)
    if not isinstance(part, dict):
        return [part]
    updates = [part, *part.values()]  # of each node
    return [message for each in updates for message in messages_of(each)] or [part]


def _value_of(result: Any) -> Any:
    """Return the state in the result of `invoke(…, version="v2")`."""
    return getattr(result, "value", result) if hasattr(result, "interrupts") else result


def messages_of(state: Any) -> list[Any]:
    """Return the messages of a graph's state or output; none if it has no such list."""
    state = _value_of(state)
    found = state.get("messages") if isinstance(state, dict) else getattr(state, "messages", None)
    return list(found) if isinstance(found, (list, tuple)) else []


def _metadata_of(message: Any) -> Mapping[str, Any]:
    metadata = getattr(message, "response_metadata", None)
    return metadata if isinstance(metadata, dict) else {}
