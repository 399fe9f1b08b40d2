"""Makes garbage: text that is nearly right, text that breaks parsers, and mutations of both."""

from __future__ import annotations

from random import Random
from typing import Any

PIECES = (
    *("", " ", "\t", "\n", "\x00", "\x1b[31m", "\ufeff", "\udcff", "\N{EURO SIGN}", "\u0663", "%s"),
    *("-1", "0", "1", "1e999", "nan", "inf", "-0.0", "9" * 400, "0x10", "1_000", "2.5", "1,,2"),
    *("[", "]", "{", "}", "${HOME}", "~nosuchuser/x", "../" * 40, "/dev/null", "/proc/self/mem"),
    *("redis://[", "redis://u:hunter2@127.0.0.1:1/0", "redis://:99999", "redis+cluster://", "a://"),
    *("postgresql://u:p/w?x@", "sqlite:///\x00", "sqlite://u:hunter2@h", "mysql://h", "memory://x"),
    *("&a [*a]", "!!python/object:os.system", "? :", "- - -", "a: *b", "<<: 1", "=", ",", ":"),
)

EVENTS: tuple[dict[str, Any], ...] = (
    {"messageStart": {"role": "assistant"}},
    {"contentBlockStart": {"start": {}}},
    {"contentBlockStart": {"start": {"toolUse": {"name": "search", "toolUseId": "1"}}}},
    {"contentBlockDelta": {"delta": {"text": "words"}}},
    {"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}},
    {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "thought"}}}},
    {"contentBlockStop": {}},
    {"messageStop": {"stopReason": "tool_use"}},
    {"metadata": {"usage": {"inputTokens": 5, "outputTokens": 5, "totalTokens": 10}}},
)

FIGURES: tuple[Any, ...] = (
    None,
    -1,
    0,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "7",
    "",
    [],
    {},
    True,
    b"\xff",
)


def text(random: Random) -> str:
    """Some pieces in a row."""
    return "".join(random.choices(PIECES, k=random.randint(1, 3)))


def mutated(random: Random, sound: str) -> str:
    """Change a text in a few places: what is left out, doubled or put in."""
    for _ in range(random.randint(0, 4)):
        begin = random.randrange(len(sound) + 1)
        end = min(len(sound), begin + random.randint(0, 6))
        put = random.choice((random.choice(PIECES), sound[begin:end] * 2, ""))
        sound = sound[:begin] + put + sound[end:]
    return sound


def events(random: Random) -> list[Any]:
    """A model's stream: in any order, any of it twice or missing, with any usage."""
    chosen: list[Any] = [event for event in EVENTS if random.random() < 0.85]
    if random.random() < 0.3:
        random.shuffle(chosen)
    if random.random() < 0.2:
        chosen.insert(random.randrange(len(chosen) + 1), {text(random): text(random)})
    names = ("inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens", "x")
    usage = {name: random.choice(FIGURES) for name in random.sample(names, random.randint(0, 5))}
    return [*chosen, {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}]
