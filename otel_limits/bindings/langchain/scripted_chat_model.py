"""A scripted chat model for LangChain."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from otel_limits.bindings.script import Script, details_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from langchain_core.messages import BaseMessage
    from langchain_core.runnables import Runnable

    from otel_limits.bindings.script import Answer


CACHED = ("cache_read", "cache_creation")
NAMES = {"inputTokens": "input_tokens", "outputTokens": "output_tokens"}


class ScriptedChatModel(BaseChatModel):
    """Answers from a script and records requests.

    Args:
        script: The answers, in order; running out of them is an error of the test.
        model: The ID of the model.
        base_url: Address of a vendor, whose price then applies. It is never called.
    """

    model: str = "scripted"
    base_url: str = ""
    _script: Iterator[Answer] = PrivateAttr()
    _requests: list[list[BaseMessage]] = PrivateAttr(default_factory=list)
    _tools: list[Any] = PrivateAttr(default_factory=list)

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        """Use the answers in order."""
        super().__init__(**fields)
        self._script = Script(script)

    @property
    def calls(self) -> int:
        """Requests that reached it."""
        return len(self._requests)

    @property
    def requests(self) -> list[list[BaseMessage]]:
        """Messages of each request."""
        return self._requests

    @property
    def tool_specs(self) -> list[Any]:
        """Tools of each request; `None` if it has none."""
        return self._tools

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Runnable[Any, AIMessage]:
        """Send tools with each request."""
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools], **options)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,  # noqa: ARG002  the signature of every model
        run_manager: Any = None,  # noqa: ARG002
        **options: Any,
    ) -> ChatResult:
        """Answer with the next answer of the script."""
        answer = self._next(messages, options)
        if answer.error is not None:
            raise answer.error
        return ChatResult(generations=[ChatGeneration(message=_message(answer, self.calls))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: Any = None,  # noqa: ARG002
        **options: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Stream the next answer of the script."""
        answer = self._next(messages, options)
        for chunk in _chunks(answer, self.calls):
            yield ChatGenerationChunk(message=chunk)
        if answer.error is not None:
            raise answer.error

    def _next(self, messages: list[BaseMessage], options: Mapping[str, Any]) -> Answer:
        """Keep what was asked, as it was at that moment."""
        self._requests.append(copy.deepcopy(messages))
        self._tools.append(options.get("tools"))
        return next(self._script)


def _usage(answer: Answer) -> Any:
    if answer.usage is None:
        return None
    usage = {NAMES[name]: count for name, count in answer.usage.items() if name in NAMES}
    total, details = {"total_tokens": sum(usage.values())}, details_in(answer, CACHED)
    return {**usage, **total, **({"input_token_details": details} if details else {})}


def _message(answer: Answer, call: int) -> AIMessage:
    tools: Any = [
        {"name": name, "args": dict(arguments), "id": f"call-{call}-{number}"}
        for number, (name, arguments) in enumerate(answer.tools)
    ]
    return AIMessage(answer.text, tool_calls=tools, usage_metadata=_usage(answer))


def _chunks(answer: Answer, call: int) -> Iterator[AIMessageChunk]:
    if answer.text or not (answer.tools or answer.error):
        yield AIMessageChunk(content=answer.text)
    for number, (name, arguments) in enumerate(answer.tools):
        part: Any = {
            "name": name,
            "args": json.dumps(dict(arguments)),
            "id": f"call-{call}-{number}",
            "index": number,
        }
        yield AIMessageChunk(content="", tool_call_chunks=[part])
    if answer.error is None and answer.usage is not None:
        yield AIMessageChunk(content="", usage_metadata=_usage(answer))
