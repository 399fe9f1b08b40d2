"""LangChain's model classes with the vendors' own clients, pointed at a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.wire import formats, models
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply

if TYPE_CHECKING:
    from tests.wire.formats import Answer

ONCE = {"api_key": "x", "max_retries": 0}


def openai(url: str, **settings: Any) -> Any:
    """OpenAI's Chat Completions."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**{"model": "gpt-4o", "base_url": f"{url}/v1", **ONCE, **settings})


def openai_responses(url: str, **settings: Any) -> Any:
    """OpenAI's Responses."""
    return openai(url, use_responses_api=True, **settings)


def anthropic(url: str, **settings: Any) -> Any:
    """Anthropic's Messages."""
    from langchain_anthropic import ChatAnthropic

    own = {"model_name": "claude-sonnet-4-5", "base_url": url}
    return ChatAnthropic(**{**own, **ONCE, **settings})


def bedrock(url: str, **settings: Any) -> Any:
    """Amazon Bedrock's Converse."""
    from langchain_aws import ChatBedrockConverse

    at = {"endpoint_url": url, "config": models.boto_config()}
    own = {
        "model": CLAUDE,
        "client": models.boto().client("bedrock-runtime", **at),
        "bedrock_client": models.boto().client("bedrock", **at),
    }
    return ChatBedrockConverse(**{**own, **settings})


def gemini(url: str, **settings: Any) -> Any:
    """Gemini's own API."""
    from langchain_google_genai import ChatGoogleGenerativeAI

    own = {"model": "gemini-2.5-flash", "base_url": url}
    return ChatGoogleGenerativeAI(**{**own, **ONCE, **settings})


def by_name(url: str, **settings: Any) -> Any:
    """The same class as `openai`, made from a name."""
    from langchain.chat_models import init_chat_model

    return init_chat_model("openai:gpt-4o", base_url=f"{url}/v1", **ONCE, **settings)


class Client(NamedTuple):
    """One of LangChain's model classes."""

    make: Callable[..., Any]
    model: str
    wire: str
    """The name of its wire format."""
    provider: str = "openai"
    """The provider as it is counted."""


CLAUDE = "anthropic.claude-sonnet-4-5-20250929-v1:0"
CLIENTS = {
    "ChatOpenAI": Client(openai, "gpt-4o", "OpenAI Chat"),
    "ChatOpenAI, Responses": Client(openai_responses, "gpt-4o", "OpenAI Responses"),
    "ChatAnthropic": Client(anthropic, "claude-sonnet-4-5", "Anthropic", "anthropic"),
    "ChatBedrockConverse": Client(bedrock, CLAUDE, "Bedrock", "bedrock"),
    "ChatGoogleGenerativeAI": Client(gemini, "gemini-2.5-flash", "Gemini", "gemini"),
    "init_chat_model": Client(by_name, "gpt-4o", "OpenAI Chat"),
}


def reply(client: str, answer: Answer, *, is_streamed: bool) -> Reply:
    """Answer in the format of a client."""
    provider = BY_NAME[CLIENTS[client].wire]
    if provider.name == "Anthropic":
        if is_streamed:
            return Reply(provider.write(*anthropic_events(answer)), provider.content_type)
        return Reply(formats.lines(anthropic_whole(answer)), "application/json")
    if is_streamed:
        return provider.stream_reply(answer)
    if provider.name == "OpenAI Responses" and answer.tool is not None:
        whole = formats.openai_responses_whole(answer)
        name, arguments = answer.tool
        call = {"type": "function_call", "id": "i1", "call_id": "t1", "name": name}
        whole["output"].append({**call, "arguments": arguments, "status": "completed"})
        return Reply(formats.lines(whole), "application/json")
    if provider.name == "Gemini" and answer.tool is not None:
        *others, last = formats.gemini(replace(answer, parts=("".join(answer.parts) or "…",)))
        parts = [part for each in (*others, last) for part in _parts(each)]
        last["candidates"][0]["content"]["parts"] = parts
        return Reply(formats.lines(last), "application/json")
    return provider.whole_reply(answer)


def _parts(chunk: Any) -> Any:
    return chunk["candidates"][0]["content"]["parts"]


def anthropic_events(answer: Answer) -> list[Any]:
    """Events whose last usage has everything but the lifetimes of the cache, as today."""
    told = {name: count for name, count in answer.usage.items() if isinstance(count, int)}
    return [
        {**event, "usage": told} if event["type"] == "message_delta" else event
        for event in formats.anthropic(answer)
    ]


def anthropic_whole(answer: Answer) -> Any:
    """Return a whole answer of Anthropic's Messages."""
    content: list[Any] = [{"type": "text", "text": "".join(answer.parts)}] if answer.parts else []
    if answer.tool is not None:
        name, arguments = answer.tool
        use = {"type": "tool_use", "id": "t1", "name": name, "input": json.loads(arguments)}
        content.append(use)
    message = formats.anthropic(answer)[0]["message"]
    reason = "end_turn" if answer.tool is None else "tool_use"
    return {**message, "content": content, "stop_reason": reason, "usage": answer.usage}
