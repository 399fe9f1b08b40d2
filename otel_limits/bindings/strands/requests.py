"""Says what is known of a model call before it goes out: its input, and the most it may answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.bindings.strands.projection import ConversationTokens, projected_input
from otel_limits.bindings.strands.readers import DICTIONARIES, model_id, provider_of
from otel_limits.bindings.strands.request_terms import terms_of
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.gate import Request
from otel_limits.usage.numbers import token_count

if TYPE_CHECKING:
    from strands.hooks import BeforeModelCallEvent

    from otel_limits.runs.run import Run

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
"""What providers call the most output tokens of an answer: the last two in Bedrock's and Gemini's
own spelling, `num_predict` in Ollama's, `n_predict` in llama.cpp's, `max_new_tokens` in those of
containers on SageMaker."""

NOT_SENT: Final = {"llamacpp": frozenset({"n_predict"})}
"""What a class drops of its settings: llama.cpp's server would know this one, but Strands' class of
that name sends only what is on its lists (strands/models/llamacpp.py, `_format_request`)."""

CONFIGS: Final = ("config", "payload_config", "client_args")
"""Attributes of a model that hold its settings: the second one is SageMaker's, and what is in the
third one, LiteLLM's class sends with every request."""

SETTINGS: Final = (
    "params",
    "options",
    "additional_args",
    "additional_request_fields",
    "extra_body",
    "generation_config",
    "inferenceConfig",
)
"""Settings within settings that go to the provider as they are."""

MAX_DEPTH: Final = 3


def call_to(model: Any, content: object) -> InFlightCall:
    """Describe a call of a model before it goes out, by all that it is sent."""
    return _described(model, projected_input(model, content), content)


@suppress_errors("binding")
def call_by_context(context: Any, cache: ConversationTokens) -> InFlightCall:
    """Describe a call of the agent loop by the context of its stage.

    The loop keeps what vendors said of earlier responses, and takes it out of what is sent.
    """
    model, beside = context.model, (context.tool_specs, context.system_prompt)
    asked = projected_input(model, context.messages, beside, cache)
    return _described(model, asked, (context.messages, beside))


def _described(model: Any, asked: int, content: object) -> InFlightCall:
    call = InFlightCall(model_id(model), asked, provider_of(model.__class__), output_cap(model))
    call.terms = terms_of(model, content)
    return call


@suppress_errors("binding")
def request_of(run: Run, event: BeforeModelCallEvent, cache: ConversationTokens) -> Request:
    """Say what is known of a model call before it goes out."""
    agent = event.agent
    tools = agent.tool_registry.get_all_tool_specs()
    return Request(
        invocation=run.invocation,
        model=model_id(agent.model),
        input=projected_input(agent.model, agent.messages, (tools, agent.system_prompt), cache),
        output_cap=output_cap(agent.model),
        provider=provider_of(agent.model.__class__),
        terms=terms_of(agent.model, (agent.messages, agent.system_prompt)),
        is_cancelled=agent.cancel_signal.is_set,
        action=run.policy.action,
        unpriced=run.policy.unpriced,
        attributes=agent.trace_attributes,
    )


def output_cap(model: object) -> int | None:
    """Return the most output tokens that a model may answer with, where its settings say so.

    Where several say so, the provider takes one of them, nobody knows which: the highest is safe.
    """
    held = (getattr(model, name, None) for name in CONFIGS)
    dropped = NOT_SENT.get(provider_of(cast("type", type(model))), frozenset())
    names = tuple(name for name in OUTPUT_CAPS if name not in dropped)
    return max((cap for config in held for cap in _caps(config, names, MAX_DEPTH)), default=None)


def _caps(settings: Any, names: tuple[str, ...], depth: int) -> Iterator[int]:
    """Yield the caps in some settings, and in those within them."""
    if settings is None or not isinstance(settings, DICTIONARIES) or depth == 0:
        return
    for name in names:
        # 0, or Ollama's -1 and -2, is not a cap.
        if name in settings and (cap := token_count(settings[name])):
            yield cap
    for name in SETTINGS:
        yield from _caps(settings.get(name), names, depth - 1)
