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


def message_of(text: str) -> ResponseOutputMessage:
    """Return a message of the assistant, with the ID that the SDK never sends to a vendor."""
    part = ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])
    return ResponseOutputMessage(
        id=FAKE_RESPONSES_ID, content=[part], role="assistant", status="completed", type="message"
    )


def response_of(text: str, previous_response_id: str | None) -> ModelResponse:
    """Return a response that no model gave.

    Args:
        text: Its text.
        previous_response_id: The ID of the last response that is stored at the vendor, which stays
            the last one.
    """
    return ModelResponse(output=[message_of(text)], usage=Usage(), response_id=previous_response_id)


def events_of(text: str, previous_response_id: str | None, position: int) -> Iterator[Any]:
    """Yield the events of a stream whose only or last message no model wrote.

    Args:
        text: Its text.
        previous_response_id: As for `response_of`.
        position: Number of items that the stream has begun before.
    """
    message = message_of(text)
    (part,) = message.content
    empty = message.model_copy(update={"content": [], "status": "in_progress"})
    # `model_construct`, as required fields differ among releases of the client.
    item: dict[str, Any] = {"output_index": position, "sequence_number": 0}
    within: dict[str, Any] = {**item, "item_id": message.id, "content_index": 0}
    yield ResponseOutputItemAddedEvent.model_construct(
        type="response.output_item.added", item=empty, **item
    )
    yield ResponseContentPartAddedEvent.model_construct(
        type="response.content_part.added", part=part.model_copy(update={"text": ""}), **within
    )
    yield ResponseTextDeltaEvent.model_construct(
        type="response.output_text.delta", delta=text, logprobs=[], **within
    )
    yield ResponseTextDoneEvent.model_construct(
        type="response.output_text.done", text=text, logprobs=[], **within
    )
    yield ResponseContentPartDoneEvent.model_construct(
        type="response.content_part.done", part=part, **within
    )
    yield ResponseOutputItemDoneEvent.model_construct(
        type="response.output_item.done", item=message, **item
    )
    response: Any = Response.model_construct(
        id=previous_response_id,
        object="response",
        created_at=0.0,
        model="otel-limits",
        output=[message],
        parallel_tool_calls=False,
        tool_choice="none",
        tools=[],
        usage=None,
    )
    yield ResponseCompletedEvent.model_construct(
        type="response.completed", response=response, sequence_number=0
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
