"""Puts sentences for the model into what it is sent, without touching what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.messages import NUDGE_NOTE

if TYPE_CHECKING:
    from strands.types.content import Message


def append_nudge(message: Message) -> None:
    """Add the nudge to the last tool result, in a copy: the tool may keep its own."""
    result = message["content"][-1]["toolResult"]
    message["content"][-1] = {
        "toolResult": {**result, "content": [*result["content"], {"text": NUDGE_NOTE}]}
    }


def with_note(messages: Any, note: str) -> Any:
    """Add a note at the end of what the model is sent."""
    if messages and messages[-1]["role"] == "user":
        last = {**messages[-1], "content": [*messages[-1]["content"], {"text": note}]}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": [{"text": note}]}]
