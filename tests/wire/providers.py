"""Strands' model classes, each with the wire format and the usage of its vendor."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.wire import formats
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strands.models import Model


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What the vendor bills for a call."""

    input: int
    output: int
    read: int = 0
    """Tokens read from the cache, a part of the input."""
    write: int = 0
    reasoning: int = 0
    """Tokens of the output that the model thought with."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One vendor, and how Strands reaches it."""

    name: str
    make: Callable[[str], Model]
    """Makes the model, at the address of the server."""
    stream: Callable[[Iterable[Any]], list[Any]]
    """What the vendor streams, with these usages."""
    write: Callable[..., list[bytes]]
    usage: Callable[[Bill], Any]
    """The bill as the vendor says it."""
    content_type: str = "text/event-stream"
    lost: Mapping[str, str] = field(default_factory=dict)
    """Cases in which Strands' class drops what the vendor said: what is lost, in words."""
    has_cache: bool = True
    has_cache_write: bool = False
    is_cumulative: bool = False
    """True where usage comes more than once, and the last one counts."""
    without_usage: str = "estimated"
    """What becomes of a call whose usage is missing."""

    def reply(self, *bills: Bill) -> Reply:
        """Make the whole answer."""
        return Reply(self.write(*self.stream(map(self.usage, bills))), self.content_type)

    def broken(self) -> Reply:
        """Make an answer that breaks off after its first part."""
        whole = self.write(*self.stream([self.usage(Bill(input=1, output=1))]))
        text = formats.PARTS[0].encode()
        end = next(number for number, chunk in enumerate(whole) if text in chunk) + 1
        return Reply(whole[:end], self.content_type, breaks_off=True)


def openai_usage(bill: Bill, *, outside: bool = False, singular: bool = False) -> dict[str, Any]:
    """Usage in OpenAI's words; `outside` leaves reasoning out of the completion, as xAI does."""
    details = "prompt_token_details" if singular else "prompt_tokens_details"
    return {
        "prompt_tokens": bill.input,
        "completion_tokens": bill.output - (bill.reasoning if outside else 0),
        "total_tokens": bill.input + bill.output,
        details: {"cached_tokens": bill.read, "cache_write_tokens": bill.write},
        "completion_tokens_details": {"reasoning_tokens": bill.reasoning},
    }


def responses_usage(bill: Bill) -> dict[str, Any]:
    """Usage of OpenAI's Responses."""
    return {
        "input_tokens": bill.input,
        "output_tokens": bill.output,
        "total_tokens": bill.input + bill.output,
        "input_tokens_details": {"cached_tokens": bill.read, "cache_write_tokens": bill.write},
        "output_tokens_details": {"reasoning_tokens": bill.reasoning},
    }


def anthropic_usage(bill: Bill) -> dict[str, Any]:
    """Usage of Anthropic's Messages: cached tokens are beside the input."""
    return {
        "input_tokens": bill.input - bill.read - bill.write,
        "output_tokens": bill.output,
        "cache_read_input_tokens": bill.read,
        "cache_creation_input_tokens": bill.write,
    }


def bedrock_usage(bill: Bill) -> dict[str, Any]:
    """Usage of Bedrock's Converse: cached tokens are beside the input."""
    return {
        "inputTokens": bill.input - bill.read - bill.write,
        "outputTokens": bill.output,
        "totalTokens": bill.input + bill.output,
        "cacheReadInputTokens": bill.read,
        "cacheWriteInputTokens": bill.write,
    }


def gemini_usage(bill: Bill) -> dict[str, Any]:
    """Usage of Gemini: thoughts are beside the candidates."""
    return {
        "promptTokenCount": bill.input,
        "candidatesTokenCount": bill.output - bill.reasoning,
        "thoughtsTokenCount": bill.reasoning,
        "cachedContentTokenCount": bill.read,
        "totalTokenCount": bill.input + bill.output,
    }


def ollama_usage(bill: Bill) -> dict[str, Any]:
    """Usage of Ollama."""
    return {"prompt_eval_count": bill.input, "eval_count": bill.output}


def llamaapi_usage(bill: Bill) -> list[dict[str, Any]]:
    """Usage of the Llama API, in floats."""
    return [
        {"metric": "num_prompt_tokens", "value": float(bill.input), "unit": "tokens"},
        {"metric": "num_completion_tokens", "value": float(bill.output), "unit": "tokens"},
        {"metric": "num_total_tokens", "value": float(bill.input + bill.output), "unit": "tokens"},
    ]


def plain_usage(bill: Bill) -> dict[str, Any]:
    """Usage of a container on SageMaker: Strands' class takes no other keys."""
    return {
        "prompt_tokens": bill.input,
        "completion_tokens": bill.output,
        "total_tokens": bill.input + bill.output,
    }


def openai(url: str) -> Model:
    """OpenAI's Chat Completions."""
    from strands.models.openai import OpenAIModel

    client = {"api_key": "x", "base_url": f"{url}/v1", "max_retries": 0}
    return OpenAIModel(client_args=client, model_id="gpt-4o")


def openai_responses(url: str) -> Model:
    """OpenAI's Responses."""
    from strands.models.openai_responses import OpenAIResponsesModel

    client = {"api_key": "x", "base_url": f"{url}/v1", "max_retries": 0}
    return OpenAIResponsesModel(client_args=client, model_id="gpt-4o")


def anthropic(url: str) -> Model:
    """Anthropic's Messages."""
    from strands.models.anthropic import AnthropicModel

    client = {"api_key": "x", "base_url": url, "max_retries": 0}
    return AnthropicModel(client_args=client, model_id="claude-sonnet-4-5", max_tokens=1_000)


def boto() -> Any:
    """Return a session with credentials of nobody."""
    import boto3

    return boto3.Session(
        aws_access_key_id="x",
        aws_secret_access_key="x",  # noqa: S106
        region_name="us-east-1",
    )


def boto_config() -> Any:
    """Return settings without a second attempt."""
    from botocore.config import Config

    return Config(retries={"total_max_attempts": 1})


def bedrock(url: str) -> Model:
    """Amazon Bedrock's Converse."""
    from strands.models.bedrock import BedrockModel

    return BedrockModel(
        boto_session=boto(),
        endpoint_url=url,
        boto_client_config=boto_config(),
        model_id="anthropic.claude-sonnet-4-5",
    )


def sagemaker(url: str) -> Model:
    """A container on SageMaker."""
    from strands.models.sagemaker import SageMakerAIModel

    session = boto()
    session.client = functools.partial(session.client, endpoint_url=url)
    return SageMakerAIModel(
        endpoint_config={"endpoint_name": "mine", "region_name": "us-east-1"},
        payload_config={"max_tokens": 1_000, "stream": True},
        boto_session=session,
        boto_client_config=boto_config(),
    )


def gemini(url: str) -> Model:
    """Gemini's own API."""
    from strands.models.gemini import GeminiModel

    client = {"api_key": "x", "http_options": {"base_url": url}}
    return GeminiModel(client_args=client, model_id="gemini-2.5-flash")


def mistral(url: str) -> Model:
    """Mistral."""
    from strands.models.mistral import MistralModel

    return MistralModel("x", client_args={"server_url": url}, model_id="mistral-large-latest")


def ollama(url: str) -> Model:
    """Ollama."""
    from strands.models.ollama import OllamaModel

    return OllamaModel(url, model_id="llama3")


def llamacpp(url: str) -> Model:
    """The server of llama.cpp."""
    from strands.models.llamacpp import LlamaCppModel

    return LlamaCppModel(base_url=url, model_id="default")


def litellm(url: str, model_id: str) -> Model:
    """One of LiteLLM's routes."""
    from strands.models.litellm import LiteLLMModel

    client = {"api_key": "x", "api_base": url, "num_retries": 0, "max_retries": 0}
    return LiteLLMModel(client_args=client, model_id=model_id)


def writer(url: str) -> Model:
    """Writer."""
    from strands.models.writer import WriterModel

    client = {"api_key": "x", "base_url": url, "max_retries": 0}
    options = {"include_usage": True}
    return WriterModel(client_args=client, model_id="palmyra-x5", stream_options=options)


def llamaapi(url: str) -> Model:
    """The Llama API."""
    from strands.models.llamaapi import LlamaAPIModel

    client = {"api_key": "x", "base_url": url, "max_retries": 0}
    return LlamaAPIModel(client_args=client, model_id="Llama-4")


def with_end(*events: Any) -> list[bytes]:
    """Write server-sent events as OpenAI ends them."""
    return formats.sse(*events, "[DONE]")


OUTSIDE = functools.partial(openai_usage, outside=True)
CHAT: dict[str, Any] = {"stream": formats.openai_chat, "write": with_end, "usage": openai_usage}
AWS: dict[str, Any] = {
    "write": formats.event_stream,
    "content_type": "application/vnd.amazon.eventstream",
}

BY_LITELLM = "as LiteLLM's tokenizer counts it"

PROVIDERS = (
    Provider(name="OpenAI Chat", make=openai, has_cache_write=True, is_cumulative=True, **CHAT),
    Provider(name="xAI, by OpenAI's class", make=openai, **{**CHAT, "usage": OUTSIDE}),
    Provider(
        name="OpenAI Responses",
        make=openai_responses,
        stream=formats.openai_responses,
        write=functools.partial(formats.sse, names=True),
        usage=responses_usage,
        has_cache_write=True,
    ),
    Provider(
        name="Anthropic",
        make=anthropic,
        stream=formats.anthropic,
        write=functools.partial(formats.sse, names=True),
        usage=anthropic_usage,
        has_cache_write=True,
        without_usage="zero, as its format always has usage",
    ),
    Provider(
        name="Bedrock",
        make=bedrock,
        stream=formats.bedrock,
        usage=bedrock_usage,
        has_cache_write=True,
        **AWS,
    ),
    Provider(
        name="Gemini",
        make=gemini,
        stream=formats.gemini,
        write=formats.sse,
        usage=gemini_usage,
        is_cumulative=True,
    ),
    Provider(
        name="Mistral",
        make=mistral,
        stream=functools.partial(formats.openai_chat, in_finish=True),
        write=with_end,
        usage=openai_usage,
        lost={"cached": "cached tokens"},
    ),
    Provider(
        name="Ollama",
        make=ollama,
        stream=formats.ollama,
        write=formats.lines,
        usage=ollama_usage,
        content_type="application/x-ndjson",
        has_cache=False,
        without_usage="estimated; the class fails",
    ),
    Provider(name="llama.cpp", make=llamacpp, **CHAT),
    Provider(
        name="LiteLLM, xAI",
        make=functools.partial(litellm, model_id="xai/grok-4"),
        without_usage=BY_LITELLM,
        **{**CHAT, "usage": OUTSIDE},
    ),
    Provider(
        name="LiteLLM, OpenRouter",
        make=functools.partial(litellm, model_id="openrouter/openai/gpt-4o"),
        without_usage=BY_LITELLM,
        **CHAT,
    ),
    Provider(
        name="LiteLLM, OpenAI",
        make=functools.partial(litellm, model_id="openai/gpt-4o"),
        without_usage=BY_LITELLM,
        **CHAT,
    ),
    Provider(
        name="Writer",
        make=writer,
        stream=formats.openai_chat,
        write=with_end,
        usage=functools.partial(openai_usage, singular=True),
        lost={"cached": "cached tokens"},
    ),
    Provider(
        name="Llama API",
        make=llamaapi,
        stream=formats.llamaapi,
        write=formats.sse,
        usage=llamaapi_usage,
        has_cache=False,
    ),
    Provider(
        name="SageMaker",
        make=sagemaker,
        stream=lambda usages: formats.sagemaker(formats.openai_chat(usages)),
        usage=plain_usage,
        has_cache=False,
        **AWS,
    ),
)
