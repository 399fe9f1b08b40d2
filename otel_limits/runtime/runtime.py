"""The runtime of a process: follows imported frameworks, resolves each agent's policy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import wrapt
from opentelemetry import trace

from otel_limits.bindings.class_patches import (
    at_end_of_import,
    is_under_way,
    under_way,
    when_imported,
)
from otel_limits.bindings.known import FRAMEWORKS, span_names
from otel_limits.bindings.recognition import exists, is_of
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.labels import quoted
from otel_limits.core.policy import NO_OVERRIDES, Overrides, Policy
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.otel.provider import ProcessorInstaller, set_fallback
from otel_limits.runs.registry import LIVE, RunRegistry
from otel_limits.runtime.guard import Enforcement, Guard, Source
from otel_limits.runtime.wiring import Wiring, make_otlp_providers, make_tracer_provider
from otel_limits.settings.children import note_agent
from otel_limits.settings.policy.file import NO_FILE, PolicyFile, price_mistakes
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.variables import variable

if TYPE_CHECKING:
    from types import ModuleType

    from otel_limits.bindings.framework import Framework
    from otel_limits.core.events import Observer
    from otel_limits.settings.table import Settings


# --- imports of frameworks ------------------------------------------------------------------------


class Imported(Protocol):
    """A function to call once a framework has been imported."""

    def __call__(self, framework: Framework, *, is_complete: bool) -> bool | None:
        """Track a framework whose module and the packages around it have been imported.

        Args:
            framework: The framework. It is passed again at later imports.
            is_complete: Neither its binding nor another module of it is being imported. They
                import each other in circles, so that one can be complete while those that it needs
                are not.

        Returns:
            Whether the module is the framework's. A user's package may have the same name.
        """


class FrameworkImports:
    """Reports frameworks that have been imported.

    Args:
        frameworks: The frameworks to wait for. More may be added before each `wait`.
        imported: Called when one has been imported, before other threads can use it.
        again: Called with a framework of which a module is imported again, before that.
    """

    def __init__(
        self,
        frameworks: Sequence[Framework],
        imported: Imported,
        again: Callable[[Framework], None],
    ) -> None:
        """Start without waiting."""
        self._frameworks = frameworks
        self._imported = imported
        self._again = again
        self._awaited: set[str] = set()
        """The names of frameworks whose imports are awaited."""
        self._executed: set[str] = set()
        """Modules whose code has run. Python marks them only later."""
        self._waiting: set[str] = set()
        """Frameworks of which an import that is in progress is awaited."""
        self._known: dict[str, Framework] = {}
        """The modules of frameworks that have been imported, by name."""

    def wait(self) -> None:
        """Report the frameworks that are imported already, and each later import."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for framework in self._frameworks:
            if framework.name in self._awaited:
                self._look(framework)
                continue
            self._awaited.add(framework.name)
            for name in awaited(framework):
                when_imported(name, functools.partial(self._look_after, framework))

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Report a module that is imported again or reloaded, and leave it to other finders."""
        # `importlib.util.find_spec` only looks for it.
        if name in self._known and (target is not None or name not in sys.modules):
            self._again(self._known[name])

    def _look_after(self, framework: Framework, module: ModuleType) -> None:
        self._executed.add(module.__name__)
        self._look(framework)

    @suppress_errors("binding")
    def _look(self, framework: Framework) -> None:
        """Report a framework, and look again at the end of an import that is in progress."""
        incomplete = {
            *under_way(framework.packages),
            *filter(is_under_way, with_parents(framework.binding)),
        } - self._executed
        if incomplete.isdisjoint(with_parents(framework.module)) and self._imported(
            framework, is_complete=not incomplete
        ):
            present = filter(sys.modules.__contains__, awaited(framework))
            self._known |= dict.fromkeys(present, framework)
        if not incomplete:
            self._waiting.discard(framework.name)
        elif framework.name not in self._waiting:
            self._waiting.add(framework.name)
            at_end_of_import(min(incomplete), functools.partial(self._look_again, framework))

    def _look_again(self, framework: Framework) -> None:
        if framework.name in self._waiting:  # not if another import has ended since
            self._waiting.discard(framework.name)
            self._look(framework)


def awaited(framework: Framework) -> Sequence[str]:
    """Return the modules of a framework after whose import something can be done."""
    return (*with_parents(framework.module), *framework.parts)


def with_parents(module: str) -> Sequence[str]:
    """Return a module and the packages around it, from the top."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))


# --- the runtime ----------------------------------------------------------------------------------

logger = logging.getLogger("otel_limits")

LONGEST_WAIT_SECONDS: Final = 30
"""How long a thread that imports a framework waits for another one."""


class Runtime:
    """Enables and disables otel-limits, and is the host of all frameworks.

    Args:
        runs: The registry of invocations.
        frameworks: The frameworks to limit. More may be added before each `start`.
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
        self._imports = FrameworkImports(frameworks, self._meet, self._report_second_import)
        self._met: set[str] = set()
        """The names of frameworks that have been imported."""
        self._used: set[str] = set()
        """Frameworks of agents with their own limits, wherever they are installed."""
        self._installer = ProcessorInstaller(LimitsSpanProcessor(runs, span_names(frameworks)))
        self._provides = False
        self._is_first_call_due = False
        self._carries_into_threads = False
        self._follows = False
        self._host_frameworks()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def is_on(self) -> bool:
        """True while all agents are limited, not only those with their own limits."""
        return self._settings is not None

    def enforcement(self, framework: str | None = None) -> Enforcement:
        """Return whether limits are enforced in this process, how, and what prevents it.

        Args:
            framework: The name of one framework; otherwise of all.
        """
        return self._guard.enforcement(framework)

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
            self._observers = tuple(observers)
            self._policy_file = policy_file
            self._guard.switch_on(source, strict=settings.strict)
            self._follow(settings)
            self._settings = settings  # only now, as `_follow` may fail
            self._guard.forget_failure()
            self._hold_quotas()
        wrapt.register_post_import_hook(lambda _: self._export_state(), "prometheus_client")
        self._find_frameworks()
        # After the observers are connected, and without the lock.
        policy_file.announce()

    def report_disabled(self, source: Source, reason: str) -> None:
        """Report that `start` failed, so limits are not enforced."""
        self._guard.switch_on(source, strict=False)
        self._guard.report_not_enforcing(reason, until_off=True)

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
            remaining = [suppress_errors("binding")(each.release)() for each in self._frameworks]
            if any(remaining):
                # From the environment, because the arguments of `enable()` no longer apply.
                self._wire(_settings_without_start(read_settings().settings))
                self._wiring.serve()
                return
            # Only now, after the events of the released invocations.
            self.runs.failures.clear()
            self._follows = False
            self._guard.switch_off()
            self._installer.detach()
            self._wiring.disconnect()

    def _follow(self, settings: Settings) -> None:
        """Connect observers according to `settings`; each framework is tracked once imported."""
        INTERNAL_ERRORS.publish_lapse = self._report_lapse
        self._wire(settings)
        self._is_first_call_due = True
        self._installer.attach()
        self._follows = True

    def _find_frameworks(self) -> None:
        """Track the frameworks that are imported, now and later.

        A metrics port is served once the first is: a supervisor of workers would otherwise occupy
        it and count nothing. If the workers share files, the supervisor serves what they count, as
        it ends last.
        """
        has_met = bool(self._met)
        self._host_frameworks()
        self._imports.wait()
        if has_met or variable("PROMETHEUS_MULTIPROC_DIR"):
            self._serve()
            self._guard.publish_state()  # for observers added since the frameworks were probed

    # --- frameworks -------------------------------------------------------------------------------

    def _host_frameworks(self) -> None:
        for framework in self._frameworks:
            framework.host = self

    def report_broken(self, sentences: Sequence[str]) -> None:
        """Report frameworks of other distributions that cannot be limited here."""
        for sentence in sentences:
            self._guard.report_not_enforcing(sentence, sentence.partition(":")[0])

    def _meet(self, framework: Framework, *, is_complete: bool) -> bool:
        """Track a framework that has been imported, and probe it once it is complete."""
        if not (
            framework.name in (*self._met, *self._used)
            or is_of(framework.module, framework.distribution)
        ):
            return False  # a package of the user, with the same name
        if framework.module not in sys.modules:
            # A release without the module, whose import would never be seen.
            if self._follows and is_complete and not exists(framework.module):
                self._guard.probe(framework)
            return True
        is_first = not self._met
        self._met.add(framework.name)
        if is_complete:
            self._guard.probe(framework)
        if self._follows:
            self._track(framework)
            if is_first:
                self._serve()
        # Last, as probes and patches import parts.
        for part in framework.parts if is_complete and self._guard.is_fit(framework) else ():
            if part in sys.modules:
                self._guard.probe(framework, part)
        return True

    def _track(self, framework: Framework) -> None:
        """Track the agents of a framework if they can be halted."""
        # Publishes events, so no lock may be held.
        if self._guard.is_fit(framework):
            try:
                with self._lock_in_import():
                    if self._follows:  # not after another thread has disabled it
                        framework.watch()
            except Exception as error:  # noqa: BLE001  of this framework alone
                self._guard.report_unfit(framework, "enabling", error)
        if not self._guard.is_fit(framework):
            # An incomplete binding could affect agents.
            suppress_errors("binding")(framework.release)()

    @contextlib.contextmanager
    def _lock_in_import(self) -> Iterator[None]:
        """Hold the lock if it is free in time: its holder may wait for an import of this thread."""
        has_lock = self._lock.acquire(timeout=LONGEST_WAIT_SECONDS)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()

    def _report_second_import(self, framework: Framework) -> None:
        """Report a framework of which a module is imported again or reloaded.

        The binding recognizes the classes of the first import.
        """
        self._guard.report_not_enforcing(
            f"{framework.name} was imported again, and its new classes are not limited. "
            "Restart the process instead.",
            framework.name,
        )

    def report_untracked_agent(self, framework: str, agent: str) -> None:
        """Report that an invocation of an agent cannot be tracked, so it is not limited."""
        self._guard.report_not_enforcing(
            f"calls of agent {quoted(agent)} cannot be tracked; see the log.",
            framework,
            until_off=True,
        )

    def _report_lapse(self, sentence: str) -> None:
        """Report a call that was not limited, of whichever framework."""
        if self._follows:
            self._guard.report_not_enforcing(sentence, until_off=True)

    def variable(self, name: str) -> str | None:
        """Return an environment variable of this process, such as one of a vendor's client."""
        return variable(name)

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
        for state in self._guard.states():
            self._wiring.export(state)

    def _after_fork(self) -> None:
        # A thread of the parent may have held any lock, and does not exist here.
        self._lock = threading.RLock()
        self._policy_file.after_fork()
        self._wiring.after_fork()

    # --- what applies to an agent -----------------------------------------------------------------

    def policy(self, agent: str, *, own: Overrides = NO_OVERRIDES) -> Policy:
        """Return the current policy of an agent, which may have its own limits."""
        base = self._settings.policy if self._settings is not None else Policy()
        self._policy_file.refresh(base)
        document = self._policy_file.document
        self._wiring.use_document(document)
        if document.quotas and not self._wiring.has_quotas:
            self._hold_quotas()  # the first of the file
        base = document.effective(agent, base)
        return base if own is NO_OVERRIDES else base.overridden_by(own)

    def own_policy(self, framework: str, own: Overrides) -> Callable[[str], Policy] | None:
        """Return the policy by agent name for an agent that has its own limits.

        `None` if otel-limits is disabled.

        Raises:
            ConfigurationError: A cost limit is set, but prices are not available.
        """
        settings = read_settings().settings
        if settings.disabled:
            return None
        mistakes = price_mistakes(own, self._policy_file.document)
        if mistakes:
            raise ConfigurationError(mistakes)
        self._used.add(framework)
        self._follow_own(settings)
        return functools.partial(self.policy, own=own)

    def _follow_own(self, settings: Settings) -> None:
        """Track agents with their own limits, whether or not the others are tracked."""
        with self._lock:
            self._guard.switch_on("plugin", strict=settings.strict)
            # A plugin adds limits to one agent and changes nothing for others.
            self._follow(self._settings or _settings_without_start(settings))
        self._find_frameworks()

    def flushes(self) -> list[Callable[[], object]]:
        """Return functions that flush all observers."""
        return self._wiring.flushes()

    def unscraped(self) -> tuple[str, int] | None:
        """Return host and port of an endpoint that was never scraped."""
        if self._settings is None or self._settings.quiet or not self.runs.has_started:
            return None
        return self._wiring.unscraped()

    @suppress_errors("quotas")
    def _hold_quotas(self) -> None:
        """Apply quotas. An error in them must not disable the other limits."""
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
            self._follow_own(read_settings().settings)
        if self._is_first_call_due:
            self._prepare_first_call()
        self._carry_into_threads()
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

    def _carry_into_threads(self) -> None:
        """Let plain threads inherit what their starter works for.

        Strands does so itself, when its first agent is created.
        """
        if not self._carries_into_threads:
            self._carries_into_threads = True
            # Imported here, because a process without agents needs none of it.
            from otel_limits.otel.threads import carry_context_into_threads

            carry_context_into_threads()

    def _prepare_first_call(self) -> None:
        """Load the price list and import the ledger, once.

        Not earlier, because this process may be in the middle of an import, and not later, as the
        time of the first invocation begins then. The packages are imported while other threads wait
        before they call an agent: a vendor's client looks into `sys.modules` for the HTTP client of
        the price list, and fails if that is only partly imported.
        """
        with self._lock:
            if self._is_first_call_due:
                self._is_first_call_due = False
                self._wiring.import_packages()
                threading.Thread(target=self._wiring.load_prices, daemon=True).start()

    def _provide(self) -> None:
        self._connect_otlp()
        # The API returns its proxy until a provider is set. Ours is a subclass.
        if type(trace.get_tracer_provider()) is trace.ProxyTracerProvider:
            set_fallback(make_tracer_provider())

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
