"""The metrics that OpenTelemetry's conventions define for agents, for those who ask for them.

Source: docs/gen-ai/gen-ai-metrics.md of
https://github.com/open-telemetry/semantic-conventions-genai at commit 004902b, whose schema is
https://opentelemetry.io/schemas/gen-ai/1.42.0 and whose status is Development. The two counts of an
invocation are those of its pull request #336. Later commits put `gen_ai.client.inference.*` in the
place of the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from otel_limits.core.errors import BY_REASON, LimitReachedError
from otel_limits.core.events import ModelCall, Started, Stop, ToolCall
from otel_limits.observers.instruments import MetricSpec

if TYPE_CHECKING:
    from otel_limits.observers.instruments import Exemplar, Series
    from otel_limits.observers.label_values import MetricLabels
    from otel_limits.runs.dispatcher import Handler

CALL_SECONDS: Final = tuple(0.01 * 2**n for n in range(14))
INVOCATION_SECONDS: Final = tuple(round(0.1 * 2**n, 1) for n in range(13))
TOKENS: Final = tuple(float(4**n) for n in range(14))
CALLS: Final = tuple(float(2**n) for n in range(8))

OF_CALLS: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

TOKEN_USAGE: Final = MetricSpec(
    name="gen_ai_client_token_usage",
    convention="gen_ai.client.token.usage",
    labels=(*OF_CALLS, "gen_ai.token.type"),
    help="Number of input and output tokens used.",
    unit="{token}",
    kind="histogram",
    buckets=TOKENS,
)
OPERATION_DURATION: Final = MetricSpec(
    name="gen_ai_client_operation_duration_seconds",
    convention="gen_ai.client.operation.duration",
    labels=(*OF_CALLS, "error.type"),
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
"""What the conventions call a provider; others are named there as we name them, or not at all."""

UNNAMED_ERROR: Final = "_OTHER"
"""The conventions' word for an error whose class is not known, or not to be told."""

FUNCTION: Final = "function"
"""A tool that the client runs, as all are that a framework runs."""


class MakeSeries(Protocol):
    """Returns one series, made when it is new."""

    def __call__(self, spec: MetricSpec, *labels: str) -> Series:
        """Return it."""


class Conventions:
    """Counts facts in the metrics of the conventions.

    Args:
        series: Returns a series.
        labels: Makes label values out of names.
        exemplar: Names the trace of a call or of an invocation, where it is exported.
    """

    def __init__(
        self,
        series: MakeSeries,
        labels: MetricLabels,
        exemplar: Callable[..., Exemplar | None],
    ) -> None:
        """Know no invocation yet."""
        self._series = series
        self._labels = labels
        self._exemplar = exemplar
        self._models: dict[str, str] = {}
        """The model of each live invocation's agent."""

    def beside(self, takers: Mapping[type, Handler]) -> dict[type, Handler]:
        """Return what hands facts to those who take them already, and then to this."""
        mine: dict[type, Handler] = {
            Started: self.started,
            ModelCall: self.model_call,
            ToolCall: self.tool_call,
            Stop: self.stop,
        }
        return {kind: both(takers[kind], take) for kind, take in mine.items()}

    def started(self, event: Started) -> None:
        """Keep the model of the agent, which its end does not name."""
        self._models[event.invocation.id] = event.model or ""

    def model_call(self, event: ModelCall) -> None:
        """Count its tokens, where the provider reported them, and its time, where it is known."""
        provider = PROVIDERS.get(event.provider, event.provider)
        of_call = ("chat", self._labels.provider(provider), self._labels.model(event.model))
        exemplar = self._exemplar(event.invocation, event.span_id)
        if event.reported is not None and not event.estimated:
            # As they are billed, which is not always as they were reported.
            for kind, tokens in (("input", event.usage.input), ("output", event.usage.output)):
                self._series(TOKEN_USAGE, *of_call, kind)(tokens, exemplar)
        # Without a beginning nobody knows how long it took, and 0 would be a very fast call.
        if event.seconds is not None:
            error = UNNAMED_ERROR if event.kind == "failed" else ""
            self._series(OPERATION_DURATION, *of_call, error)(event.seconds, exemplar)

    def tool_call(self, event: ToolCall) -> None:
        """Count its time; a refused one has none."""
        # What did not run took no time, and is none of the tool's.
        if event.seconds is None:
            return
        agent = self._labels.agent(event.invocation.agent)
        tool = self._labels.tool(event.tool, agent)
        error = UNNAMED_ERROR if event.status == "error" else ""
        series = self._series(TOOL_DURATION, tool, agent, FUNCTION, error)
        series(event.seconds, self._exemplar(event.invocation))

    def stop(self, event: Stop) -> None:
        """Count what the invocation took."""
        agent, model = self._labels.agent(event.agent), self._models.pop(event.invocation_id, "")
        # A stop that was read back from a message has no place in a tree.
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


def both(first: Handler, second: Handler) -> Handler:
    """Make what hands an event to two who take it."""

    def take(event: Any) -> None:
        first(event)
        second(event)

    return take


def error_of(stop: Stop) -> str:
    """Class of the error with which an invocation ended; a halt that returns is not an error."""
    # By the class that was raised: the conventions ask for a name that is found in the code.
    if stop.action == "raised":
        return BY_REASON.get(stop.reason, LimitReachedError).__qualname__
    return UNNAMED_ERROR if stop.reason == "error" else ""
