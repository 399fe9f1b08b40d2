"""A scripted model for the OpenAI Agents SDK."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from agents import ModelResponse, Usage
from agents.models.fake_id import FAKE_RESPONSES_ID
from agents.models.interface import Model
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseTextDeltaEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from otel_limits.bindings.openai_agents.halt_responses import message_of
from otel_limits.bindings.script import Script, details_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from otel_limits.bindings.script import Answer


CACHED = ("cached_tokens", "cache_write_tokens")


class ScriptedAgentsModel(Model):
    """Answers from a script and records requests.

    Args:
        script: The answers, in order; running out of them is an error of the test.
        model: The ID of the model.
        base_url: Address of a vendor, whose price then applies. It is never called.
    """

    def __init__(
        self, script: Iterable[Answer], model: str = "scripted", base_url: str = ""
    ) -> None:
        """Use the answers in order."""
        self._script: Iterator[Answer] = Script(script)
        self.model = model
        self.base_url = base_url
        self.requests: list[list[Any]] = []
        """Items of each request."""
        self.tool_specs: list[list[str]] = []
        """Names of the tools and hand-offs of each request."""

    @property
    def calls(self) -> int:
        """Requests that reached it."""
        return len(self.requests)

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Answer with the next answer of the script."""
        answer = self._next(args, options)
        if answer.error is not None:
            raise answer.error
        return ModelResponse(
            output=_items(answer),
            usage=_usage(answer),
            response_id=f"resp-{self.calls}",
            # Without it, zeros would be a missing usage.
            raw_usage=None if answer.usage is None else _counts(answer),
        )

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream the next answer of the script."""
        answer = self._next(args, options)
        items = _items(answer)
        for number, item in enumerate(items):
            at: dict[str, Any] = {"output_index": number, "sequence_number": 0}
            yield ResponseOutputItemAddedEvent.model_construct(
                type="response.output_item.added", item=item, **at
            )
            if item.type == "message":
                yield ResponseTextDeltaEvent.model_construct(
                    type="response.output_text.delta",
                    delta=answer.text,
                    item_id=item.id,
                    content_index=0,
                    logprobs=[],
                    **at,
                )
            if answer.error is None:
                yield ResponseOutputItemDoneEvent.model_construct(
                    type="response.output_item.done", item=item, **at
                )
        if answer.error is not None:
            raise answer.error
        yield ResponseCompletedEvent.model_construct(
            type="response.completed",
            sequence_number=0,
            response=Response.model_construct(
                id=f"resp-{self.calls}",
                created_at=0.0,
                model=self.model,
                object="response",
                output=items,
                parallel_tool_calls=True,
                tool_choice="auto",
                tools=[],
                usage=_streamed_usage(answer),
            ),
        )

    def _next(self, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        """Keep what was asked, as it was at that moment."""
        names = ("system_instructions", "input", "model_settings", "tools", "output_schema")
        given = {**options, **dict(zip((*names, "handoffs"), args, strict=False))}
        asked = given["input"]
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        self.requests.append(copy.deepcopy(list(items)))
        handoffs = [each.tool_name for each in given["handoffs"]]
        self.tool_specs.append([*(each.name for each in given["tools"]), *handoffs])
        return next(self._script)


def _items(answer: Answer) -> list[Any]:
    items: list[Any] = []
    if answer.text or not (answer.tools or answer.error):
        items.append(message_of(answer.text))
    for name, arguments in answer.tools:
        items.append(
            ResponseFunctionToolCall(
                id=FAKE_RESPONSES_ID,
                # The SDK refuses one that it has seen in the same run, also in another process.
                call_id=f"call-{uuid4().hex}",
                name=name,
                arguments=json.dumps(dict(arguments)),
                type="function_call",
            )
        )
    return items


def _counts(answer: Answer) -> dict[str, Any]:
    usage = answer.usage or {}
    counts = {"input_tokens": usage["inputTokens"], "output_tokens": usage["outputTokens"]}
    return {**counts, "total_tokens": sum(counts.values())}


def _usage(answer: Answer) -> Usage:
    if answer.usage is None:
        return Usage()
    return Usage(requests=1, **_counts(answer), input_tokens_details=_details(answer))


def _details(answer: Answer) -> InputTokensDetails:
    counts: dict[str, Any] = {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        **details_in(answer, CACHED),
    }
    return InputTokensDetails.model_construct(**counts)


def _streamed_usage(answer: Answer) -> ResponseUsage | None:
    if answer.usage is None:
        return None
    return ResponseUsage.model_construct(
        **_counts(answer),
        input_tokens_details=_details(answer),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    )
