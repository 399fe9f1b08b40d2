"""State and message markers shared by all modules of the binding; imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.errors import stop_of_error
from otel_limits.core.events import MARKER, stop_from_json, stop_to_json
from otel_limits.otel.kinds import SpanNames

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from otel_limits.core.events import Stop

SPANS: Final = SpanNames(
    scope="strands.telemetry.tracer",
    agent="invoke_agent",
    cycle="execute_event_loop_cycle",
    realtime="bidi_session",
)


INNER: Final = "otel_limits_inner"
"""Key of the stops within a result: an attribute of the result of a graph or swarm, else under the
message's `metadata["custom"]`."""


def mark(message: MutableMapping[str, Any], stop: Stop, *, synthetic: bool = True) -> None:
    """Write `stop` into the metadata of `message`, which is never sent to a model.

    A synthetic message has no `usage` and gets none: Strands uses the last assistant message with
    usage as the baseline of its next projection, and zeros there would make the projection
    collapse.
    """
    metadata = {**message.get("metadata", {})}
    if synthetic and not metadata.get("usage", {}).get("totalTokens"):
        metadata.pop("usage", None)  # of a response that was broken off
    custom = {**metadata.get("custom", {}), "synthetic": synthetic}
    custom[MARKER] = stop_to_json(stop)
    message["metadata"] = {**metadata, "custom": custom}


def marker_of(result: Any) -> Mapping[str, Any] | None:
    """Return what `mark` wrote into a message, or into the message of a result."""
    custom = custom_of(result)
    is_synthetic = custom.get("synthetic") is True
    # A delegation may have answered with the text of a halt.
    inner = custom.get(INNER, ()) if is_synthetic else ()
    marker = custom.get(MARKER, next(iter(inner), None))
    return {**marker, "synthetic": is_synthetic} if isinstance(marker, dict) else None


def custom_of(result: Any) -> Mapping[str, Any]:
    """Return the custom metadata of a message, or of the message of a result."""
    message = result if isinstance(result, dict) else getattr(result, "message", None)
    metadata = message.get("metadata") if isinstance(message, dict) else None
    custom = metadata.get("custom") if isinstance(metadata, dict) else None
    return custom if isinstance(custom, dict) else {}


def stops_of(result: Any) -> Sequence[Stop]:
    """Return the stops in a result, a message or an exception, in their order."""
    if isinstance(result, BaseException):
        stop = stop_of_error(result)
        return () if stop is None else (stop,)
    kept = getattr(result, INNER, None)
    if kept is not None:
        return tuple(kept)
    # Of a group whose run was not tracked, e.g. restored from a session.
    nodes = getattr(result, "results", None)
    if isinstance(nodes, dict):
        return [stop for node in nodes.values() for stop in stops_of(getattr(node, "result", None))]
    custom = custom_of(result)
    if isinstance(own := custom.get(MARKER), dict):
        return (stop_from_json(own),)
    return [stop_from_json(each) for each in custom.get(INNER, ())]


def put_stop(ending: Any, reason: str) -> None:
    """Replace the reason in a stop event, from which the result and the span take it."""
    # Strands adds fields to this tuple over time (seven in 1.62), so any number is accepted.
    _, *rest = ending["stop"]
    ending["stop"] = (reason, *rest)
