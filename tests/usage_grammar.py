"""Random usages by the grammar of names, nestings, orders and vendors, each with its meaning."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SIDES: Final = (("input", "output"), ("prompt", "completion"))
VENDORS: Final = ("openai", "anthropic", "gemini", "bedrock", "unknown")
PREFIXES: Final = (
    "gen_ai.usage.",
    "llm.usage.",
    "ai.usage.",
    "acme.usage.",
    "app.llm.token_usage.",
)

READ: Final = (
    "cache_read_{side}_tokens", "{side}_cache_read_tokens", "cached_{side}_tokens", "cached_tokens",
    "{side}_tokens_details.cached_tokens", "{side}_token_details.cache_read", "cache.read.tokens",
    "details.cache_read_tokens", "tokens_read_from_cache", "{side}_cached_tokens",
    "cache_hit_tokens", "{side}_cache_hit_tokens", "cache_read_token_count", "cached_token_count",
    "{side}_details.cached",
)  # fmt: skip
WRITE: Final = (
    "cache_creation_{side}_tokens", "cache_write_{side}_tokens", "{side}_cache_write_tokens",
    "{side}_tokens_details.cache_write_tokens", "{side}_token_details.cache_creation",
    "details.cache_write_tokens", "cache.creation.tokens", "cache_written_tokens",
    "tokens_written_to_cache", "cache_write_token_count",
)  # fmt: skip
BY_TTL: Final = (
    ("cache_creation.ephemeral_5m_{side}_tokens", "cache_creation.ephemeral_1h_{side}_tokens"),
    ("cache_write_5m_tokens", "cache_write_1h_tokens"),
    ("details.cache_creation_5m_tokens", "details.cache_creation_1h_tokens"),
)
THOUGHTS: Final = (
    "reasoning_tokens", "{side}_tokens_details.reasoning_tokens", "thinking_tokens",
    "{side}_token_details.reasoning", "thoughts_token_count", "details.thinking_tokens",
    "{side}_reasoning_tokens", "reasoning.{side}_tokens", "reasoning_token_count",
)  # fmt: skip
AUDIO: Final = (
    "{side}_audio_tokens", "{side}_tokens_details.audio_tokens", "audio.{side}_tokens",
    "{side}_token_details.audio", "audio_{side}_token_count",
)  # fmt: skip
SAME: Final = (
    "{side}_tokens_details.text_tokens", "{side}_image_tokens", "{side}_token_details.image",
    "completion_tokens_details.accepted_prediction_tokens", "text_{side}_tokens",
)  # fmt: skip
NEW: Final = ("{side}_tokens_details.frobnicated_tokens", "quantum_{side}_tokens", "cache_tokens")
"""Names that no rule knows, whose price differs from that of the whole for all that is known."""

INNOCENT: Final[tuple[str, ...]] = (
    "gen_ai.latency.time_to_first_token", "gen_ai.usage.cost", "gen_ai.usage.{word}_cost",
    "gen_ai.usage.{word}_tokens_cost_usd", "gen_ai.usage.{word}_tokens_per_second",
    "gen_ai.usage.cache_hit_ratio", "gen_ai.usage.{word}_token_rate", "gen_ai.request.max_tokens",
    "gen_ai.request.{word}_tokens", "gen_ai.request.reasoning_effort", "llm.max_{word}_tokens",
    "gen_ai.usage.{word}_latency_ms", "gen_ai.usage.reasoning_enabled", "{word}.cache_control",
    "{word}.image_url", "system.{word}.usage", "process.memory.usage.{word}", "http.{word}.size",
    "{word}.temperature", "auth.{word}.token", "rag.{word}.tokens", "retriever.{word}_tokens",
    "gen_ai.usage.{word}_tokens_limit", "gen_ai.usage.{word}_tokens_remaining", "{word}.count",
    "gen_ai.usage.{word}_token_budget", "session.{word}_tokens", "gen_ai.usage.avg_{word}_tokens",
    "gen_ai.aggregated_usage.{word}_tokens", "tool.{word}_tokens", "embedding.{word}_tokens",
    "gen_ai.usage.{word}_requests", "gen_ai.usage.num_{word}_pages", "gen_ai.usage.{word}_seconds",
    "context.window_tokens", "gen_ai.usage.is_byok", "llm.{word}.score", "disk.usage.total",
    "usage.total_tokens", "billing.usage.total_tokens", "gen_ai.usage.cache_ttl",
    "gen_ai.usage.cache_hit", "gen_ai.agent.{word}_tokens", "gen_ai.usage.{word}_images",
    "ratelimit.{word}_tokens.remaining", "gen_ai.usage.{word}_characters",
)  # fmt: skip
THINGS: Final = (
    "input",
    "output",
    "prompt",
    "completion",
    "cached",
    "reasoning",
    "search",
    "audio",
)


@dataclass(frozen=True)
class Case:
    """One usage as an emitter writes it, and what it means."""

    raw: dict[str, Any]
    provider: str
    model: str
    truth: Usage
    is_span: bool
    may_be_unknown: bool


def cases(seed: int, number: int) -> Iterator[Case]:
    """Yield random usages; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311
    for _ in range(number):
        yield _case(chance)


def innocents(seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """Yield attributes that are no usage of a call, with their values."""
    chance = random.Random(seed)  # noqa: S311
    seen: set[str] = set()
    while len(seen) < number:
        name = chance.choice(INNOCENT).format(word=chance.choice(THINGS))
        name = _spelled(name, chance.choice(("snake", "camel"))) + chance.choice(
            ("", "", f"_{len(seen)}")
        )
        value = chance.choice((7, 0.5, "12", 4_000, True, "high"))
        if name not in seen:
            seen.add(name)
            yield name, value


def _case(chance: random.Random) -> Case:
    is_span = chance.random() < 0.6
    vendor = "unknown" if is_span else chance.choice(VENDORS)
    has_total = chance.random() < 0.6
    truth = _truth(chance)
    # A vendor without a total follows its rule; others may do as they like if a total shows it.
    is_net = vendor in ("anthropic", "bedrock")
    if vendor == "unknown" and has_total:
        is_net = chance.random() < 0.4
    is_apart = has_total and vendor in ("unknown", "openai") and chance.random() < 0.4
    counts = _counts(chance, truth, is_net=is_net, is_apart=is_apart)
    is_new = chance.random() < 0.06
    if is_new:
        counts[chance.choice(NEW).format(side="input")] = chance.randint(1, 20)
    if has_total:
        counts["total_tokens"] = truth.total
    return Case(
        raw=_written(counts, chance, is_span=is_span),
        provider=vendor,
        model=chance.choice(("gpt-4o", "qwen3", "mistral-large")) if is_span else "m",
        truth=truth,
        is_span=is_span,
        may_be_unknown=is_new,
    )


def _truth(chance: random.Random) -> Usage:
    fresh, visible = chance.randint(20, 5_000), chance.randint(5, 3_000)
    read = chance.choice((0, chance.randint(100, 90_000)))
    written = chance.choice((0, 0, chance.randint(100, 9_000)))
    thoughts = chance.choice((None, chance.randint(1, 4_000)))
    return Usage(
        input=fresh + read + written,
        output=visible + (thoughts or 0),
        cache_read=read,
        cache_write=written,
        cache_write_1h=chance.randint(1, written) if written and chance.random() < 0.4 else None,
        reasoning=thoughts,
        input_audio=chance.choice((None, None, None, chance.randint(1, fresh))),
    )


def _counts(chance: random.Random, truth: Usage, *, is_net: bool, is_apart: bool) -> dict[str, int]:
    sent, answered = chance.choice(SIDES)
    read, written, hour = truth.cache_read, truth.cache_write, truth.cache_write_1h
    counts = {
        f"{sent}_tokens": truth.input - (read + written if is_net else 0),
        f"{answered}_tokens": truth.output - ((truth.reasoning or 0) if is_apart else 0),
    }
    if hour is not None:
        five_minutes, one_hour = chance.choice(BY_TTL)
        counts[five_minutes.format(side=sent)] = written - hour
        counts[one_hour.format(side=sent)] = hour
    parts = (
        (READ, sent, read),
        (WRITE, sent, written if hour is None or chance.random() < 0.5 else 0),
        (THOUGHTS, answered, truth.reasoning),
        (AUDIO, sent, truth.input_audio),
        (SAME, chance.choice((sent, answered)), chance.choice((0, 0, chance.randint(1, 20)))),
    )
    for names, side, count in parts:
        if count:
            for name in chance.sample(names, 1 if names is SAME else chance.choice((1, 1, 1, 2))):
                counts[name.format(side=side)] = count
    return counts


def _written(counts: Mapping[str, int], chance: random.Random, *, is_span: bool) -> dict[str, Any]:
    """Write counts in a spelling, an order and a nesting."""
    spelling = chance.choice(("snake", "snake", "camel", "kebab", "upper"))
    as_text = is_span and chance.random() < 0.3
    items = [
        (
            _spelled(name, spelling),
            str(count) if as_text else float(count) if chance.random() < 0.1 else count,
        )
        for name, count in counts.items()
    ]
    chance.shuffle(items)
    flat = dict(items)
    if not is_span:
        return _nested(flat)
    prefix = chance.choice(PREFIXES)
    form = chance.choice(("flat", "flat", "objects", "json"))
    if form == "flat":
        return {prefix + name: count for name, count in flat.items()}
    nested = _nested(flat)
    if form == "objects":
        return {
            prefix + name: json.dumps(held) if isinstance(held, dict) else held
            for name, held in nested.items()
        }
    return {prefix.removesuffix("."): json.dumps(nested)}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, count in flat.items():
        *above, last = name.split(".")
        at = nested
        for each in above:
            at = at.setdefault(each, {})
        at[last] = count
    return nested


def _spelled(name: str, spelling: str) -> str:
    if spelling == "upper":
        return name.upper()
    if spelling == "kebab":
        return name.replace("_", "-")
    if spelling == "camel":
        return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)
    return name
