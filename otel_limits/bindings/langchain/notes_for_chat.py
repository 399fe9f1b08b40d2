"""Adds sentences for the model to a request, without changing the graph's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NO_RESULT: Final = "[The tool returned nothing.]"


def with_note(messages: Any, note: str) -> Any:
    """Return the messages of a request with a sentence for the model."""
    # At the end, so that everything before it stays identical and the vendor's prompt cache still
    # applies. In the last message, as several vendors refuse two of one role in a row.
    if isinstance(messages, str):
        return f"{messages}\n\n{note}"
    if hasattr(messages, "to_messages"):
        messages = messages.to_messages()
    if (
        messages
        and isinstance(messages[-1], HumanMessage)
        and isinstance(messages[-1].content, str)
    ):
        last = messages[-1].model_copy(update={"content": f"{messages[-1].content}\n\n{note}"})
        return [*messages[:-1], last]
    return [*messages, HumanMessage(note)]


def nudged(messages: Any, repeated: str, note: str) -> Any:
    """Return the messages with a sentence in the result of a tool call, by its ID."""
    return (
        [_nudged(each, repeated, note) for each in messages]
        if isinstance(messages, list)
        else messages
    )


def _nudged(message: Any, repeated: str, note: str) -> Any:
    if not isinstance(message, ToolMessage) or message.tool_call_id != repeated:
        return message
    return message.model_copy(update={"content": f"{text_of(message)}\n\n{note}"})


def as_texts(messages: Any) -> Any:
    """Return the messages without tool calls, which are texts then.

    Several vendors refuse tool calls in a conversation for which no tools are declared. All results
    of a turn become one message.
    """
    if hasattr(messages, "to_messages"):
        messages = messages.to_messages()
    return list(_as_texts(messages)) if isinstance(messages, list) else messages


def _as_texts(messages: Sequence[Any]) -> Iterator[Any]:
    results: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            text = text_of(message)
            has_text = bool(text.strip())
            results.append(f"[Result of the tool:]\n{text}" if has_text else NO_RESULT)
            continue
        if results:
            yield HumanMessage("\n\n".join(results))
            results = []
        is_answer = isinstance(message, AIMessage)
        calls = [*message.tool_calls, *message.invalid_tool_calls] if is_answer else []
        if calls:
            told = [f"[I called the tool {each['name']} with {_arguments(each)}]" for each in calls]
            text = "\n".join(filter(None, [str(message.text), *told]))
            yield AIMessage(text, name=message.name)
        else:
            yield message
    if results:
        yield HumanMessage("\n\n".join(results))


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["args"]  # an invalid call has them as the model wrote them
    return arguments if isinstance(arguments, str) else as_json(arguments)
