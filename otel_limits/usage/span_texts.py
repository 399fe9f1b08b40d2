"""Estimates the tokens of a model call by what its span has of prompt and answer."""

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
"""How deep contents may be within one another; LangChain's messages are eight deep."""

PROMPTS: Final = (
    "gen_ai.input.messages",  # OpenTelemetry semantic conventions for generative AI, since 1.37
    "gen_ai.prompt",  # OpenLLMetry before that, with numbers behind it; LangSmith
    "llm.input_messages",  # OpenInference
    "llm.prompts",
    "langfuse.observation.input",
    "gcp.vertex.agent.llm_request",  # Google ADK
    "input.value",  # OpenInference, where it knows no messages
)
ANSWERS: Final = (
    "gen_ai.output.messages",
    "gen_ai.completion",
    "llm.output_messages",
    "langfuse.observation.output",
    "gcp.vertex.agent.llm_response",
    "output.value",
)
"""Attributes of a span, or what their names begin with: the first that it has is read, as others
have the same in another way."""
SYSTEM: Final = ("gen_ai.system_instructions",)
TOOLS: Final = ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions")
"""Those that are asked along with a prompt."""

IN_EVENTS: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
CHOICE: Final = "gen_ai.choice"
"""Events of spans that the conventions had before 1.37: messages of a prompt, and the answer."""

PASSED_OVER: Final = frozenset(
    {"finish_reason", "id", "index", "lc", "mime_type", "object", "response_metadata", "role"}
    | {"signature", "tool_call_id", "type", "usage", "usage_metadata"}
)
"""What no model is sent, or what costs nothing there, by the last part of a name."""

MIME_TYPES: Final = ("mime_type", "media_type", "mimeType", "mediaType")
DATA: Final = ("data", "content", "bytes")
"""How vendors call the kind and the bytes of a medium."""
# Bounded in every part but the data, so that no text takes long.
DATA_URL: Final = re.compile(
    r"data:([\w.+-]{1,40}/[\w.+-]{1,80})(?:;[\w.=-]{1,80}){0,4};base64,([\w+/=\s-]*)"
)


def estimates_of_span(
    attributes: Mapping[str, Any],
    events: Iterable[tuple[str, Mapping[str, Any]]],
    model: str,
) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, about; 0 for what the span does not have.

    Args:
        attributes: Those of the span.
        events: Those of the span, each with its name and its attributes.
        model: Who is asked; images and documents count by its vendor's rule.
    """
    prompt, answer, told = [], [], dict(attributes)
    for name, of_event in events:
        if name == CHOICE:
            answer.append(of_event)
        elif IN_EVENTS.fullmatch(name):
            prompt.append({"role": "", **of_event})
        else:  # which have the same names as attributes
            told = {**of_event, **told}
    to = recipient("unknown", model)
    prompt += [_first(told, PROMPTS), _first(told, SYSTEM), _first(told, TOOLS)]
    answer.append(_first(told, ANSWERS))
    return _tokens_of(prompt, to), _tokens_of(answer, to)


def _first(attributes: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    for name in names:
        told = {key: each for key, each in attributes.items() if _is_of(key, name)}
        if told:
            return told
    return {}


def _is_of(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _tokens_of(content: object, to: Recipient) -> int:
    """Tokens of a list of messages, however they are written down, about."""
    tokens, texts = 0, []
    # No recursion: a runaway agent is deep in its own by the time this is asked.
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
    """What a text holds as JSON; `None` for one that is only text, such as one that was cut off."""
    if not text.startswith(("[", "{")):
        return None
    try:
        held: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return held


def _medium(mime: str, data: str, to: Recipient) -> int:
    """Tokens of a medium that is written in base64."""
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
