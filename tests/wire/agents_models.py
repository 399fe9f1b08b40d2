"""Model classes of the OpenAI Agents SDK with the vendors' own clients, on loopback."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.wire import formats
from tests.wire.chat_models import reply as chat_reply
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.wire.formats import Answer


MADE: list[Any] = []
"""Clients whose connections are open."""


async def close_clients() -> None:
    """Close every connection."""
    while MADE:
        await MADE.pop().close()
    if (library := sys.modules.get("litellm")) is not None:
        await library.close_litellm_async_clients()


def client_of(url: str, **settings: Any) -> Any:
    """OpenAI's own client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, **settings)
    MADE.append(client)
    return client


def responses(url: str, **settings: Any) -> Any:
    """OpenAI's Responses."""
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("gpt-4o", client_of(url, **settings))


def chat(url: str, **settings: Any) -> Any:
    """OpenAI's Chat Completions."""
    from agents import OpenAIChatCompletionsModel

    return OpenAIChatCompletionsModel("gpt-4o", client_of(url, **settings))


def litellm(url: str, **_: Any) -> Any:
    """OpenAI's Chat Completions through LiteLLM."""
    from agents.extensions.models.litellm_model import LitellmModel

    return LitellmModel("openai/gpt-4o", base_url=f"{url}/v1", api_key="x")


def litellm_anthropic(url: str, **_: Any) -> Any:
    """Anthropic's Messages through LiteLLM."""
    from agents.extensions.models.litellm_model import LitellmModel

    return LitellmModel("anthropic/claude-sonnet-4-5", base_url=url, api_key="x")


class AgentsClient(NamedTuple):
    """One of the SDK's model classes."""

    make: Callable[..., Any]
    model: str
    wire: str
    """The name of its wire format."""
    provider: str = "openai"
    """The provider as it is counted."""
    chat: str = "ChatOpenAI"
    """LangChain's class with the same wire format."""


AGENTS_CLIENTS = {
    "Responses": AgentsClient(
        responses, "gpt-4o", "OpenAI Responses", chat="ChatOpenAI, Responses"
    ),
    "Chat Completions": AgentsClient(chat, "gpt-4o", "OpenAI Chat"),
    "LiteLLM": AgentsClient(litellm, "openai/gpt-4o", "OpenAI Chat", "litellm"),
    "LiteLLM, Anthropic": AgentsClient(
        litellm_anthropic, "anthropic/claude-sonnet-4-5", "Anthropic", "litellm", "ChatAnthropic"
    ),
}


def reply(client: str, answer: Answer, *, is_streamed: bool) -> Reply:
    """Answer in the format of a client."""
    known = AGENTS_CLIENTS[client]
    if known.wire != "OpenAI Responses" or not is_streamed:
        return chat_reply(known.chat, answer, is_streamed=is_streamed)
    *events, last = formats.openai_responses(answer)
    whole = formats.openai_responses_whole(answer)["output"] if answer.parts else []
    if answer.tool is not None:
        name, arguments = answer.tool
        call = {"type": "function_call", "id": "i1", "call_id": "t1", "name": name}
        whole = [*whole, {**call, "arguments": arguments, "status": "completed"}]
    last["response"] = {**last["response"], "output": whole}
    provider = BY_NAME[known.wire]
    return Reply(provider.write(*events, last), provider.content_type)
