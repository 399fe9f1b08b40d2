"""Projects the input tokens of a model call from its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from otel_limits.bindings.strands.readers import model_id, provider_of
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
"""Maximum nesting of contents; a tool result in a message is seven levels deep."""

CHUNK_MESSAGES: Final = 32
MAX_SEARCHES: Final = 8

IMMUTABLE: Final = (str, int, float, bytes, type(None))

Chunk: TypeAlias = "tuple[list[Any], int]"
"""Copies of consecutive messages, and their tokens."""


class ConversationTokens:
    """Estimated tokens of an agent's messages, each counted only once until it changes.

    Messages are compared with copies by value, so edits in place, replacements and trims are
    noticed. Comparing takes a thirtieth of the time of counting: copies share their texts.

    Args:
        chunk_messages: Most messages whose tokens are remembered together.
        max_searches: How many chunks are searched for further back before the rest counts as new.
    """

    def __init__(
        self, chunk_messages: int = CHUNK_MESSAGES, max_searches: int = MAX_SEARCHES
    ) -> None:
        """Create an empty cache."""
        self._chunk_messages = chunk_messages
        self._max_searches = max_searches
        self._cached: tuple[Recipient | None, list[Chunk]] = None, []

    def count(self, messages: list[Any], to: Recipient) -> int:
        """Return the tokens of `messages` for a model, and remember them."""
        found: list[Chunk] = []
        position, searches, total = 0, self._max_searches, 0
        # Read and assigned as a whole, as several threads may use an agent.
        counted_for, chunks = self._cached
        for chunk in chunks if to == counted_for else ():
            copies, tokens = chunk
            start = position
            if not _is_equal(messages, copies, start):
                if not searches:
                    break
                searches -= 1
                start = _index(messages, copies, position)
                if start < 0:
                    continue
            total += self._add(found, messages[position:start], to) + tokens
            found.append(chunk)
            position = start + len(copies)
        total += self._add(found, messages[position:], to)
        self._cached = to, found
        return total

    def _add(self, chunks: list[Chunk], messages: list[Any], to: Recipient) -> int:
        """Count new messages and append them to `chunks`; return their tokens."""
        total, most = 0, self._chunk_messages
        for start in range(0, len(messages), most):
            new = messages[start : start + most]
            total += (tokens := tokens_of_content(new, to))
            try:
                copies = _copy(new, MAX_DEPTH)
            # Cannot be compared later, or too few frames are left: counted for each call.
            except (TypeError, RecursionError):
                continue
            if chunks and len(chunks[-1][0]) + len(copies) <= most:
                before, tokens_before = chunks[-1]
                chunks[-1] = ([*before, *copies], tokens_before + tokens)
            else:
                chunks.append((copies, tokens))
        return total


def _index(messages: list[Any], copies: list[Any], position: int) -> int:
    """Return where `copies` are found from `position` on, or -1."""
    try:
        start = messages.index(copies[0], position)
    except Exception:  # noqa: BLE001  not found, or messages hold what cannot be compared
        return -1
    return start if _is_equal(messages, copies, start) else -1


def _is_equal(messages: list[Any], copies: list[Any], start: int) -> bool:
    try:
        return messages[start : start + len(copies)] == copies
    except Exception:  # noqa: BLE001  such as an array of an application
        return False


def _copy(value: Any, depth: int) -> Any:
    """Copy containers but not what is in them.

    Raises:
        TypeError: It contains something else that may change, or is nested too deeply.
    """
    if isinstance(value, IMMUTABLE):
        return value
    if depth and type(value) is dict:
        return {key: _copy(each, depth - 1) for key, each in value.items()}
    if depth and type(value) is list:
        return [_copy(each, depth - 1) for each in value]
    raise TypeError(type(value))


def projected_input(
    model: object,
    messages: object,
    extra: Sequence[object] = (),
    cache: ConversationTokens | None = None,
) -> int:
    """Estimate the input tokens of a request: at least 1.

    Usage that the vendor reported for an earlier response covers everything before it, so only
    what came later is estimated.

    Args:
        model: The model that is called; images and documents count by its vendor's rules.
        messages: The conversation, or other content.
        extra: Other content of every request: tools, the system prompt.
        cache: Tokens of earlier messages of the same agent.
    """
    try:
        named = model_id(model)
        to = recipient(provider_of(cast("type", type(model))), named)
        known, later = _baseline(messages, to.provider, named)
        if known:
            return known + tokens_of_content(later, to)
        if cache is not None and isinstance(messages, list):
            tokens = cache.count(messages, to)
        else:
            tokens = tokens_of_content(messages, to)
        return max(1, tokens + tokens_of_content(extra, to))
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return 1


def _baseline(messages: object, provider: str, model: str) -> tuple[int, object]:
    """Return the tokens up to the last response with known usage, and what came after it."""
    if not isinstance(messages, list):
        return 0, messages
    for number in range(len(messages) - 1, -1, -1):
        message = messages[number]
        metadata = message.get("metadata") if isinstance(message, dict) else None
        if metadata and message.get("role") == "assistant" and (usage := metadata.get("usage")):
            # Strands writes zeros for calls without usage; with them, all before would vanish.
            if isinstance(usage, dict) and not any(usage.values()):
                continue
            record = record_of_usage(usage, provider, model)
            if record.sure == "measured" and record.usage.input:
                return record.usage.total, messages[number + 1 :]
    return 0, messages


def tokens_of_content(content: object, to: Recipient) -> int:
    """Estimate the tokens of text, a content block, a message or a list of them."""
    tokens, texts = 0, []
    # No recursion: a runaway agent may be close to the recursion limit.
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
"""Counts tokens of binary content, by block type."""

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
"""Fields that are not sent to models, or are free."""
