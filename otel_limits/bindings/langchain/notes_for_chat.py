"""Adds sentences for the model to a request, without changing the graph's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.core.texts import NUDGE_NOTE, budget_note, wrap_up_note
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from otel_limits.bindings.langchain.graph_path import GraphPath
    from otel_limits.core.policy import Verdict


def noted(messages: Any, path: GraphPath) -> Any:
    """Return the messages of a request with a warning about a repetition or a budget, if due."""
    repeated, path.nudge_for = path.nudge_for, None
    if repeated is not None and isinstance(messages, list):
        messages = [_nudged(each, repeated) for each in messages]
    if path.run.policy.budget_hints and (levels := path.run.levels()):
        return _with_note(messages, budget_note(levels))
    return messages


def without_tools(messages: Any, verdict: Verdict) -> Any:
    """Return the messages of the last request, with a note and without tool calls.

    Several vendors refuse tool calls in a conversation for which no tools are declared.
    """
    if hasattr(messages, "to_messages"):
        messages = messages.to_messages()
    if isinstance(messages, list):
        messages = [_as_text(each) for each in messages]
    return _with_note(messages, wrap_up_note(verdict))


def _with_note(messages: Any, note: str) -> Any:
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


def _nudged(message: Any, repeated: str) -> Any:
    if not isinstance(message, ToolMessage) or message.tool_call_id != repeated:
        return message
    return message.model_copy(update={"content": f"{text_of(message)}\n\n{NUDGE_NOTE}"})


def _as_text(message: Any) -> Any:
    if isinstance(message, AIMessage) and message.tool_calls:
        told = [
            f"[I called the tool {call['name']} with {as_json(call['args'])}]"
            for call in message.tool_calls
        ]
        text = "" if not isinstance(message.content, str) else message.content
        return AIMessage("\n".join(filter(None, [text, *told])), name=message.name)
    if isinstance(message, ToolMessage):
        text = text_of(message)
        shown = f"[Result of the tool:]\n{text}" if text.strip() else "[The tool returned nothing.]"
        return HumanMessage(shown)
    return message
