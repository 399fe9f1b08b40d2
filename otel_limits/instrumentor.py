"""Switches otel-limits on and off: from the environment alone, in one line, or for one agent."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import wrapt
from opentelemetry._logs import get_logger
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.metrics import get_meter

from otel_limits import config
from otel_limits.errors import ConfigurationError
from otel_limits.faults import FAULTS
from otel_limits.limits import ACTIONS, NO_LIMITS, Action, Limits, Policy, require_choice
from otel_limits.observers.log import log
from otel_limits.processor import LimitsSpanProcessor
from otel_limits.provider import Attachment
from otel_limits.runs import LIVE

if TYPE_CHECKING:
    from opentelemetry._logs import Logger, LoggerProvider
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from strands.agent.agent import Agent

    from otel_limits.bindings.strands import Binding
    from otel_limits.facts import Observer
    from otel_limits.observers.counting import CountingObserver
    from otel_limits.observers.events import EventObserver

logger = logging.getLogger("otel_limits")

AGENT_MODULE: Final = "strands.agent.agent"


@functools.cache
def own_version() -> str:
    """Version of the installed package."""
    return version("otel-limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Where metrics and events go in OpenTelemetry; where the process sends them unless given."""

    meters: MeterProvider | None = None
    loggers: LoggerProvider | None = None

    def meter(self) -> Meter:
        """Return what makes our instruments."""
        return get_meter("otel_limits", own_version(), self.meters)

    def logger(self) -> Logger:
        """Return what emits our events."""
        return get_logger("otel_limits", own_version(), self.loggers)


class Switch:
    """Whether otel-limits is on in this process, and everything that has to be undone."""

    def __init__(self) -> None:
        """Begin switched off."""
        self._lock = threading.RLock()
        self._settings: config.Settings | None = None
        self._attachment = Attachment(LimitsSpanProcessor(LIVE))
        self._counting: dict[str, CountingObserver] = {}
        self._events: EventObserver | None = None
        self._observers: tuple[Observer, ...] = ()
        self.telemetry = Telemetry()
        self._bindings: weakref.WeakKeyDictionary[Agent, Binding] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakSet[Agent] = weakref.WeakSet()
        self._originals: dict[str, Any] = {}
        self._waiting_for_strands = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def on(self, settings: config.Settings, observers: Sequence[Observer] = ()) -> None:
        """Apply `settings` to every agent of the process; again with others replaces them."""
        if settings.disabled:
            logger.info("otel-limits is switched off by OTEL_LIMITS_DISABLED.")
            return
        with self._lock:
            self._settings = settings
            self._observers = tuple(observers)
            self._start(settings)
            self._serve(settings)

    def off(self) -> None:
        """Undo `on` completely. An agent with a plugin of its own keeps it."""
        with self._lock:
            self._settings = None
            for agent, binding in list(self._bindings.items()):
                if agent not in self._own:
                    binding.detach(agent)
                    del self._bindings[agent]
            if self._own:
                return
            self._unwatch_agents()
            self._attachment.detach()
            LIVE.observers = self._observers = ()
            for counting in self._counting.values():
                counting.close()
            self._counting.clear()

    def adopt(self, agent: Agent, limits: Limits, action: Action | None) -> None:
        """Give `agent` a policy of its own, over the one that `on` gave to all."""
        reading = config.read()
        if reading.settings.disabled:
            return
        with self._lock:
            self._start(self._settings or reading.settings)
            self._own.add(agent)
            self._bind(agent, limits, action)

    def policy(self, limits: Limits = NO_LIMITS, action: Action | None = None) -> Policy:
        """What applies now to an agent that sets `limits` and `action` itself."""
        base = self._settings.policy if self._settings is not None else Policy()
        return Policy(
            limits=limits.over(base.limits),
            action=action or base.action,
            unmeasured=base.unmeasured,
        )

    # --- observers --------------------------------------------------------------------------------

    def _start(self, settings: config.Settings) -> None:
        for way in [way for way in self._counting if way not in settings.metrics]:
            self._counting.pop(way).close()
        for way in settings.metrics:
            if way not in self._counting:
                self._counting[way] = self._count(way, settings.metrics_max_agents)
        if self._events is None:
            from otel_limits.observers.events import EventObserver

            self._events = EventObserver(self.telemetry.logger())
        LIVE.observers = (log, *self._counting.values(), self._events, *self._observers)
        self._attachment.attach()
        self._watch_agents()

    def _count(self, way: str, max_agents: int) -> CountingObserver:
        counting: CountingObserver
        if way == "prometheus":
            from otel_limits.observers.prometheus import PrometheusObserver

            counting = PrometheusObserver(max_agents=max_agents)
        else:
            from otel_limits.observers.otlp import OtlpObserver

            counting = OtlpObserver(self.telemetry.meter(), max_agents)
        counting.info(own_version())
        return counting

    def _serve(self, settings: config.Settings) -> None:
        counting = self._counting.get("prometheus")
        if settings.prometheus_port is None or counting is None:
            return
        from otel_limits.observers.prometheus import PrometheusObserver, is_shared

        assert isinstance(counting, PrometheusObserver)
        try:
            counting.serve(settings.prometheus_port, settings.prometheus_host)
        except OSError as error:
            if is_shared() and error.errno == errno.EADDRINUSE:
                logger.info("otel-limits: another process of the application serves /metrics.")
                return
            logger.error(  # noqa: TRY400  the sentence says it all
                "otel-limits cannot serve /metrics on %s port %d (%s); limits stay in force. "
                "Set OTEL_LIMITS_PROMETHEUS_PORT to a free port.",
                settings.prometheus_host,
                settings.prometheus_port,
                error.strerror,
            )
            LIVE.tell_fault("prometheus")

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        for counting in self._counting.values():
            counting.reset_after_fork()

    # --- agents -----------------------------------------------------------------------------------

    def _watch_agents(self) -> None:
        """See every invocation begin and end, without importing Strands for those who do not."""
        if self._originals:
            return
        if AGENT_MODULE in sys.modules:
            self._wrap_agent_class()
        elif not self._waiting_for_strands:
            self._waiting_for_strands = True
            wrapt.register_post_import_hook(lambda _: self._strands_imported(), AGENT_MODULE)

    def _strands_imported(self) -> None:
        with self._lock:
            self._waiting_for_strands = False
            if self._settings is not None and not self._originals:
                self._wrap_agent_class()

    def _wrap_agent_class(self) -> None:
        from strands.agent.agent import Agent

        for name, wrap in (
            ("_start_agent_trace_span", self._wrap_start),
            ("_end_agent_trace_span", self._wrap_end),
        ):
            self._originals[name] = getattr(Agent, name)
            setattr(Agent, name, wrap(self._originals[name]))

    def _unwatch_agents(self) -> None:
        if not self._originals:
            return
        from strands.agent.agent import Agent

        for name, original in self._originals.items():
            setattr(Agent, name, original)
        self._originals.clear()

    def _wrap_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            span = original(agent, *args, **kwargs)
            binding = self._binding_of(agent)
            if binding is not None:
                binding.begin(agent, span)
            return span

        return start

    def _wrap_end(self, original: Any) -> Any:
        @functools.wraps(original)
        def end(
            agent: Agent,
            response: Any = None,
            error: Exception | None = None,
            cancellation: BaseException | None = None,
        ) -> Any:
            try:
                return original(agent, response, error, cancellation)
            finally:
                binding = self._bindings.get(agent)
                if binding is not None:
                    binding.end(response, error, cancellation)

        return end

    def _binding_of(self, agent: Agent) -> Binding | None:
        """Return the agent's binding, made on first use while otel-limits is on."""
        binding = self._bindings.get(agent)
        if binding is not None or self._settings is None:
            return binding
        try:
            with self._lock:
                return self._bindings.get(agent) or self._bind(agent, NO_LIMITS, None)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            FAULTS.report("binding", error)
            return None

    def _bind(self, agent: Agent, limits: Limits, action: Action | None) -> Binding:
        from otel_limits.bindings.strands import Binding

        binding = Binding(LIVE, functools.partial(self.policy, limits, action))
        binding.attach(agent)
        self._bindings[agent] = binding
        return binding


SWITCH: Final = Switch()


def enable(
    limits: Limits | None = None,
    *,
    action: Action | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Limit every agent of this process: those that exist, and those made later.

    Without arguments the environment decides; an argument wins over it. Calling it again is
    harmless, and with other arguments replaces what applies to invocations that begin afterwards.

    Args:
        limits: Caps; one that is `None` is taken from the environment.
        action: `observe`, `halt` or `raise`.
        observers: Called with every fact (see `otel_limits.Fact`); one that fails is logged and
            counted, and never felt by the agent.

    Raises:
        ConfigurationError: A setting of the environment or an argument is invalid; nothing was
            changed. It is a `ValueError`.
    """
    reading = config.read()
    mistakes = list(reading.mistakes)
    if action is not None:
        try:
            require_choice("action", action, ACTIONS)
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigurationError(mistakes)
    SWITCH.on(_override(reading.settings, limits, action), observers)


def disable() -> None:
    """Undo `enable()` completely: hooks, stages, span processor, metrics and endpoint."""
    SWITCH.off()


def enable_leniently() -> None:
    """Enable from the environment where an exception would take others down with it.

    A mistake is logged as an error and counted, and every valid setting is in force all the same;
    with `OTEL_LIMITS_STRICT=true` the process ends with status 2 instead.

    Raises:
        SystemExit: There is a mistake, and the settings are strict.
    """
    reading = config.read()
    if reading.mistakes and reading.settings.strict:
        for mistake in reading.mistakes:
            sys.stderr.write(f"otel-limits: {mistake}\n")
        raise SystemExit(2)
    SWITCH.on(reading.settings)
    for mistake in reading.mistakes:
        logger.error("otel-limits: %s Every other setting is in force.", mistake)
        LIVE.tell_fault("config")
    if reading.settings.preset != "none":
        logger.warning(
            "otel-limits: preset %r sets %s.",
            reading.settings.preset,
            ", ".join(f"{k}={v}" for k, v in config.PRESETS[reading.settings.preset].items()),
        )


def _override(
    settings: config.Settings, limits: Limits | None, action: Action | None
) -> config.Settings:
    policy = replace(
        settings.policy,
        limits=(limits or NO_LIMITS).over(settings.policy.limits),
        action=action or settings.policy.action,
    )
    return replace(settings, policy=policy)


class OtelLimitsInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """What `opentelemetry-instrument` loads."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what has to be installed for this to make sense."""
        return ("strands-agents >= 1.62",)

    def _instrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        enable_leniently()

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002  set by the base class
        disable()


def environment_provider() -> TracerProvider:
    """Make the provider for `OTEL_PYTHON_TRACER_PROVIDER=otel_limits python app.py`.

    Where OTEL_EXPORTER_OTLP_* is set, metrics and events get providers too. Those are ours alone:
    a global one that the application sets later would otherwise be refused.
    """
    from otel_limits import export

    timeout = config.otlp_timeout_seconds()
    SWITCH.telemetry = Telemetry(
        meters=export.meter_provider(config.otlp_protocol(signal="metrics"), timeout),
        loggers=export.logger_provider(config.otlp_protocol(signal="logs"), timeout),
    )
    enable_leniently()
    return export.tracer_provider(config.otlp_protocol(), timeout)
