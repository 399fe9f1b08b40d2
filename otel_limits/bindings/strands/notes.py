"""Adds sentences for the model to a request, without changing the stored conversation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.bindings.tool_call import reworded_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.types.content import ContentBlock, Message, Messages
    from strands.types.tools import ToolResult

    from otel_limits.runs.run import Run, TaskScope


def append_nudge(message: Message, repeated: object, note: str) -> None:
    """Add the nudge to a copy of the repeated call's result: the tool may keep its own object.

    Args:
        message: The results of a turn, in the order of the requests.
        repeated: The result; if it is not among them, the last one is used.
        note: The text of the nudge.
    """
    results = [block["toolResult"] for block in message["content"]]
    position = next((n for n, each in enumerate(results) if each is repeated), -1)
    result = results[position]
    message["content"][position] = {
        "toolResult": {**result, "content": [*result["content"], {"text": note}]}
    }


def reword_results(message: Message, run: Run) -> None:
    """Reword the texts of halted agents in the results of a turn, in a copy of each."""
    for position, block in enumerate(message["content"]):
        if "toolResult" in block:
            message["content"][position] = {"toolResult": reworded(block["toolResult"], run)}


def reworded(result: ToolResult, run: Run, scope: TaskScope | None = None) -> ToolResult:
    """Return a result with the text for the model around a halted agent.

    A tool returns the agent's last message, which is written for end users, or its exception, which
    is written for operators.

    Args:
        result: The result of a tool.
        run: The invocation that called the tool.
        scope: The call, if known.
    """
    if not run.halted:
        return result
    content = [
        {**part, "text": reworded_text(part["text"], run, scope)} if "text" in part else part
        for part in result["content"]
    ]
    return {**result, "content": content}  # type: ignore[typeddict-item]


def with_note(messages: Any, note: str) -> Any:
    """Add a note at the end of the messages for the model."""
    # At the end, so that everything before it stays identical and the provider's prompt cache still
    # applies. In the last message, as several providers refuse two of one role in a row.
    if messages and messages[-1]["role"] == "user":
        last = {**messages[-1], "content": [*messages[-1]["content"], {"text": note}]}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": [{"text": note}]}]


def without_tools(messages: Messages) -> Messages:
    """Rewrite a conversation without tool blocks, for a call that has no tools.

    Some providers, Amazon Bedrock among them, refuse tool blocks where no tools are declared, and
    text that is blank.
    """
    return [
        {
            "role": message["role"],
            "content": [part for block in message["content"] for part in _as_text(block)]
            or [{"text": NO_TEXT}],
        }
        for message in messages
    ]


def _as_text(block: ContentBlock) -> list[ContentBlock]:
    """Describe a call or a result in text. Pictures and documents are kept, blank text is not."""
    if "toolUse" in block:
        use = block["toolUse"]
        # Not escaped: `\u00e4` costs the model several tokens for one letter.
        arguments = json.dumps(use["input"], default=str, ensure_ascii=False)
        return [{"text": f"[I called the tool {use['name']} with {arguments}]"}]
    if "toolResult" not in block:
        return [] if _is_blank(block) else [block]
    parts: list[ContentBlock] = []
    for part in block["toolResult"]["content"]:
        if "json" in part:
            parts.append({"text": json.dumps(part["json"], default=str, ensure_ascii=False)})
        elif not _is_blank(part):
            parts.append(cast("ContentBlock", part))
    return [{"text": "[Result of the tool:]" if parts else "[The tool returned nothing.]"}, *parts]


NO_TEXT: Final = "[no text]"


def _is_blank(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a message is text without any characters to see."""
    return "text" in part and not part["text"].strip()
