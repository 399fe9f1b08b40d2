"""Classifies spans of any instrumentation, and reads their names, models and providers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from otel_limits.core.terms import STANDARD, PricingTerms, region_of, vendor_at
from otel_limits.core.usage import NOTHING_REPORTED, UsageRecord
from otel_limits.otel import semconv
from otel_limits.usage import fields
from otel_limits.usage.normaliser import record_of_span
from otel_limits.usage.span_texts import estimates_of_span

OperationKind: TypeAlias = Literal["model call", "possible call", "agent", "tool", "other"]
"""A possible call is one unless there is a call within it."""

MODEL_CALLS: Final[tuple[OperationKind, ...]] = ("model call", "possible call")

BOUNDARIES: Final[tuple[OperationKind, ...]] = ("agent", "tool")
"""Kinds that call models themselves: a model call within one is not the surrounding call."""

OPENINFERENCE: Final = "openinference.span.kind"
TRACELOOP: Final = "traceloop.span.kind"
LANGFUSE: Final = "langfuse.observation.type"
REQUEST_TYPE: Final = "llm.request.type"

MARKS: Final[Sequence[tuple[str, Mapping[str, OperationKind]]]] = (
    # The semantic conventions of OpenInference.
    (OPENINFERENCE, {"LLM": "model call", "AGENT": "agent", "TOOL": "tool"}),
    # OpenTelemetry semantic conventions for generative AI; `completion` was written before 1.27.
    (
        semconv.OPERATION,
        {
            "chat": "model call",
            "completion": "model call",
            "generate_content": "model call",
            "text_completion": "model call",
            "invoke_agent": "agent",
            "execute_tool": "tool",
            "create_agent": "other",
            "embeddings": "other",
            "invoke_workflow": "other",
            "retrieval": "other",
            # LiteLLM names its own function: litellm, types/utils.py, CallTypes.
            "acompletion": "model call",
            "atext_completion": "model call",
            "responses": "model call",
            "aresponses": "model call",
            "anthropic_messages": "model call",
            "aanthropic_messages": "model call",
            "agenerate_content": "model call",
            "embedding": "other",
            "aembedding": "other",
        },
    ),
    # OpenLLMetry: its model calls have none of these kinds, but a type of request.
    (TRACELOOP, {"agent": "agent", "tool": "tool"}),
    (REQUEST_TYPE, {"chat": "model call", "completion": "model call"}),
    # langfuse, _client/constants.py, ObservationTypeLiteral.
    (LANGFUSE, {"generation": "model call", "agent": "agent", "tool": "tool"}),
    # mlflow, entities/span.py, SpanType; its values are JSON.
    (
        "mlflow.spanType",
        {"CHAT_MODEL": "model call", "LLM": "model call", "AGENT": "agent", "TOOL": "tool"},
    ),
    # genkit, js/core/src/action.ts: the type of an action.
    ("genkit:metadata:subtype", {"model": "model call", "tool": "tool"}),
)
"""Attributes with the kind of a span, in order of precedence."""

MODELS: Final = (
    semconv.REQUEST_MODEL,
    "llm.model_name",
    "llm.request.model",
    "langfuse.observation.model.name",
    "gen_ai.response.model",
    "llm.response.model",
    "mlflow.llm.model",
    "genkit:name",
    "model",  # MLflow, which records the arguments of OpenAI's client by their names
)
# The second is the name before version 1.37 of the conventions.
PROVIDERS: Final = (
    "gen_ai.provider.name",
    "gen_ai.system",
    "llm.provider",
    "llm.system",
    "mlflow.llm.provider",
)
RESPONSE_IDS: Final = ("gen_ai.response.id", "llm.response.id")
CLAUDE_CODE: Final = "com.anthropic.claude_code"
"""Scope of the spans whose `request_id` is that of the vendor; in others, it may be any."""
AGENT_NAMES: Final = (semconv.AGENT_NAME, "agent.name", "traceloop.entity.name")
TIERS: Final = (
    "gen_ai.response.service_tier",  # LangSmith
    "openai.response.service_tier",
    "gen_ai.openai.response.service_tier",
    "openai.request.service_tier",
    "gen_ai.openai.request.service_tier",
)
"""The billed tier; if it is missing, the requested one."""

ADDRESS: Final = "server.address"
REGION: Final = "aws.region"
"""Where a call was sent. `cloud.region` is that of the caller."""

QUOTE: Final = '"'
"""Around a text that is written as JSON."""

ENDS: Final = ("", ".", "_", "/", " ")
"""Characters that may follow an operation: Semantic Kernel's is `chat.completions`."""


def kind_of(attributes: Mapping[str, Any], name: str) -> OperationKind:
    """Return the kind of a span, by its attributes, or else by its name.

    A framework's own spans are recognized by their names alone: live, they have no attributes yet.
    """
    for mark, kinds in MARKS:
        if (said := attributes.get(mark)) is not None:
            found = (
                _operation_of(str(said), kinds)
                if mark == semconv.OPERATION
                else kinds.get(str(said).strip(QUOTE))
            )
            return found or _unknown_operation(attributes, is_operation=mark == semconv.OPERATION)
    # Two of three signs: any span may be named `chat`, or have the name of a model.
    told = (
        name.startswith(semconv.MODEL_CALL_PREFIXES),
        first_text(attributes, MODELS[:4]) is not None,
        has_usage(attributes),
    )
    return "model call" if sum(told) > 1 else "other"


def _operation_of(said: str, kinds: Mapping[str, OperationKind]) -> OperationKind | None:
    """Return the kind of an operation by its beginning, as in `chat.completions`."""
    said = said.lower()
    known = [
        name for name in kinds if said.startswith(name) and said[len(name) : len(name) + 1] in ENDS
    ]
    return kinds[max(known, key=len)] if known else None


def _unknown_operation(attributes: Mapping[str, Any], *, is_operation: bool) -> OperationKind:
    has_both = first_text(attributes, MODELS[:4]) is not None and has_usage(attributes)
    return "possible call" if is_operation and has_both else "other"


def first_text(attributes: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some attributes that is text."""
    found = (attributes.get(name) for name in names)
    return next((value for value in found if isinstance(value, str) and value), None)


def model_of(attributes: Mapping[str, Any]) -> str:
    """Return the ID of the requested model, or `unknown`."""
    return (first_text(attributes, MODELS) or "unknown").strip(QUOTE)


def provider_of(attributes: Mapping[str, Any]) -> str:
    """Return the provider, or `unknown`."""
    return (first_text(attributes, PROVIDERS) or "unknown").strip(QUOTE)


def terms_of(attributes: Mapping[str, Any], answered: str | None) -> PricingTerms:
    """Return the pricing terms of a call; `answered` is the tier in its usage, if any."""
    address, region = (first_text(attributes, [name]) for name in (ADDRESS, REGION))
    return PricingTerms(
        vendor=None if address is None else vendor_at(address),
        tier=answered or first_text(attributes, TIERS) or STANDARD,
        region=region_of(
            model_of(attributes),
            () if address is None else (address,),
            set_as=() if region is None else (region,),
        ),
    )


# --- the model call that a span shows -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A model call as its span shows it, to live recording and to an import alike."""

    model: str
    provider: str
    terms: PricingTerms
    response_id: str | None
    record: UsageRecord
    input_estimate: int
    answer_estimate: int
    """Tokens of its texts; 0 if its usage is known."""
    failed: bool

    @property
    def tokens(self) -> int:
        """Reported tokens."""
        return self.record.usage.total

    @property
    def has_estimate(self) -> bool:
        """Whether it has texts whose tokens are estimated."""
        return self.input_estimate + self.answer_estimate > 0

    @property
    def answered(self) -> bool:
        """Whether it has a part of an answer, so that it is billed even if it failed."""
        return self.answer_estimate > 0


def stated_usage(attributes: Mapping[str, Any], scope: str) -> UsageRecord:
    """Return the usage that a span reports, whatever it is."""
    # Most spans report none, which their names show faster than their values.
    return record_of_span(attributes, scope) if has_usage(attributes) else NOTHING_REPORTED


def has_usage(attributes: Mapping[str, Any]) -> bool:
    """Return whether a span has an attribute about usage."""
    return any(map(fields.is_usage, attributes))


def shown_call(
    attributes: Mapping[str, Any],
    scope: str,
    events: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    is_error: bool,
) -> ShownCall:
    """Return the model call that an ended span shows.

    Args:
        attributes: All attributes of the span.
        scope: Its instrumentation scope.
        events: Its events, each with its name and its attributes.
        is_error: Whether it has the status ERROR.
    """
    model, provider = model_of(attributes), provider_of(attributes)
    record = record_of_span(attributes, scope, provider, model)
    is_known = record.sure == "measured"
    sent, answer = (0, 0) if is_known else estimates_of_span(attributes, events, model)
    return ShownCall(
        model=model,
        provider=provider,
        terms=terms_of(attributes, record.tier),
        response_id=first_text(
            attributes,
            ("request_id",) if scope.startswith(CLAUDE_CODE) else RESPONSE_IDS,
        ),
        record=record,
        input_estimate=sent,
        answer_estimate=answer,
        # Reported tokens were billed, so the provider had accepted the call.
        failed=is_error and not record.usage.total,
    )


# --- names of spans of invocations ----------------------------------------------------------------


# By names, not by attributes: Strands sets attributes after a span has started, and its invocation
# must be known at the start.
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNames:
    """Names by which a framework's own spans are recognized."""

    scope: str
    """Its instrumentation scope."""
    agent: str
    """Prefix of the name of an invocation's span."""
    realtime: str | None = None
    """Prefix of the name of the span of a realtime agent, if there are any."""
    cycle: str | None = None
    """Name of the span of one loop cycle: a model call and the tools it requested."""

    @property
    def invocations(self) -> tuple[str, ...]:
        """Prefixes of the names of all spans that are a whole invocation."""
        return (self.agent,) if self.realtime is None else (self.agent, self.realtime)


OWN_SPANS: Final = SpanNames(scope="otel_limits", agent="invoke_agent")
"""Our own spans, for frameworks that make none."""
