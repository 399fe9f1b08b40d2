"""A vendor calls further models within one request: what Strands passes on of their usage.

Both vendors report it in fields that Strands' classes drop: Anthropic in `usage.iterations`
(https://platform.claude.com/docs/en/agents-and-tools/tool-use/advisor-tool), OpenRouter in
`usage.cost` (https://openrouter.ai/docs/use-cases/usage-accounting).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool

import otel_limits
from otel_limits import ModelCall, enable
from tests.wire import formats, models
from tests.wire.formats import Answer
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.models import Model

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the vendors' clients
    pytest.mark.skipif(
        sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
    ),
]

INPUT, OUTPUT = 412, 531
"""Tokens of the model that the agent calls."""

EXECUTOR = {"input_tokens": INPUT, "output_tokens": OUTPUT}
ADVISOR = {"input_tokens": 823, "output_tokens": 1_612, "model": "claude-opus-4-8"}
ADVISED: dict[str, Any] = {
    **EXECUTOR,
    "iterations": [{"type": "message", **EXECUTOR}, {"type": "advisor_message", **ADVISOR}],
}
"""The advisor's tokens are not in the totals."""


def anthropic() -> Reply:
    """Answer with the advice between two texts."""
    begin, *text, _, end = formats.anthropic(Answer(usages=(ADVISED,)))
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "advisor", "input": {}},
        {
            "type": "advisor_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {"type": "advisor_result", "text": "Moor in the north."},
        },
    ]
    advice = [
        event
        for index, block in enumerate(blocks, start=1)
        for event in (
            {"type": "content_block_start", "index": index, "content_block": block},
            {"type": "content_block_stop", "index": index},
        )
    ]
    finish = {"stop_reason": "end_turn", "stop_sequence": None}
    delta = {"type": "message_delta", "delta": finish, "usage": ADVISED}
    return Reply(formats.sse(begin, *text, *advice, delta, end, names=True))


def compacted() -> Reply:
    """Answer after a summary of the conversation, whose tokens are not in the totals."""
    summary = {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500}
    usage = {**EXECUTOR, "iterations": [summary, {"type": "message", **EXECUTOR}]}
    return Reply(formats.sse(*formats.anthropic(Answer(usages=(usage,))), names=True))


def openrouter() -> Reply:
    """Answer with the cost of all models."""
    usage = {
        "prompt_tokens": INPUT,
        "completion_tokens": OUTPUT,
        "total_tokens": INPUT + OUTPUT,
        "cost": 0.252,
        "cost_details": {"upstream_inference_cost": 0.252},
        "server_tool_use": {"tool_calls_requested": 1, "tool_calls_executed": 1},
    }
    return Reply(formats.sse_with_end(*formats.openai_chat(Answer(usages=(usage,)))))


ADVISOR_TOOL = {"type": "advisor_20260301", "name": "advisor", "model": "claude-opus-4-8"}
COMPACT = {"extra_body": {"context_management": {"edits": [{"type": "compact_20260112"}]}}}
FUSION = {"extra_body": {"plugins": [{"id": "fusion"}]}}
ROUTED = {"model_id": "openrouter/openai/gpt-4o"}

WAYS: dict[str, tuple[Callable[..., Model], dict[str, Any], Callable[[], Reply]]] = {
    "Anthropic, advisor": (models.anthropic, {"params": {"tools": [ADVISOR_TOOL]}}, anthropic),
    "Anthropic, advisor in anthropic_tools": (
        models.anthropic,
        {"anthropic_tools": [ADVISOR_TOOL]},
        anthropic,
    ),
    "Anthropic, compaction": (models.anthropic, {"params": COMPACT}, compacted),
    "OpenRouter, advisor": (
        models.openai,
        {"params": {"tools": [{"type": "openrouter:advisor"}]}},
        openrouter,
    ),
    "OpenRouter, fusion": (models.openai, {"params": FUSION}, openrouter),
    "OpenRouter by LiteLLM, fusion": (models.litellm, {**ROUTED, "params": FUSION}, openrouter),
}


def call_of(way: str, vendor: Vendor, events: list[Event], *, is_offered: bool) -> ModelCall:
    """Call the model once, with the tool offered or not, and return the event."""
    make, config, reply = WAYS[way]
    settings = config if is_offered else {**config, "params": {}, "anthropic_tools": []}
    config = {name: each for name, each in settings.items() if each or name == "params"}
    vendor.replies[:] = [reply()]
    enable(max_turns=3, observers=[events.append])
    Agent(model=make(vendor.url, **config), callback_handler=None)("go")
    (call,) = (event for event in events if isinstance(event, ModelCall))
    return call


@pytest.mark.parametrize("way", WAYS)
def test_call_that_may_use_further_models_has_no_price(
    way: str, vendor: Vendor, events: list[Event]
) -> None:
    """Strands passes on the tokens of the first model only, so a price would be far too low."""
    call = call_of(way, vendor, events, is_offered=True)
    assert (call.usage.input, call.usage.output) == (INPUT, OUTPUT)
    assert (call.price, call.price_at_most) == (None, None)
    sent = vendor.requests[0]
    assert any(each in sent for each in (b"advisor", b"fusion", b"compact"))


@pytest.mark.parametrize("way", WAYS)
def test_call_without_further_models_has_a_price(
    way: str, vendor: Vendor, events: list[Event]
) -> None:
    """The tool alone makes the price unknown: not the model, and not the address."""
    assert call_of(way, vendor, events, is_offered=False).price


def searching() -> Reply:
    """Request a tool of the application, after the advice."""
    answer = Answer(usages=(ADVISED,), tool=("search", "{}"))
    return Reply(formats.sse(*formats.anthropic(answer), names=True))


@tool
def search() -> str:
    """Search."""
    return "nothing"


@pytest.mark.parametrize("way", ["Anthropic, advisor", "Anthropic, advisor in anthropic_tools"])
def test_cost_limit_alone_halts_before_the_call_after_advice(way: str, vendor: Vendor) -> None:
    """Nothing bounds the advice: by default, the number of its calls is "unlimited"."""
    make, config, _ = WAYS[way]
    vendor.replies[:] = [searching() for _ in range(9)]
    enable(max_cost_usd=1)
    agent = Agent(model=make(vendor.url, **config), tools=[search], callback_handler=None)
    stop = otel_limits.stop_of(agent("go"))
    assert stop is not None
    assert (stop.reason, stop.cost, stop.unpriced_calls) == ("max_cost_usd", 0, 1)
    assert len(vendor.requests) == 1
