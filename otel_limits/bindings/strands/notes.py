"""Puts sentences for the model into what it is sent, without touching what is kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from otel_limits.core.messages import NUDGE_NOTE

if TYPE_CHECKING:
    from strands.types.content import ContentBlock, Message, Messages


def append_nudge(message: Message, repeated: object) -> None:
    """Add the nudge to the result of the call that repeats, in a copy: the tool may keep its own.

    Args:
        message: The results of a turn, in the order of the requests.
        repeated: That result; the last one where it is not among them.
    """
    results = [block["toolResult"] for block in message["content"]]
    position = next((n for n, each in enumerate(results) if each is repeated), -1)
    result = results[position]
    message["content"][position] = {
        "toolResult": {**result, "content": [*result["content"], {"text": NUDGE_NOTE}]}
    }


def with_note(messages: Any, note: str) -> Any:
    """Add a note at the end of what the model is sent."""
    # At the end of the last message and not before it: everything in front stays byte for byte the
    # same, so that a provider's prompt cache still fits. Into the same message, as several
    # providers refuse two of one role in a row.
    if messages and messages[-1]["role"] == "user":
        last = {**messages[-1], "content": [*messages[-1]["content"], {"text": note}]}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": [{"text": note}]}]


def without_tools(messages: Messages) -> Messages:
    """Tell a conversation without tool blocks, for a call that has no tools.

    Some providers, Amazon Bedrock among them, refuse tool blocks where no tools are declared.
    """
    return [
        {
            "role": message["role"],
            "content": [told for block in message["content"] for told in _as_text(block)],
        }
        for message in messages
    ]


def _as_text(block: ContentBlock) -> list[ContentBlock]:
    """Tell a call or a result in words; pictures and documents stay what they are."""
    if "toolUse" in block:
        use = block["toolUse"]
        # Not escaped: `\u00e4` costs the model several tokens for one letter.
        arguments = json.dumps(use["input"], default=str, ensure_ascii=False)
        return [{"text": f"[I called the tool {use['name']} with {arguments}]"}]
    if "toolResult" not in block:
        return [block]
    told: list[ContentBlock] = [{"text": "[Result of the tool:]"}]
    for part in block["toolResult"]["content"]:
        if "json" in part:
            told.append({"text": json.dumps(part["json"], default=str, ensure_ascii=False)})
        else:
            told.append(cast("ContentBlock", part))
    return told
