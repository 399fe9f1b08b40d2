"""Whether the agents of this process are limited, and what applies to each of them."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import wrapt
from opentelemetry import trace

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.limits import NO_LIMITS, Limits
from otel_limits.core.policy import Action, Policy
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.otel.provider import ProcessorInstaller
from otel_limits.runs.registry import LIVE, RunRegistry
from otel_limits.runtime.guard import Enforcement, Guard, Source
from otel_limits.runtime.wiring import Wiring, make_otlp_providers, make_tracer_provider
from otel_limits.settings import environment as config
from otel_limits.settings.policy.file import NO_FILE, PolicyFile, price_mistakes
from otel_limits.settings.variables import variable

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework
    from otel_limits.core.events import Observer
    from otel_limits.settings.table import Settings

logger = logging.getLogger("otel_limits")


class Runtime:
    """Switches otel-limits on and off, and is the host whom every framework asks.

    Args:
        runs: Where invocations are followed.
        frameworks: Those whose agents are limited.
    """

    def __init__(self, runs: RunRegistry, frameworks: Sequence[Framework]) -> None:
        """Begin switched off."""
        self.runs = runs
        self._frameworks = frameworks
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._policy_file = NO_FILE
        self._observers: tuple[Observer, ...] = ()
        self._wiring = Wiring(runs)
        self._guard = Guard(runs.observers.publish)
        self._installer = ProcessorInstaller(LimitsSpanProcessor(runs, frameworks))
        self._provides = False
        self._follows = False
        for framework in frameworks:
            framework.host = self
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def is_on(self) -> bool:
        """True while every agent is limited, not only those with limits of their own."""
        return self._settings is not None

    def enforcement(self) -> Enforcement:
        """Return whether limits are in force in this process, by which way, and why not."""
        return self._guard.enforcement()

    # --- on and off -------------------------------------------------------------------------------

    def start(
        self,
        settings: Settings,
        observers: Sequence[Observer] = (),
        policy_file: PolicyFile = NO_FILE,
        source: Source = "code",
    ) -> None:
        """Apply `settings` to every agent of the process; again with others replaces them."""
        if settings.disabled:
            logger.info("otel-limits is switched off by OTEL_LIMITS_DISABLED.")
            return
        with self._lock:
            self._settings = settings
            self._observers = tuple(observers)
            self._policy_file = policy_file
            self._guard.switch_on(source, strict=settings.strict)
            self._follow(settings)
            # A fault in quotas must not leave agents without their other limits, nor say so.
            suppress_errors("quotas")(self._wiring.hold_quotas)()
        for framework in self._frameworks:
            # A program without agents leaves the port to the one that has them: a supervisor of
            # workers would take it and count nothing.
            wrapt.register_post_import_hook(lambda _: self._serve(), framework.module)
        self._probe_when_imported()
        # Last and without the lock, as the observers that it tells are open by now.
        policy_file.announce()

    def report_disabled(self, source: Source, why: str) -> None:
        """Tell that agents were to be limited and are not: `start` has failed."""
        self._guard.switch_on(source, strict=False)
        self._guard.report_not_enforcing(why)

    def stop(self) -> None:
        """Undo `start` completely. An agent with limits of its own keeps them.

        It is followed again from its next invocation on: nobody knows whether it will have one, as
        something of its framework may keep it alive that its application has dropped.
        """
        with self._lock:
            # First: an invocation that begins in another thread from here on is not
            # followed any more.
            self._settings = None
            self._provides = False
            self._policy_file = NO_FILE
            self._observers = ()
            self._wiring.release_quotas()
            # Each of them, not only until one says so; they end what is live, so observers are
            # still told.
            going_on = [framework.release() for framework in self._frameworks]
            if any(going_on):
                # From the environment, as what `enable()` was given has just been taken back.
                self._wire(_settings_without_start(config.read().settings))
                self._wiring.serve()
                return
            # Only now: the invocations that `release` ended have told their events.
            self._follows = False
            self._guard.switch_off()
            self._installer.detach()
            self._wiring.disconnect()

    def _follow(self, settings: Settings) -> None:
        """Follow invocations, and tell of them what `settings` want to be told."""
        self._follows = True
        self._wire(settings)
        # A list of prices takes longer to load than an application should wait for `enable()`.
        threading.Thread(target=self._wiring.load_prices, daemon=True).start()
        self._installer.attach()
        for framework in self._frameworks:
            framework.watch()

    def _probe_when_imported(self) -> None:
        """Find out whether limits can be in force, outside of any lock: it is told as an event."""
        for framework in self._frameworks:
            probe = functools.partial(self._probe, framework)
            wrapt.register_post_import_hook(probe, framework.module)
            for part in framework.parts:
                probe = functools.partial(self._probe, framework, part=part)
                wrapt.register_post_import_hook(probe, part)

    def _probe(self, framework: Framework, _module: object, part: str | None = None) -> None:
        self._guard.probe(framework, part)

    def variable(self, name: str) -> str | None:
        """Return what a variable of this process says, such as one that a vendor's client reads."""
        return variable(name)

    def report_untracked_agent(self, agent: str) -> None:
        """An invocation of an agent cannot be followed, so that nothing limits it."""
        self._guard.report_not_enforcing(
            f"calls of agent {agent!r} cannot be followed. The log says why."
        )

    def _wire(self, settings: Settings) -> None:
        self._wiring.connect(settings, self._observers, self._policy_file.document)

    def _serve(self) -> None:
        with self._lock:
            self._wiring.serve()

    def _after_fork(self) -> None:
        # Another thread of the parent may have held any lock, and is not there to release it.
        self._lock = threading.RLock()
        self._policy_file.renew_lock()
        self._wiring.after_fork()

    # --- what applies to an agent -----------------------------------------------------------------

    def policy(
        self,
        agent: str,
        *,
        limits: Limits = NO_LIMITS,
        action: Action | None = None,
        tree: Limits = NO_LIMITS,
        origin: str = "",
    ) -> Policy:
        """Return what applies now to an agent of this name that sets these itself, at `origin`."""
        self._policy_file.refresh()
        document = self._policy_file.document
        self._wiring.use_document(document)
        if document.quotas and not self._wiring.has_quotas:
            # Quotas that the file did not have before; a fault must not cost the agent its limits.
            suppress_errors("quotas")(self._hold_quotas)()
        base = self._settings.policy if self._settings is not None else Policy()
        base = document.effective(agent, base)
        if limits is tree is NO_LIMITS and action is None:
            return base
        return base.merged_over(limits, action, tree, origin)

    def own_policy(
        self, limits: Limits, action: Action | None, tree: Limits, origin: str = ""
    ) -> Callable[[str], Policy] | None:
        """Return what applies to an agent that sets these itself, over what `start` gave to all.

        `None` where otel-limits is disabled. `origin` is where it sets them.

        Raises:
            ConfigurationError: A limit on cost is asked for where no price can be known.
        """
        settings = config.read().settings
        if settings.disabled:
            return None
        mistakes = price_mistakes([limits, tree], self._policy_file.document)
        if mistakes:
            raise ConfigurationError(mistakes)
        self._follow_own(settings)
        return functools.partial(
            self.policy, limits=limits, action=action, tree=tree, origin=origin
        )

    def _follow_own(self, settings: Settings) -> None:
        """Follow agents with limits of their own, be the others followed or not."""
        with self._lock:
            self._guard.switch_on("plugin", strict=settings.strict)
            # What all agents have stands: a plugin adds limits to one agent and changes
            # nothing for others.
            self._follow(self._settings or _settings_without_start(settings))
        self._probe_when_imported()

    def flushes(self) -> list[Callable[[], object]]:
        """Return what keeps the end of the process from losing what was told."""
        return self._wiring.flushes()

    def unscraped(self) -> tuple[str, int] | None:
        """Return where metrics are lost at the end of the process, as nobody has scraped them."""
        if self._settings is None or self._settings.quiet or not self.runs.has_started:
            return None
        return self._wiring.unscraped()

    def _hold_quotas(self) -> None:
        with self._lock:
            self._wiring.hold_quotas()

    # --- where spans, metrics and events go -------------------------------------------------------

    def provide_when_missing(self) -> None:
        """Set a tracer provider when an agent is first called and the program has set none."""
        self._provides = True

    @suppress_errors("provider")
    def prepare(self, *, has_own: bool) -> None:
        """Do what has to be done before an agent is called.

        One with limits of its own is followed again, where `stop` has undone that. And where a
        tracer provider was promised and none is set, it is set: not earlier, as the program may set
        one until then. Tracers that exist already follow it.
        """
        if has_own and not self._follows:
            self._follow_own(config.read().settings)
        if not self._provides:
            return
        self._provides = False
        self.export_over_otlp()
        # The proxy is what the API returns while nobody has set one; setting a second is refused
        # with a warning.
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(make_tracer_provider())

    @suppress_errors("export")
    def export_over_otlp(self) -> None:
        """Export metrics and events where OTEL_EXPORTER_OTLP_* asks for it and nobody else does."""
        settings = self._settings
        if settings is None:
            return
        with self._lock:
            self._wiring.providers = make_otlp_providers()
            self._wire(settings)
        self._guard.publish_state()


def _settings_without_start(settings: Settings) -> Settings:
    """Return what the environment sets where only agents with limits of their own are followed.

    They have metrics and a ledger; only who calls `enable()` gets an endpoint and a tool log.
    """
    return replace(settings, prometheus_port=None, tool_log_dir=None)


RUNTIME: Final = Runtime(LIVE, FRAMEWORKS)
"""The runtime of this process."""
