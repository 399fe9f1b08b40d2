"""Names of each usage count at all vendors, clients and instrumentations."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from otel_limits.usage.numbers import token_count
from otel_limits.vendors.records import APART

MAX_DEPTH: Final = 4
"""Maximum nesting of a count; the deepest known one is two levels down."""

SPAN_PREFIXES: Final = (
    "gen_ai.usage.",  # OpenTelemetry semantic conventions for generative AI
    "llm.token_count.",  # OpenInference
    "llm.usage.",  # OpenLLMetry
    "anthropic.usage.",  # the client library of Anthropic
    "ai.usage.",  # Vercel's AI SDK
)
"""Prefixes of span attributes; the rest of the name is the vendor's."""

OF_RESPONSE: Final = ("gen_ai.response.prompt_tokens", "gen_ai.response.completion_tokens")
"""Semantic Kernel: its utils/telemetry/model_diagnostics/gen_ai_attributes.py, until 2025."""

AS_JSON: Final = (
    "langsmith.metadata.usage_metadata",  # langchain-core, messages/ai.py, UsageMetadata
    "langfuse.observation.usage_details",  # langfuse, _client/attributes.py
)
"""Attributes that contain counts as JSON text."""


REMEMBERED: Final = 256
"""Cached names."""


def _spelled_alike(name: str) -> str:
    return name.replace("_", "").lower()


# Cached, because a vendor uses the same names in every answer.
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
        "billed_units.input_tokens",  # Cohere: the billed tokens, next to the processed ones
        "input_tokens",  # Anthropic, OpenAI Responses, Bedrock (inputTokens), the conventions
        "prompt_tokens",  # OpenAI Chat and compatible APIs
        "prompt_token_count",  # Gemini
        "prompt_eval_count",  # Ollama
        "num_prompt_tokens",  # LlamaAPI
        "prompt",  # OpenInference
        "tokens.input_tokens",
        OF_RESPONSE[0],
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
        OF_RESPONSE[1],
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
        "input_token_details.priority_cache_read",  # the same, of OpenAI's tiers
        "input_token_details.flex_cache_read",
        "cached_content_token_count",
        "prompt_cache_hit_tokens",  # DeepSeek
        "prompt_eval_cached_count",
        "input_token_details.cache_read_tokens",  # Vercel's AI SDK since version 6
        "cached_input_tokens",  # before that; Mastra
        "input_cache_read",  # Langfuse, for LangChain
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
        "input_token_details.priority_cache_creation",
        "input_token_details.flex_cache_creation",
        "input_token_details.cache_write_tokens",
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
        "output_token_details.priority_reasoning",
        "output_token_details.flex_reasoning",
        "output_token_details.reasoning_tokens",
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
"""The names of each count, by precedence.

Whether an emitter's input includes cached tokens is in `usage/rules.py`, with sources."""

MEANINGS: Final = {
    _spelled_alike(name): (kind, place)
    for kind, names in NAMES.items()
    for place, name in enumerate(names)
}
"""The count that each name means, and its precedence."""

REASONING_APART: Final = frozenset(map(_spelled_alike, APART))


class Fields:
    """A reported usage, with normalized names.

    `promptTokenCount` becomes `prompt_token_count`, and nested names are joined by dots. For a list
    of counts by modality or by time to live, those are the last part of the name.
    """

    def __init__(self, raw: object) -> None:
        """Read a dictionary, an object of a client library, or the attributes of a span."""
        self._found: dict[str, tuple[int, Any]] = {}
        """Readable values, with the precedence of their names."""
        self._named: set[str] = set()
        """Names with a value, readable or not."""
        self.is_reasoning_apart = False
        """True if the name of the output is that of a vendor whose output excludes reasoning."""
        # No recursion: a runaway agent may already be deep in its own.
        left: list[tuple[str, Any, int]] = [("", raw, 0)]
        while left:
            name, value, depth = left.pop()
            # Deeper than any known count: circular data would never end.
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
        self.is_reasoning_apart |= name in REASONING_APART
        known = self._found.get(kind)
        # Precedence is independent of the position in the response.
        if known is not None and known[0] <= place:
            return
        readable = _text(value) if kind == TIER else token_count(value)
        if readable is not None:
            self._found[kind] = place, readable

    def is_named(self, kind: str) -> bool:
        """Return whether there is a value under any of its names, readable or not."""
        return kind in self._named

    def count(self, kind: str) -> int | None:
        """Return the number of tokens under the first name with a readable value."""
        known = self._found.get(kind)
        return None if known is None else known[1]

    @property
    def tier(self) -> str | None:
        """The service tier under the first of its names that has text."""
        known = self._found.get(TIER)
        return None if known is None else known[1]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def is_usage(name: str) -> bool:
    """Return whether a span attribute is about usage."""
    return name.startswith(SPAN_PREFIXES) or name in (*AS_JSON, *OF_RESPONSE)


def as_said(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the span attributes that are about usage."""
    told = {name: value for name, value in attributes.items() if is_usage(name)}
    for name in AS_JSON:
        # Attributes of the span take precedence over the contents of its texts.
        if name in told:
            told = {**_within(told.pop(name)), **told}
    return told


def _within(text: object) -> dict[str, Any]:
    try:
        held = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):  # attributes may contain anything
        held = None
    return held if isinstance(held, dict) else {}


def _below(value: object) -> Iterable[tuple[object, Any]] | None:
    """Return the named contents of a container; `None` for a plain value."""
    if type(value) is dict:  # nearly always
        return value.items()
    # Text is a sequence as well, but its characters are not counts.
    if value is None or isinstance(value, (str, bytes, int, float)):
        return None
    if isinstance(value, (list, tuple)):
        return _listed(value)
    if isinstance(value, Mapping):
        return value.items()
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or not own:
        return None
    # pydantic keeps unknown fields separately.
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **(extra if isinstance(extra, dict) else {})}.items()


def _listed(items: Sequence[object]) -> Iterator[tuple[object, Any]]:
    """Yield the counts of a list, as in Bedrock, Gemini and LlamaAPI."""
    for item in items:
        by = {_spelled_alike(str(key)): value for key, value in _below(item) or ()}
        # The names of Bedrock, Gemini and LlamaAPI, in this order.
        count = by.get("inputtokens", by.get("tokencount", by.get("value")))
        kind = by.get("ttl", by.get("modality", by.get("metric")))
        if kind is not None:
            yield getattr(kind, "value", kind), count
