"""A request's maximum of output tokens, read from the settings of each model class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent

from otel_limits import enable
from otel_limits.core.events import QuotaDecision
from tests.wire import models
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strands.models import Model

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

CAP = 7_777
REFUSED = Reply([b'{"error": {"message": "no"}}'], "application/json", 400)

EXTRA = {"params": {"extra_body": {"max_completion_tokens": CAP}}}
WAYS: dict[str, tuple[Callable[..., Model], dict[str, Any]]] = {
    "SageMaker": (models.sagemaker, {"payload_config": {"max_tokens": CAP, "stream": True}}),
    "SageMaker, additional_args": (
        models.sagemaker,
        {"payload_config": {"max_tokens": 5, "additional_args": {"max_new_tokens": CAP}}},
    ),
    "Ollama, max_tokens": (models.ollama, {"max_tokens": CAP}),
    "Ollama, num_predict": (models.ollama, {"options": {"num_predict": CAP}}),
    "Ollama, additional_args": (
        models.ollama,
        {"additional_args": {"options": {"num_predict": CAP}}},
    ),
    "Ollama, without a cap": (
        models.ollama,
        {"max_tokens": CAP, "options": {"num_predict": -1}},
    ),
    "OpenAI": (models.openai, {"params": {"max_completion_tokens": CAP}}),
    "OpenAI, extra_body": (models.openai, EXTRA),
    "OpenAI Responses": (models.openai_responses, {"params": {"max_output_tokens": CAP}}),
    "Anthropic": (models.anthropic, {"max_tokens": CAP}),
    "Bedrock": (models.bedrock, {"max_tokens": CAP}),
    "Bedrock, additional_request_fields": (
        models.bedrock,
        {"additional_request_fields": {"max_tokens": CAP}},
    ),
    "Bedrock, additional_args": (
        models.bedrock,
        {"additional_args": {"inferenceConfig": {"maxTokens": CAP}}},
    ),
    "Gemini": (models.gemini, {"params": {"max_output_tokens": CAP}}),
    "Mistral": (models.mistral, {"max_tokens": CAP}),
    "llama.cpp": (models.llamacpp, {"params": {"max_tokens": CAP}}),
    "llama.cpp, what its class drops": (
        models.llamacpp,
        {"params": {"max_tokens": CAP, "n_predict": 9 * CAP}},
    ),
    "OpenAI's class for llama.cpp": (
        models.openai,
        {"params": {"extra_body": {"n_predict": CAP}}},
    ),
    "LiteLLM": (models.litellm, {"params": {"max_tokens": CAP}}),
    "LiteLLM, client_args": (models.litellm, {"client_args": {"max_tokens": CAP}}),
    "Writer": (models.writer, {"max_tokens": CAP}),
    "Llama API": (models.llamaapi, {"max_completion_tokens": CAP}),
}


@pytest.mark.parametrize("way", WAYS)
def test_output_cap_is_reserved(
    way: str, vendor: Vendor, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota reserves the output cap that the vendor receives."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {all: {tokens: 100000, window: day}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(observers=[events.append])
    make, config = WAYS[way]
    vendor.replies[:] = [REFUSED]
    agent = Agent(model=make(vendor.url, **config), callback_handler=None, retry_strategy=None)
    with pytest.raises(Exception):  # noqa: B017, PT011  each client has its own error
        agent("go")
    assert str(CAP).encode() in vendor.requests[0]
    (decision,) = (event for event in events if isinstance(event, QuotaDecision))
    assert CAP < int(decision.wanted) < CAP + 100
