"""Counts events in the metrics of `metrics.py`, independent of the exporter.

Series that an alert or a rate needs are created at 0 when an agent is first seen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core import events
from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names, clean
from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    NO_LIMITS,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    Limits,
    kind_of,
)
from otel_limits.core.price import differs
from otel_limits.core.usage import NO_USAGE, Usage
from otel_limits.observers import metrics as table
from otel_limits.observers.conventions import Conventions
from otel_limits.observers.metrics import MetricLabels, SeriesKeeper, framework_reasons

if TYPE_CHECKING:
    from otel_limits.core.events import QuotaUse
    from otel_limits.observers.metrics import Exemplar


# --- the service of this process ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Version, namespace and environment of a service; empty if not set."""

    version: str = ""
    namespace: str = ""
    environment: str = ""


NO_SERVICE: Final = Service()


def service_of(attributes: Mapping[str, Any]) -> Service:
    """Read the attributes of a resource."""
    # Semantic conventions 1.27 renamed the environment; most programs still set the old name.
    environment = attributes.get("deployment.environment.name") or attributes.get(
        "deployment.environment"
    )
    return Service(
        version=str(attributes.get("service.version") or ""),
        namespace=str(attributes.get("service.namespace") or ""),
        environment=str(environment or ""),
    )


# --- the observer ---------------------------------------------------------------------------------

QUOTA_GAUGES: Final = (
    table.QUOTA_USED,
    table.QUOTA_RESERVED,
    table.QUOTA_LIMIT,
    table.QUOTA_RESETS,
)


class CountingObserver(SeriesKeeper):
    """Counts events.

    Args:
        max_agents: Maximum number of agents, and of models, in addition to those named in the
            policy file; five times as many tools. Others are counted as `_other`.
        named: Returns the names that the policy file contains without a glob.
        conventions: Also count in the metrics of OpenTelemetry's semantic conventions.
    """

    def __init__(
        self,
        max_agents: int = MAX_AGENTS,
        named: Callable[[], Names] = lambda: NO_NAMES,
        *,
        conventions: bool = False,
    ) -> None:
        """Create an observer without series."""
        super().__init__()
        self._labels = MetricLabels(max_agents, named, self._fold)
        self._quota_keys = QuotaKeys(ever=None if self.can_drop else MAX_EVER)
        self._shown: dict[str, Limits] = {}
        """Limits currently in the metrics, by agent."""
        self._live: dict[str, Exemplar | None] = {}
        """Exemplars of active invocations, by ID."""
        self._waiting: set[tuple[str, str]] = set()
        """Waiting invocations, each with its quota."""
        self._seen: set[str] = set()
        """Agents whose series exist."""
        self._conventions = Conventions(self.series, self._labels, _exemplar)
        self.subscribes_to = {
            events.Started: self._started,
            events.Cycle: self._cycle,
            events.Turn: self._turn,
            events.ModelCall: self._model_call,
            events.ToolCall: self._tool_call,
            events.LimitWarning: self._warned,
            events.Stop: self._stop,
            events.TaskLost: self._task_lost,
            events.InternalError: self._fault,
            events.ObserverDropped: self._dropped,
            events.ObserverLag: self._lag,
            events.PolicyRead: self._policy_read,
            events.Enforcing: self._enforcing,
            events.QuotaDecision: self._quota_decision,
            events.QuotaUse: self._quota_use,
            events.QuotaWait: self._quota_wait,
        }
        if conventions:
            self.subscribes_to |= self._conventions.combined_with(self.subscribes_to)

    def after_fork(self) -> None:
        """Forget the active invocations, which continue in the parent."""
        self._forget()

    def close(self) -> None:
        """Forget the active invocations; a subclass removes its metrics if possible."""
        self._forget()

    def _forget_series(self) -> None:
        """Forget all series, in a process that counts from 0."""
        self._series.clear()
        self._seen.clear()

    def _forget(self) -> None:
        self._live.clear()
        self._waiting.clear()
        self._conventions.forget()

    def info(self, version: str, service: Service = NO_SERVICE) -> None:
        """Publish version and service, and that no policy file was rejected."""
        of_service = (service.version, service.namespace, service.environment)
        self.series(table.BUILD_INFO, version, *map(clean, of_service))(1)
        self.series(table.POLICY_VALID)(1)

    def announce(self) -> None:
        """Called when the series of a new agent were created at 0."""

    def _fold(self, label: str) -> None:
        self.series(table.LABEL_OVERFLOWS, label)(1)

    def _started(self, event: events.Started) -> None:
        agent = self._labels.agent(event.invocation.agent)
        # Remembered, because an invocation that started before this observer must not be
        # subtracted when it ends.
        self._live[event.invocation.id] = _exemplar(event.invocation)
        self._prepare(agent, event)
        self._show_limits(agent, event.limits)
        if agent not in self._seen:
            self._seen.add(agent)
            self.announce()
        self.series(table.IN_PROGRESS, agent)(1)
        if event.unsampled:
            self.series(table.UNSAMPLED_INVOCATIONS, agent)(1)

    def _prepare(self, agent: str, event: events.Started) -> None:
        """Create the series of the invocation at 0: a series that starts at 1 has no increase."""
        self.series(table.LABEL_OVERFLOWS, "agent")
        self.series(table.LOST_TASKS, "unknown")
        for spec in (table.UNSAMPLED_INVOCATIONS, table.CYCLES, table.TURNS):
            self.series(spec, agent)
        for reason in framework_reasons():
            self.series(table.STOPS, agent, reason, "none")
        for reason, action in possible_halts(event):
            self.series(table.STOPS, agent, reason, action)
            if action != "wrapped_up":  # whose last message is the model's
                self.series(table.SYNTHETIC_MESSAGES, agent, reason)
        action = "observed" if event.action == "observed" else "refused"
        for name in event.limits.max_calls_per_tool or ():
            tool = self._labels.tool(name, agent)
            self.series(table.TOOL_REFUSALS, agent, tool, "max_calls_per_tool", action)
        if event.model is not None:
            model = self._labels.model(event.model)
            self.series(table.MODEL_CALLS, agent, model, "measured")
            self._spend(agent, model, NO_USAGE, None)

    def _show_limits(self, agent: str, limits: Limits) -> None:
        shown = self._shown.get(agent, NO_LIMITS)
        if limits == shown:
            return
        self._shown[agent] = limits
        # A gauge cannot be removed over OTLP, so a removed limit is 0.
        caps = dict.fromkeys(dict(_numbers(shown)), 0.0) | dict(_numbers(limits))
        for name, cap in caps.items():
            self.series(table.LIMIT, agent, clean(name))(cap)

    def _cycle(self, event: events.Cycle) -> None:
        self.series(table.CYCLES, self._labels.agent(event.invocation.agent))(1)

    def _turn(self, event: events.Turn) -> None:
        self.series(table.TURNS, self._labels.agent(event.invocation.agent))(1)

    def _model_call(self, event: events.ModelCall) -> None:
        agent = self._labels.agent(event.invocation.agent)
        model = self._labels.model(event.model)
        calls = self.series(table.MODEL_CALLS, agent, model, event.kind)
        calls(1, _exemplar(event.invocation, event.span_id))
        self._spend(agent, model, event.usage, event.price)
        if event.unknown_usage:
            self.series(table.UNKNOWN_USAGE, agent, model)(1)
        if event.stated_refused:
            self.series(table.REFUSED_COSTS, agent, model)(1)
        if differs(event.stated_cost, event.listed_price):
            self.series(table.COST_DIFFERENCES, agent, model)(1)

    def _spend(self, agent: str, model: str, usage: Usage, price: Decimal | None) -> None:
        """Count tokens and cost of a call, creating the series at 0 if it used nothing."""
        # A counter rejects NaN and negative prices, so those tokens count as unpriced.
        is_priced = price is not None and price.is_finite() and price >= 0
        for spec, labels, amount in (
            (table.TOKENS, (agent, model, "input"), usage.input),
            (table.TOKENS, (agent, model, "output"), usage.output),
            (table.CACHED_TOKENS, (agent, model, "read"), usage.cache_read),
            (table.CACHED_TOKENS, (agent, model, "write"), usage.cache_write),
            (table.COST, (agent, model), float(price) if price is not None and is_priced else 0),
            (table.UNPRICED_TOKENS, (agent, model), 0 if is_priced else usage.total),
        ):
            series = self.series(spec, *labels)
            if amount:
                series(amount)

    def _tool_call(self, event: events.ToolCall) -> None:
        agent = self._labels.agent(event.invocation.agent)
        tool = self._labels.tool(event.tool, agent)
        self.series(table.TOOL_CALLS, agent, tool, event.status)(1)
        if event.limit is not None:
            action = "refused" if event.status == "refused" else "observed"
            self.series(table.TOOL_REFUSALS, agent, tool, clean(event.limit), action)(1)

    def _warned(self, event: events.LimitWarning) -> None:
        agent, limit = self._labels.agent(event.invocation.agent), clean(event.level.limit)
        # `:g`, so that 0.8 and 0.80 are one label.
        warnings = self.series(table.WARNINGS, agent, limit, f"{event.threshold:g}")
        warnings(1, _exemplar(event.invocation))

    def _stop(self, event: events.Stop) -> None:
        agent = self._labels.agent(event.agent)
        exemplar = None
        # One that started before this observer was never added.
        if event.invocation_id in self._live:
            exemplar = self._live.pop(event.invocation_id)
            self.series(table.IN_PROGRESS, agent)(-1)
        # The reason of the breach, if any: a would-be halt does not change the stop reason of the
        # result.
        reason = self._labels.reason(event.breach.reason if event.breach else event.reason)
        self.series(table.STOPS, agent, reason, event.action)(1, exemplar)
        if event.synthetic:
            self.series(table.SYNTHETIC_MESSAGES, agent, reason)(1, exemplar)
        for spec, value in (
            (table.INVOCATION_TURNS, event.turns),
            (table.INVOCATION_TOKENS, event.usage.total),
            (table.INVOCATION_DURATION, event.seconds),
        ):
            self.series(spec, agent)(value, exemplar)
        self._levels(event, agent, exemplar)

    def _levels(self, event: events.Stop, agent: str, exemplar: Exemplar | None) -> None:
        # Would-be halts are excluded: they continue, so the excess is not overshoot.
        reached = {breach.limit for breach in event.breaches if event.action in events.HALTED}
        for level in event.levels:
            limit = clean(level.limit)
            self.series(table.BUDGET_USED, agent, limit)(level.ratio, exemplar)
            # Only tokens can overshoot, because they are known only after the call.
            if level.limit in reached and is_of_tokens(level.limit):
                over = max(0.0, float(level.observed) - float(level.cap))
                self.series(table.OVERSHOOT, agent, limit)(over, exemplar)

    def _task_lost(self, event: events.TaskLost) -> None:
        self.series(table.LOST_TASKS, event.cause)(event.interrupts)

    def _fault(self, event: events.InternalError) -> None:
        self.series(table.INTERNAL_ERRORS, self._labels.component(event.component))(1)

    def _dropped(self, event: events.ObserverDropped) -> None:
        self.series(table.OBSERVER_DROPPED_EVENTS, self._labels.component(event.observer))(
            event.events
        )

    def _lag(self, event: events.ObserverLag) -> None:
        observer = self._labels.component(event.observer)
        self.series(
            table.OBSERVER_DROPPED_EVENTS, observer
        )  # at 0, so that the first drop is an increase
        self.series(table.OBSERVER_LAG, observer)(event.seconds)

    def _policy_read(self, event: events.PolicyRead) -> None:
        self.series(table.POLICY_VALID)(event.valid)
        self.series(table.POLICY_READS, "accepted" if event.valid else "refused")(1)

    def _enforcing(self, event: events.Enforcing) -> None:
        self.series(table.ENFORCING, event.source, event.framework)(event.in_force)

    def _quota_decision(self, event: events.QuotaDecision) -> None:
        self.series(table.QUOTA_DECISIONS, clean(event.quota), event.decision)(1)

    def _quota_wait(self, event: events.QuotaWait) -> None:
        quota, wait = clean(event.quota), (event.invocation.id, event.quota)
        waiting, seconds = (
            self.series(table.QUOTA_WAITING, quota),
            self.series(table.QUOTA_WAIT, quota),
        )
        if event.seconds is None:
            self._waiting.add(wait)
            waiting(1)
            return
        seconds(event.seconds, _exemplar(event.invocation))
        # One that started before this observer was never added.
        if wait in self._waiting:
            self._waiting.remove(wait)
            waiting(-1)

    def _quota_use(self, event: events.QuotaUse) -> None:
        """Show the usage of a key if it is among those closest to their limit."""
        # Wall clock time, as in the shared store.
        is_shown, dropped = self._quota_keys.consider(event, time.time())
        if dropped is not None:
            for spec in QUOTA_GAUGES:
                self.drop(spec, clean(event.quota), clean(dropped))
        if not is_shown:
            return
        values = (event.used, event.reserved, event.limit, event.resets)
        for spec, value in zip(QUOTA_GAUGES, values, strict=True):
            self.series(spec, clean(event.quota), clean(event.key))(float(value))


def possible_halts(event: events.Started) -> Iterator[tuple[str, str]]:
    """Yield reason and action of each halt that is possible for an invocation."""
    caps = (*event.limits.items(), *event.tree.items())
    # 0 disables a limit.
    limits = (kind_of(name) for name, cap in caps if cap)
    reasons = dict.fromkeys(limit.reason for limit in limits if limit is not None)
    if event.has_quotas:
        reasons |= dict.fromkeys((QUOTA_EXCEEDED_STOP_REASON, QUOTA_UNAVAILABLE_STOP_REASON))
    # Without budget for a last answer, there is none.
    actions = ("wrapped_up", "halted") if event.action == "wrapped_up" else (event.action,)
    for reason in reasons:
        for action in actions:
            yield reason, action
    # An agent can always be killed, and a kill is never only observed.
    yield KILLED_STOP_REASON, "killed"


def is_of_tokens(limit: str) -> bool:
    """Return whether a limit is counted in tokens."""
    kind = kind_of(limit)
    return kind is not None and kind.unit.endswith("tokens")


def _numbers(limits: Limits) -> Iterator[tuple[str, float]]:
    """Yield the limits that have a single number and are not disabled."""
    for name, cap in limits.items():
        if isinstance(cap, int | float | Decimal) and cap:
            yield name, float(cap)


def _exemplar(invocation: events.Invocation, span_id: str | None = None) -> Exemplar | None:
    """Return the trace, if it is exported."""
    # An exemplar whose trace was not exported is worse than none.
    if not invocation.sampled or invocation.trace_id is None:
        return None
    return {"trace_id": invocation.trace_id, "span_id": span_id or invocation.span_id or ""}


# --- the quota keys that have metrics: those closest to their limit -------------------------------

MAX_KEYS: Final = 50
"""Maximum number of keys per quota with metrics at a time."""

MAX_EVER: Final = 1000
"""Maximum number of keys per quota that ever get metrics, if series cannot be removed."""


class KeyUtilization(NamedTuple):
    """The utilization of a shown key, and when its window resets."""

    resets: float
    share: float


class QuotaKeys:
    """The keys with metrics, by quota. Bounded, because every user may be a key."""

    def __init__(self, ever: int | None) -> None:
        """Show at most `MAX_KEYS` keys at a time and `ever` in total; `None` for no total."""
        self._ever = ever
        self._count: Counter[str] = Counter()
        self._shown: dict[str, dict[str, KeyUtilization]] = {}

    def consider(self, use: QuotaUse, now: float) -> tuple[bool, str | None]:
        """Return whether to show a key, and the key that it replaces.

        Args:
            use: Current usage of the key.
            now: Wall clock time; a key whose window has ended is replaced first.
        """
        shown = self._shown.setdefault(use.quota, {})
        used = float(use.used) + float(use.reserved)
        # A quota of 0 is always exhausted.
        share = used / float(use.limit) if use.limit else float("inf")
        utilization = KeyUtilization(use.resets, share)
        # A shown key stays, even if others are now closer: series must not come and go.
        if use.key in shown:
            shown[use.key] = utilization
            return True, None
        # If series cannot be removed, a replaced one would stay in every scrape.
        if self._ever is not None and self._count[use.quota] >= self._ever:
            return False, None
        if len(shown) < MAX_KEYS:
            return self._show(use, utilization), None
        # A scan of at most fifty keys; a heap would not be faster.
        furthest = min(shown, key=lambda key: _share_at(shown[key], now))
        if _share_at(shown[furthest], now) >= _share_at(utilization, now):
            return False, None
        del shown[furthest]
        return self._show(use, utilization), furthest

    def _show(self, use: QuotaUse, utilization: KeyUtilization) -> bool:
        self._shown[use.quota][use.key] = utilization
        self._count[use.quota] += 1
        return True


def _share_at(utilization: KeyUtilization, now: float) -> float:
    # Below every share, so that it is replaced first.
    return utilization.share if utilization.resets > now else -1.0
