"""Every metric in one table, whichever way it leaves the process, and what its labels may say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, get_args

from otel_limits.core.events import CallKind, Decision, ToolStatus

PREFIX: Final = "otel_limits_"

InstrumentKind: TypeAlias = Literal["counter", "updown", "gauge", "minimum", "histogram"]
"""`updown` goes up and down and is summed over processes; `gauge` is set to what was seen last;
`minimum` is one of which the least over all live processes is shown."""

Exemplar: TypeAlias = dict[str, str]
"""`trace_id` and `span_id` of an example of what was counted."""


class Series(Protocol):
    """One time series: counts, sets or observes a value."""

    def __call__(self, value: float, exemplar: Exemplar | None = None, /) -> None:
        """Take `value`, as an example of which a trace may be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric, as code, OpenTelemetry, Prometheus and documentation want it."""

    name: str
    """Its name in Prometheus, whichever way it got there."""
    labels: tuple[str, ...]
    """Its attributes in OpenTelemetry. Where a value is empty there is no such attribute."""
    help: str
    unit: str = ""
    """UCUM unit for OpenTelemetry; one in braces adds nothing to the name in Prometheus."""
    kind: InstrumentKind = "counter"
    buckets: tuple[float, ...] = ()
    """Upper bounds, for a histogram."""
    values: tuple[str, ...] = ()
    """What its last label can say, where that is a short list: all are made with the first."""
    convention: str = ""
    """Its name in OpenTelemetry's semantic conventions, for a metric of theirs."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in Prometheus, which takes dots for underscores."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @property
    def otel_name(self) -> str:
        """Its name in OpenTelemetry: what Prometheus adds for kind and unit is not in it."""
        if self.convention:
            return self.convention
        name = self.name.removeprefix(PREFIX).removesuffix("_total").removesuffix("_seconds")
        return f"otel_limits.{name}"


STOPS: Final = MetricSpec(
    name="otel_limits_stops_total",
    labels=("agent", "reason", "action"),
    help="Finished invocations by stop reason and by what otel-limits did (none, observed, halted, "
    "wrapped_up, raised). The reason of an observed one is that of the limit that it went past.",
    unit="{stop}",
)
TURNS: Final = MetricSpec(
    name="otel_limits_turns_total",
    labels=("agent",),
    help="Model responses taken into a conversation, each with the tools it asked for.",
    unit="{turn}",
)
CYCLES: Final = MetricSpec(
    name="otel_limits_cycles_total",
    labels=("agent",),
    help="Event loop cycles, replays of interrupted tools included.",
    unit="{cycle}",
)
MODEL_CALLS: Final = MetricSpec(
    name="otel_limits_model_calls_total",
    labels=("agent", "model", "kind"),
    help="Requests to a provider: measured, zero_token (the provider reported zero), "
    "unmeasured (it reported nothing) or failed. A halt is none of them.",
    unit="{call}",
    values=get_args(CallKind),
)
TOOL_CALLS: Final = MetricSpec(
    name="otel_limits_tool_calls_total",
    labels=("agent", "tool", "status"),
    help="Tools that a model asked for, by how it ended: success, error, "
    "or refused because of a limit.",
    unit="{call}",
    values=get_args(ToolStatus),
)
SYNTHETIC_MESSAGES: Final = MetricSpec(
    name="otel_limits_synthetic_messages_total",
    labels=("agent", "reason"),
    help="Messages that a halt put into a conversation; no model wrote them.",
    unit="{message}",
)
TOKENS: Final = MetricSpec(
    name="otel_limits_tokens_total",
    labels=("agent", "model", "type"),
    help="Tokens by type (input, output). Input includes cached tokens; "
    "unmeasured calls count with their estimate.",
    unit="{token}",
    values=("input", "output"),
)
CACHED_TOKENS: Final = MetricSpec(
    name="otel_limits_cached_tokens_total",
    labels=("agent", "model", "kind"),
    help="Input tokens that were read from a cache or written to one. "
    "They are a part of the input tokens: never add the two.",
    unit="{token}",
    values=("read", "write"),
)
COST: Final = MetricSpec(
    name="otel_limits_cost_usd_total",
    labels=("agent", "model"),
    help="US dollars spent on model calls whose price is known.",
    unit="{USD}",
)
UNPRICED_TOKENS: Final = MetricSpec(
    name="otel_limits_unpriced_tokens_total",
    labels=("agent", "model"),
    help="Tokens of model calls whose price is unknown, and that no cost includes.",
    unit="{token}",
)
IN_PROGRESS: Final = MetricSpec(
    name="otel_limits_invocations_in_progress",
    labels=("agent",),
    help="Invocations that have begun and not ended.",
    unit="{invocation}",
    kind="updown",
)
INVOCATION_TURNS: Final = MetricSpec(
    name="otel_limits_invocation_turns",
    labels=("agent",),
    help="Turns of a finished invocation.",
    unit="{turn}",
    kind="histogram",
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
INVOCATION_TOKENS: Final = MetricSpec(
    name="otel_limits_invocation_tokens",
    labels=("agent",),
    help="Input and output tokens of a finished invocation.",
    unit="{token}",
    kind="histogram",
    buckets=(256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0),
)
INVOCATION_DURATION: Final = MetricSpec(
    name="otel_limits_invocation_duration_seconds",
    labels=("agent",),
    help="Seconds from the begin of an invocation to its end.",
    unit="s",
    kind="histogram",
    buckets=(0.5, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0),
)
BUDGET_USED: Final = MetricSpec(
    name="otel_limits_budget_used_ratio",
    labels=("agent", "limit"),
    help="Share of a limit that a finished invocation had used: 1 when it was reached.",
    kind="histogram",
    buckets=(0.25, 0.5, 0.8, 0.9, 0.95, 1.0, 1.25),
)
LIMIT: Final = MetricSpec(
    name="otel_limits_limit",
    labels=("agent", "limit"),
    help="What a limit permits now, in its own unit (turns, tokens, US dollars, seconds); "
    "0 when it was set and is not any more.",
    kind="gauge",
)
OVERSHOOT: Final = MetricSpec(
    name="otel_limits_overshoot_tokens",
    labels=("agent", "limit"),
    help="Tokens above a limit on tokens when it halted an invocation: "
    "the last model call is counted when it is over.",
    unit="{token}",
    kind="histogram",
    buckets=(0.0, 256.0, 1024.0, 4096.0, 16384.0),
)
WARNINGS: Final = MetricSpec(
    name="otel_limits_warnings_total",
    labels=("agent", "limit", "threshold"),
    help="Invocations that passed a soft threshold of a limit, such as 0.8 of it.",
    unit="{warning}",
)
QUOTA_DECISIONS: Final = MetricSpec(
    name="otel_limits_quota_decisions_total",
    labels=("quota", "decision"),
    help="What quotas said to model calls: admitted, refused, observed (it would have been "
    "refused), unpriced (a quota in money did not count it), waited (admitted after a wait), "
    "gave_up (refused after one), or one of degraded_grace_admitted, degraded_denied, "
    "degraded_allowed, degraded_local_admitted, degraded_local_refused while the store did "
    "not answer.",
    unit="{decision}",
    values=get_args(Decision),
)
QUOTA_WAITING: Final = MetricSpec(
    name="otel_limits_quota_waiting",
    labels=("quota",),
    help="Model calls that wait for a quota now.",
    unit="{call}",
    kind="updown",
)
QUOTA_WAIT: Final = MetricSpec(
    name="otel_limits_quota_wait_seconds",
    labels=("quota",),
    help="How long model calls waited for a quota, however the wait ended.",
    unit="s",
    kind="histogram",
    buckets=(0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
QUOTA_USED: Final = MetricSpec(
    name="otel_limits_quota_used",
    labels=("quota", "key"),
    help="What the fleet had used of a quota, in its own unit, when this process last asked; "
    "until otel_limits_quota_resets_timestamp_seconds.",
    kind="gauge",
)
QUOTA_RESERVED: Final = MetricSpec(
    name="otel_limits_quota_reserved",
    labels=("quota", "key"),
    help="What was set aside for model calls under way, in the whole fleet, "
    "when this process last asked.",
    kind="gauge",
)
QUOTA_LIMIT: Final = MetricSpec(
    name="otel_limits_quota_limit",
    labels=("quota", "key"),
    help="What a quota permits in the window, grants included, in its own unit "
    "(tokens, US dollars, model calls, invocations, model calls at once).",
    kind="gauge",
)
QUOTA_RESETS: Final = MetricSpec(
    name="otel_limits_quota_resets_timestamp_seconds",
    labels=("quota", "key"),
    help="When the window ends in which this process last asked: what was used counts until then. "
    "For model calls at once, which have no window, a day ahead or two.",
    unit="s",
    kind="gauge",
)
UNSAMPLED_INVOCATIONS: Final = MetricSpec(
    name="otel_limits_unsampled_invocations_total",
    labels=("agent",),
    help="Invocations whose span did not reach the span processor, "
    "followed through the framework's hooks instead.",
    unit="{invocation}",
)
LABEL_OVERFLOWS: Final = MetricSpec(
    name="otel_limits_label_overflows_total",
    labels=("label",),
    help="Times that a name was counted as _other, because its label (agent, model, tool, reason, "
    "provider, observer) tells no more names apart.",
    unit="{name}",
    values=("agent", "model", "tool", "reason", "provider", "observer"),
)
INTERNAL_ERRORS: Final = MetricSpec(
    name="otel_limits_internal_errors_total",
    labels=("component",),
    help="Failures inside otel-limits that were kept away from the agent.",
    unit="{error}",
)
OBSERVER_DROPPED_EVENTS: Final = MetricSpec(
    name="otel_limits_observer_dropped_events_total",
    labels=("observer",),
    help="Facts that an observer lost, because it failed or could not keep up.",
    unit="{event}",
)
OBSERVER_LAG: Final = MetricSpec(
    name="otel_limits_observer_lag_seconds",
    labels=("observer",),
    help="Seconds that an observer kept the end of an invocation waiting.",
    unit="s",
    kind="histogram",
    buckets=(0.0001, 0.001, 0.01, 0.05, 0.25, 1.0),
)
POLICY_VALID: Final = MetricSpec(
    name="otel_limits_policy_valid",
    labels=(),
    help="1 unless the newest version of the policy file was refused, so that the version "
    "before it stays in force.",
    kind="gauge",
)
POLICY_READS: Final = MetricSpec(
    name="otel_limits_policy_reads_total",
    labels=("outcome",),
    help="Versions of the policy file that were read, by whether they were taken (accepted) or the "
    "one before stays in force (refused).",
    unit="{version}",
    values=("accepted", "refused"),
)
ENFORCING: Final = MetricSpec(
    name="otel_limits_enforcing",
    labels=("source",),
    help="1 where limits are in force, 0 where otel-limits is switched on and cannot stop any "
    "agent. The source is the way in which it was switched on first: run, autoload, instrumentor, "
    "provider, code or plugin. Told when a framework is imported; of several processes the least.",
    kind="minimum",
)
BUILD_INFO: Final = MetricSpec(
    name="otel_limits_build_info",
    labels=("version", "service_version", "service_namespace", "deployment_environment"),
    help="Version of otel-limits, as a label of a constant 1, with what OTEL_RESOURCE_ATTRIBUTES "
    "or the program's own provider says of the service.",
    kind="gauge",
)

METRICS: Final = tuple(each for each in globals().values() if isinstance(each, MetricSpec))
"""Every metric above; both ways out and the table of the documentation are made from this."""
