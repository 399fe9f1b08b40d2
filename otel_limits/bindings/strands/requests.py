"""Describes a model call before it is sent: its input, and the cap on its output."""

from __future__ import annotations

from typing import Any, Final, cast

from otel_limits.bindings.strands.projection import ConversationTokens, projected_input
from otel_limits.bindings.strands.readers import DICTIONARIES, model_id, provider_of
from otel_limits.bindings.strands.request_terms import terms_of
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.fields import token_count

OUTPUT_CAPS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "num_predict",
    "n_predict",
    "maxTokens",
    "maxOutputTokens",
)
"""Providers' names for the cap on output tokens: the last two are Bedrock's and Gemini's,
`num_predict` is Ollama's, `n_predict` llama.cpp's, and `max_new_tokens` that of containers on
SageMaker."""

NOT_SENT: Final = {"llamacpp": frozenset({"n_predict"})}
"""Settings that a class does not send: llama.cpp's server supports this one, but Strands' class
sends only listed settings (strands/models/llamacpp.py, `_format_request`)."""

CONFIGS: Final = ("config", "payload_config", "client_args")
"""Attributes of a model that hold its settings: the second is SageMaker's; LiteLLM's class sends
the third with every request."""

SETTINGS: Final = (
    "params",
    "options",
    "additional_args",
    "additional_request_fields",
    "extra_body",
    "generation_config",
    "inferenceConfig",
)
"""Nested settings that are sent to the provider unchanged."""

MAX_DEPTH: Final = 3


def call_to(model: Any, content: object) -> InFlightCall:
    """Describe a model call by its content."""
    return _described(model, projected_input(model, content), content)


@suppress_errors("binding")
def call_by_context(context: Any, cache: ConversationTokens) -> InFlightCall:
    """Describe a call of the agent loop by the context of its stage.

    Unlike the request, the context contains the usage of earlier responses.
    """
    model, beside = context.model, (context.tool_specs, context.system_prompt)
    tokens = projected_input(model, context.messages, beside, cache)
    return _described(model, tokens, (context.messages, beside))


def _described(model: Any, tokens: int, content: object) -> InFlightCall:
    call = InFlightCall(model_id(model), tokens, provider_of(model.__class__), output_cap(model))
    call.terms = terms_of(model, content)
    return call


def redescribe(call: InFlightCall, model: Any, content: object) -> None:
    """Describe a call by the model that sends it; its ID only if the call has none."""
    if call.model == "unknown":
        call.model = model_id(model)
    call.provider = provider_of(model.__class__)
    call.terms = terms_of(model, content)


def output_cap(model: object) -> int | None:
    """Return the cap on output tokens in a model's settings, if any.

    If there are several, it is unknown which one the provider uses: the highest is safe.
    """
    dropped = NOT_SENT.get(provider_of(cast("type", type(model))), frozenset())
    names = [name for name in OUTPUT_CAPS if name not in dropped]
    highest = 0
    level: list[Any] = [getattr(model, name, None) for name in CONFIGS]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for settings in level:
            if settings is None or not isinstance(settings, DICTIONARIES):
                continue
            for name in names:
                # 0, or Ollama's -1 and -2, is not a cap.
                if name in settings:
                    highest = max(highest, token_count(settings[name]) or 0)
            below += map(settings.get, SETTINGS)
        level = below
    return highest or None
