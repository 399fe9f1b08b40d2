"""Stated costs and served tiers through the vendors' own clients, against the page."""

from __future__ import annotations

import asyncio
import itertools
import logging
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from agents import Agent as SDKAgent
from agents import ModelSettings, RunConfig, Runner
from langchain.agents import create_agent
from strands import Agent, tool

from otel_limits import Limits, ModelCall, Stop, disable, enable, stop_of
from tests.paths import ROOT
from tests.readme import with_tables
from tests.wire import chat_models, models, stated
from tests.wire.stated import COSTS, DOORS, Fact, reply, stated_tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

ROUTED = COSTS[0]
HANDS_ON = ("Strands `OpenAIModel`", "LangChain `ChatOpenAI`", "SDK `OpenAIChatCompletionsModel`")
"""A class of each framework that hands on the cost."""


def test_page_lists_what_each_class_hands_on(vendor: Vendor) -> None:
    """Run `python -m tests.generate tables` when this fails."""
    page = (ROOT / "otel_limits/docs/vendors.md").read_text(encoding="utf-8")
    assert with_tables(page, {"stated-costs": lambda: stated_tables(vendor)}) == page


def routed(**usage: Any) -> Fact:
    """A response of OpenRouter."""
    return Fact(**{**stated.ROUTED, "name": "", "usage": usage})


def model(vendor: Vendor, *facts: Fact) -> Any:
    """Strands' class for the answers with some facts."""
    vendor.replies[:] = [reply(fact, "chat", is_streamed=True) for fact in facts]
    return stated.strands_openai(vendor, ROUTED, is_streamed=True)


@tool
def search() -> str:
    """Find nothing."""
    return ""


def test_limit_in_usd_counts_the_stated_cost(vendor: Vendor, events: list[Event]) -> None:
    """The list has no price of these calls."""
    enable(Limits(max_cost_usd=Decimal("0.03")), observers=[events.append])
    asked = model(vendor, routed(cost=0.02, is_byok=False))
    vendor.replies[:] = [
        reply(routed(cost=0.02, is_byok=False), "chat", is_streamed=True, tool=("search", "{}"))
    ]
    stop = stop_of(Agent(model=asked, tools=[search], callback_handler=None)("Go."))
    assert stop is not None
    assert (stop.reason, stop.cost, stop.model_calls) == ("max_cost_usd", Decimal("0.04"), 2)


def test_quota_in_usd_counts_the_stated_cost(
    vendor: Vendor, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each framework, streamed and not: the third call is not sent, and the halt names why."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {daily: {usd: 0.03, window: day}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    asked = routed(cost=0.02, is_byok=False)
    doors = [door for door in DOORS if door.name in HANDS_ON]
    halted: dict[tuple[str, bool], Any] = {}
    for door, is_streamed in itertools.product(doors, (True, False)):
        events.clear()
        vendor.requests.clear()
        enable(observers=[events.append])
        for _ in range(3):
            vendor.replies[:] = [reply(asked, door.form, is_streamed=is_streamed)]
            door.ask(vendor, asked, is_streamed)
        stops = [event for event in events if isinstance(event, Stop)]
        is_named = "allows 0.03 USD: 0.04 used" in stops[-1].sentence
        costs = [str(stop.cost) for stop in stops]
        halted[door.name, is_streamed] = (stops[-1].reason, is_named, costs, len(vendor.requests))
        disable()
    right = ("quota_exceeded", True, ["0.02", "0.02", "0"], 2)
    assert halted == dict.fromkeys(itertools.product(HANDS_ON, (True, False)), right)


def test_amount_that_is_not_a_cost_is_logged_once(
    vendor: Vendor, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """By vendor, and each call counts."""
    enable(Limits(max_turns=9), observers=[events.append])
    facts = [routed(cost=amount, is_byok=False) for amount in ("0.01", -1, 9_999)]
    asked = model(vendor, *facts)
    with caplog.at_level(logging.WARNING, "otel_limits"):
        for _ in facts:
            Agent(model=asked, callback_handler=None)("Go.")
    calls = [event for event in events if isinstance(event, ModelCall)]
    assert [bool(call.stated_refused) for call in calls] == [True] * 3
    assert [call.price for call in calls] == [None] * 3
    (line,) = [each.message for each in caplog.records if "openrouter" in each.message]
    assert line.startswith("The cost that openrouter states for a call of model")
    assert "it is not a number" in line


def test_raw_usage_stays_for_an_application_that_asked_for_it(vendor: Vendor) -> None:
    """It is the SDK's own setting."""
    enable(Limits(max_turns=9))
    vendor.replies[:] = [reply(ROUTED, "chat", is_streamed=False)]
    agent = SDKAgent(
        "boss",
        model=stated.sdk_chat(vendor, ROUTED),
        model_settings=ModelSettings(preserve_raw_usage=True),
    )
    done = asyncio.run(Runner.run(agent, "Go.", run_config=RunConfig(tracing_disabled=True)))
    (response,) = done.raw_responses
    assert response.raw_usage is not None
    assert response.raw_usage["cost"] == 0.0021


FAST: dict[str, Any] = {"extra_body": {"speed": "fast"}}


def ask_strands(vendor: Vendor) -> None:
    """Request Anthropic's fast mode through Strands."""
    asked = models.anthropic(vendor.url, params=FAST)
    Agent(model=asked, callback_handler=None)("Go.")


def ask_langchain(vendor: Vendor, *, is_streamed: bool) -> None:
    """Request it through LangChain."""
    graph = create_agent(chat_models.anthropic(vendor.url, model_kwargs=FAST), [])
    given: Any = {"messages": [("user", "Go.")]}
    if is_streamed:
        list(graph.stream(given, stream_mode="messages"))
    else:
        graph.invoke(given)


WAYS: dict[str, tuple[bool, Callable[[Vendor], None]]] = {
    "strands": (True, ask_strands),
    "langchain": (False, lambda vendor: ask_langchain(vendor, is_streamed=False)),
    "langchain, streamed": (True, lambda vendor: ask_langchain(vendor, is_streamed=True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_served_speed_is_billed(way: str, vendor: Vendor, events: list[Event]) -> None:
    """Standard if that was served, also next to a service tier, which says nothing of it."""
    enable(Limits(max_turns=9), observers=[events.append])
    is_streamed, ask = WAYS[way]
    served = {}
    for speed in ("standard", "fast", None):
        usage = {"service_tier": "standard", **({} if speed is None else {"speed": speed})}
        fact = Fact(name="", usage=usage)
        vendor.replies[:] = [reply(fact, "anthropic", is_streamed=is_streamed)]
        ask(vendor)
        served[speed] = next(each.tier for each in events if isinstance(each, ModelCall))
        events.clear()
    assert b'"speed":"fast"' in vendor.requests[-1].replace(b" ", b"")
    assert served == {"standard": "standard", "fast": "fast", None: "fast"}
