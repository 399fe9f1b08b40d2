"""Stated costs and served tiers that frameworks hand on: the tables of the page on vendors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.wire import formats, usages
from tests.wire.chat_models import anthropic_events, anthropic_whole
from tests.wire.formats import Answer
from tests.wire.hosts import clients
from tests.wire.run import ENVIRONMENT
from tests.wire.server import Reply, serving
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_limits import ModelCall
    from tests.wire.server import Vendor

BILL: Final = Bill(input=1_000, output=100, read=800)
LENIENT: Final = {"drop_params": True}
"""LiteLLM's setting for requests with arguments that a vendor does not know."""
EVENT_STREAM: Final = "application/vnd.amazon.eventstream"
YES, NO, STREAMED, WHOLE, NONE = "yes", "no", "streamed", "not streamed", "-"


# --- the responses --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A field of a response that decides the price."""

    name: str
    host: str = ""
    """The vendor's API."""
    model: str = ""
    prefix: str = "openai"
    """LiteLLM's name of the vendor."""
    formats: tuple[str, ...] = ("chat", "responses")
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the usage."""
    response: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the response outside of its usage."""
    is_told: Callable[[ModelCall], bool] = lambda call: call.price_source == "stated"
    """Whether a call shows that the framework has handed it on."""


ROUTED: Final[dict[str, Any]] = {
    "host": "https://openrouter.ai/api/v1",
    "model": "anthropic/claude-3.7-sonnet",
    "prefix": "openrouter",
}
OWN_KEY: Final = {"upstream_inference_cost": 0.002}
SEARCHED: Final[dict[str, Any]] = {
    "host": "https://api.perplexity.ai",
    "model": "sonar-pro",
    "prefix": "perplexity",
    "formats": ("chat",),
}
COSTS: Final = (
    Fact(name="OpenRouter", **ROUTED, usage={"cost": 0.0021, "is_byok": False}),
    Fact(
        name="OpenRouter, own key",
        **ROUTED,
        usage={"cost": 0.0001, "is_byok": True, "cost_details": OWN_KEY},
        is_told=lambda call: str(call.price) == "0.0021",
    ),
    Fact(name="Perplexity", **SEARCHED, usage={"cost": {"total_cost": 0.0105}}),
    Fact(
        name="Perplexity's fee",
        **SEARCHED,
        usage={"search_context_size": "low"},
        is_told=lambda call: call.price is not None,
    ),
    Fact(
        name="xAI",
        host="https://api.x.ai/v1",
        model="grok-3",
        prefix="xai",
        usage={"cost_in_usd_ticks": 21_000_000},
    ),
    Fact(
        name="LiteLLM's proxy, recorded",
        host="http://proxy.internal:4000/v1",
        model="gpt-4o",
        usage={"cost": 0.0021},
        is_told=lambda call: call.stated_cost is not None and call.price_source != "stated",
    ),
    Fact(
        name="tier of OpenAI",
        host="https://api.openai.com/v1",
        model="gpt-4o",
        response={"service_tier": "priority"},
        is_told=lambda call: call.tier == "priority",
    ),
)
TIERS: Final = {
    "anthropic": Fact(
        name="tier",
        formats=("anthropic",),
        usage={"service_tier": "priority", "speed": "standard"},
        is_told=lambda call: call.tier == "priority",
    ),
    "bedrock": Fact(
        name="tier",
        formats=("bedrock",),
        response={"serviceTier": {"type": "priority"}},
        is_told=lambda call: call.tier == "priority",
    ),
    "gemini": Fact(
        name="tier",
        formats=("gemini",),
        usage={"trafficType": "ON_DEMAND_PRIORITY"},
        is_told=lambda call: call.tier == "priority",
    ),
}


def reply(
    fact: Fact, form: str, *, is_streamed: bool, tool: tuple[str, str] | None = None
) -> Reply:
    """Answer with a fact, in one of its formats."""
    makers: dict[str, Any] = {
        "chat": usages.openai,
        "responses": usages.responses,
        "anthropic": usages.anthropic,
        "gemini": usages.gemini,
        "bedrock": usages.bedrock,
    }
    answer = Answer(usages=({**makers[form](BILL), **fact.usage},), tool=tool)
    if form == "gemini":
        events = formats.gemini(answer)
        whole = formats.gemini_whole(answer)
        return Reply(formats.sse(*events)) if is_streamed else _json(whole)
    if form == "bedrock":
        *others, (name, metadata) = formats.bedrock(answer)
        parts = formats.event_stream(*others, (name, {**metadata, **fact.response}))
        whole = {**formats.bedrock_whole(answer), **fact.response}
        return Reply(parts, EVENT_STREAM) if is_streamed else _json(whole)
    if form == "anthropic":
        events = anthropic_events(answer)
        whole = anthropic_whole(answer)
        return Reply(formats.sse(*events, names=True)) if is_streamed else _json(whole)
    if form == "chat":
        chunks = [{**each, **fact.response} for each in formats.openai_chat(answer)]
        whole = {**formats.openai_chat_whole(answer), **fact.response}
        return Reply(formats.sse_with_end(*chunks)) if is_streamed else _json(whole)
    whole = {**formats.openai_responses_whole(answer), **fact.response}
    *events, last = formats.openai_responses(answer)
    last["response"] = {**last["response"], **fact.response, "output": whole["output"]}
    return Reply(formats.sse(*events, last, names=True)) if is_streamed else _json(whole)


def _json(whole: Any) -> Reply:
    return Reply(formats.lines(whole), "application/json")


# --- how a framework asks -------------------------------------------------------------------------


class Door(NamedTuple):
    """One of a framework's model classes."""

    name: str
    form: str
    ask: Callable[[Vendor, Fact, bool], None]
    """Runs an agent, streamed or not."""
    is_always_streamed: bool = False


def strands(make: Callable[..., Any]) -> Callable[[Vendor, Fact, bool], None]:
    """Run a Strands agent."""

    def ask(vendor: Vendor, fact: Fact, is_streamed: bool) -> None:  # noqa: FBT001
        from strands import Agent

        Agent(model=make(vendor, fact, is_streamed), callback_handler=None)("Go.")

    return ask


def strands_openai(vendor: Vendor, fact: Fact, is_streamed: bool) -> Any:  # noqa: FBT001
    """Strands' class for Chat Completions."""
    from strands.models.openai import OpenAIModel

    return OpenAIModel(client_args=_args(vendor, fact), model_id=fact.model, stream=is_streamed)


def strands_responses(vendor: Vendor, fact: Fact, _: object) -> Any:
    """Strands' class for Responses."""
    from strands.models.openai_responses import OpenAIResponsesModel

    return OpenAIResponsesModel(client_args=_args(vendor, fact), model_id=fact.model)


def strands_litellm(vendor: Vendor, fact: Fact, is_streamed: bool) -> Any:  # noqa: FBT001
    """Strands' class for LiteLLM."""
    from strands.models.litellm import LiteLLMModel

    client = {"api_key": "x", "api_base": vendor.url, "num_retries": 0}
    name = f"{fact.prefix}/{fact.model}"
    return LiteLLMModel(client_args=client, model_id=name, stream=is_streamed, params=LENIENT)


def strands_anthropic(vendor: Vendor, _: Fact, __: object) -> Any:
    """Strands' class for Anthropic."""
    from tests.wire import models

    return models.anthropic(vendor.url)


def strands_gemini(vendor: Vendor, _: Fact, __: object) -> Any:
    """Strands' class for Gemini."""
    from tests.wire import models

    return models.gemini(vendor.url)


def strands_bedrock(vendor: Vendor, _: Fact, is_streamed: bool) -> Any:  # noqa: FBT001
    """Strands' class for Bedrock."""
    from tests.wire import models

    return models.bedrock(vendor.url, streaming=is_streamed)


def _args(vendor: Vendor, fact: Fact) -> dict[str, Any]:
    client = clients(vendor.url)["http_async_client"]
    return {"api_key": "x", "max_retries": 0, "base_url": fact.host, "http_client": client}


def langchain(make: Callable[[Vendor, Fact], Any]) -> Callable[[Vendor, Fact, bool], None]:
    """Run a LangChain agent."""

    def ask(vendor: Vendor, fact: Fact, is_streamed: bool) -> None:  # noqa: FBT001
        from langchain.agents import create_agent

        graph = create_agent(make(vendor, fact), [])
        asked: Any = {"messages": [("user", "Go.")]}
        if is_streamed:
            list(graph.stream(asked, stream_mode="messages"))
        else:
            graph.invoke(asked)

    return ask


def chat_openai(vendor: Vendor, fact: Fact, **settings: Any) -> Any:
    """LangChain's class for OpenAI."""
    from langchain_openai import ChatOpenAI

    own: dict[str, Any] = {
        "model": fact.model,
        "base_url": fact.host,
        "api_key": "x",
        "max_retries": 0,
    }
    return ChatOpenAI(**own, **clients(vendor.url), stream_usage=True, **settings)


def chat_responses(vendor: Vendor, fact: Fact) -> Any:
    """The same class with Responses."""
    return chat_openai(vendor, fact, use_responses_api=True)


def chat_anthropic(vendor: Vendor, _: Fact) -> Any:
    """LangChain's class for Anthropic."""
    from tests.wire import chat_models

    return chat_models.anthropic(vendor.url)


def chat_bedrock(vendor: Vendor, _: Fact) -> Any:
    """LangChain's class for Bedrock."""
    from tests.wire import chat_models

    return chat_models.bedrock(vendor.url)


def chat_gemini(vendor: Vendor, _: Fact) -> Any:
    """LangChain's class for Gemini."""
    from tests.wire import chat_models

    return chat_models.gemini(vendor.url)


def sdk(
    make: Callable[[Vendor, Fact], Any], **arguments: Any
) -> Callable[[Vendor, Fact, bool], None]:
    """Run an agent of the SDK."""

    async def run(vendor: Vendor, fact: Fact, is_streamed: bool) -> None:  # noqa: FBT001
        from agents import Agent, ModelSettings, RunConfig, Runner

        settings = ModelSettings(include_usage=True, extra_args=arguments)
        agent = Agent("boss", model=make(vendor, fact), model_settings=settings)
        config = RunConfig(tracing_disabled=True)
        if not is_streamed:
            result: Any = await Runner.run(agent, "Go.", run_config=config)
        else:
            streamed = Runner.run_streamed(agent, "Go.", run_config=config)
            async for _ in streamed.stream_events():
                pass
            result = streamed
        # As the application did not ask for them.
        assert [each.raw_usage for each in result.raw_responses] == [None]

    return lambda *asked: asyncio.run(run(*asked))


def sdk_client(vendor: Vendor, fact: Fact) -> Any:
    """OpenAI's client."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(**_args(vendor, fact))


def sdk_chat(vendor: Vendor, fact: Fact) -> Any:
    """The SDK's class for Chat Completions."""
    from agents import OpenAIChatCompletionsModel

    return OpenAIChatCompletionsModel(fact.model, sdk_client(vendor, fact))


def sdk_responses(vendor: Vendor, fact: Fact) -> Any:
    """The SDK's class for Responses."""
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel(fact.model, sdk_client(vendor, fact))


def sdk_litellm(vendor: Vendor, fact: Fact) -> Any:
    """The SDK's class for LiteLLM."""
    from agents.extensions.models.litellm_model import LitellmModel

    return LitellmModel(f"{fact.prefix}/{fact.model}", base_url=vendor.url, api_key="x")


ALWAYS: Final = True
"""The class always streams."""
DOORS: Final = (
    Door("Strands `OpenAIModel`", "chat", strands(strands_openai)),
    Door("Strands `OpenAIResponsesModel`", "responses", strands(strands_responses), ALWAYS),
    Door("Strands `LiteLLMModel`", "chat", strands(strands_litellm)),
    Door("LangChain `ChatOpenAI`", "chat", langchain(chat_openai)),
    Door("the same, Responses", "responses", langchain(chat_responses)),
    Door("SDK `OpenAIChatCompletionsModel`", "chat", sdk(sdk_chat)),
    Door("SDK `OpenAIResponsesModel`", "responses", sdk(sdk_responses)),
    Door("SDK `LitellmModel`", "chat", sdk(sdk_litellm, **LENIENT)),
)
OTHERS: Final = (
    Door("Strands `AnthropicModel`", "anthropic", strands(strands_anthropic), ALWAYS),
    Door("LangChain `ChatAnthropic`", "anthropic", langchain(chat_anthropic)),
    Door("Strands `BedrockModel`", "bedrock", strands(strands_bedrock)),
    Door("LangChain `ChatBedrockConverse`", "bedrock", langchain(chat_bedrock)),
    Door("Strands `GeminiModel`", "gemini", strands(strands_gemini), ALWAYS),
    Door("LangChain `ChatGoogleGenerativeAI`", "gemini", langchain(chat_gemini)),
)
"""Classes for one vendor."""


# --- the table ------------------------------------------------------------------------------------


def cell(vendor: Vendor, door: Door, fact: Fact, events: list[Any]) -> str:
    """Return in which ways a class hands on a fact."""
    from otel_limits import ModelCall

    if door.form not in fact.formats:
        return NONE
    told = []
    for is_streamed in (True,) if door.is_always_streamed else (True, False):
        vendor.replies[:] = [reply(fact, door.form, is_streamed=is_streamed)]
        events.clear()
        door.ask(vendor, fact, is_streamed)
        (call,) = [event for event in events if isinstance(event, ModelCall)]
        assert call.usage.input == BILL.input, (door.name, fact.name, call)
        told.append(fact.is_told(call))
    if all(told) or not any(told):
        return YES if told[0] else NO
    return STREAMED if told[0] else WHOLE


def cells(vendor: Vendor) -> Iterator[tuple[str, str, str]]:
    """Yield each class, fact and cell."""
    import otel_limits

    events: list[Any] = []
    otel_limits.enable(otel_limits.Limits(max_turns=9), observers=[events.append])
    for door, fact in itertools.product(DOORS, COSTS):
        yield door.name, fact.name, cell(vendor, door, fact, events)
    for door in OTHERS:
        fact = TIERS[door.form]
        yield door.name, fact.name, cell(vendor, door, fact, events)


def stated_tables(vendor: Vendor) -> str:
    """Lay out both tables."""
    from tests.wire.table import table

    words = {(door, fact): word for door, fact, word in cells(vendor)}
    names = [fact.name for fact in COSTS]
    costs = ((door.name, *(words[door.name, name] for name in names)) for door in DOORS)
    tiers = ((door.name, words[door.name, "tier"]) for door in OTHERS)
    return f"{table(('class', *names), costs)}\n{table(('class', 'served tier'), tiers)}"


def measured_tables() -> str:
    """Measure the tables in this process."""
    import otel_limits

    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings(), serving() as vendor, contextlib.ExitStack() as ending:
        warnings.simplefilter("ignore")
        ending.callback(otel_limits.disable)
        return stated_tables(vendor)
