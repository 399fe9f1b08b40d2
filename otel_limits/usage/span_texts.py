"""Estimates the tokens of a model call from the prompt and the answer in its span."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from otel_limits.usage.media import (
    Recipient,
    recipient,
    tokens_of_audio,
    tokens_of_document,
    tokens_of_image,
    tokens_of_video,
)
from otel_limits.usage.text import MESSAGE, tokens_of_text

MAX_DEPTH: Final = 12
"""Maximum nesting of contents; LangChain's messages are eight deep."""

PROMPTS: Final = (
    "gen_ai.input.messages",  # OpenTelemetry semantic conventions for generative AI, since 1.37
    "gen_ai.prompt",  # OpenLLMetry before that, followed by numbers; LangSmith
    "llm.input_messages",  # OpenInference
    "llm.prompts",
    "langfuse.observation.input",
    "gcp.vertex.agent.llm_request",  # Google ADK
    "input.value",  # OpenInference, if it has no messages
)
ANSWERS: Final = (
    "gen_ai.output.messages",
    "gen_ai.completion",
    "llm.output_messages",
    "langfuse.observation.output",
    "gcp.vertex.agent.llm_response",
    "output.value",
)
"""Attributes of a span, or prefixes of their names: the first one present is read, because others
contain the same in another form."""
SYSTEM: Final = ("gen_ai.system_instructions",)
TOOLS: Final = ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions")
"""The tools that are sent along with a prompt."""

IN_EVENTS: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
CHOICE: Final = "gen_ai.choice"
"""Span events in the conventions before 1.37: messages of a prompt, and the answer."""

PASSED_OVER: Final = frozenset(
    {"finish_reason", "id", "index", "lc", "mime_type", "object", "response_metadata", "role"}
    | {"signature", "tool_call_id", "type", "usage", "usage_metadata"}
)
"""Contents that are not sent to a model, or not billed, by the last part of the name."""

MIME_TYPES: Final = ("mime_type", "media_type", "mimeType", "mediaType")
DATA: Final = ("data", "content", "bytes")
"""Vendors' names for the kind and the bytes of a medium."""
# Every part but the data is bounded, so that no text takes long.
DATA_URL: Final = re.compile(
    r"data:([\w.+-]{1,40}/[\w.+-]{1,80})(?:;[\w.=-]{1,80}){0,4};base64,([\w+/=\s-]*)"
)


def estimates_of_span(
    attributes: Mapping[str, Any],
    events: Iterable[tuple[str, Mapping[str, Any]]],
    model: str,
) -> tuple[int, int]:
    """Return the estimated tokens of prompt and answer; 0 if the span does not have them.

    Args:
        attributes: The attributes of the span.
        events: The events of the span, each with its name and its attributes.
        model: The model, whose vendor determines how images and documents count.
    """
    prompt, answer, told = [], [], dict(attributes)
    for name, of_event in events:
        if name == CHOICE:
            answer.append(of_event)
        elif IN_EVENTS.fullmatch(name):
            prompt.append({"role": "", **of_event})
        else:  # named like attributes
            told = {**of_event, **told}
    to = recipient("unknown", model)
    prompt += [_first(told, PROMPTS), _first(told, SYSTEM), _first(told, TOOLS)]
    answer.append(_first(told, ANSWERS))
    return _tokens_of(prompt, to), _tokens_of(answer, to)


def _first(attributes: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    for name in names:
        told = {key: each for key, each in attributes.items() if f"{key}.".startswith(f"{name}.")}
        if told:
            return told
    return {}


def _tokens_of(content: object, to: Recipient) -> int:
    """Return the estimated tokens of a list of messages, in any format."""
    tokens, texts = 0, []
    # No recursion: a runaway agent may already be deep in its own.
    left = [(content, MAX_DEPTH)]
    while left:
        part, depth = left.pop()
        if depth == 0 or part is None:
            continue
        if isinstance(part, str):
            if (held := _parsed(part)) is not None:
                left.append((held, depth - 1))
            else:
                texts.append(DATA_URL.sub("", part))
                media = DATA_URL.findall(part)
                tokens += sum(_medium(mime, data, to) for mime, data in media)
        elif isinstance(part, Mapping):
            tokens += MESSAGE * sum(key.rpartition(".")[2] == "role" for key in part)
            mime, data = (_text_of(part, names) for names in (MIME_TYPES, DATA))
            if mime and data:
                tokens += _medium(mime, data, to)
            else:
                kept = (key for key in part if key.rpartition(".")[2] not in PASSED_OVER)
                left.extend((part[key], depth - 1) for key in kept)
        elif isinstance(part, (list, tuple)):
            left.extend((each, depth - 1) for each in part)
        else:
            texts.append(str(part))
    return tokens + tokens_of_text("\n".join(texts))


def _text_of(part: Mapping[str, Any], names: Iterable[str]) -> str:
    return next((part[name] for name in names if isinstance(part.get(name), str)), "")


def _parsed(text: str) -> object:
    """Return the contents of JSON text; `None` for other text, such as truncated JSON."""
    if not text.startswith(("[", "{")):
        return None
    try:
        held: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return held


def _medium(mime: str, data: str, to: Recipient) -> int:
    """Return the tokens of a base64-encoded medium."""
    try:
        raw = base64.b64decode(data)
    except ValueError:
        raw = None
    kind, _, form = mime.partition("/")
    if kind == "audio":
        return tokens_of_audio(raw, to)
    if kind == "video":
        return tokens_of_video(raw, to)
    if kind in ("application", "text"):
        return tokens_of_document(raw, {"plain": "txt"}.get(form, form), to, cited=False)
    return tokens_of_image(raw, to)
