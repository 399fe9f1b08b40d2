"""Strands' model classes with the vendors' own clients, pointed at a server on loopback.

Each takes the address of the server and its settings.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands.models import Model

ONCE = {"api_key": "x", "max_retries": 0}
"""Arguments of clients that retry by default."""


def openai(url: str, **config: Any) -> Model:
    """OpenAI's Chat Completions and compatible servers."""
    from strands.models.openai import OpenAIModel

    client = {**ONCE, "base_url": f"{url}/v1"}
    return OpenAIModel(client_args=client, **{"model_id": "gpt-4o", **config})


def openai_responses(url: str, **config: Any) -> Model:
    """OpenAI's Responses."""
    from strands.models.openai_responses import OpenAIResponsesModel

    client = {**ONCE, "base_url": f"{url}/v1"}
    return OpenAIResponsesModel(client_args=client, **{"model_id": "gpt-4o", **config})


def anthropic(url: str, **config: Any) -> Model:
    """Anthropic's Messages."""
    from strands.models.anthropic import AnthropicModel

    own = {"model_id": "claude-sonnet-4-5", "max_tokens": 1_000}
    return AnthropicModel(client_args={**ONCE, "base_url": url}, **{**own, **config})


@functools.cache
def boto() -> Any:
    """Return a session with fake credentials; it reads the service descriptions once."""
    import boto3

    return boto3.Session(
        aws_access_key_id="x",
        aws_secret_access_key="x",  # noqa: S106
        region_name="us-east-1",
    )


def boto_config() -> Any:
    """Return settings without retries."""
    from botocore.config import Config

    return Config(retries={"total_max_attempts": 1})


def bedrock(url: str, **config: Any) -> Model:
    """Amazon Bedrock's Converse."""
    from strands.models.bedrock import BedrockModel

    return BedrockModel(
        boto_session=boto(),
        endpoint_url=url,
        boto_client_config=boto_config(),
        **{"model_id": "anthropic.claude-sonnet-4-5", **config},
    )


class SessionAt:
    """A boto3 session whose clients use another address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.region_name = "us-east-1"

    def client(self, **arguments: Any) -> Any:
        """Make a client."""
        return boto().client(**arguments, endpoint_url=self.url)


def sagemaker(url: str, **config: Any) -> Model:
    """A container on SageMaker."""
    from strands.models.sagemaker import SageMakerAIModel

    session: Any = SessionAt(url)
    own = {
        "endpoint_config": {"endpoint_name": "mine", "region_name": "us-east-1"},
        "payload_config": {"max_tokens": 1_000, "stream": True},
    }
    return SageMakerAIModel(
        boto_session=session, boto_client_config=boto_config(), **{**own, **config}
    )


def gemini(url: str, **config: Any) -> Model:
    """Gemini's own API."""
    from strands.models.gemini import GeminiModel

    client = {"api_key": "x", "http_options": {"base_url": url}}
    return GeminiModel(client_args=client, **{"model_id": "gemini-2.5-flash", **config})


def mistral(url: str, **config: Any) -> Model:
    """Mistral."""
    from strands.models.mistral import MistralModel

    own = {"model_id": "mistral-large-latest"}
    return MistralModel("x", client_args={"server_url": url}, **{**own, **config})


def ollama(url: str, **config: Any) -> Model:
    """Ollama."""
    from strands.models.ollama import OllamaModel

    return OllamaModel(url, **{"model_id": "llama3", **config})


def llamacpp(url: str, **config: Any) -> Model:
    """The server of llama.cpp."""
    from strands.models.llamacpp import LlamaCppModel

    return LlamaCppModel(base_url=url, **{"model_id": "default", **config})


def litellm(url: str, **config: Any) -> Model:
    """One of LiteLLM's routes."""
    from strands.models.litellm import LiteLLMModel

    client = {**ONCE, "api_base": url, "num_retries": 0, **config.pop("client_args", {})}
    return LiteLLMModel(client_args=client, **{"model_id": "openai/gpt-4o", **config})


def litellm_vertex(url: str, **config: Any) -> Model:
    """LiteLLM's route to Vertex AI, whose key gets its token from the same server."""
    own = {
        "api_key": None,
        "vertex_project": "mine",
        "vertex_location": "us-central1",
        "vertex_credentials": service_account(url),
    }
    return litellm(url, client_args=own, **{"model_id": "vertex_ai/gemini-2.5-flash", **config})


@functools.cache
def service_account(url: str) -> str:
    """Make a fake key of a Google service account."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "mine",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "test@mine.iam.gserviceaccount.com",
        "token_uri": f"{url}/token",
    }
    return json.dumps(account)


def litellm_azure(url: str, **config: Any) -> Model:
    """LiteLLM's route to Azure."""
    own = {"api_version": "2024-10-21"}
    return litellm(url, client_args=own, **{"model_id": "azure/gpt-4o", **config})


def writer(url: str, **config: Any) -> Model:
    """Writer."""
    from strands.models.writer import WriterModel

    own = {"model_id": "palmyra-x5", "stream_options": {"include_usage": True}}
    return WriterModel(client_args={**ONCE, "base_url": url}, **{**own, **config})


def llamaapi(url: str, **config: Any) -> Model:
    """The Llama API."""
    from strands.models.llamaapi import LlamaAPIModel

    client = {**ONCE, "base_url": url}
    return LlamaAPIModel(client_args=client, **{"model_id": "Llama-4", **config})
