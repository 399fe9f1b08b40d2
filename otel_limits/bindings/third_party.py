"""Frameworks whose bindings are in other distributions, which name them in an entry point.

The object of an entry point is imported after its framework was. One that fails disables itself
alone.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.recognition import exists, has_name
from otel_limits.core.events import stop_from_json
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.secrets import redact_url

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.base_framework import BaseFramework
    from otel_limits.bindings.entry_points import EntryPoint
    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.bindings.script import ScriptedRun
    from otel_limits.core.events import Stop
    from otel_limits.otel.kinds import SpanNames


def _is_installed(point: EntryPoint) -> bool:
    """Return whether the distribution of a binding, or at least its module, is in this environment.

    The metadata of some is damaged or deleted.
    """
    try:
        return bool(version(point.distribution))
    except PackageNotFoundError:
        return exists(point.module)


class BindingError(Exception):
    """A binding of another distribution cannot be used. Its text names it, and what to do."""


class ThirdPartyFramework:
    """A framework whose binding is imported once the framework has been."""

    requirement = without = ""
    needed: Mapping[str, Sequence[str]] = MappingProxyType({})
    importers: Sequence[str] = ()
    parts: Collection[str] = ()
    spans: SpanNames | None = None
    stop_reasons: Collection[str] = ()
    successes: Collection[str] = ()
    host: Host | None = None

    def __init__(self, entry_point: EntryPoint) -> None:
        """Wait for the module that an entry point names."""
        self.entry_point = entry_point
        self.name = self.module = entry_point.waits_for
        self.packages: Collection[str] = (entry_point.package,)
        self.distribution = entry_point.framework
        self.binding = entry_point.module
        self._binding: BaseFramework | None = None

    def obstacle_on_disk(self) -> str | None:
        """Return what prevents limits, as far as it can be seen without an import."""
        if not exists(self.module):
            return str(self._missing_module())
        if has_name(self.entry_point.module, self.entry_point.name) is False:
            return str(self._unusable("names an object that does not exist"))
        return None

    def gaps(self) -> Sequence[Gap]:
        """Import the binding.

        Raises:
            BindingError: It cannot be used.
        """
        if not exists(self.module):
            raise self._missing_module()
        gaps: Sequence[Gap] = self._tried("gaps", self.load().gaps)
        return gaps

    def gaps_of(self, part: str) -> Sequence[Gap]:  # noqa: ARG002  it has no parts
        """Return no gap."""
        return ()

    def watch(self) -> None:
        """Track every invocation, once the binding is imported.

        Not before `gaps`, which is called when all modules of the framework can be imported.
        """
        if self._binding is not None:
            self._binding.host = self.host
            self._tried("watch", self._binding.watch)

    def release(self) -> bool:
        """Stop tracking invocations."""
        return self._binding is not None and bool(self._tried("release", self._binding.release))

    @suppress_errors("binding")
    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`."""
        marker = None if self._binding is None else self._binding.marker_of(result)
        if marker is not None:
            stop_from_json(marker)  # whose error affects nothing else here
        return marker

    def stops_of(self, result: Any) -> Sequence[Stop]:
        """Return the stops in a message, a result or an exception."""
        return self._stops_of(result) or ()

    @suppress_errors("binding")
    def _stops_of(self, result: Any) -> Sequence[Stop]:
        return () if self._binding is None else tuple(self._binding.stops_of(result))

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run an agent with a scripted model."""
        return self.load().run_script(run)

    def load(self) -> BaseFramework:
        """Import the binding, once.

        Raises:
            BindingError: It cannot be used.
        """
        if self._binding is None:
            binding, stop_reasons, successes = self._tried("import", self._imported)
            self.stop_reasons, self.successes = stop_reasons, successes
            binding.host = self.host
            self._binding = binding
        return self._binding

    def _imported(self) -> tuple[BaseFramework, Collection[str], Collection[str]]:
        # Imported here, as commands that only name the framework need none of it.
        from otel_limits.bindings.base_framework import BaseFramework

        value: Any = import_module(self.entry_point.module)
        for name in self.entry_point.name.split("."):
            value = getattr(value, name)
        if not isinstance(value, BaseFramework):
            raise TypeError(f"{value!r:.100} is not an instance of a subclass of BaseFramework")
        return value, tuple(map(str, value.stop_reasons)), tuple(map(str, value.successes))

    def _tried(self, action: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise self._unusable(f"failed in {action} ({redact_url(repr(error))})") from error

    def _missing_module(self) -> BindingError:
        return self._unusable(f"waits for a module that {self.distribution} does not have")

    def _unusable(self, problem: str) -> BindingError:
        point = self.entry_point
        if not _is_installed(point):
            return BindingError(
                f"{point.distribution}: autoload or a parent process has handed over its entry "
                f"point {point.line!r}, but it is not installed here, so agents of {self.module} "
                f"are not limited. Install {point.distribution}, or run `otel-limits autoload "
                "install` again."
            )
        return BindingError(
            f"{point.distribution}: its entry point {point.line!r} {problem}, so agents of "
            f"{self.module} are not limited. Correct, upgrade or uninstall {point.distribution}."
        )
