"""Under which names vendors, their clients and instrumentations report each count of a call."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from otel_limits.usage.numbers import token_count

MAX_DEPTH: Final = 4
"""How deep a count may be nested; the deepest known one is two levels down."""

SPAN_PREFIXES: Final = (
    "gen_ai.usage.",  # OpenTelemetry semantic conventions for generative AI
    "llm.token_count.",  # OpenInference
    "llm.usage.",  # OpenLLMetry
    "anthropic.usage.",  # the client library of Anthropic
)
"""What the names of span attributes begin with; the rest is named as vendors name it."""

AS_JSON: Final = (
    "langsmith.metadata.usage_metadata",  # langchain-core, messages/ai.py, UsageMetadata
    "langfuse.observation.usage_details",  # langfuse, _client/attributes.py
)
"""Attributes that have counts within one text."""


REMEMBERED: Final = 256
"""Names that are remembered as they are looked up."""


def _spelled_alike(name: str) -> str:
    return name.replace("_", "").lower()


# Remembered, as a vendor reports the same names in every answer.
@functools.lru_cache(REMEMBERED)
def _outermost(name: str) -> str:
    for prefix in SPAN_PREFIXES:
        name = name.removeprefix(prefix)
    return _spelled_alike(name)


INPUT: Final = "input"
OUTPUT: Final = "output"
TOTAL: Final = "total"
CACHE_READ: Final = "cache_read"
CACHE_WRITE: Final = "cache_write"
CACHE_WRITE_5M: Final = "cache_write_5m"
CACHE_WRITE_1H: Final = "cache_write_1h"
REASONING: Final = "reasoning"
TOOL_PROMPT: Final = "tool_prompt"
INPUT_AUDIO: Final = "input_audio"
OUTPUT_AUDIO: Final = "output_audio"
WEB_SEARCHES: Final = "web_searches"
TIER: Final = "tier"

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    INPUT: (
        "billed_units.input_tokens",  # Cohere: what is billed, beside what was processed
        "input_tokens",  # Anthropic, OpenAI Responses, Bedrock (inputTokens), the conventions
        "prompt_tokens",  # OpenAI Chat and all that follow it
        "prompt_token_count",  # Gemini
        "prompt_eval_count",  # Ollama
        "num_prompt_tokens",  # LlamaAPI
        "prompt",  # OpenInference
        "tokens.input_tokens",
        "input",  # Langfuse
    ),
    OUTPUT: (
        "billed_units.output_tokens",
        "output_tokens",
        "completion_tokens",
        "candidates_token_count",
        "eval_count",
        "num_completion_tokens",
        "completion",
        "tokens.output_tokens",
        "output",
    ),
    TOTAL: ("total_tokens", "total_token_count", "num_total_tokens", "total"),
    CACHE_READ: (
        "cache_read.input_tokens",
        "cache_read_input_tokens",
        "prompt_tokens_details.cached_tokens",
        "prompt_token_details.cached_tokens",  # Writer
        "input_tokens_details.cached_tokens",
        "prompt_details.cache_read",
        "input_token_details.cache_read",  # LangChain
        "cached_content_token_count",
        "prompt_cache_hit_tokens",  # DeepSeek
        "prompt_eval_cached_count",
        "input_cache_read",  # Langfuse, of what LangChain says
        "cached_tokens",
    ),
    CACHE_WRITE: (
        "cache_creation.input_tokens",
        "cache_write.input_tokens",
        "cache_creation_input_tokens",
        "cache_write_input_tokens",
        "prompt_tokens_details.cache_write_tokens",
        "input_tokens_details.cache_write_tokens",
        "prompt_details.cache_write",
        "input_token_details.cache_creation",
        "input_cache_creation",
    ),
    CACHE_WRITE_5M: (
        "cache_creation.ephemeral_5m_input_tokens",
        "cache_details.5m",
        "input_token_details.ephemeral_5m_input_tokens",
    ),
    CACHE_WRITE_1H: (
        "cache_creation.ephemeral_1h_input_tokens",
        "cache_details.1h",
        "input_token_details.ephemeral_1h_input_tokens",
    ),
    REASONING: (
        "reasoning.output_tokens",
        "completion_tokens_details.reasoning_tokens",
        "output_tokens_details.reasoning_tokens",
        "output_tokens_details.thinking_tokens",
        "completion_details.reasoning",
        "details.reasoning_tokens",
        "output_token_details.reasoning",
        "thoughts_token_count",
        "reasoning_tokens",
        "output_reasoning",
    ),
    TOOL_PROMPT: ("tool_use_prompt_token_count",),
    INPUT_AUDIO: (
        "prompt_tokens_details.audio_tokens",
        "prompt_details.audio",
        "prompt_tokens_details.audio",
        "input_token_details.audio",
    ),
    OUTPUT_AUDIO: (
        "completion_tokens_details.audio_tokens",
        "completion_details.audio",
        "output_token_details.audio",
        "candidates_tokens_details.audio",
    ),
    WEB_SEARCHES: ("server_tool_use.web_search_requests",),
    TIER: ("service_tier", "traffic_type", "service_tier.type"),
}
"""How each is called; where a response has it under several names, the first one decides."""

MEANINGS: Final = {
    _spelled_alike(name): (kind, place)
    for kind, names in NAMES.items()
    for place, name in enumerate(names)
}
"""What each name says, and at which place it is among the names that say the same."""

GEMINI: Final = _spelled_alike("candidates_token_count")
"""How Gemini alone calls its output."""


class Fields:
    """What was reported, under names that are the same in whatever way they are written.

    `promptTokenCount` is `prompt_token_count`, and nested names are joined by dots. A list of
    counts by modality or by time to live has those as the last part of its names.
    """

    def __init__(self, raw: object) -> None:
        """Take a dictionary, an object of a client library, or the attributes of a span."""
        self._found: dict[str, tuple[int, Any]] = {}
        """What is readable, with the place of its name."""
        self._named: set[str] = set()
        """What has a value, be it readable or not."""
        self.is_of_gemini = False
        """True where the output is called as Gemini calls it."""
        # No recursion: a runaway agent is deep in its own by the time it is answered.
        left: list[tuple[str, Any, int]] = [("", raw, 0)]
        while left:
            name, value, depth = left.pop()
            # Deeper than any known count: what nests itself would never end.
            below = _below(value) if depth < MAX_DEPTH else None
            if below is None:
                if value is not None and name in MEANINGS:
                    self._note(name, value)
                continue
            for key, each in below:
                part = f"{name}.{_spelled_alike(str(key))}" if depth else _outermost(str(key))
                left.append((part, each, depth + 1))

    def _note(self, name: str, value: object) -> None:
        kind, place = MEANINGS[name]
        self._named.add(kind)
        self.is_of_gemini |= name == GEMINI
        known = self._found.get(kind)
        # A name further in front decides, wherever it stands in the response.
        if known is not None and known[0] <= place:
            return
        readable = _text(value) if kind == TIER else token_count(value)
        if readable is not None:
            self._found[kind] = place, readable

    def is_named(self, kind: str) -> bool:
        """Tell whether it has a value under any of its names, be it readable or not."""
        return kind in self._named

    def count(self, kind: str) -> int | None:
        """Return the number of tokens under the first of the names that has a readable one."""
        known = self._found.get(kind)
        return None if known is None else known[1]

    @property
    def tier(self) -> str | None:
        """The tier under the first of its names that has some text."""
        known = self._found.get(TIER)
        return None if known is None else known[1]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def is_usage(name: str) -> bool:
    """Tell whether an attribute of a span says something of usage."""
    return name.startswith(SPAN_PREFIXES) or name in AS_JSON


def as_said(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a span that are about usage; what is not is passed over."""
    told = {name: value for name, value in attributes.items() if is_usage(name)}
    for name in AS_JSON:
        # What the span says by itself wins over what is within one of its texts.
        if name in told:
            told = {**_within(told.pop(name)), **told}
    return told


def _within(text: object) -> dict[str, Any]:
    try:
        held = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):  # anybody may write to an attribute
        held = None
    return held if isinstance(held, dict) else {}


def _below(value: object) -> Iterable[tuple[object, Any]] | None:
    """Return what a container has, with its names; `None` for what is a value itself."""
    if type(value) is dict:  # as good as always
        return value.items()
    # Text is a sequence as well, and its letters are not counts.
    if value is None or isinstance(value, (str, bytes, int, float)):
        return None
    if isinstance(value, (list, tuple)):
        return _listed(value)
    if isinstance(value, Mapping):
        return value.items()
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or not own:
        return None
    # What a client library does not know, pydantic keeps beside what it knows.
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **(extra if isinstance(extra, dict) else {})}.items()


def _listed(items: Sequence[object]) -> Iterator[tuple[object, Any]]:
    """Yield the counts of a list, as Bedrock, Gemini and LlamaAPI have them."""
    for item in items:
        by = {_spelled_alike(str(key)): value for key, value in _below(item) or ()}
        # Bedrock's name, Gemini's and LlamaAPI's, in this order.
        count = by.get("inputtokens", by.get("tokencount", by.get("value")))
        kind = by.get("ttl", by.get("modality", by.get("metric")))
        if kind is not None:
            yield getattr(kind, "value", kind), count
