"""Caps at one token below and above what a vendor bills, with cached tokens and reasoning."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import Limits, enable
from otel_limits.testing import ScriptedModel, endless, only, uses

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent

CACHED: dict[str, tuple[str, dict[str, int], tuple[int, int]]] = {
    "inside": (
        "openai",
        {"inputTokens": 12_050, "outputTokens": 30, "totalTokens": 12_080},
        (12_050, 30),
    ),
    "outside": (
        "bedrock",
        {"inputTokens": 50, "outputTokens": 30, "totalTokens": 12_080},
        (12_050, 30),
    ),
    "outside, in no total": (
        "bedrock",
        {"inputTokens": 50, "outputTokens": 30, "totalTokens": 80},
        (12_050, 30),
    ),
    "outside, Anthropic": (
        "anthropic",
        {"inputTokens": 50, "outputTokens": 30, "totalTokens": 12_080},
        (12_050, 30),
    ),
    "reasoning outside": (
        "litellm",
        {"inputTokens": 12_050, "outputTokens": 10, "totalTokens": 12_080},
        (12_050, 30),
    ),
    "a rest that nothing explains": (
        "openai",
        {"inputTokens": 12_050, "outputTokens": 10, "totalTokens": 12_080},
        (12_070, 10),
    ),
}
MODELS = {"reasoning outside": "xai/grok-4"}
"""Usage as Strands' class of a provider hands it on, and what is billed; 2,000 tokens are read from
the cache, and 10,000 written."""


def model_of(provider: str, usage: dict[str, int], model_id: str = "mine") -> ScriptedModel:
    """Make a model of this provider's class that always asks for tools."""
    told: Any = {**usage, "cacheReadInputTokens": 2_000, "cacheWriteInputTokens": 10_000}
    kind = type("Scripted", (ScriptedModel,), {"__module__": f"strands.models.{provider}"})
    model: ScriptedModel = kind(endless(uses("search", usage=told)), model_id=model_id)
    return model


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("name", ["max_token_budget", "max_input_tokens", "max_output_tokens"])
def test_a_cap_on_tokens_is_exact(make_agent: MakeAgent, case: str, name: str, source: str) -> None:
    """Three calls fit where the cap is one token above two, and two where it is just that."""
    provider, usage, (sent, output) = CACHED[case]
    of_call = {"max_input_tokens": sent, "max_output_tokens": output}.get(name, sent + output)
    for cap, expected in ((2 * of_call - 1, 2), (2 * of_call, 2), (2 * of_call + 1, 3)):
        model = model_of(provider, usage, MODELS.get(case, "mine"))
        enable(only(name, cap))
        assert (make_agent(model)("go").stop_reason, model.calls) == (name, expected)


@pytest.mark.parametrize("off", ["-0.000000001", "0", "0.000000001"])
@pytest.mark.parametrize("kind", ["limits", "tree"])
def test_a_cap_on_cost_is_exact(
    make_agent: MakeAgent,
    kind: str,
    off: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three calls fit where the cap is a billionth of a USD above two, two where it is just that.

    The price is one that no float can hold, times a number of tokens that no vendor rounds.
    """
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {mine: {price: {input: 0.1, output: 0.7}}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    of_call = (Decimal("0.1") * 12_050 + Decimal("0.7") * 30) / 1_000_000
    cap = Limits(max_cost_usd=2 * of_call + Decimal(off))
    enable(cap) if kind == "limits" else enable(tree=cap)
    told = {"inputTokens": 12_050, "outputTokens": 30, "totalTokens": 12_080}
    model = ScriptedModel(endless(uses("search", usage=told)), model_id="mine")
    assert make_agent(model)("go").stop_reason == "max_cost_usd"
    assert model.calls == (3 if off == "0.000000001" else 2)
