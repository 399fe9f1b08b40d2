"""Metrics of OpenTelemetry's semantic conventions for agents. Off by default.

Source: docs/gen-ai/gen-ai-metrics.md of
https://github.com/open-telemetry/semantic-conventions-genai at commit 004902b, whose schema is
https://opentelemetry.io/schemas/gen-ai/1.42.0 and whose status is Development. The two counts per
invocation are from pull request #336. Later commits replace the first two metrics by
`gen_ai.client.inference.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from otel_limits.core.errors import BY_REASON, LimitReachedError
from otel_limits.core.events import ModelCall, Started, Stop, ToolCall
from otel_limits.observers.metrics import MetricSpec

if TYPE_CHECKING:
    from otel_limits.observers.metrics import Exemplar, MetricLabels, Series
    from otel_limits.runs.dispatcher import Handler

CALL_SECONDS: Final = tuple(0.01 * 2**n for n in range(14))
INVOCATION_SECONDS: Final = tuple(round(0.1 * 2**n, 1) for n in range(13))
TOKENS: Final = tuple(float(4**n) for n in range(14))
CALLS: Final = tuple(float(2**n) for n in range(8))

CALL_LABELS: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

TOKEN_USAGE: Final = MetricSpec(
    name="gen_ai_client_token_usage",
    convention="gen_ai.client.token.usage",
    labels=(*CALL_LABELS, "gen_ai.token.type"),
    help="Number of input and output tokens used.",
    unit="{token}",
    kind="histogram",
    buckets=TOKENS,
)
OPERATION_DURATION: Final = MetricSpec(
    name="gen_ai_client_operation_duration_seconds",
    convention="gen_ai.client.operation.duration",
    labels=(*CALL_LABELS, "error.type"),
    help="GenAI operation duration.",
    unit="s",
    kind="histogram",
    buckets=CALL_SECONDS,
)
AGENT_DURATION: Final = MetricSpec(
    name="gen_ai_invoke_agent_duration_seconds",
    convention="gen_ai.invoke_agent.duration",
    labels=("gen_ai.agent.name", "gen_ai.request.model", "error.type"),
    help="Duration of an invocation of an agent.",
    unit="s",
    kind="histogram",
    buckets=INVOCATION_SECONDS,
)
AGENT_CALLS: Final = MetricSpec(
    name="gen_ai_invoke_agent_inference_calls",
    convention="gen_ai.invoke_agent.inference_calls",
    labels=("gen_ai.agent.name",),
    help="Model calls of an invocation of an agent, failed ones included.",
    unit="{inference_call}",
    kind="histogram",
    buckets=CALLS,
)
AGENT_TOOLS: Final = MetricSpec(
    name="gen_ai_invoke_agent_tool_calls",
    convention="gen_ai.invoke_agent.tool_calls",
    labels=("gen_ai.agent.name",),
    help="Tool calls of an invocation of an agent, failed ones included.",
    unit="{tool_call}",
    kind="histogram",
    buckets=CALLS,
)
TOOL_DURATION: Final = MetricSpec(
    name="gen_ai_execute_tool_duration_seconds",
    convention="gen_ai.execute_tool.duration",
    labels=("gen_ai.tool.name", "gen_ai.agent.name", "gen_ai.tool.type", "error.type"),
    help="Duration of a tool execution.",
    unit="s",
    kind="histogram",
    buckets=CALL_SECONDS,
)

CONVENTIONAL: Final = (
    TOKEN_USAGE,
    OPERATION_DURATION,
    AGENT_DURATION,
    AGENT_CALLS,
    AGENT_TOOLS,
    TOOL_DURATION,
)

PROVIDERS: Final[Mapping[str, str]] = {
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "openai_responses": "openai",
}
"""Provider names of the conventions where they differ from ours."""

UNNAMED_ERROR: Final = "_OTHER"
"""The conventions' `error.type` of an error whose class is unknown or must not be exported."""

FUNCTION: Final = "function"
"""The type of a tool that the client runs, as every framework does."""


class MakeSeries(Protocol):
    """Returns one series, creating it if it is new."""

    def __call__(self, spec: MetricSpec, *labels: str) -> Series:
        """Return the series of `spec` with these labels."""


class Conventions:
    """Counts events in the metrics of the conventions.

    Args:
        series: Returns a series.
        labels: Converts names to label values.
        exemplar: Returns the trace of a call or an invocation, if it is exported.
    """

    def __init__(
        self,
        series: MakeSeries,
        labels: MetricLabels,
        exemplar: Callable[..., Exemplar | None],
    ) -> None:
        """Count in the given series."""
        self._series = series
        self._labels = labels
        self._exemplar = exemplar
        self._models: dict[str, str] = {}
        """The model of the agent, by active invocation."""

    def combined_with(self, handlers: Mapping[type, Handler]) -> dict[type, Handler]:
        """Return handlers that call the given one, then that of this class."""
        own: dict[type, Handler] = {
            Started: self.started,
            ModelCall: self.model_call,
            ToolCall: self.tool_call,
            Stop: self.stop,
        }
        return {kind: call_both(handlers[kind], handle) for kind, handle in own.items()}

    def started(self, event: Started) -> None:
        """Remember the model of the agent, which `Stop` does not contain."""
        self._models[event.invocation.id] = event.model or ""

    def model_call(self, event: ModelCall) -> None:
        """Record its tokens if reported, and its duration if known."""
        provider = PROVIDERS.get(event.provider, event.provider)
        labels = ("chat", self._labels.provider(provider), self._labels.model(event.model))
        exemplar = self._exemplar(event.invocation, event.span_id)
        if event.reported is not None and not event.estimated:
            # As billed, which may differ from the reported usage.
            for kind, tokens in (("input", event.usage.input), ("output", event.usage.output)):
                self._series(TOKEN_USAGE, *labels, kind)(tokens, exemplar)
        # The duration is unknown if the start is; 0 would count as a fast call.
        if event.seconds is not None:
            error = UNNAMED_ERROR if event.kind == "failed" else ""
            self._series(OPERATION_DURATION, *labels, error)(event.seconds, exemplar)

    def tool_call(self, event: ToolCall) -> None:
        """Record its duration, unless it was refused."""
        # A refused call did not run.
        if event.seconds is None:
            return
        agent = self._labels.agent(event.invocation.agent)
        tool = self._labels.tool(event.tool, agent)
        error = UNNAMED_ERROR if event.status == "error" else ""
        series = self._series(TOOL_DURATION, tool, agent, FUNCTION, error)
        series(event.seconds, self._exemplar(event.invocation))

    def stop(self, event: Stop) -> None:
        """Record the duration and the calls of the invocation."""
        agent, model = self._labels.agent(event.agent), self._models.pop(event.invocation_id, "")
        # A stop parsed from a message has no invocation.
        exemplar = self._exemplar(event.invocation) if event.invocation else None
        duration = self._series(
            AGENT_DURATION, agent, self._labels.model(model) if model else "", error_of(event)
        )
        duration(event.seconds, exemplar)
        self._series(AGENT_CALLS, agent)(event.model_calls, exemplar)
        self._series(AGENT_TOOLS, agent)(event.tool_calls, exemplar)

    def forget(self) -> None:
        """Forget the live invocations."""
        self._models.clear()


def call_both(first: Handler, second: Handler) -> Handler:
    """Return a handler that calls both."""

    def handle(event: Any) -> None:
        first(event)
        second(event)

    return handle


def error_of(stop: Stop) -> str:
    """Return the `error.type` of an invocation; a halt that returns a result is not an error."""
    # The class that was raised, because the conventions require a name from the code.
    if stop.raised:
        return BY_REASON.get(stop.reason, LimitReachedError).__qualname__
    return UNNAMED_ERROR if stop.reason == "error" else ""
