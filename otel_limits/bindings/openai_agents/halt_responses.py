"""The response with which a halt answers a model call, and the exception if it cannot."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, cast

from agents import AgentsException, ModelResponse, Usage
from agents.models.fake_id import FAKE_RESPONSES_ID
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from otel_limits.core.errors import limit_reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict

CLASSES: Final = 32
"""Number of cached classes of exceptions: one for each limit."""


TEXT: Final = "This request could not be completed."
"""The text of a halt after an internal error."""


def message_of(text: str) -> ResponseOutputMessage:
    """Return a message of the assistant, with the ID that the SDK never sends to a vendor."""
    part = ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])
    return ResponseOutputMessage(
        id=FAKE_RESPONSES_ID, content=[part], role="assistant", status="completed", type="message"
    )


def response_of(item: Any, previous_response_id: str | None) -> ModelResponse:
    """Return a response that no model gave.

    Args:
        item: Its only item.
        previous_response_id: The ID of the last response that is stored at the vendor, which stays
            the last one.
    """
    return ModelResponse(output=[item], usage=Usage(), response_id=previous_response_id)


def events_of(item: Any, previous_response_id: str | None, position: int) -> Iterator[Any]:
    """Yield the events of a stream whose only or last item no model wrote.

    Args:
        item: The item.
        previous_response_id: As for `response_of`.
        position: Number of items that the stream has begun before.
    """
    # `model_construct`, as required fields differ among releases of the client.
    at: dict[str, Any] = {"output_index": position, "sequence_number": 0}
    begun = item.model_copy(update={"status": "in_progress"})
    if item.type == "message":
        begun.content = []
    yield ResponseOutputItemAddedEvent.model_construct(
        type="response.output_item.added", item=begun, **at
    )
    if item.type == "message":
        yield from _events_of_text(item.content[0], {**at, "item_id": item.id, "content_index": 0})
    yield ResponseOutputItemDoneEvent.model_construct(
        type="response.output_item.done", item=item, **at
    )
    response: Any = Response.model_construct(
        id=previous_response_id,
        object="response",
        created_at=0.0,
        model="otel-limits",
        output=[item],
        parallel_tool_calls=False,
        tool_choice="none",
        tools=[],
        usage=None,
    )
    yield ResponseCompletedEvent.model_construct(
        type="response.completed", response=response, sequence_number=0
    )


def _events_of_text(part: ResponseOutputText, at: dict[str, Any]) -> Iterator[Any]:
    empty, text = part.model_copy(update={"text": ""}), part.text
    yield ResponseContentPartAddedEvent.model_construct(
        type="response.content_part.added", part=empty, **at
    )
    yield ResponseTextDeltaEvent.model_construct(
        type="response.output_text.delta", delta=text, logprobs=[], **at
    )
    yield ResponseTextDoneEvent.model_construct(
        type="response.output_text.done", text=text, logprobs=[], **at
    )
    yield ResponseContentPartDoneEvent.model_construct(
        type="response.content_part.done", part=part, **at
    )


def error_of(verdict: Verdict, stop: Stop) -> LimitReachedError:
    """Return the exception for a verdict, which programs can catch as the SDK's or as ours."""
    error = limit_reached(verdict, stop)
    raised: LimitReachedError = cast("Any", _class_of_both)(type(error))(*error.args)
    raised.stop = error.stop
    return raised


@functools.lru_cache(CLASSES)
def _class_of_both(kind: type[LimitReachedError]) -> type[LimitReachedError]:
    def reduce(error: LimitReachedError) -> Any:
        # Another process may not have the SDK: there it is ours only.
        return kind, error.args, {"stop": error.stop}

    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, (kind, AgentsException), own)
