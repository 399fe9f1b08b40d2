"""Counts every fact in prometheus_client, and serves the counters where asked to.

The metrics live in the default registry, so that an application that serves `/metrics` already has
them. Label values are cleaned and capped in number: names that a model or a user made up cannot
flood a Prometheus.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from otel_limits.facts import (
    ActionTaken,
    CallKind,
    Cycle,
    Fact,
    Fault,
    Halt,
    ModelCall,
    PolicyRead,
    Started,
    Stop,
    Turn,
    Warned,
)
from otel_limits.limits import STOP_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable

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

OTHER: Final = "_other"
MAX_LABEL_LENGTH: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric, as code and documentation both want it."""

    name: str
    labels: tuple[str, ...]
    help: str
    kind: type[Counter | Gauge] = Counter


METRICS: Final = (
    MetricSpec(
        name="otel_limits_stops_total",
        labels=("agent", "reason", "action"),
        help="Finished invocations by stop reason and by what otel-limits did "
        "(none, observed, halted, wrapped_up, raised).",
    ),
    MetricSpec(
        name="otel_limits_turns_total",
        labels=("agent",),
        help="Model responses taken into a conversation, each with the tools it asked for.",
    ),
    MetricSpec(
        name="otel_limits_cycles_total",
        labels=("agent",),
        help="Event loop cycles, replays of interrupted tools included.",
    ),
    MetricSpec(
        name="otel_limits_model_calls_total",
        labels=("agent", "model", "kind"),
        help="Requests to a provider: measured, zero_token (the provider reported zero), "
        "unmeasured (it reported nothing) or failed. A halt is none of them.",
    ),
    MetricSpec(
        name="otel_limits_synthetic_messages_total",
        labels=("agent", "reason"),
        help="Messages that a halt put into a conversation; no model wrote them.",
    ),
    MetricSpec(
        name="otel_limits_tokens_total",
        labels=("agent", "model", "type"),
        help="Tokens by type (input, output). Input includes cached tokens; "
        "unmeasured calls count with their estimate.",
    ),
    MetricSpec(
        name="otel_limits_blind_invocations_total",
        labels=("agent",),
        help="Invocations whose span did not reach the span processor, "
        "followed through the framework's hooks instead.",
    ),
    MetricSpec(
        name="otel_limits_internal_errors_total",
        labels=("component",),
        help="Failures inside otel-limits that were kept away from the agent.",
    ),
    MetricSpec(
        name="otel_limits_warnings_total",
        labels=("agent", "limit", "threshold"),
        help="Soft thresholds that were passed, once per invocation, limit and threshold.",
    ),
    MetricSpec(
        name="otel_limits_unpriced_tokens_total",
        labels=("model",),
        help="Tokens of model calls whose price is unknown.",
    ),
    MetricSpec(
        name="otel_limits_policy_valid",
        labels=(),
        help="1 unless the newest version of the policy file was refused, so that the version "
        "before it stays in force.",
        kind=Gauge,
    ),
    MetricSpec(
        name="otel_limits_build_info",
        labels=("version",),
        help="Version of otel-limits, as a label of a constant 1.",
        kind=Gauge,
    ),
)
"""Every metric; the README's table is generated from this."""


class LabelValues:
    """Cleans label values, and folds all beyond a number of them into `_other`."""

    def __init__(self, limit: int) -> None:
        """Admit `limit` distinct values."""
        self._limit = limit
        self._admitted: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        """Return the value to use as a label."""
        known = self._admitted.get(value)
        if known is not None:
            return known
        if len(self._admitted) >= self._limit:
            return OTHER
        return self._admitted.setdefault(value, clean(value))


def clean(value: str) -> str:
    """Make any text a label value: no surrogates or control characters, and not too long.

    One lone surrogate would make every scrape of the process fail.
    """
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return shown[:MAX_LABEL_LENGTH]


class AgentCounters:
    """The counters of one agent, resolved once so that counting is a dictionary look-up."""

    __slots__ = ("agent", "blind", "cycles", "turns")

    def __init__(self, agent: str, metrics: PrometheusObserver) -> None:
        """Create every series of the agent at 0, or the first alert is missed."""
        self.agent = agent
        self.turns = metrics.counter("otel_limits_turns_total", agent)
        self.cycles = metrics.counter("otel_limits_cycles_total", agent)
        self.blind = metrics.counter("otel_limits_blind_invocations_total", agent)
        for reason in FRAMEWORK_REASONS:
            metrics.counter("otel_limits_stops_total", agent, reason, "none")
        for reason in STOP_REASONS:
            metrics.counter("otel_limits_synthetic_messages_total", agent, reason)


class ModelCounters:
    """The counters of one agent with one model."""

    __slots__ = ("input", "kinds", "output", "unpriced")

    def __init__(self, agent: str, model: str, metrics: PrometheusObserver) -> None:
        """Create every series of the pair at 0."""
        self.input = metrics.counter("otel_limits_tokens_total", agent, model, "input")
        self.output = metrics.counter("otel_limits_tokens_total", agent, model, "output")
        self.unpriced = metrics.counter("otel_limits_unpriced_tokens_total", model)
        self.kinds = {
            kind: metrics.counter("otel_limits_model_calls_total", agent, model, kind)
            for kind in CALL_KINDS
        }


class PrometheusObserver:
    """Counts facts.

    Args:
        registry: Where the metrics live; the default registry unless told otherwise.
        max_agents: Distinct agent names; further ones are counted as `_other`.
        max_pairs: Distinct pairs of agent and model; further ones are counted as `_other`.
    """

    component = "prometheus"

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, max_agents: int = 64, max_pairs: int = 256
    ) -> None:
        """Register the metrics.

        Raises:
            ValueError: The registry has metrics of these names already.
        """
        self._registry = registry
        self._metrics = {
            spec.name: spec.kind(spec.name, spec.help, spec.labels, registry=registry)
            for spec in METRICS
        }
        self._agent_label = LabelValues(max_agents)
        self._component_label = LabelValues(max_agents)
        self._max_pairs = max_pairs
        self._agents: dict[str, AgentCounters] = {}
        self._models: dict[tuple[str, str], ModelCounters] = {}
        self._handlers: dict[type, Callable[..., None]] = {
            Started: self._started,
            Cycle: self._cycle,
            Turn: self._turn,
            ModelCall: self._model_call,
            Warned: self._warned,
            Halt: self._halt,
            Stop: self._stop,
            Fault: self._fault,
            PolicyRead: self._policy_read,
        }
        self._server: Server | None = None
        self._policy_read(PolicyRead(path="", valid=True))

    def __call__(self, fact: Fact) -> None:
        """Count one fact."""
        handler = self._handlers.get(type(fact))
        if handler is not None:
            handler(fact)

    def info(self, version: str) -> None:
        """Publish the version."""
        self._metrics["otel_limits_build_info"].labels(version).set(1)  # type: ignore[union-attr]

    def counter(self, name: str, *labels: str) -> Counter:
        """One series, created at 0 when it is new."""
        child = self._metrics[name].labels(*labels)
        assert isinstance(child, Counter)
        return child

    def serve(self, port: int, host: str) -> None:
        """Serve the registry over HTTP.

        Raises:
            OSError: The address is taken or cannot be bound.
        """
        if self._server is None or self._server.address != (host, port):
            self.stop_serving()
            self._server = Server(port, host, self._registry)

    def stop_serving(self) -> None:
        """Close the endpoint, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        """Take the metrics out of the registry and close the endpoint."""
        self.stop_serving()
        for metric in self._metrics.values():
            self._registry.unregister(metric)

    def renew_locks(self) -> None:
        """Replace every lock in a forked child: another thread may have held one.

        prometheus_client has no hook for this, hence the private names.
        """
        for metric in self._metrics.values():
            metric._lock = threading.Lock()  # noqa: SLF001
            for child in (metric, *getattr(metric, "_metrics", {}).values()):
                value = getattr(child, "_value", None)
                if value is not None and hasattr(value, "_lock"):
                    value._lock = threading.Lock()  # noqa: SLF001

    def _agent(self, name: str) -> AgentCounters:
        counters = self._agents.get(name)
        if counters is None:
            label = self._agent_label(name)
            counters = self._agents.get(label) or AgentCounters(label, self)
            self._agents[label] = counters
            if label != OTHER:
                self._agents[name] = counters
        return counters

    def _pair(self, agent: str, model: str) -> ModelCounters:
        counters = self._models.get((agent, model))
        if counters is None:
            known = len(self._models) < self._max_pairs
            key = (self._agent(agent).agent, clean(model) if known else OTHER)
            counters = self._models.get(key) or ModelCounters(*key, self)
            self._models[key] = counters
            if known:
                self._models[agent, model] = counters
        return counters

    def _started(self, fact: Started) -> None:
        counters = self._agent(fact.invocation.agent)
        for reason in STOP_REASONS:
            self.counter("otel_limits_stops_total", counters.agent, reason, fact.action)
        if fact.blind:
            counters.blind.inc()

    def _cycle(self, fact: Cycle) -> None:
        self._agent(fact.invocation.agent).cycles.inc()

    def _turn(self, fact: Turn) -> None:
        self._agent(fact.invocation.agent).turns.inc()

    def _model_call(self, fact: ModelCall) -> None:
        counters = self._pair(fact.invocation.agent, fact.model)
        counters.kinds[fact.kind].inc()
        if fact.usage.input:
            counters.input.inc(fact.usage.input)
        if fact.usage.output:
            counters.output.inc(fact.usage.output)
        if fact.price is None and fact.usage.total:
            counters.unpriced.inc(fact.usage.total)

    def _halt(self, fact: Halt) -> None:
        if fact.action in ("halted", "raised"):
            agent = self._agent(fact.invocation.agent).agent
            self.counter("otel_limits_synthetic_messages_total", agent, fact.reason).inc()

    def _stop(self, fact: Stop) -> None:
        reason = fact.breach.reason if fact.breach else fact.reason
        agent = self._agent(fact.agent).agent
        self.counter("otel_limits_stops_total", agent, reason_label(reason), fact.action).inc()

    def _warned(self, fact: Warned) -> None:
        agent, limit = self._agent(fact.invocation.agent).agent, fact.level.limit
        threshold = f"{fact.threshold:g}"
        self.counter("otel_limits_warnings_total", agent, limit, threshold).inc()

    def _policy_read(self, fact: PolicyRead) -> None:
        self._metrics["otel_limits_policy_valid"].set(fact.valid)  # type: ignore[union-attr]

    def _fault(self, fact: Fault) -> None:
        self.counter(
            "otel_limits_internal_errors_total", self._component_label(fact.component)
        ).inc()


def reason_label(reason: str) -> str:
    """Return a stop reason as a label; one that nobody defined is `_other`."""
    return reason if reason in STOP_REASONS or reason in FRAMEWORK_REASONS else OTHER


class Server:
    """The `/metrics` endpoint."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        """Bind and serve in a daemon thread."""
        self.address = (host, port)
        self._httpd, self._thread = prometheus_client.start_http_server(
            port, addr=host, registry=registry
        )

    def close(self) -> None:
        """Stop serving and free the port."""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


def action_labels() -> tuple[ActionTaken, ...]:
    """Every value of the label `action`."""
    return ("none", "observed", "halted", "wrapped_up", "raised")
