"""Switches otel-limits on and off: from the environment alone, in one line, or for one agent."""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import threading
import weakref
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import wrapt
from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_limits.bindings.strands.classes import Watch
from otel_limits.core import pricing
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.faults import never_raises
from otel_limits.core.limits import NO_LIMITS, Limits, require_tree
from otel_limits.core.policy import ACTION, Action, Policy
from otel_limits.core.pricing import Prices
from otel_limits.observers.lazy import LazyObserver
from otel_limits.observers.log import log
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.otel.provider import Attachment
from otel_limits.quotas.urls import MEMORY_URL
from otel_limits.runs.registry import LIVE, kill
from otel_limits.settings import environment as config
from otel_limits.settings import otlp
from otel_limits.settings.policy import NO_FILE, PolicyFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import MeterProvider
    from strands.agent.agent import Agent

    from otel_limits.bindings.strands.binding import Binding
    from otel_limits.core.facts import Observer
    from otel_limits.observers.counting import CountingObserver
    from otel_limits.observers.events import EventObserver
    from otel_limits.observers.ledger import LedgerObserver
    from otel_limits.observers.toollog import ToolLog
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.setup import Quotas
    from otel_limits.settings.policy.document import Document

logger = logging.getLogger("otel_limits")

AGENT_MODULE: Final = "strands.agent.agent"

Telemetry: TypeAlias = "tuple[MeterProvider | None, LoggerProvider | None]"
"""Where metrics and events go in OpenTelemetry; `None` for where the process sends them."""


class Switch:
    """Whether otel-limits is on in this process, and everything that has to be undone."""

    def __init__(self) -> None:
        """Begin switched off."""
        self._lock = threading.RLock()
        self._settings: config.Settings | None = None
        self._observers: tuple[Observer, ...] = ()
        self._policy_file = NO_FILE
        self._prices: tuple[Document, Prices] | None = None
        self._attachment = Attachment(LimitsSpanProcessor(LIVE))
        self._quotas: Quotas | None = None
        self._counting: dict[str, LazyObserver[CountingObserver]] = {}
        self._telemetry: Telemetry = (None, None)
        self._events: LazyObserver[EventObserver] | None = None
        self._ledger: LedgerObserver | None = None
        self._bindings: weakref.WeakKeyDictionary[Agent, Binding] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakSet[Agent] = weakref.WeakSet()
        self._watch = Watch(self, LIVE)
        self._provides = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def is_on(self) -> bool:
        """Whether every agent of the process is limited."""
        return self._settings is not None

    def on(
        self,
        settings: config.Settings,
        observers: Sequence[Observer] = (),
        policy_file: PolicyFile = NO_FILE,
    ) -> None:
        """Apply `settings` to every agent of the process; again with others replaces them."""
        if settings.disabled:
            logger.info("otel-limits is switched off by OTEL_LIMITS_DISABLED.")
            return
        with self._lock:
            self._settings = settings
            self._observers = tuple(observers)
            self._policy_file = policy_file
            self._start(settings)
            self._hold_quotas()
        wrapt.register_post_import_hook(lambda _: self._serve(), AGENT_MODULE)
        policy_file.announce()

    def off(self) -> None:
        """Undo `on` completely. An agent with a plugin of its own keeps it."""
        with self._lock:
            self._settings = None
            self._provides = False
            self._policy_file = NO_FILE
            self._observers = ()
            self._release_quotas()
            for agent, binding in list(self._bindings.items()):
                if agent not in self._own:
                    binding.detach(agent)
                    del self._bindings[agent]
            if self._own:
                self._tell(config.read().settings)
                self._serve()
                return
            self._watch.stop()
            self._attachment.detach()
            LIVE.observers.use(())
            LIVE.prices = LIVE.tool_log = None
            self._record(config.Settings())
            for way in list(self._counting):
                self._stop_counting(way)

    def adopt(self, agent: Agent, limits: Limits, action: Action | None, tree: Limits) -> None:
        """Give `agent` a policy of its own, over the one that `on` gave to all."""
        reading = config.read()
        if reading.settings.disabled:
            return
        mistakes = price_mistakes([limits, tree], self._policy_file.document)
        if mistakes:
            raise ConfigurationError(mistakes)
        with self._lock:
            self._start(self._settings or reading.settings)
            former = self._bindings.pop(agent, None)
            if former is not None:
                former.detach(agent)
            own = functools.partial(self.policy, limits=limits, action=action, tree=tree)
            self._bind(agent, own)

    def provide_when_missing(self) -> None:
        """Set a tracer provider when an agent is first called and the program has set none."""
        self._provides = True

    def policy(
        self,
        agent: str,
        *,
        limits: Limits = NO_LIMITS,
        action: Action | None = None,
        tree: Limits = NO_LIMITS,
    ) -> Policy:
        """What applies now to an agent of this name that sets these itself."""
        self._policy_file.refresh()
        self._set_prices()
        if self._quotas is None and self._policy_file.document.quotas:
            never_raises("quotas")(self._hold_quotas)()  # which must not cost the agent its limits
        base = self._settings.policy if self._settings is not None else Policy()
        base = self._policy_file.document.effective(agent, base)
        if limits is tree is NO_LIMITS and action is None:
            return base
        return replace(
            base,
            limits=limits.over(base.limits),
            tree=tree.over(base.tree),
            action=action or base.action,
        )

    # --- observers --------------------------------------------------------------------------------

    def _start(self, settings: config.Settings) -> None:
        self._tell(settings)
        threading.Thread(target=self._current_prices().load, daemon=True).start()
        self._attachment.attach()
        self._watch.start()

    def _tell(self, settings: config.Settings) -> None:
        """Tell those of what happens who are to be told now."""
        for way in [way for way in self._counting if way not in settings.metrics]:
            self._stop_counting(way)
        for way in settings.metrics:
            if way not in self._counting:
                make = functools.partial(_make_counting, way, settings, self._telemetry)
                self._counting[way] = LazyObserver(way, make, LIVE.observers.replace)
        counting = [later.made() or later for later in self._counting.values()]
        self._events = LazyObserver(
            "events", functools.partial(_make_events, self._telemetry), LIVE.observers.replace
        )
        self._record(settings)
        recording = () if self._ledger is None else (self._ledger,)
        LIVE.observers.use((log, *counting, self._events, *self._observers, *recording))
        LIVE.prices = self._current_prices()
        LIVE.tool_log = _make_tool_log(self._settings)

    def _record(self, settings: config.Settings) -> None:
        """Keep the ledger that `settings` name, and no other."""
        LIVE.audit_keys = settings.audit_keys
        kept = (self._ledger.address, self._ledger.sync) if self._ledger is not None else None
        if settings.ledger is not None and kept == (settings.ledger, settings.ledger_sync):
            return
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if settings.ledger is not None:
            from otel_limits.observers.ledger import LedgerObserver

            self._ledger = LedgerObserver(settings.ledger, settings.ledger_sync)

    def _stop_counting(self, way: str) -> None:
        counting = self._counting.pop(way).never()
        if counting is not None:
            counting.close()

    @never_raises("prometheus")
    def _serve(self) -> None:
        """Serve /metrics, once Strands is there.

        A program without agents leaves the port to the one that has them: a supervisor of workers
        would take it and count nothing.
        """
        with self._lock:
            settings, metrics = self._settings, self._counting.get("prometheus")
            if metrics is None:
                return
            port = None if settings is None else settings.prometheus_port
            observer = metrics.made() if port is None else metrics.now()
            if observer is None:
                return
            from otel_limits.observers.prometheus import PrometheusObserver, is_shared

            assert isinstance(observer, PrometheusObserver)
            if settings is None or port is None:
                observer.stop_serving()
                return
            try:
                observer.serve(port, settings.prometheus_host)
            except (OSError, UnicodeError) as error:  # taken, or no address at all
                if is_shared() and getattr(error, "errno", None) == errno.EADDRINUSE:
                    logger.info("otel-limits: another process of the application serves /metrics.")
                    return
                logger.error(  # noqa: TRY400  the sentence says it all
                    "otel-limits cannot serve /metrics on %s port %d (%s); limits stay in force. "
                    "Set OTEL_LIMITS_PROMETHEUS_PORT to a free port.",
                    settings.prometheus_host,
                    port,
                    getattr(error, "strerror", None) or error,
                )
                LIVE.observers.publish_fault("prometheus")

    @never_raises("prices")
    def _set_prices(self) -> None:
        LIVE.prices = self._current_prices()

    def _current_prices(self) -> Prices:
        """Return the prices by the policy file that is in force."""
        document = self._policy_file.document
        if self._prices is None or self._prices[0] is not document:
            self._prices = (document, Prices(document.price_list()))
        return self._prices[1]

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._policy_file.renew_lock()
        if self._events is not None:
            self._events.renew_lock()
        for later in self._counting.values():
            later.renew_lock()
            counting = later.made()
            if counting is not None:
                counting.reset_after_fork()
        if self._ledger is not None:
            self._ledger.renew()
        if self._quotas is not None:
            self._quotas.reset_after_fork()

    # --- quotas -----------------------------------------------------------------------------------

    def _hold_quotas(self) -> None:
        """Ask quotas before model calls, and hear kills where a store is shared."""
        with self._lock:
            url = None if self._settings is None else self._settings.quota_store
            if self._quotas is not None and self._quotas.url == url:
                return
            self._release_quotas()
            if url is not None and (url != MEMORY_URL or self._policy_file.document.quotas):
                from otel_limits.quotas.setup import Quotas

                self._quotas = Quotas(url, self._current_quotas, LIVE, self._find_charges)

    def _find_charges(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Look up in the ledger, where there is one, what killed workers did not settle."""
        address = None if self._settings is None else self._settings.ledger
        if address is None:
            return ()
        from otel_limits.ledger.settlements import charges_in

        return charges_in(address, operations)

    def _release_quotas(self) -> None:
        quotas, self._quotas = self._quotas, None
        if quotas is not None:
            quotas.close()

    def _current_quotas(self) -> Sequence[Quota]:
        """Return the quotas of the policy file that is in force."""
        return [entry.value for entry in self._policy_file.document.quotas.values()]

    # --- agents -----------------------------------------------------------------------------------

    @never_raises("provider")
    def prepare(self) -> None:
        """An agent is about to be called: set a provider where one was promised and none is.

        Tracers that exist already follow it.
        """
        if not self._provides:
            return
        self._provides = False
        self.export_over_otlp()
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(make_tracer_provider())

    @never_raises("export")
    def export_over_otlp(self) -> None:
        """Export metrics and events where OTEL_EXPORTER_OTLP_* asks for it and nobody else does.

        Their providers are ours alone: a global one would stand in the way of one that the program
        sets later.
        """
        from otel_limits.otel import export

        settings, timeout = self._settings, otlp.otlp_timeout_seconds()
        if settings is None:
            return
        with self._lock:
            self._telemetry = (
                export.meter_provider(otlp.otlp_protocol(signal="metrics"), timeout),
                export.logger_provider(otlp.otlp_protocol(signal="logs"), timeout),
            )
            if "otlp" in self._counting:
                self._stop_counting("otlp")
            self._tell(settings)

    def binding_of(self, agent: Agent) -> Binding | None:
        """Return the agent's binding, made on first use while otel-limits is on."""
        binding = self._bindings.get(agent)
        if binding is not None:
            return binding
        policy = self._policy_of_copied(agent)
        if policy is None and self._settings is None:
            return None
        with self._lock:
            return (
                self._bindings.get(agent)
                or self._bind_unfelt(agent, policy)
                or self._bind_unfelt(agent, policy)  # a fault must not leave it without its limits
            )

    @never_raises("binding")
    def _policy_of_copied(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return the own limits of the agent that this one is a copy of, if it is one."""
        from otel_limits.bindings.strands.binding import Binding
        from otel_limits.bindings.strands.registries import follower_of

        follower = follower_of(agent)
        if not isinstance(follower, Binding) or not follower.is_own:
            return None
        return follower.policy if follower.stands_in_for(agent) else None

    def _bind(self, agent: Agent, own: Callable[[str], Policy] | None = None) -> Binding:
        from otel_limits.bindings.strands.binding import Binding

        binding = Binding(LIVE, own or self.policy, is_own=own is not None)
        try:
            binding.attach(agent)
        except Exception:
            binding.detach(agent)
            raise
        if own is not None:
            self._own.add(agent)
        self._bindings[agent] = binding
        return binding

    _bind_unfelt = never_raises("binding")(_bind)


def own_version() -> str:
    """Return our version; a frozen application may have left its metadata out."""
    try:
        return version("otel-limits")
    except PackageNotFoundError:
        return "unknown"


def _make_counting(
    way: str, settings: config.Settings, telemetry: Telemetry
) -> CountingObserver | None:
    """Make the metrics, or go without: what limits an agent does not depend on them."""
    try:
        observer = _MAKE_COUNTING[way](settings, telemetry)
        observer.info(own_version())
    except (OSError, ValueError) as error:
        logger.error(  # noqa: TRY400  the sentence says it all
            "otel-limits cannot count in prometheus_client (%s); limits stay in force. "
            "Check PROMETHEUS_MULTIPROC_DIR and the names in the default registry.",
            error,
        )
        return None
    return observer


def _through_prometheus(settings: config.Settings, telemetry: Telemetry) -> CountingObserver:  # noqa: ARG001  the signature of both
    from otel_limits.observers.prometheus import PrometheusObserver

    return PrometheusObserver(max_agents=settings.metrics_max_agents)


def _through_otlp(settings: config.Settings, telemetry: Telemetry) -> CountingObserver:
    from opentelemetry.metrics import get_meter

    from otel_limits.observers.otlp import OtlpObserver

    meter = get_meter("otel_limits", own_version(), telemetry[0])
    return OtlpObserver(meter, settings.metrics_max_agents)


_MAKE_COUNTING: Final = {"prometheus": _through_prometheus, "otlp": _through_otlp}


def _make_events(telemetry: Telemetry) -> EventObserver:
    from opentelemetry._logs import get_logger

    from otel_limits.observers.events import EventObserver

    return EventObserver(get_logger("otel_limits", own_version(), telemetry[1]))


def _make_tool_log(settings: config.Settings | None) -> ToolLog | None:
    """Make the tool log where one was asked for."""
    if settings is None or settings.tool_log_dir is None:
        return None
    from pathlib import Path

    from otel_limits.observers.toollog import ToolLog

    return ToolLog(Path(settings.tool_log_dir), settings.tool_log_interval)


def price_mistakes(limits: Iterable[Limits], document: Document) -> list[str]:
    """Say that a limit on cost is asked for where no price can be known.

    That the policy file itself asks for one is a mistake of the file.
    """
    capped = any(each.max_cost_usd is not None for each in limits)
    if not capped or Prices(document.price_list()).available:
        return []
    return [f"max_cost_usd {pricing.MISSING}"]


def policy_mistakes(reading: config.Reading, policy_file: PolicyFile) -> list[str]:
    """Say what is wrong with the policy file, and with what the environment asks of it."""
    policy = reading.settings.policy
    return [
        *policy_file.mistakes,
        *price_mistakes([policy.limits, policy.tree], policy_file.document),
    ]


RUNTIME: Final = Switch()


def enable(
    limits: Limits | None = None,
    *,
    action: Action | None = None,
    tree: Limits | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Limit every agent of this process: those that exist, and those made later.

    Without arguments the environment decides; an argument wins over it. The policy file wins over
    both, and a `LimitsPlugin` over everything. Calling it again is harmless, and with other
    arguments replaces what applies to invocations that begin afterwards.

    Args:
        limits: Caps; one that is `None` is taken from the environment.
        action: `observe`, `halt`, `wrap_up`, `raise` or `ask`.
        tree: Caps for an invocation together with everything that it starts.
        observers: Called with every fact (see `otel_limits.Fact`); one that fails is logged and
            counted, and never felt by the agent.

    Raises:
        ConfigurationError: A setting of the environment or an argument is invalid; nothing was
            changed. It is a `ValueError`.
    """
    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    mistakes = [*reading.mistakes, *policy_file.mistakes]
    try:
        ACTION.of_value("action", "halt" if action is None else action)
        require_tree(tree or NO_LIMITS)
    except ValueError as error:
        mistakes.append(str(error))
    policy = reading.settings.policy
    mistakes += price_mistakes(
        [limits or NO_LIMITS, tree or NO_LIMITS, policy.limits, policy.tree], policy_file.document
    )
    if mistakes:
        raise ConfigurationError(mistakes)
    RUNTIME.on(_override(reading.settings, limits, action, tree), observers, policy_file)
    _announce_preset(reading)


def disable() -> None:
    """Undo `enable()` completely: hooks, stages, span processor, metrics and endpoint."""
    RUNTIME.off()


def enable_leniently() -> None:
    """Enable from the environment where an exception would take others down with it.

    A mistake is logged as an error and counted, and every valid setting is in force all the same;
    with `OTEL_LIMITS_STRICT=true` the process ends with status 2 instead.
    """
    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    policy = reading.settings.policy
    unpriced = price_mistakes([policy.limits, policy.tree], policy_file.document)
    mistakes = (*reading.mistakes, *policy_file.mistakes, *unpriced)
    if mistakes and reading.settings.strict:
        _end_process(mistakes)
    try:
        RUNTIME.on(reading.settings, policy_file=policy_file)
    except Exception as error:
        if reading.settings.strict:
            _end_process([f"It cannot be switched on ({error!r})."])
        logger.exception("otel-limits cannot be switched on, so no limit is in force.")
        return
    for mistake in (*reading.mistakes, *unpriced):
        logger.error("otel-limits: %s Every other setting is in force.", mistake)
        LIVE.observers.publish_fault("config")
    _announce_preset(reading)


def _announce_preset(reading: config.Reading) -> None:
    """Say which limits nobody has set one by one."""
    preset = f"preset {reading.settings.preset}"
    caps = [
        f"{name}={reading.values[name]}" for name, of in reading.sources.items() if of == preset
    ]
    if caps:
        logger.warning("otel-limits: preset %r sets %s.", reading.settings.preset, ", ".join(caps))


def enable_for_run() -> None:
    """Enable in a program that `otel-limits run` started, and provide what it lacks."""
    if not RUNTIME.is_on:
        enable_leniently()
    RUNTIME.provide_when_missing()
    _kill_on_signal()


def _kill_on_signal() -> None:
    """End every live invocation on SIGUSR2, unless the program uses the signal itself.

    A handler runs between two instructions of whatever the main thread does, locks included, so
    that the work is left to a thread.
    """
    name = getattr(signal, "SIGUSR2", None)
    if name is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(name) is signal.SIG_DFL:
        end_all = functools.partial(kill, all=True)
        signal.signal(name, lambda *_: threading.Thread(target=end_all).start())


def _end_process(mistakes: Sequence[str]) -> NoReturn:
    """End the process with status 2.

    `SystemExit` would not: while Python starts it leads to a traceback and status 1, and in a
    thread it ends that thread alone.
    """
    for mistake in mistakes:
        sys.stderr.write(f"otel-limits: {mistake}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _override(
    settings: config.Settings, limits: Limits | None, action: Action | None, tree: Limits | None
) -> config.Settings:
    policy = replace(
        settings.policy,
        limits=(limits or NO_LIMITS).over(settings.policy.limits),
        tree=(tree or NO_LIMITS).over(settings.policy.tree),
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


def environment_provider() -> trace.TracerProvider:
    """Make the provider for `OTEL_PYTHON_TRACER_PROVIDER=otel_limits python app.py`.

    What the program enabled in code before it asked for a tracer stays in force.
    """
    if not RUNTIME.is_on:
        enable_leniently()
    RUNTIME.export_over_otlp()
    try:
        return make_tracer_provider()
    except Exception:
        logger.exception("otel-limits cannot make a tracer provider; limits stay in force.")
        return trace.NoOpTracerProvider()


def make_tracer_provider() -> trace.TracerProvider:
    """Make a provider that exports where OTEL_EXPORTER_OTLP_* asks for it."""
    from otel_limits.otel import export

    return export.tracer_provider(otlp.otlp_protocol(), otlp.otlp_timeout_seconds())
