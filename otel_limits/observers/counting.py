"""Counts facts in the instruments of the table, for whichever way the metrics leave the process.

Label values are cleaned and capped in number: names that a model or a user made up cannot flood a
Prometheus. Series that an alert or a rate needs are created at 0 when an agent is first seen.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, get_args

from otel_limits.core.facts import (
    CallKind,
    Cycle,
    Decision,
    Dropped,
    Fault,
    Halt,
    Lag,
    ModelCall,
    PolicyRead,
    QuotaDecision,
    QuotaUse,
    Started,
    Stop,
    ToolCall,
    Turn,
    Warned,
)
from otel_limits.core.limits import LIMITS, NO_LIMITS, STOP_REASONS, TREE_PREFIX, Limits
from otel_limits.core.names import MAX_AGENTS
from otel_limits.core.records import Record, record
from otel_limits.observers import instruments as table
from otel_limits.observers.instruments import OTHER, Exemplar, LabelValues, MetricSpec, Series

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.facts import Fact, Invocation

logger = logging.getLogger("otel_limits")

FRAMEWORK_REASONS: Final = (
    "cancelled",
    "checkpoint",
    "content_filtered",
    "end_turn",
    "guardrail_intervened",
    "interrupt",
    "limit_output_tokens",
    "limit_total_tokens",
    "limit_turns",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "error",
    "aborted",
    "evicted",
)
"""How an invocation ends without us: Strands' stop reasons, and ours for what has none."""

CALL_KINDS: Final[tuple[CallKind, ...]] = ("measured", "zero_token", "unmeasured", "failed")
TOOL_STATUSES: Final = ("success", "error", "refused")
DECISIONS: Final[tuple[Decision, ...]] = get_args(Decision)
ENFORCED: Final = ("halted", "wrapped_up", "raised")

MODELS_PER_AGENT: Final = 2
TOOLS_PER_AGENT: Final = 5


@record
class AgentSeries(Record):
    """What one agent counts in at every turn, looked up once for all of them."""

    label: str
    turns: Series
    cycles: Series
    calls: dict[str, CallSeries]
    """By model."""
    tools: dict[str, dict[str, Series]]
    """By tool, and by how its calls end."""


@record
class CallSeries(Record):
    """What the calls of one model by one agent count in, looked up once for all of them."""

    kinds: dict[CallKind, Series]
    input: Series
    output: Series
    cache_read: Series
    cache_write: Series
    cost: Series
    unpriced: Series


class CountingObserver(ABC):
    """Counts facts.

    Args:
        max_agents: Distinct agent names; further ones are counted as `_other`. The process as a
            whole gets two models and five tools per agent before they are `_other` too.
    """

    component: str

    def __init__(self, max_agents: int = MAX_AGENTS) -> None:
        """Begin with no series."""
        self._series: dict[tuple[str, ...], Series] = {}
        self._agent = LabelValues(max_agents, self._say_full)
        self._max_agents = max_agents
        self._model = LabelValues(max_agents * MODELS_PER_AGENT)
        self._tool = LabelValues(max_agents * TOOLS_PER_AGENT)
        self._limit = LabelValues(max_agents)
        self._component = LabelValues(max_agents)
        self._quota = LabelValues(max_agents)
        self._quota_key = LabelValues(max_agents)
        self._lags: dict[str, Series] = {}
        self._prepared: set[tuple[str, ...]] = set()
        self._agents: dict[str, AgentSeries] = {}
        self._limits_of: dict[str, Limits] = {}
        self._live: dict[str, Exemplar | None] = {}
        self.subscribes_to: dict[type, Callable[[Any], None]] = {
            Started: self._started,
            Cycle: self._cycle,
            Turn: self._turn,
            ModelCall: self._model_call,
            ToolCall: self._tool_call,
            Warned: self._warned,
            Halt: self._halt,
            Stop: self._stop,
            Fault: self._fault,
            Dropped: self._dropped,
            Lag: self._lag,
            PolicyRead: self._policy_read,
            QuotaDecision: self._quota_decision,
            QuotaUse: self._quota_use,
        }

    def __call__(self, fact: Fact) -> None:
        """Count one fact."""
        handler = self.subscribes_to.get(type(fact))
        if handler is not None:
            handler(fact)

    @abstractmethod
    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 where its kind has a zero."""

    def series(self, spec: MetricSpec, *labels: str) -> Series:
        """Return one series, created when it is new."""
        key = (spec.name, *labels)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self.make_series(spec, labels)
        return series

    def close(self) -> None:
        """Leave nothing behind, where that can be done."""
        self._live.clear()

    def reset_after_fork(self) -> None:
        """Leave the live invocations to the parent."""
        self._live.clear()

    def info(self, version: str) -> None:
        """Publish the version, and that no policy file was refused so far."""
        self.series(table.BUILD_INFO, version)(1)
        self.series(table.POLICY_VALID)(1)

    def _say_full(self) -> None:
        """Say why agents are missing from the dashboards, once."""
        if (OTHER,) not in self._prepared:
            self._prepared.add((OTHER,))
            logger.warning(
                "otel-limits: more than %d agent names; metrics count the rest as %s. "
                "Set OTEL_LIMITS_METRICS_MAX_AGENTS to tell more apart.",
                self._max_agents,
                OTHER,
            )

    def _started(self, fact: Started) -> None:
        series = self._of(fact.invocation.agent)
        agent = series.label
        self._live[fact.invocation.id] = _exemplar(fact.invocation)
        self._prepare_agent(agent, fact.action)
        if fact.model is not None:
            self._calls_of(series, fact.model)
        self._show_limits(agent, fact.limits)
        self.series(table.IN_PROGRESS, agent)(1)
        if fact.blind:
            self.series(table.BLIND_INVOCATIONS, agent)(1)

    def _prepare_agent(self, agent: str, action: str) -> None:
        """Create every series of the agent at 0, or the first alert is missed."""
        if (agent, action) in self._prepared:
            return
        self._prepared.add((agent, action))
        self.series(table.BLIND_INVOCATIONS, agent)
        for reason in FRAMEWORK_REASONS:
            self.series(table.STOPS, agent, reason, "none")
        for reason in STOP_REASONS:
            self.series(table.STOPS, agent, reason, action)

    def _of(self, agent: str) -> AgentSeries:
        """Return what an agent counts in; all beyond the cap share one."""
        return self._agents.get(agent) or self._make_agent(agent)

    def _make_agent(self, agent: str) -> AgentSeries:
        label = self._agent(agent)
        key = kept_as(agent, label)
        if key not in self._agents:
            turns, cycles = self.series(table.TURNS, label), self.series(table.CYCLES, label)
            made = AgentSeries(label=label, turns=turns, cycles=cycles, calls={}, tools={})
            self._agents[key] = made
        return self._agents[key]

    def _calls_of(self, agent: AgentSeries, model: str) -> CallSeries:
        """Return what model calls count in, made at 0, or the first call has no rate."""
        return agent.calls.get(model) or self._make_calls_of(agent, model)

    def _make_calls_of(self, agent: AgentSeries, model: str) -> CallSeries:
        label = self._model(model, agent.label)
        key = kept_as(model, label)
        if key not in agent.calls:
            agent.calls[key] = self._make_calls(agent.label, label)
        return agent.calls[key]

    def _make_calls(self, agent: str, model: str) -> CallSeries:
        return CallSeries(
            kinds={kind: self.series(table.MODEL_CALLS, agent, model, kind) for kind in CALL_KINDS},
            input=self.series(table.TOKENS, agent, model, "input"),
            output=self.series(table.TOKENS, agent, model, "output"),
            cache_read=self.series(table.CACHED_TOKENS, agent, model, "read"),
            cache_write=self.series(table.CACHED_TOKENS, agent, model, "write"),
            cost=self.series(table.COST, agent, model),
            unpriced=self.series(table.UNPRICED_TOKENS, model),
        )

    def _show_limits(self, agent: str, limits: Limits) -> None:
        shown = self._limits_of.get(agent, NO_LIMITS)
        if limits == shown:
            return
        self._limits_of[agent] = limits
        caps = dict.fromkeys((name for name, _ in _numbers(shown)), 0.0)
        for name, cap in (caps | dict(_numbers(limits))).items():
            self.series(table.LIMIT, agent, self._limit(name))(cap)
            self.series(table.SYNTHETIC_MESSAGES, agent, LIMITS[name].reason)

    def _cycle(self, fact: Cycle) -> None:
        self._of(fact.invocation.agent).cycles(1)

    def _turn(self, fact: Turn) -> None:
        self._of(fact.invocation.agent).turns(1)

    def _model_call(self, fact: ModelCall) -> None:
        """Count a call and what it took."""
        calls = self._calls_of(self._of(fact.invocation.agent), fact.model)
        calls.kinds[fact.kind](1, _exemplar(fact.invocation, fact.span_id))
        usage, price = fact.usage, fact.price
        # A counter cannot be increased by a price that is not an amount: those tokens are unpriced.
        is_priced = price is not None and price.is_finite() and price >= 0
        for series, amount in (
            (calls.input, usage.input),
            (calls.output, usage.output),
            (calls.cache_read, usage.cache_read),
            (calls.cache_write, usage.cache_write),
            (calls.cost, float(price) if price is not None and is_priced else 0),
            (calls.unpriced, 0 if is_priced else usage.total),
        ):
            if amount:
                series(amount)

    def _tool_call(self, fact: ToolCall) -> None:
        agent = self._of(fact.invocation.agent)
        series = agent.tools.get(fact.tool) or self._make_tool(agent, fact.tool)
        series[fact.status](1)

    def _make_tool(self, agent: AgentSeries, tool: str) -> dict[str, Series]:
        """Make what calls of a tool count in at 0, or the first failure has no rate."""
        label = self._tool(tool, agent.label)
        key = kept_as(tool, label)
        if key not in agent.tools:
            agent.tools[key] = {
                status: self.series(table.TOOL_CALLS, agent.label, label, status)
                for status in TOOL_STATUSES
            }
        return agent.tools[key]

    def _warned(self, fact: Warned) -> None:
        agent, limit = self._agent(fact.invocation.agent), self._limit(fact.level.limit)
        warnings = self.series(table.WARNINGS, agent, limit, f"{fact.threshold:g}")
        warnings(1, _exemplar(fact.invocation))

    def _halt(self, fact: Halt) -> None:
        if fact.action in ("halted", "raised"):
            agent, reason = self._agent(fact.invocation.agent), reason_label(fact.reason)
            self.series(table.SYNTHETIC_MESSAGES, agent, reason)(1, _exemplar(fact.invocation))

    def _stop(self, fact: Stop) -> None:
        agent = self._agent(fact.agent)
        exemplar = None
        if fact.invocation_id in self._live:
            exemplar = self._live.pop(fact.invocation_id)
            self.series(table.IN_PROGRESS, agent)(-1)
        reason = reason_label(fact.breach.reason if fact.breach else fact.reason)
        self.series(table.STOPS, agent, reason, fact.action)(1, exemplar)
        for spec, value in (
            (table.INVOCATION_TURNS, fact.turns),
            (table.INVOCATION_TOKENS, fact.usage.total),
            (table.INVOCATION_DURATION, fact.seconds),
        ):
            self.series(spec, agent)(value, exemplar)
        self._levels(fact, agent, exemplar)

    def _levels(self, fact: Stop, agent: str, exemplar: Exemplar | None) -> None:
        reached = {breach.limit for breach in fact.breaches if fact.action in ENFORCED}
        for level in fact.levels:
            limit = self._limit(level.limit)
            self.series(table.BUDGET_USED, agent, limit)(level.ratio, exemplar)
            if level.limit in reached and is_of_tokens(level.limit):
                over = max(0.0, float(level.observed) - float(level.cap))
                self.series(table.OVERSHOOT, agent, limit)(over, exemplar)

    def _fault(self, fact: Fault) -> None:
        self.series(table.INTERNAL_ERRORS, self._component(fact.component))(1)

    def _dropped(self, fact: Dropped) -> None:
        self.series(table.OBSERVERS_DROPPED, self._component(fact.observer))(fact.facts)

    def _lag(self, fact: Lag) -> None:
        lag = self._lags.get(fact.observer) or self._make_lag(fact.observer)
        lag(fact.seconds)

    def _make_lag(self, name: str) -> Series:
        observer = self._component(name)
        self.series(table.OBSERVERS_DROPPED, observer)  # at 0, or the first loss is missed
        lag = self._lags[kept_as(name, observer)] = self.series(table.OBSERVER_LAG, observer)
        return lag

    def _policy_read(self, fact: PolicyRead) -> None:
        self.series(table.POLICY_VALID)(fact.valid)

    def _quota_decision(self, fact: QuotaDecision) -> None:
        quota = self._quota(fact.quota)
        if (quota, "quota") not in self._prepared:
            self._prepared.add((quota, "quota"))
            for decision in DECISIONS:
                self.series(table.QUOTA_DECISIONS, quota, decision)
        self.series(table.QUOTA_DECISIONS, quota, fact.decision)(1)

    def _quota_use(self, fact: QuotaUse) -> None:
        """Show how a key stands; of those beyond the cap nothing is shown, as they have no sum."""
        quota, key = self._quota(fact.quota), self._quota_key(fact.key, fact.quota)
        if OTHER in (quota, key):
            return
        for spec, value in (
            (table.QUOTA_USED, fact.used),
            (table.QUOTA_RESERVED, fact.reserved),
            (table.QUOTA_LIMIT, fact.limit),
            (table.QUOTA_RESETS, fact.resets),
        ):
            self.series(spec, quota, key)(float(value))


def kept_as(name: str, label: str) -> str:
    """Return the name to look a label up by the next time: there is no end to those folded."""
    return OTHER if label == OTHER else name


def reason_label(reason: str) -> str:
    """Return a stop reason as a label; one that nobody defined is `_other`."""
    return reason if reason in STOP_REASONS or reason in FRAMEWORK_REASONS else OTHER


def is_of_tokens(limit: str) -> bool:
    """Tell whether a limit, of an invocation or of a budget tree, is counted in tokens."""
    kind = LIMITS.get(limit.removeprefix(TREE_PREFIX))
    return kind is not None and kind.unit.endswith("tokens")


def _numbers(limits: Limits) -> Iterator[tuple[str, float]]:
    """Caps that are one number each; one that is switched off is none."""
    for name, cap in limits.items():
        if isinstance(cap, int | float | Decimal) and cap:
            yield name, float(cap)


def _exemplar(invocation: Invocation, span_id: str | None = None) -> Exemplar | None:
    """Name the trace, where there is one that is exported."""
    if not invocation.sampled or invocation.trace_id is None:
        return None
    return {"trace_id": invocation.trace_id, "span_id": span_id or invocation.span_id or ""}
