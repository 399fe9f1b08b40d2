"""The table of all metrics, for every exporter, with their labels and series."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, get_args

from otel_limits.bindings import known
from otel_limits.core.events import CallKind, Decision, TaskLoss, ToolStatus
from otel_limits.core.labels import OTHER, LabelLimiter, Names
from otel_limits.core.limits import STOP_REASONS
from otel_limits.observers.protocol import BaseObserver

PREFIX: Final = "otel_limits_"

InstrumentKind: TypeAlias = Literal["counter", "updown", "gauge", "minimum", "histogram"]
"""Over processes, `updown` is summed, `gauge` is the latest value, `minimum` the least."""

Exemplar: TypeAlias = dict[str, str]
"""`trace_id` and `span_id` of a counted event."""


class Series(Protocol):
    """A time series that counts, sets or observes a value."""

    def __call__(self, value: float, exemplar: Exemplar | None = None, /) -> None:
        """Record `value`, with a trace as an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric, as code, OpenTelemetry, Prometheus and the documentation need it."""

    name: str
    """Its name in Prometheus, for both exporters."""
    labels: tuple[str, ...]
    """Its attributes in OpenTelemetry, which omits empty ones."""
    help: str
    unit: str = ""
    """UCUM unit for OpenTelemetry; one in braces adds nothing to the name in Prometheus."""
    kind: InstrumentKind = "counter"
    buckets: tuple[float, ...] = ()
    """Upper bounds, for a histogram."""
    values: tuple[str, ...] = ()
    """All values of its last label, if they are few: the series are created together."""
    convention: str = ""
    """Its name in OpenTelemetry's semantic conventions, if it has one."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in Prometheus, which replaces dots by underscores."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @property
    def otel_name(self) -> str:
        """Its OpenTelemetry name, without the suffixes Prometheus adds for kind and unit."""
        if self.convention:
            return self.convention
        name = self.name.removeprefix(PREFIX).removesuffix("_total").removesuffix("_seconds")
        return f"otel_limits.{name}"


STOPS: Final = MetricSpec(
    name="otel_limits_stops_total",
    labels=("agent", "reason", "action"),
    help="Finished invocations by stop reason and action taken (none, observed, halted, "
    "wrapped_up, raised, killed). For action=observed, reason is the limit that would have halted.",
    unit="{stop}",
)
TURNS: Final = MetricSpec(
    name="otel_limits_turns_total",
    labels=("agent",),
    help="Model responses accepted into the conversation.",
    unit="{turn}",
)
CYCLES: Final = MetricSpec(
    name="otel_limits_cycles_total",
    labels=("agent",),
    help="Event loop cycles, including replays of interrupted tools.",
    unit="{cycle}",
)
MODEL_CALLS: Final = MetricSpec(
    name="otel_limits_model_calls_total",
    labels=("agent", "model", "kind"),
    help="Model calls by kind: measured, zero_token (the provider reported 0), estimated (it "
    "reported nothing), unmeasured (the same, without an estimate), failed.",
    unit="{call}",
    values=get_args(CallKind),
)
TOOL_CALLS: Final = MetricSpec(
    name="otel_limits_tool_calls_total",
    labels=("agent", "tool", "status"),
    help="Tool calls by status: success, error (as the framework reports), refused (by a limit).",
    unit="{call}",
    values=get_args(ToolStatus),
)
TOOL_REFUSALS: Final = MetricSpec(
    name="otel_limits_tool_refusals_total",
    labels=("agent", "tool", "limit", "action"),
    help="Tool calls that a limit on tool calls refused (action=refused), or would have refused "
    "(observed).",
    unit="{call}",
)
SYNTHETIC_MESSAGES: Final = MetricSpec(
    name="otel_limits_synthetic_messages_total",
    labels=("agent", "reason"),
    help="Messages added by a halt instead of a model.",
    unit="{message}",
)
TOKENS: Final = MetricSpec(
    name="otel_limits_tokens_total",
    labels=("agent", "model", "type"),
    help="Tokens by type (input, output). Input includes cached tokens; estimated calls count "
    "with their estimate.",
    unit="{token}",
    values=("input", "output"),
)
CACHED_TOKENS: Final = MetricSpec(
    name="otel_limits_cached_tokens_total",
    labels=("agent", "model", "kind"),
    help="Cached input tokens by kind (read, write). Already included in input tokens.",
    unit="{token}",
    values=("read", "write"),
)
COST: Final = MetricSpec(
    name="otel_limits_cost_usd_total",
    labels=("agent", "model"),
    help="Cost of model calls with a known price, in USD.",
    unit="{USD}",
)
UNPRICED_TOKENS: Final = MetricSpec(
    name="otel_limits_unpriced_tokens_total",
    labels=("agent", "model"),
    help="Tokens of model calls without a known price. Not included in any cost.",
    unit="{token}",
)
UNKNOWN_USAGE: Final = MetricSpec(
    name="otel_limits_unknown_usage_calls_total",
    labels=("agent", "model"),
    help="Model calls whose usage has tokens with an unknown meaning. The log has their names.",
    unit="{call}",
)
COST_DIFFERENCES: Final = MetricSpec(
    name="otel_limits_stated_cost_differences_total",
    labels=("agent", "model"),
    help="Model calls whose response states a cost that differs by more than 1% from the price by "
    "the policy file or the price list.",
    unit="{call}",
)
REFUSED_COSTS: Final = MetricSpec(
    name="otel_limits_refused_stated_costs_total",
    labels=("agent", "model"),
    help="Model calls whose response states an amount that is not a cost. The log has the reason.",
    unit="{call}",
)
IN_PROGRESS: Final = MetricSpec(
    name="otel_limits_invocations_in_progress",
    labels=("agent",),
    help="Invocations in progress.",
    unit="{invocation}",
    kind="updown",
)
INVOCATION_TURNS: Final = MetricSpec(
    name="otel_limits_invocation_turns",
    labels=("agent",),
    help="Turns of finished invocations.",
    unit="{turn}",
    kind="histogram",
    buckets=tuple(map(float, (1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 75, 100, 200))),
)
INVOCATION_TOKENS: Final = MetricSpec(
    name="otel_limits_invocation_tokens",
    labels=("agent",),
    help="Input and output tokens of finished invocations.",
    unit="{token}",
    kind="histogram",
    buckets=(256.0, 1024.0, 4096.0, *(16384.0 * 2**power for power in range(9))),
)
INVOCATION_DURATION: Final = MetricSpec(
    name="otel_limits_invocation_duration_seconds",
    labels=("agent",),
    help="Duration of finished invocations, in seconds.",
    unit="s",
    kind="histogram",
    buckets=tuple(map(float, (1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 900, 1800, 3600))),
)
BUDGET_USED: Final = MetricSpec(
    name="otel_limits_budget_used_ratio",
    labels=("agent", "limit"),
    help="Fraction of a limit used at the end of an invocation, by its whole task; 1 or more when "
    "reached.",
    kind="histogram",
    # With 0.0, quantiles of a limit that nothing uses are 0, and not within the first bucket.
    buckets=(0.0, 0.25, 0.5, 0.8, 0.9, 0.95, 1.0, 1.25),
)
LIMIT: Final = MetricSpec(
    name="otel_limits_limit",
    labels=("agent", "limit"),
    help="Configured limit in its own unit (turns, tokens, USD, seconds); 0 after removal.",
    kind="gauge",
)
OVERSHOOT: Final = MetricSpec(
    name="otel_limits_overshoot_tokens",
    labels=("agent", "limit"),
    help="Tokens above a token limit at halt. A model call's tokens are known only after the call.",
    unit="{token}",
    kind="histogram",
    buckets=(0.0, 256.0, 1024.0, 4096.0, 16384.0),
)
WARNINGS: Final = MetricSpec(
    name="otel_limits_warnings_total",
    labels=("agent", "limit", "threshold"),
    help="Invocations that crossed a soft threshold of a limit, e.g. 0.8.",
    unit="{warning}",
)
QUOTA_DECISIONS: Final = MetricSpec(
    name="otel_limits_quota_decisions_total",
    labels=("quota", "decision"),
    help="Quota decisions: admitted, refused, observed (would have been refused), unpriced (no "
    "known price, for a quota in USD), waited (admitted after a wait), gave_up (refused "
    "after a wait). degraded_* were made without the store: degraded_grace_admitted, "
    "degraded_denied, degraded_allowed, degraded_local_admitted, degraded_local_refused.",
    unit="{decision}",
    values=get_args(Decision),
)
QUOTA_WAITING: Final = MetricSpec(
    name="otel_limits_quota_waiting",
    labels=("quota",),
    help="Model calls waiting for quota.",
    unit="{call}",
    kind="updown",
)
QUOTA_WAIT: Final = MetricSpec(
    name="otel_limits_quota_wait_seconds",
    labels=("quota",),
    help="Time spent waiting for quota, in seconds, whatever the outcome.",
    unit="s",
    kind="histogram",
    buckets=(0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
QUOTA_USED: Final = MetricSpec(
    name="otel_limits_quota_used",
    labels=("quota", "key"),
    help="Fleet-wide usage, in the quota's unit, as last read by this process. Valid until "
    "otel_limits_quota_resets_timestamp_seconds.",
    kind="gauge",
)
QUOTA_RESERVED: Final = MetricSpec(
    name="otel_limits_quota_reserved",
    labels=("quota", "key"),
    help="Usage reserved by in-flight calls of the whole fleet, as last read by this process.",
    kind="gauge",
)
QUOTA_LIMIT: Final = MetricSpec(
    name="otel_limits_quota_limit",
    labels=("quota", "key"),
    help="Quota limit including grants, in its own unit (tokens, USD, model calls, invocations, "
    "concurrent model calls).",
    kind="gauge",
)
QUOTA_RESETS: Final = MetricSpec(
    name="otel_limits_quota_resets_timestamp_seconds",
    labels=("quota", "key"),
    help="End of the current quota window. Quotas on concurrent model calls have no window, so "
    "it is one to two days ahead.",
    unit="s",
    kind="gauge",
)
LOST_TASKS: Final = MetricSpec(
    name="otel_limits_lost_tasks_total",
    labels=("cause",),
    help="Interrupted tasks whose usage is lost, by cause: forgotten (dropped from memory before "
    "an answer), unknown (an answer began a new task).",
    unit="{task}",
    values=get_args(TaskLoss),
)
UNSAMPLED_INVOCATIONS: Final = MetricSpec(
    name="otel_limits_unsampled_invocations_total",
    labels=("agent",),
    help="Invocations tracked through hooks because spans were missing.",
    unit="{invocation}",
)
LABEL_OVERFLOWS: Final = MetricSpec(
    name="otel_limits_label_overflows_total",
    labels=("label",),
    help="Label values replaced by _other, by label (agent, model, tool, reason, provider, "
    "observer).",
    unit="{name}",
    values=("agent", "model", "tool", "reason", "provider", "observer"),
)
INTERNAL_ERRORS: Final = MetricSpec(
    name="otel_limits_internal_errors_total",
    labels=("component",),
    help="Internal errors by component. Agents are not affected.",
    unit="{error}",
)
OBSERVER_DROPPED_EVENTS: Final = MetricSpec(
    name="otel_limits_observer_dropped_events_total",
    labels=("observer",),
    help="Events dropped by an observer, because it failed or fell behind.",
    unit="{event}",
)
OBSERVER_LAG: Final = MetricSpec(
    name="otel_limits_observer_lag_seconds",
    labels=("observer",),
    help="Delay an observer added at invocation end, in seconds.",
    unit="s",
    kind="histogram",
    buckets=(0.0001, 0.001, 0.01, 0.05, 0.25, 1.0),
)
POLICY_VALID: Final = MetricSpec(
    name="otel_limits_policy_valid",
    labels=(),
    help="1 if the latest policy file was accepted, 0 if the previous version is still used.",
    kind="gauge",
)
POLICY_READS: Final = MetricSpec(
    name="otel_limits_policy_reads_total",
    labels=("outcome",),
    help="Policy file reloads by outcome (accepted, refused).",
    unit="{version}",
    values=("accepted", "refused"),
)
ENFORCING: Final = MetricSpec(
    name="otel_limits_enforcing",
    labels=("source", "framework"),
    help="1 if limits are enforced, 0 if otel-limits is enabled but cannot halt agents. source "
    "is how it was enabled first: run, autoload, instrumentor, provider, code, parent or plugin. "
    "framework is strands, langchain or openai-agents once it is imported; the series without it "
    "is that of the process, from the import of prometheus_client or of a framework on. With "
    "several processes, the minimum.",
    kind="minimum",
)
BUILD_INFO: Final = MetricSpec(
    name="otel_limits_build_info",
    labels=("version", "service_version", "service_namespace", "deployment_environment"),
    help="Constant 1, labeled with the version of otel-limits and the service attributes from "
    "OTEL_RESOURCE_ATTRIBUTES or the program's provider.",
    kind="gauge",
)

METRICS: Final = tuple(each for each in globals().values() if isinstance(each, MetricSpec))
"""All metrics above, for the exporters and the documentation."""


# --- label values ---------------------------------------------------------------------------------
# Names from models, users or applications are capped: agents, models, tools, stop reasons,
# providers and observers. Finite sets (limits, quotas, built-in stop reasons) are not.

logger = logging.getLogger("otel_limits")

TOOLS_PER_AGENT: Final = 5

MAX_THIRD_PARTY: Final = 100
"""Maximum number of third-party observers, providers and stop reasons."""

OWN_STOP_REASONS: Final = ("error", "aborted", "evicted")
"""Stop reasons of invocations for which neither a framework nor a limit gave one."""


class MetricLabels:
    """Converts names to label values.

    Args:
        max_agents: Maximum number of agents, and of models, in addition to those named in the
            policy file; five times as many tools.
        named: Returns the names in the current policy file.
        folded: Called with the name of the label whenever a name is counted as `_other`.
    """

    def __init__(
        self, max_agents: int, named: Callable[[], Names], folded: Callable[[str], None]
    ) -> None:
        """Create an empty set of names for each label."""
        self._max_agents = max_agents
        self._folded = folded
        self._reported: set[str] = set()
        # Called for each new name, because the policy file may have changed.
        self.agent = self._capped("agent", max_agents, lambda: named().agents)
        self.model = self._capped("model", max_agents, lambda: named().models)
        self.tool = self._capped("tool", max_agents * TOOLS_PER_AGENT, lambda: named().tools)
        self.reason = self._capped("reason", MAX_THIRD_PARTY, known_reasons)
        self.provider = self._capped("provider", MAX_THIRD_PARTY, frozenset)
        self.component = self._capped("observer", MAX_THIRD_PARTY, frozenset)

    def _capped(self, label: str, limit: int, always: Callable[[], frozenset[str]]) -> LabelLimiter:
        fold = functools.partial(self._fold, label, limit)
        return LabelLimiter(limit, always=always, folded=fold)

    def _fold(self, label: str, limit: int) -> None:
        # Once per label; the metric counts every occurrence.
        if label not in self._reported:
            self._reported.add(label)
            logger.warning(
                "otel-limits: more than %d names for the label %s; metrics count the rest as %s. "
                "Use stable agent names, list important names in the policy file, or raise "
                "OTEL_LIMITS_METRICS_MAX_AGENTS (now %d).",
                limit,
                label,
                OTHER,
                self._max_agents,
            )
        self._folded(label)


def known_reasons() -> frozenset[str]:
    """Return all known stop reasons."""
    return frozenset((*STOP_REASONS, *framework_reasons()))


def framework_reasons() -> Iterator[str]:
    """Yield the stop reasons that are not limits, of all frameworks."""
    for framework in known.FRAMEWORKS:
        yield from framework.stop_reasons
    # Independent of the framework, so no framework has to list them.
    yield from OWN_STOP_REASONS


# --- series ---------------------------------------------------------------------------------------


class SeriesKeeper(BaseObserver, ABC):
    """Base class of observers that count, with one cached series per set of labels."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def can_drop(self) -> bool:
        """True if a series can be removed."""
        return False

    @abstractmethod
    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 unless it is a gauge."""

    def drop_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """Remove one series of a gauge, if possible."""

    def series(self, spec: MetricSpec, *labels: str) -> Series:
        """Return one series, creating it if it is new."""
        return self._series.get((spec.name, *labels)) or self._create(spec, labels)

    def drop(self, spec: MetricSpec, *labels: str) -> None:
        """Set the series of a gauge to 0 and remove it, if possible."""
        series = self._series.pop((spec.name, *labels), None)
        if series is None:
            return
        series(0)  # for exporters that cannot remove it
        self.drop_series(spec, labels)

    def _create(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create a series at 0, with one for each other value of its last label."""
        # Prometheus sees no increase in a series whose first sample is already 1.
        for each in (labels, *((*labels[:-1], value) for value in spec.values)):
            if (spec.name, *each) not in self._series:
                self._series[(spec.name, *each)] = self.make_series(spec, each)
        return self._series[(spec.name, *labels)]
