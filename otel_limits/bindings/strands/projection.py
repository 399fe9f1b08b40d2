"""Projects how many input tokens a model call will have, by what is in its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from otel_limits.bindings.strands.reading import model_id, provider_of
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.usage.media import (
    Recipient,
    recipient,
    tokens_of_audio,
    tokens_of_document,
    tokens_of_image,
    tokens_of_video,
)
from otel_limits.usage.normaliser import record_of_usage
from otel_limits.usage.text import MESSAGE, as_json, tokens_of_text

MAX_DEPTH: Final = 10
"""How deep contents may be within one another; the result of a tool in a message is seven deep."""


def projected_input(model: object, messages: object, beside: Sequence[object] = ()) -> int:
    """Tokens that a request has, about: at least 1.

    What the vendor said of an earlier response in the conversation is taken as it is, as that had
    all before it for its input, and only what came afterwards is estimated.

    Args:
        model: Who is asked; images and documents count by its vendor's rule.
        messages: The conversation, or whatever else is asked.
        beside: What goes along with every request: tools, the system prompt.
    """
    try:
        to = recipient(provider_of(cast("type", type(model))), model_id(model))
        known, later = _baseline(messages, to.provider)
        return max(1, known + tokens_of_content([later, *(() if known else beside)], to))
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return 1


def _baseline(messages: object, provider: str) -> tuple[int, object]:
    """Return the tokens up to the last response whose usage is known, and what came after it."""
    if not isinstance(messages, list):
        return 0, messages
    for number in range(len(messages) - 1, -1, -1):
        message = messages[number]
        told = message.get("metadata") if isinstance(message, dict) else None
        if told and message.get("role") == "assistant" and told.get("usage"):
            record = record_of_usage(told["usage"], provider)
            # One of an unmeasured call has zeros in it, which would make all before it vanish.
            if record.sure == "measured" and record.usage.input:
                return record.usage.total, messages[number + 1 :]
    return 0, messages


def tokens_of_content(content: object, to: Recipient) -> int:
    """Tokens of text, a content block, a message or a list of any of them, about."""
    tokens, texts = 0, []
    # No recursion: a runaway agent is deep in its own by the time it asks.
    left = [(content, MAX_DEPTH)]
    while left:
        part, depth = left.pop()
        if depth == 0 or part is None:  # such as one that contains itself
            continue
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            tokens += MESSAGE if "role" in part else 0
            for kind, each in part.items():
                if (medium := MEDIA.get(kind)) is not None and isinstance(each, dict):
                    tokens += medium(each, to)
                elif kind in CONTAINERS:
                    left.append((each, depth - 1))
                elif kind not in PASSED_OVER:
                    texts.append(as_json(each))
        elif isinstance(part, (list, tuple)):
            left.extend((each, depth - 1) for each in part)
        else:
            texts.append(as_json(part))
    return tokens + tokens_of_text("\n".join(texts))


def _bytes_of(part: Mapping[str, Any]) -> bytes | None:
    source = part.get("source")
    data = source.get("bytes") if isinstance(source, dict) else None
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else None


def _document(part: Mapping[str, Any], to: Recipient) -> int:
    citations = part.get("citations")
    is_cited = isinstance(citations, dict) and citations.get("enabled") is True
    kind = str(part.get("format", ""))
    return tokens_of_document(_bytes_of(part), kind, to, cited=is_cited)


MEDIA: Final[Mapping[str, Callable[[Mapping[str, Any], Recipient], int]]] = {
    "audio": lambda part, to: tokens_of_audio(_bytes_of(part), to),
    "document": _document,
    "image": lambda part, to: tokens_of_image(_bytes_of(part), to),
    "video": lambda part, to: tokens_of_video(_bytes_of(part), to),
}
"""Bytes that are never text, by the name of their block."""

CONTAINERS: Final = frozenset(
    {
        "content",
        "messages",
        "prompt",
        "system_prompt",
        "system_prompt_content",
        "tool_specs",
        "citationsContent",
        "guardContent",
        "reasoningContent",
        "reasoningText",
        "text",
        "toolResult",
    }
)
PASSED_OVER: Final = frozenset(
    {
        "cachePoint",
        "metadata",
        "redactedContent",
        "role",
        "signature",
        "status",
        "toolUseId",
        "tracking_id",  # Strands' own, of each message
    }
)
"""What no model is sent, or what costs nothing there."""
