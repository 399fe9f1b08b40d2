"""Counts facts in the instruments of the table, for whichever way the metrics leave the process.

Label values are cleaned and capped in number: names that a model or a user made up cannot flood a
Prometheus. Series that an alert or a rate needs are created at 0 when an agent is first seen.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from otel_limits.bindings import known
from otel_limits.core import facts
from otel_limits.core.labels import MAX_AGENTS, OTHER, LabelValues
from otel_limits.core.limits import LIMITS, NO_LIMITS, STOP_REASONS, TREE_PREFIX, Limits
from otel_limits.core.usage import NO_USAGE, Usage
from otel_limits.observers import instruments as table
from otel_limits.observers.protocol import OwnObserver

if TYPE_CHECKING:
    from otel_limits.observers.instruments import Exemplar, MetricSpec, Series

logger = logging.getLogger("otel_limits")

OWN_ENDINGS: Final = ("error", "aborted", "evicted")
"""How an invocation ends that got no stop reason, from a framework or from a limit."""

ENFORCED: Final = ("halted", "wrapped_up", "raised")

MODELS_PER_AGENT: Final = 2
TOOLS_PER_AGENT: Final = 5


class CountingObserver(OwnObserver, ABC):
    """Counts facts.

    Args:
        max_agents: Distinct agent names; further ones are counted as `_other`. The process as a
            whole gets two models and five tools per agent before they are `_other` too.
    """

    def __init__(self, max_agents: int = MAX_AGENTS) -> None:
        """Begin with no series."""
        self._series: dict[tuple[str, ...], Series] = {}
        self._max_agents = max_agents
        self._agent = LabelValues(max_agents, self._log_full)
        self._model = LabelValues(max_agents * MODELS_PER_AGENT)
        self._tool = LabelValues(max_agents * TOOLS_PER_AGENT)
        self._limit = LabelValues(max_agents)
        self._component = LabelValues(max_agents)
        self._quota = LabelValues(max_agents)
        self._quota_key = LabelValues(max_agents)
        self._shown: dict[str, Limits] = {}
        """What is permitted to each agent, as the metrics say it now."""
        self._live: dict[str, Exemplar | None] = {}
        """Invocations that have begun and not ended."""
        self.subscribes_to = {
            facts.Started: self._started,
            facts.Cycle: self._cycle,
            facts.Turn: self._turn,
            facts.ModelCall: self._model_call,
            facts.ToolCall: self._tool_call,
            facts.Warned: self._warned,
            facts.Halt: self._halt,
            facts.Stop: self._stop,
            facts.Fault: self._fault,
            facts.Dropped: self._dropped,
            facts.Lag: self._lag,
            facts.PolicyRead: self._policy_read,
            facts.QuotaDecision: self._quota_decision,
            facts.QuotaUse: self._quota_use,
        }

    @abstractmethod
    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0 where its kind has a zero."""

    def series(self, spec: MetricSpec, *labels: str) -> Series:
        """Return one series, created when it is new."""
        return self._series.get((spec.name, *labels)) or self._create(spec, labels)

    def _create(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create a series, and those of the same list, at 0: a first failure must have a rate."""
        for each in (labels, *((*labels[:-1], value) for value in spec.values)):
            if (spec.name, *each) not in self._series:
                self._series[(spec.name, *each)] = self.make_series(spec, each)
        return self._series[(spec.name, *labels)]

    def after_fork(self) -> None:
        """Leave the live invocations to the parent."""
        self._live.clear()

    def close(self) -> None:
        """Forget the live invocations; a subclass takes its metrics out, where that can be done."""
        self._live.clear()

    def info(self, version: str) -> None:
        """Publish the version, and that no policy file was refused so far."""
        self.series(table.BUILD_INFO, version)(1)
        self.series(table.POLICY_VALID)(1)

    def _log_full(self) -> None:
        """Say why agents are missing from the dashboards."""
        logger.warning(
            "otel-limits: more than %d agent names; metrics count the rest as %s. "
            "Set OTEL_LIMITS_METRICS_MAX_AGENTS to tell more apart.",
            self._max_agents,
            OTHER,
        )

    def _started(self, fact: facts.Started) -> None:
        agent = self._agent(fact.invocation.agent)
        self._live[fact.invocation.id] = _exemplar(fact.invocation)
        self._prepare(agent, fact)
        self._show_limits(agent, fact.limits)
        self.series(table.IN_PROGRESS, agent)(1)
        if fact.unsampled:
            self.series(table.BLIND_INVOCATIONS, agent)(1)

    def _prepare(self, agent: str, fact: facts.Started) -> None:
        """Create at 0 what the invocation can count in: from nothing to 1 is not an increase."""
        for spec in (table.BLIND_INVOCATIONS, table.CYCLES, table.TURNS):
            self.series(spec, agent)
        for reason in framework_reasons():
            self.series(table.STOPS, agent, reason, "none")
        for reason in STOP_REASONS:
            self.series(table.STOPS, agent, reason, fact.action)
        if fact.model is not None:
            model = self._model(fact.model, agent)
            self.series(table.MODEL_CALLS, agent, model, "measured")
            self._spend(agent, model, NO_USAGE, None)

    def _show_limits(self, agent: str, limits: Limits) -> None:
        shown = self._shown.get(agent, NO_LIMITS)
        if limits == shown:
            return
        self._shown[agent] = limits
        # A gauge cannot be taken back over OTLP: a cap that is gone says 0.
        caps = dict.fromkeys(dict(_numbers(shown)), 0.0) | dict(_numbers(limits))
        for name, cap in caps.items():
            self.series(table.LIMIT, agent, self._limit(name))(cap)
            self.series(table.SYNTHETIC_MESSAGES, agent, LIMITS[name].reason)

    def _cycle(self, fact: facts.Cycle) -> None:
        self.series(table.CYCLES, self._agent(fact.invocation.agent))(1)

    def _turn(self, fact: facts.Turn) -> None:
        self.series(table.TURNS, self._agent(fact.invocation.agent))(1)

    def _model_call(self, fact: facts.ModelCall) -> None:
        agent = self._agent(fact.invocation.agent)
        model = self._model(fact.model, agent)
        calls = self.series(table.MODEL_CALLS, agent, model, fact.kind)
        calls(1, _exemplar(fact.invocation, fact.span_id))
        self._spend(agent, model, fact.usage, fact.price)

    def _spend(self, agent: str, model: str, usage: Usage, price: Decimal | None) -> None:
        """Count what a call took; where it took nothing, its series are there at 0."""
        # A counter cannot be increased by a price that is not an amount: those tokens are unpriced.
        is_priced = price is not None and price.is_finite() and price >= 0
        for spec, labels, amount in (
            (table.TOKENS, (agent, model, "input"), usage.input),
            (table.TOKENS, (agent, model, "output"), usage.output),
            (table.CACHED_TOKENS, (agent, model, "read"), usage.cache_read),
            (table.CACHED_TOKENS, (agent, model, "write"), usage.cache_write),
            (table.COST, (agent, model), float(price) if price is not None and is_priced else 0),
            (table.UNPRICED_TOKENS, (model,), 0 if is_priced else usage.total),
        ):
            series = self.series(spec, *labels)
            if amount:
                series(amount)

    def _tool_call(self, fact: facts.ToolCall) -> None:
        agent = self._agent(fact.invocation.agent)
        tool = self._tool(fact.tool, agent)
        self.series(table.TOOL_CALLS, agent, tool, fact.status)(1)

    def _warned(self, fact: facts.Warned) -> None:
        agent, limit = self._agent(fact.invocation.agent), self._limit(fact.level.limit)
        warnings = self.series(table.WARNINGS, agent, limit, f"{fact.threshold:g}")
        warnings(1, _exemplar(fact.invocation))

    def _halt(self, fact: facts.Halt) -> None:
        if fact.action in ("halted", "raised"):
            agent, reason = self._agent(fact.invocation.agent), reason_label(fact.reason)
            self.series(table.SYNTHETIC_MESSAGES, agent, reason)(1, _exemplar(fact.invocation))

    def _stop(self, fact: facts.Stop) -> None:
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

    def _levels(self, fact: facts.Stop, agent: str, exemplar: Exemplar | None) -> None:
        reached = {breach.limit for breach in fact.breaches if fact.action in ENFORCED}
        for level in fact.levels:
            limit = self._limit(level.limit)
            self.series(table.BUDGET_USED, agent, limit)(level.ratio, exemplar)
            if level.limit in reached and is_of_tokens(level.limit):
                over = max(0.0, float(level.observed) - float(level.cap))
                self.series(table.OVERSHOOT, agent, limit)(over, exemplar)

    def _fault(self, fact: facts.Fault) -> None:
        self.series(table.INTERNAL_ERRORS, self._component(fact.component))(1)

    def _dropped(self, fact: facts.Dropped) -> None:
        self.series(table.OBSERVERS_DROPPED, self._component(fact.observer))(fact.facts)

    def _lag(self, fact: facts.Lag) -> None:
        observer = self._component(fact.observer)
        self.series(table.OBSERVERS_DROPPED, observer)  # at 0, for the same reason
        self.series(table.OBSERVER_LAG, observer)(fact.seconds)

    def _policy_read(self, fact: facts.PolicyRead) -> None:
        self.series(table.POLICY_VALID)(fact.valid)

    def _quota_decision(self, fact: facts.QuotaDecision) -> None:
        self.series(table.QUOTA_DECISIONS, self._quota(fact.quota), fact.decision)(1)

    def _quota_use(self, fact: facts.QuotaUse) -> None:
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


def framework_reasons() -> Iterator[str]:
    """How an invocation ends without us, whichever framework runs it."""
    for framework in known.FRAMEWORKS:
        yield from framework.stop_reasons
    yield from OWN_ENDINGS


def reason_label(reason: str) -> str:
    """Return a stop reason as a label; one that nobody defined is `_other`."""
    return reason if reason in STOP_REASONS or reason in framework_reasons() else OTHER


def is_of_tokens(limit: str) -> bool:
    """Tell whether a limit, of an invocation or of a budget tree, is counted in tokens."""
    kind = LIMITS.get(limit.removeprefix(TREE_PREFIX))
    return kind is not None and kind.unit.endswith("tokens")


def _numbers(limits: Limits) -> Iterator[tuple[str, float]]:
    """Caps that are one number each, without those that are switched off."""
    for name, cap in limits.items():
        if isinstance(cap, int | float | Decimal) and cap:
            yield name, float(cap)


def _exemplar(invocation: facts.Invocation, span_id: str | None = None) -> Exemplar | None:
    """Name the trace, where there is one that is exported."""
    if not invocation.sampled or invocation.trace_id is None:
        return None
    return {"trace_id": invocation.trace_id, "span_id": span_id or invocation.span_id or ""}
