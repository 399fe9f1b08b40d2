"""Vendors' bills for a call, and the names of their usage fields."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The vendor's bill for one call or several."""

    input: int = 0
    output: int = 0
    read: int = 0
    """Tokens read from the cache, a part of the input."""
    write: int = 0
    """Tokens put in the cache, a part of the input."""
    write_1h: int = 0
    """The part of them that is kept for an hour."""
    reasoning: int = 0
    """Reasoning tokens, a part of the output."""

    @property
    def cost(self) -> Decimal:
        """USD at `PRICES`, added up as vendors do."""
        parts = {
            "input": self.input - self.read - self.write,
            "cache_read": self.read,
            "cache_write": self.write - self.write_1h,
            "cache_write_1h": self.write_1h,
            "output": self.output,
        }
        amounts = (PRICES[part] * tokens for part, tokens in parts.items())
        return sum(amounts, Decimal(0)) / 1_000_000


PRICES = {
    "input": Decimal("1.3"),
    "output": Decimal("7.9"),
    "cache_read": Decimal("0.17"),
    "cache_write": Decimal("2.1"),
    "cache_write_1h": Decimal("3.7"),
}
"""USD per million tokens, for every model that does not run locally: all different, so a token
counted in the wrong field shows."""


def openai(bill: Bill, *, outside: bool = False, singular: bool = False) -> dict[str, Any]:
    """Usage in OpenAI's format; `outside` excludes reasoning from the completion, as xAI does."""
    details = "prompt_token_details" if singular else "prompt_tokens_details"
    return {
        "prompt_tokens": bill.input,
        "completion_tokens": bill.output - (bill.reasoning if outside else 0),
        "total_tokens": bill.input + bill.output,
        details: {"cached_tokens": bill.read, "cache_write_tokens": bill.write},
        "completion_tokens_details": {"reasoning_tokens": bill.reasoning},
    }


def deepseek(bill: Bill) -> dict[str, Any]:
    """Usage of DeepSeek: OpenAI's format, and how much of the input its cache had."""
    return {
        **openai(bill),
        "prompt_cache_hit_tokens": bill.read,
        "prompt_cache_miss_tokens": bill.input - bill.read,
    }


def minimax(bill: Bill) -> dict[str, Any]:
    """Usage of MiniMax: OpenAI's format, and characters, which text models do not bill."""
    return {
        "total_tokens": bill.input + bill.output,
        "total_characters": 0,
        "prompt_tokens": bill.input,
        "completion_tokens": bill.output,
        "prompt_tokens_details": {"cached_tokens": bill.read},
        "completion_tokens_details": {"reasoning_tokens": bill.reasoning},
    }


def responses(bill: Bill) -> dict[str, Any]:
    """Usage of OpenAI's Responses."""
    return {
        "input_tokens": bill.input,
        "output_tokens": bill.output,
        "total_tokens": bill.input + bill.output,
        "input_tokens_details": {"cached_tokens": bill.read, "cache_write_tokens": bill.write},
        "output_tokens_details": {"reasoning_tokens": bill.reasoning},
    }


def anthropic(bill: Bill) -> dict[str, Any]:
    """Usage of Anthropic's Messages: input excludes cached tokens."""
    return {
        "input_tokens": bill.input - bill.read - bill.write,
        "output_tokens": bill.output,
        "cache_read_input_tokens": bill.read,
        "cache_creation_input_tokens": bill.write,
        "cache_creation": {
            "ephemeral_5m_input_tokens": bill.write - bill.write_1h,
            "ephemeral_1h_input_tokens": bill.write_1h,
        },
    }


def bedrock(bill: Bill) -> dict[str, Any]:
    """Usage of Bedrock's Converse: input excludes cached tokens."""
    parts = {"5m": bill.write - bill.write_1h, "1h": bill.write_1h}
    details = [{"ttl": ttl, "inputTokens": tokens} for ttl, tokens in parts.items() if tokens]
    return {
        "inputTokens": bill.input - bill.read - bill.write,
        "outputTokens": bill.output,
        "totalTokens": bill.input + bill.output,
        "cacheReadInputTokens": bill.read,
        "cacheWriteInputTokens": bill.write,
        **({"cacheDetails": details} if details else {}),
    }


def gemini(bill: Bill) -> dict[str, Any]:
    """Usage of Gemini: candidates exclude thoughts."""
    return {
        "promptTokenCount": bill.input,
        "candidatesTokenCount": bill.output - bill.reasoning,
        "thoughtsTokenCount": bill.reasoning,
        "cachedContentTokenCount": bill.read,
        "totalTokenCount": bill.input + bill.output,
    }


def ollama(bill: Bill) -> dict[str, Any]:
    """Usage of Ollama."""
    return {"prompt_eval_count": bill.input, "eval_count": bill.output}


def llamaapi(bill: Bill) -> list[dict[str, Any]]:
    """Usage of the Llama API, in floats."""
    counts = {"prompt": bill.input, "completion": bill.output, "total": bill.input + bill.output}
    return [
        {"metric": f"num_{name}_tokens", "value": float(count), "unit": "tokens"}
        for name, count in counts.items()
    ]


def plain(bill: Bill) -> dict[str, Any]:
    """Usage of a container on SageMaker: Strands' class takes no other keys."""
    return {
        "prompt_tokens": bill.input,
        "completion_tokens": bill.output,
        "total_tokens": bill.input + bill.output,
    }
