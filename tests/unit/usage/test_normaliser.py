"""Usage of every vendor, normalized, including reports that are only half readable."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.core.usage import MAX_TOKENS, Usage, UsageRecord
from otel_limits.usage.fields import field_names, lexicon, meaning_of
from otel_limits.usage.normaliser import (
    completed,
    record_of_response,
    record_of_span,
    record_of_usage,
)
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import Cached, Rest, vendors_of_classes
from tests.usage_grammar import Case, cases, innocents

OPENAI = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 60, "audio_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 8, "audio_tokens": 2},
}
CASES: dict[str, tuple[str, Any, Usage]] = {
    "OpenAI": (
        "openai",
        OPENAI,
        Usage(input=100, output=20, cache_read=60, reasoning=8, input_audio=5, output_audio=2),
    ),
    "xAI, reasoning outside": (
        "openai",
        {
            "prompt_tokens": 10_120,
            "completion_tokens": 1_499,
            "total_tokens": 14_428,
            "prompt_tokens_details": {"cached_tokens": 128},
            "completion_tokens_details": {"reasoning_tokens": 2_809},
        },
        Usage(input=10_120, output=4_308, cache_read=128, reasoning=2_809),
    ),
    "Anthropic": (
        "anthropic",
        {
            "input_tokens": 50,
            "output_tokens": 30,
            "cache_read_input_tokens": 2_000,
            "cache_creation_input_tokens": 10_000,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 4_000,
                "ephemeral_1h_input_tokens": 6_000,
            },
            "server_tool_use": {"web_search_requests": 3},
        },
        Usage(
            input=12_050,
            output=30,
            cache_read=2_000,
            cache_write=10_000,
            cache_write_1h=6_000,
            web_searches=3,
        ),
    ),
    "Bedrock": (
        "bedrock",
        {
            "inputTokens": 50,
            "outputTokens": 30,
            "totalTokens": 80,
            "cacheReadInputTokens": 2_000,
            "cacheWriteInputTokens": 10_000,
            "cacheDetails": [
                {"ttl": "5m", "inputTokens": 4_000},
                {"ttl": "1h", "inputTokens": 6_000},
            ],
        },
        Usage(input=12_050, output=30, cache_read=2_000, cache_write=10_000, cache_write_1h=6_000),
    ),
    "Gemini": (
        "gemini",
        {
            "promptTokenCount": 100,
            "toolUsePromptTokenCount": 7,
            "candidatesTokenCount": 20,
            "thoughtsTokenCount": 30,
            "cachedContentTokenCount": 40,
            "totalTokenCount": 157,
            "promptTokensDetails": [
                {"modality": "TEXT", "tokenCount": 90},
                {"modality": "AUDIO", "tokenCount": 10},
            ],
        },
        Usage(input=107, output=50, cache_read=40, reasoning=30, input_audio=10),
    ),
    "Gemini, thoughts within": (
        "gemini",
        {
            "prompt_token_count": 100,
            "candidates_token_count": 50,
            "thoughts_token_count": 30,
            "total_token_count": 150,
        },
        Usage(input=100, output=50, reasoning=30),
    ),
    "Gemini, a total of less than its parts": (
        "gemini",
        {
            "promptTokenCount": 100,
            "candidatesTokenCount": 50,
            "thoughtsTokenCount": 30,
            "totalTokenCount": 100,
        },
        Usage(input=100, output=50, reasoning=30),
    ),
    "Bedrock, five minutes alone": (
        "bedrock",
        {
            "inputTokens": 50,
            "outputTokens": 30,
            "totalTokens": 80,
            "cacheWriteInputTokens": 4_000,
            "cacheDetails": [{"ttl": "5m", "inputTokens": 4_000}],
        },
        Usage(input=4_050, output=30, cache_write=4_000, cache_write_1h=0),
    ),
    "reasoning that is more than the output": (
        "openai",
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "completion_tokens_details": {"reasoning_tokens": 300},
        },
        Usage(input=100, output=320, reasoning=300),
    ),
    "DeepSeek": (
        "openai",
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_cache_hit_tokens": 64,
            "prompt_cache_miss_tokens": 36,
        },
        Usage(input=100, output=20, cache_read=64),
    ),
    "Ollama": (
        "ollama",
        {"prompt_eval_count": 11, "eval_count": 3, "prompt_eval_cached_count": 5},
        Usage(input=11, output=3, cache_read=5),
    ),
    "LlamaAPI": (
        "llamaapi",
        [
            {"metric": "num_prompt_tokens", "value": 11.0, "unit": "tokens"},
            {"metric": "num_completion_tokens", "value": 3.0, "unit": "tokens"},
            {"metric": "num_total_tokens", "value": 14.0, "unit": "tokens"},
        ],
        Usage(input=11, output=3),
    ),
    "Cohere": (
        "litellm",
        {
            "billed_units": {"input_tokens": 9, "output_tokens": 4},
            "tokens": {"input_tokens": 75, "output_tokens": 6},
        },
        Usage(input=9, output=4),
    ),
    "Writer": (
        "writer",
        {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "total_tokens": 13,
            "prompt_token_details": {"cached_tokens": 2},
        },
        Usage(input=9, output=4, cache_read=2),
    ),
    "a class of its own, cached outside": (
        "MyModel",
        {"inputTokens": 10, "outputTokens": 5, "totalTokens": 20, "cacheReadInputTokens": 5},
        Usage(input=15, output=5, cache_read=5),
    ),
    "a class of its own, cached inside": (
        "MyModel",
        {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15, "cacheReadInputTokens": 5},
        Usage(input=10, output=5, cache_read=5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_usage_of_a_vendor(case: str) -> None:
    """Each counts in its own way; what comes out is always counted in ours."""
    provider, raw, expected = CASES[case]
    record = record_of_usage(raw, provider)
    assert (record.sure, record.usage) == ("measured", expected)


def test_a_whole_response() -> None:
    """The usage is found where a vendor's response has it."""
    assert record_of_response({"usage": OPENAI}, "openai").usage.total == 120
    summed = {"usage": OPENAI, "total_tokens": 5_000}  # of a conversation
    assert record_of_response(summed, "openai").usage.total == 120
    assert record_of_response({"prompt_eval_count": 3, "eval_count": 2}, "ollama").usage.total == 5
    assert record_of_response({"choices": []}, "openai").sure == "missing"


SPANS: dict[str, tuple[str, dict[str, Any], Usage]] = {
    "Vercel's AI SDK 7, with Anthropic's cache for an hour": (
        "gen_ai",
        {
            "gen_ai.usage.input_tokens": 3_100,
            "gen_ai.usage.output_tokens": 40,
            "gen_ai.usage.cache_read.input_tokens": 2_000,
            "gen_ai.usage.cache_creation.input_tokens": 1_000,
            "ai.response.providerMetadata": json.dumps(
                {
                    "anthropic": {
                        "usage": {
                            "input_tokens": 100,
                            "cache_creation": {"ephemeral_1h_input_tokens": 1_000},
                        }
                    }
                }
            ),
            # The text of the model.
            "ai.response.text": json.dumps({"usage": {"input_tokens": 9, "reasoning_tokens": 9}}),
        },
        Usage(input=3_100, output=40, cache_read=2_000, cache_write=1_000, cache_write_1h=1_000),
    ),
    "Genkit": (
        "genkit-tracer",
        {
            "genkit:output": json.dumps(
                {
                    "message": {"role": "model", "content": [{"text": "no"}]},
                    "usage": {"inputTokens": 210, "outputTokens": 40, "totalTokens": 250},
                }
            )
        },
        Usage(input=210, output=40),
    ),
    "cached and uncached input, without a sum": (
        "any",
        {
            "acme.usage.uncached_input_tokens": 100,
            "acme.usage.cached_input_tokens": 900,
            "acme.usage.output_tokens": 50,
        },
        Usage(input=1_000, output=50, cache_read=900),
    ),
    # Of the prompt for tools as many tokens are missing as of cached and reasoning tokens.
    "Gemini's usage in a namespace": (
        "any",
        {
            "acme.usage_metadata.prompt_token_count": 110,
            "acme.usage_metadata.candidates_token_count": 50,
            "acme.usage_metadata.cached_content_token_count": 30,
            "acme.usage_metadata.thoughts_token_count": 20,
            "acme.usage_metadata.tool_use_prompt_token_count": 10,
            "acme.usage_metadata.total_token_count": 190,
        },
        Usage(input=120, output=70, cache_read=30, reasoning=20),
    ),
    "Vercel's AI SDK 6": (
        "ai",
        {
            "gen_ai.usage.input_tokens": 2_100,
            "gen_ai.usage.output_tokens": 40,
            "ai.usage.inputTokens": 2_100,
            "ai.usage.outputTokens": 40,
            "ai.usage.totalTokens": 2_140,
            "ai.usage.cachedInputTokens": 2_000,
            "ai.usage.inputTokenDetails.cacheReadTokens": 2_000,
            "ai.usage.inputTokenDetails.cacheWriteTokens": 60,
            "ai.usage.outputTokenDetails.reasoningTokens": 30,
        },
        Usage(input=2_100, output=40, cache_read=2_000, cache_write=60, reasoning=30),
    ),
    "Vercel's AI SDK 5 with Anthropic": (
        "ai",
        {
            "ai.usage.inputTokens": 100,
            "ai.usage.outputTokens": 40,
            "ai.usage.totalTokens": 140,
            "ai.usage.cachedInputTokens": 2_000,
        },
        Usage(input=2_100, output=40, cache_read=2_000),
    ),
    "Mastra": (
        "mastra",
        {
            "gen_ai.usage.input_tokens": 2_100,
            "gen_ai.usage.output_tokens": 40,
            "gen_ai.usage.cached_input_tokens": 2_000,
        },
        Usage(input=2_100, output=40, cache_read=2_000),
    ),
    "the conventions": (
        "pydantic-ai",
        {
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 60,
            "gen_ai.usage.cache_creation.input_tokens": 30,
            "gen_ai.usage.details.reasoning_tokens": 7,
        },
        Usage(input=100, output=20, cache_read=60, cache_write=30, reasoning=7),
    ),
    "OpenInference": (
        "openinference.instrumentation.openai",
        {
            "llm.token_count.prompt": 100,
            "llm.token_count.completion": 20,
            "llm.token_count.total": 120,
            "llm.token_count.prompt_details.cache_read": 60,
        },
        Usage(input=100, output=20, cache_read=60),
    ),
    "OpenLLMetry of old": (
        "opentelemetry.instrumentation.openai",
        {
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 20,
            "llm.usage.total_tokens": 120,
        },
        Usage(input=100, output=20),
    ),
    "botocore": (
        "opentelemetry.instrumentation.botocore.bedrock-runtime",
        {
            "gen_ai.usage.input_tokens": 50,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 40,
        },
        Usage(input=90, output=20, cache_read=40),
    ),
    "Langfuse, of what LangChain says": (
        "langfuse-sdk",
        {
            "langfuse.observation.usage_details": (
                '{"input": 700, "output": 90, "total": 1000,'
                ' "input_cache_read": 150, "input_cache_creation": 50, "output_reasoning": 10}'
            ),
        },
        Usage(input=900, output=100, cache_read=150, cache_write=50, reasoning=10),
    ),
    "Pydantic AI of old": (
        "pydantic-ai",
        {
            "gen_ai.usage.input_tokens": 90_260,
            "gen_ai.usage.output_tokens": 310,
            "gen_ai.usage.details.input_tokens": 10,
            "gen_ai.usage.details.output_tokens": 310,
            "gen_ai.usage.details.cache_read_tokens": 89_000,
            "gen_ai.usage.details.cache_write_tokens": 1_250,
            "gen_ai.usage.details.cache_read_input_tokens": 89_000,
        },
        Usage(input=90_260, output=310, cache_read=89_000, cache_write=1_250),
    ),
    "LangSmith's details as text": (
        "langsmith",
        {
            "gen_ai.usage.input_tokens": 40_020,
            "gen_ai.usage.output_tokens": 100,
            "gen_ai.usage.total_tokens": 40_120,
            "gen_ai.usage.input_token_details": '{"cache_read": 38000, "cache_creation": 2000}',
            "gen_ai.usage.output_token_details": '{"reasoning": 30}',
        },
        Usage(input=40_020, output=100, cache_read=38_000, cache_write=2_000, reasoning=30),
    ),
    "LangSmith's details as Python shows them": (
        "langsmith",
        {
            "gen_ai.usage.input_tokens": 40_020,
            "gen_ai.usage.output_tokens": 100,
            "gen_ai.usage.input_token_details": "{'cache_read': 38000, 'cache_creation': 2000}",
        },
        Usage(input=40_020, output=100, cache_read=38_000, cache_write=2_000),
    ),
    "Vercel's AI SDK with two prefixes, as text": (
        "ai",
        {
            "gen_ai.usage.input_tokens": "22118",
            "gen_ai.usage.output_tokens": "1970",
            "ai.usage.reasoningTokens": "956",
            "ai.usage.totalTokens": "24088",
        },
        Usage(input=22_118, output=1_970, reasoning=956),
    ),
    "MLflow": (
        "mlflow",
        {
            "mlflow.chat.tokenUsage": (
                '{"input_tokens": 90, "output_tokens": 7, "total_tokens": 97,'
                ' "cache_read_input_tokens": 40}'
            ),
        },
        Usage(input=90, output=7, cache_read=40),
    ),
    "OpenInference's cached input": (
        "openinference.instrumentation.any",
        {
            "llm.token_count.prompt": 100,
            "llm.token_count.completion": 20,
            "llm.token_count.prompt_details.cache_input": 60,
            "llm.token_count.prompt_details.audio": 0,
        },
        Usage(input=100, output=20, cache_read=60, input_audio=0),
    ),
    "OpenClaw": (
        "openclaw",
        {
            "gen_ai.usage.input_tokens": 5,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read_tokens": 128_955,
            "gen_ai.usage.cache_write_tokens": 1_253,
            "gen_ai.usage.total_tokens": 130_233,
        },
        Usage(input=130_213, output=20, cache_read=128_955, cache_write=1_253),
    ),
    "Claude Code": (
        "com.anthropic.claude_code",
        {
            "input_tokens": "10",
            "output_tokens": "20",
            "cache_read_tokens": "8",
            "cache_creation_tokens": "500",
            "cost_usd": "0.5",
            "duration_ms": "900",
        },
        Usage(input=518, output=20, cache_read=8, cache_write=500),
    ),
    "Spring AI": (
        "org.springframework.boot",
        {
            "gen_ai.usage.input_tokens": "1210",
            "gen_ai.usage.output_tokens": "77",
            "gen_ai.usage.total_tokens": "1287",
        },
        Usage(input=1_210, output=77),
    ),
    "Google ADK of old": (
        "gcp.vertex.agent",
        {
            "gen_ai.usage.input_tokens": 140,
            "gen_ai.usage.output_tokens": 200,
            "gen_ai.usage.experimental.reasoning_tokens": 80,
        },
        Usage(input=140, output=280, reasoning=80),
    ),
    "Strands 1.30 with Bedrock": (
        "strands.telemetry.tracer",
        {
            "gen_ai.usage.input_tokens": 50,
            "gen_ai.usage.output_tokens": 30,
            "gen_ai.usage.total_tokens": 12_080,
            "gen_ai.usage.cache_read_input_tokens": 2_000,
            "gen_ai.usage.cache_write_input_tokens": 10_000,
        },
        Usage(input=12_050, output=30, cache_read=2_000, cache_write=10_000),
    ),
}


@pytest.mark.parametrize("case", SPANS)
def test_the_usage_of_a_span(case: str) -> None:
    """Instrumentations count in their own ways as well."""
    scope, attributes, expected = SPANS[case]
    record = record_of_span({**attributes, "input.value": "{}"}, scope)
    assert (record.sure, record.usage) == ("measured", expected)


UNREADABLE = [
    None, -1, "-12", "1.5", "1e3", " 1", "²", "9" * 5_000, True, float("nan"), float("inf"),
    -float("inf"), 10**30, 2.5, b"1",
]  # fmt: skip


@pytest.mark.parametrize("value", UNREADABLE)
def test_invalid_token_number_never_counts(value: object) -> None:
    """Text, NaN, infinities, negative and absurd numbers are as good as missing."""
    record = record_of_usage({"inputTokens": 10, "outputTokens": value, "totalTokens": value})
    assert (record.sure, record.has_input, record.has_output) == ("partial", True, False)
    assert completed(record, 99, 7) == Usage(input=10, output=7)


@pytest.mark.parametrize("value", [np.int64(12), np.uint8(12), 12.0, np.float32(12), "12"])
def test_numbers_of_other_kinds_are_numbers(value: Any) -> None:
    """A client library may count with numpy or in floats, and a span may have digits as text."""
    record = record_of_usage({"inputTokens": value, "outputTokens": value})
    assert record.usage == Usage(input=12, output=12)
    assert type(record.usage.input) is int


@pytest.mark.parametrize("raw", [{"inputTokens": 90}, {"outputTokens": 10}])
def test_the_total_settles_what_is_missing(raw: dict[str, int]) -> None:
    """A call with one missing part is still measured."""
    record = record_of_usage({**raw, "totalTokens": 100})
    assert (record.sure, record.usage) == ("measured", Usage(input=90, output=10))


def test_a_total_alone_is_at_least_what_counts() -> None:
    """Where estimates are less than the vendor's total, the total counts."""
    record = record_of_usage({"totalTokens": 5_000})
    assert (record.sure, completed(record, 20, 3)) == ("partial", Usage(input=4_997, output=3))
    assert completed(record, 6_000, 3).total == 6_003


def test_zeros_that_a_client_made_up_are_no_usage() -> None:
    """Writer's model class says 0 where the vendor said nothing; another vendor means it."""
    zeros = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    assert record_of_usage(zeros, "writer").sure == "missing"
    assert record_of_usage(zeros, "openai").sure == "measured"


class Odd:
    """An object of a client library, which may be within itself."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members, own=self)


def test_each_word_has_one_meaning() -> None:
    """The file is not checked when it is read, and a later word would replace an earlier one."""
    known = facts("usage/fields.yaml")
    words = [word for held in known["words"].values() for word in held]
    assert len(words) == len(set(words)) == len(lexicon().words)
    assert all(type(word) is str for word in (*words, *known["innocent"], *known["namespaces"]))
    assert lexicon().innocent.isdisjoint(words)
    assert set(known["exceptions"]) <= {
        "input", "output", "cache_read", "web_searches", "tier",
    }  # fmt: skip
    assert {rule.cached for rule in field_names().scopes.values()} <= {*get_args(Cached)}
    assert {*known["rests"].values()} <= {*get_args(Rest)}


KNOWN = {
    "input": """
        billed_units.input_tokens input_tokens prompt_tokens prompt_token_count
        prompt_eval_count num_prompt_tokens prompt tokens.input_tokens input
    """,
    "output": """
        billed_units.output_tokens output_tokens completion_tokens candidates_token_count
        eval_count num_completion_tokens completion tokens.output_tokens output
    """,
    "total": """
        total_tokens total_token_count num_total_tokens total
    """,
    "cache_read": """
        cache_read.input_tokens cache_read_input_tokens prompt_tokens_details.cached_tokens
        prompt_token_details.cached_tokens input_tokens_details.cached_tokens
        prompt_details.cache_read input_token_details.cache_read
        input_token_details.priority_cache_read input_token_details.flex_cache_read
        cached_content_token_count prompt_cache_hit_tokens prompt_eval_cached_count
        input_token_details.cache_read_tokens cached_input_tokens input_cache_read cached_tokens
    """,
    "cache_write": """
        cache_creation.input_tokens cache_write.input_tokens cache_creation_input_tokens
        cache_write_input_tokens prompt_tokens_details.cache_write_tokens
        input_tokens_details.cache_write_tokens prompt_details.cache_write
        input_token_details.cache_creation input_token_details.priority_cache_creation
        input_token_details.flex_cache_creation input_token_details.cache_write_tokens
        input_cache_creation
    """,
    "cache_write_5m": """
        cache_creation.ephemeral_5m_input_tokens cache_details.5m
        input_token_details.ephemeral_5m_input_tokens
    """,
    "cache_write_1h": """
        cache_creation.ephemeral_1h_input_tokens cache_details.1h
        input_token_details.ephemeral_1h_input_tokens
    """,
    "reasoning": """
        reasoning.output_tokens completion_tokens_details.reasoning_tokens
        output_tokens_details.reasoning_tokens output_tokens_details.thinking_tokens
        completion_details.reasoning details.reasoning_tokens output_token_details.reasoning
        output_token_details.priority_reasoning output_token_details.flex_reasoning
        output_token_details.reasoning_tokens thoughts_token_count reasoning_tokens
        output_reasoning
    """,
    "tool_prompt": """
        tool_use_prompt_token_count
    """,
    "input_audio": """
        prompt_tokens_details.audio_tokens prompt_details.audio prompt_tokens_details.audio
        input_token_details.audio
    """,
    "output_audio": """
        completion_tokens_details.audio_tokens completion_details.audio
        output_token_details.audio candidates_tokens_details.audio
    """,
    "web_searches": """
        server_tool_use.web_search_requests
    """,
    "tier": """
        service_tier traffic_type service_tier.type
    """,
}
"""Names of each count at vendors, clients and instrumentations."""


@pytest.mark.parametrize("kind", KNOWN)
def test_known_names_mean_their_count(kind: str) -> None:
    """In snake case and in camel case."""
    for name in KNOWN[kind].split():
        first, *others = name.split("_")
        for spelled in (name, first + "".join(map(str.title, others))):
            meaning = meaning_of(spelled)
            assert meaning is not None, spelled
            assert (meaning.kind, meaning.is_certain) == (kind, True), spelled


NAMES = st.sampled_from(
    [
        *OPENAI, "cached_tokens", "audio_tokens", "reasoning_tokens",
        "inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens",
        "cacheWriteInputTokens", "cacheDetails", "input_tokens", "output_tokens",
        "cache_creation_input_tokens", "cache_creation", "ephemeral_1h_input_tokens",
        "ephemeral_5m_input_tokens", "promptTokenCount", "candidatesTokenCount",
        "thoughtsTokenCount", "toolUsePromptTokenCount", "totalTokenCount", "promptTokensDetails",
        "billed_units", "ttl", "modality", "tokenCount",
    ]
)  # fmt: skip
COUNTS = st.integers(0, 200) | st.integers(0, MAX_TOKENS)
GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from([np.int8(-3), np.float64("nan"), 10**30, 10**400, 1j, Ellipsis, object()]),
)
NESTED = st.recursive(
    COUNTS | GARBAGE,
    lambda inner: st.one_of(
        st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=6),
        st.lists(inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=4).map(lambda members: Odd(**members)),
    ),
    max_leaves=12,
)
REPORTED = st.dictionaries(NAMES, COUNTS | NESTED, max_size=8) | NESTED
PROVIDERS = st.sampled_from([*vendors_of_classes(), "unknown"])


def check(record: UsageRecord) -> None:
    """Nothing that is reported becomes anything but numbers of tokens, and parts stay parts."""
    counted = completed(record, 10, 5)
    for usage in (record.usage, counted, record.reported or Usage()):
        for each in fields(usage):
            count = getattr(usage, each.name)
            assert count is None or (type(count) is int and 0 <= count <= 4 * MAX_TOKENS), each
    for usage in (record.usage, counted):
        assert usage.cache_read + usage.cache_write <= usage.input
        assert (usage.cache_write_1h or 0) <= usage.cache_write
        assert (usage.reasoning or 0) <= usage.output
    assert counted.total >= max(record.total or 0, record.usage.total)
    assert counted == record.usage or record.sure != "measured"


@given(REPORTED, PROVIDERS)
def test_any_report_becomes_whole_numbers(raw: Any, provider: str) -> None:
    """However deep it is nested, for every vendor."""
    check(record_of_usage(raw, provider))
    check(record_of_response(raw, provider))


@given(
    st.dictionaries(
        st.builds(str.__add__, st.sampled_from([*field_names().prefixes, "x."]), NAMES),
        COUNTS | NESTED,
    ),
    st.sampled_from(["", "langsmith", "opentelemetry.instrumentation.botocore.bedrock-runtime"]),
    NESTED,
)
def test_any_span_usage_becomes_whole_numbers(
    attributes: dict[str, Any], scope: str, odd: Any
) -> None:
    """For every instrumentation; an importer reads the files of strangers."""
    for name in ("gen_ai.usage", "langsmith.metadata.usage_metadata"):
        check(record_of_span({**attributes, name: odd}, scope))
        check(record_of_span({**attributes, name: '{"input_tokens": 7, "x": [1]}'}, scope))


# --- any names ------------------------------------------------------------------------------------


def record_of(case: Case) -> UsageRecord:
    """Read a usage as its emitter writes it."""
    if case.is_span:
        return record_of_span({"gen_ai.operation.name": "chat", **case.raw}, "acme", "", case.model)
    return record_of_usage(case.raw, case.provider, case.model)


def test_random_usage_is_exact_or_unknown() -> None:
    """Nine of ten random spellings are exact, the price of the others is unknown, none is wrong."""
    exact = 0
    for case in cases(seed=1, number=500):
        record = record_of(case)
        if record.unplaced is None:
            assert (record.sure, record.usage) == ("measured", case.truth), case.raw
            exact += 1
        else:
            assert case.may_be_unknown, case.raw
            assert record.unplaced.reason
    assert exact >= 450


def test_innocent_attributes_change_nothing() -> None:
    """Costs, times, shares, flags, bounds, sums and settings of a request are no usage."""
    counts = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 20}
    expected = record_of_span(counts)
    for name, value in innocents(seed=1, number=200):
        assert record_of_span({**counts, name: value}) == expected, name


UNPLACED: dict[str, tuple[str, str, dict[str, Any], Usage, str]] = {
    "a rest of Claude's total": (
        "bedrock",
        "us.anthropic.claude-sonnet-4-20250514-v1:0",
        {"inputTokens": 12, "outputTokens": 150, "totalTokens": 7_162},
        Usage(input=7_012, output=150),
        "its total has more tokens than its parts",
    ),
    "a new part": (
        "openai",
        "gpt-4o",
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"frobnicated_tokens": 30},
        },
        Usage(input=100, output=20),
        "the rate of its prompt_tokens_details.frobnicated_tokens is unknown",
    ),
    "two counts of one part": (
        "openai",
        "gpt-4o",
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "cached_tokens": 30,
            "prompt_tokens_details": {"cached_tokens": 40},
        },
        Usage(input=100, output=20),
        "the rate of its prompt_tokens_details.cached_tokens, cached_tokens is unknown",
    ),
    "Claude's cached tokens, without a total": (
        "MyModel",
        "claude-sonnet-4-5",
        {"input_tokens": 100, "output_tokens": 20, "cache_read_tokens": 40},
        Usage(input=100, output=20, cache_read=40),
        "its input may or may not contain its cached tokens",
    ),
}


@pytest.mark.parametrize("case", UNPLACED)
def test_tokens_that_cannot_be_placed_are_named(case: str) -> None:
    """They are counted at least by the vendor's total, and never as output."""
    provider, model, raw, usage, reason = UNPLACED[case]
    record = record_of_usage(raw, provider, model)
    assert record.unplaced is not None
    assert (record.sure, record.usage, record.unplaced.reason) == ("measured", usage, reason)


PLACED: dict[str, tuple[str, str, dict[str, Any], Usage]] = {
    "OpenAI's models on Bedrock report the whole input": (
        "bedrock",
        "openai.gpt-5.6-v1:0",
        {
            "inputTokens": 12_401,
            "outputTokens": 30,
            "totalTokens": 24_830,
            "cacheReadInputTokens": 8_367,
            "cacheWriteInputTokens": 4_032,
        },
        Usage(input=12_401, output=30, cache_read=8_367, cache_write=4_032),
    ),
    "thoughts that an OpenAI-compatible answer leaves out": (
        "openai",
        "gemini-2.5-pro",
        {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 113},
        Usage(input=9, output=104),
    ),
    "an unknown word in the name of a known part": (
        "openai",
        "gpt-4o",
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "cached_tokens": 30,
            "foo_cached_tokens": 30,
        },
        Usage(input=100, output=20, cache_read=30),
    ),
    "counts of other things": (
        "openai",
        "gpt-4o",
        {"prompt_tokens": 100, "completion_tokens": 20, "num_sources_used": 3, "queue_time": 7},
        Usage(input=100, output=20),
    ),
    "cached tokens of two modalities": (
        "openai",
        "gpt-4o",
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "input_token_details": {
                "cached_tokens": 40,
                "cached_tokens_details": {"text_tokens": 40, "audio_tokens": 0},
                "accepted_prediction_tokens": 5,
            },
        },
        Usage(input=100, output=20, cache_read=40),
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_tokens_are_placed_by_vendor_and_family(case: str) -> None:
    """Where the total alone does not show it."""
    provider, model, raw, usage = PLACED[case]
    record = record_of_usage(raw, provider, model)
    assert (record.sure, record.usage, record.unplaced) == ("measured", usage, None)
