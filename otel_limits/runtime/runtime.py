"""The runtime of a process: enables enforcement and resolves the policy of each agent."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import wrapt
from opentelemetry import trace

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.policy import NO_OVERRIDES, Overrides, Policy
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.otel.provider import ProcessorInstaller
from otel_limits.runs.registry import LIVE, RunRegistry
from otel_limits.runtime.guard import Enforcement, Guard, Source
from otel_limits.runtime.reimports import ReimportFinder
from otel_limits.runtime.wiring import Wiring, make_otlp_providers, make_tracer_provider
from otel_limits.settings import environment as config
from otel_limits.settings.children import note_agent
from otel_limits.settings.policy.file import NO_FILE, PolicyFile, price_mistakes
from otel_limits.settings.variables import variable

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework
    from otel_limits.core.events import Observer
    from otel_limits.settings.table import Settings

logger = logging.getLogger("otel_limits")


class Runtime:
    """Enables and disables otel-limits, and is the host of all frameworks.

    Args:
        runs: The registry of invocations.
        frameworks: The frameworks to limit.
    """

    def __init__(self, runs: RunRegistry, frameworks: Sequence[Framework]) -> None:
        """Start disabled."""
        self.runs = runs
        self._frameworks = frameworks
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._policy_file = NO_FILE
        self._observers: tuple[Observer, ...] = ()
        self._wiring = Wiring(runs)
        self._guard = Guard(runs.observers.publish)
        self._reimports = ReimportFinder(self._follow_again)
        self._installer = ProcessorInstaller(LimitsSpanProcessor(runs, frameworks))
        self._provides = False
        self._loads_prices = False
        self._follows = False
        for framework in frameworks:
            framework.host = self
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def is_on(self) -> bool:
        """True while all agents are limited, not only those with their own limits."""
        return self._settings is not None

    def enforcement(self) -> Enforcement:
        """Return whether limits are enforced in this process, how, and what prevents it."""
        return self._guard.enforcement()

    # --- on and off -------------------------------------------------------------------------------

    def start(
        self,
        settings: Settings,
        observers: Sequence[Observer] = (),
        policy_file: PolicyFile = NO_FILE,
        source: Source = "code",
    ) -> None:
        """Apply `settings` to all agents of the process, replacing those of an earlier call."""
        if settings.disabled:
            logger.info("otel-limits is disabled by OTEL_LIMITS_DISABLED.")
            return
        with self._lock:
            self._settings = settings
            self._observers = tuple(observers)
            self._policy_file = policy_file
            self._guard.switch_on(source, strict=settings.strict)
            self._follow(settings)
            # An error in quotas must not disable the other limits.
            suppress_errors("quotas")(self._wiring.hold_quotas)()
        for framework in self._frameworks:
            # Served only once a framework is imported: a supervisor of workers would otherwise
            # occupy the port and count nothing.
            wrapt.register_post_import_hook(lambda _: self._serve(), framework.module)
        wrapt.register_post_import_hook(lambda _: self._export_state(), "prometheus_client")
        self._probe_when_imported()
        # After the observers are connected, and without the lock.
        policy_file.announce()

    def report_disabled(self, source: Source, reason: str) -> None:
        """Report that `start` failed, so limits are not enforced."""
        self._guard.switch_on(source, strict=False)
        self._guard.report_not_enforcing(reason)

    def stop(self) -> None:
        """Undo `start`. Agents with their own limits keep them.

        These are tracked again from their next invocation, if any: the application may have
        dropped an agent that its framework still references.
        """
        with self._lock:
            # First, so that invocations started in other threads are no longer tracked.
            self._settings = None
            self._provides = False
            self._policy_file = NO_FILE
            self._observers = ()
            self._wiring.release_quotas()
            # Releasing ends live invocations, so observers are still connected. A list, because all
            # frameworks must be released.
            remaining = [framework.release() for framework in self._frameworks]
            if any(remaining):
                # From the environment, because the arguments of `enable()` no longer apply.
                self._wire(_settings_without_start(config.read().settings))
                self._wiring.serve()
                return
            # Only now, after the events of the released invocations.
            self._follows = False
            self._guard.switch_off()
            self._installer.detach()
            self._wiring.disconnect()

    def _follow(self, settings: Settings) -> None:
        """Track invocations and connect observers according to `settings`."""
        self._follows = True
        self._wire(settings)
        self._loads_prices = True
        self._installer.attach()
        for framework in self._frameworks:
            framework.watch()

    def _probe_when_imported(self) -> None:
        """Probe whether limits can be enforced. Publishes an event, so no lock may be held."""
        for framework in self._frameworks:
            probe = functools.partial(self._probe, framework)
            wrapt.register_post_import_hook(probe, framework.module)
            package = framework.module.partition(".")[0]
            missing = functools.partial(self._probe_without_module, framework)
            wrapt.register_post_import_hook(missing, package)
            for part in framework.parts:
                probe = functools.partial(self._probe, framework, part=part)
                wrapt.register_post_import_hook(probe, part)

    def _probe(self, framework: Framework, _module: object, part: str | None = None) -> None:
        self._reimports.watch(part or framework.module)
        self._guard.probe(framework, part)

    def _follow_again(self, module: str) -> None:
        """Track the new classes of a framework that is being imported again.

        A part alone, and a module that is reloaded in place, mix old and new classes. That is
        reported instead.
        """
        for framework in self._frameworks:
            if module == framework.module and module not in sys.modules:
                self._reimports.forget((module, *framework.parts))
                renew = functools.partial(self._renew, framework)
                wrapt.register_post_import_hook(renew, module)
                return
        package = module.partition(".")[0]
        self._guard.report_not_enforcing(
            f"{package} was imported again in part, and its new classes are not limited. Restart "
            "the process instead."
        )

    @suppress_errors("binding")
    def _renew(self, framework: Framework, _module: object) -> None:
        framework.renew()
        # They contain classes of the import before, and are imported again on next use.
        for name in ("otel_limits.plugin", "otel_limits.testing"):
            sys.modules.pop(name, None)
        vars(sys.modules["otel_limits"]).pop("LimitsPlugin", None)
        if self._follows:
            framework.watch()
        self._probe_when_imported()

    def _probe_without_module(self, framework: Framework, _package: object) -> None:
        """Report a release without the module, whose import would never be seen."""
        try:
            is_missing = importlib.util.find_spec(framework.module) is None
        except ImportError:  # of a package that contains it
            is_missing = True
        if is_missing:
            self._guard.probe(framework)

    def variable(self, name: str) -> str | None:
        """Return an environment variable of this process, such as one of a vendor's client."""
        return variable(name)

    def report_untracked_agent(self, agent: str) -> None:
        """Report that an invocation of an agent cannot be tracked, so it is not limited."""
        self._guard.report_not_enforcing(
            f"calls of agent {agent!r} cannot be tracked; see the log."
        )

    def _wire(self, settings: Settings) -> None:
        self._wiring.connect(settings, self._observers, self._policy_file.document)

    def _serve(self) -> None:
        with self._lock:
            self._wiring.serve()

    @suppress_errors("prometheus")
    def _export_state(self) -> None:
        """Export whether limits are enforced as soon as the application can serve metrics.

        A process without traffic may import no agents, and would look as if it was not limited.
        """
        # Without the lock: a thread that holds it may wait for the import that this is part of.
        state = self._guard.state()
        if state is not None:
            self._wiring.export(state)

    def _after_fork(self) -> None:
        # A thread of the parent may have held any lock, and does not exist here.
        self._lock = threading.RLock()
        self._policy_file.renew_lock()
        self._wiring.after_fork()

    # --- what applies to an agent -----------------------------------------------------------------

    def policy(self, agent: str, *, own: Overrides = NO_OVERRIDES) -> Policy:
        """Return the current policy of an agent, which may have its own limits."""
        base = self._settings.policy if self._settings is not None else Policy()
        self._policy_file.refresh(base)
        document = self._policy_file.document
        self._wiring.use_document(document)
        if document.quotas and not self._wiring.has_quotas:
            # The first quotas of the file. An error in them must not disable the other limits.
            suppress_errors("quotas")(self._hold_quotas)()
        base = document.effective(agent, base)
        return base if own is NO_OVERRIDES else base.overridden_by(own)

    def own_policy(self, own: Overrides) -> Callable[[str], Policy] | None:
        """Return the policy by agent name for an agent that has its own limits.

        `None` if otel-limits is disabled.

        Raises:
            ConfigurationError: A cost limit is set, but prices are not available.
        """
        settings = config.read().settings
        if settings.disabled:
            return None
        mistakes = price_mistakes([own.limits, own.tree], self._policy_file.document)
        if mistakes:
            raise ConfigurationError(mistakes)
        self._follow_own(settings)
        return functools.partial(self.policy, own=own)

    def _follow_own(self, settings: Settings) -> None:
        """Track agents with their own limits, whether or not the others are tracked."""
        with self._lock:
            self._guard.switch_on("plugin", strict=settings.strict)
            # A plugin adds limits to one agent and changes nothing for others.
            self._follow(self._settings or _settings_without_start(settings))
        self._probe_when_imported()

    def flushes(self) -> list[Callable[[], object]]:
        """Return functions that flush all observers."""
        return self._wiring.flushes()

    def unscraped(self) -> tuple[str, int] | None:
        """Return host and port of an endpoint that was never scraped."""
        if self._settings is None or self._settings.quiet or not self.runs.has_started:
            return None
        return self._wiring.unscraped()

    def _hold_quotas(self) -> None:
        with self._lock:
            self._wiring.hold_quotas()

    # --- where spans, metrics and events go -------------------------------------------------------

    def provide_when_missing(self) -> None:
        """Set a tracer provider at the first agent call, unless the program has set one."""
        self._provides = True

    @suppress_errors("provider")
    def prepare(self, *, has_own: bool) -> None:
        """Prepare for an agent call.

        Tracks an agent with its own limits again after `stop`, and sets a missing tracer provider
        if requested: not earlier, because the program may still set one. Existing tracers use it.
        """
        if has_own and not self._follows:
            self._follow_own(config.read().settings)
        if self._loads_prices:
            self._load_prices()
        if not self._provides:
            return
        # Other threads that call their first agent wait: their spans need the provider.
        with self._lock:
            is_first = self._provides
            try:
                if is_first:
                    self._provide()
            finally:
                self._provides = False
        if is_first:
            note_agent()
            self._guard.publish_state()

    def _load_prices(self) -> None:
        """Load the price list, once.

        Not earlier, because this process may be in the middle of an import. The package is imported
        while other threads wait before they call an agent: a vendor's client looks into
        `sys.modules` for the package's HTTP client, and fails if that is only partly imported.
        """
        with self._lock:
            if self._loads_prices:
                self._loads_prices = False
                self._wiring.import_prices()
                threading.Thread(target=self._wiring.load_prices, daemon=True).start()

    def _provide(self) -> None:
        self._connect_otlp()
        # The API returns a proxy until a provider is set, and rejects a second one with a warning.
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(make_tracer_provider())

    def export_over_otlp(self) -> None:
        """Export metrics and events as OTEL_EXPORTER_OTLP_* requires, unless the program does."""
        with self._lock:
            self._connect_otlp()
        self._guard.publish_state()

    @suppress_errors("export")
    def _connect_otlp(self) -> None:
        if self._settings is not None:
            self._wiring.providers = make_otlp_providers()
            self._wire(self._settings)


def _settings_without_start(settings: Settings) -> Settings:
    """Return the settings of a process in which only agents with their own limits are tracked.

    They have metrics and a ledger, but an endpoint and a tool log require `enable()`.
    """
    return replace(settings, prometheus_port=None, tool_log_dir=None)


RUNTIME: Final = Runtime(LIVE, FRAMEWORKS)
"""The runtime of this process."""
