"""Frameworks that other distributions limit: they name the object in an entry point.

    [project.entry-points."otel_limits.frameworks"]
    bots = "bots_limits:BOTS"

The name is the module to wait for. `otel-limits run`, `otel-limits autoload install` and `enable()`
read these entry points, and hand them as text to the processes that wait for the modules. The
object is imported after its framework was. One that fails disables itself alone.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distributions,
    version,
)
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.recognition import exists, has_name
from otel_limits.core.events import stop_from_json
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.secrets import redact_url

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from otel_limits.bindings.base_framework import BaseFramework
    from otel_limits.bindings.framework import Framework, Gap, Host
    from otel_limits.bindings.script import ScriptedRun
    from otel_limits.core.events import Stop
    from otel_limits.otel.kinds import SpanNames

GROUP: Final = "otel_limits.frameworks"
"""The group of the entry points."""

UNNAMED: Final = "unnamed"
"""Instead of the name of a distribution whose metadata is damaged."""

DOTTED: Final = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"

LINE: Final = re.compile(rf"({DOTTED})\s*=\s*({DOTTED})\s*:\s*({DOTTED})", re.ASCII)
"""An entry point: a module to wait for, and the object, in its module."""

HANDED: Final = re.compile(rf"({DOTTED})=({DOTTED}):({DOTTED})@([\w.-]+)@([\w.-]+)", re.ASCII)
"""An entry point as text for another process."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The binding of a framework, as a distribution names it."""

    waits_for: str
    """The module of the framework that every program with agents imports."""
    module: str
    """The module of the binding."""
    name: str
    """The name of its object there."""
    distribution: str
    """The distribution of the binding."""
    framework: str
    """The distribution of the framework; that of the binding if it is not known."""

    def __str__(self) -> str:
        """Return it as text for another process."""
        return f"{self.waits_for}={self.module}:{self.name}@{self.distribution}@{self.framework}"

    @property
    def package(self) -> str:
        """The package of the framework."""
        return self.waits_for.partition(".")[0]

    @property
    def line(self) -> str:
        """The entry point as its distribution writes it."""
        return f"{self.waits_for} = {self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class Installed:
    """The entry points of this environment."""

    entry_points: tuple[EntryPoint, ...] = ()
    broken: tuple[str, ...] = ()
    """Sentences about those whose frameworks are therefore not limited. Each begins with the name
    of the distribution."""
    unused: tuple[str, ...] = ()
    """Sentences about those that are not used, although their frameworks may be limited."""

    @property
    def absent(self) -> Sequence[str]:
        """Sentences about those whose frameworks are not installed."""
        return [
            f"{each.distribution}: its entry point {each.line!r} waits for {each.package}, which "
            f"is not installed. Install it, correct the entry point, or uninstall "
            f"{each.distribution}."
            for each in self.entry_points
            if not exists(each.package)
        ]

    @property
    def text(self) -> str:
        """The entry points as text for another process."""
        return " ".join(map(str, self.entry_points))


def entry_points_of(text: str) -> tuple[EntryPoint, ...]:
    """Return the entry points that another process has handed to this one."""
    return tuple(EntryPoint(*found.groups()) for found in HANDED.finditer(text))


# --- reading metadata -----------------------------------------------------------------------------


def read_installed(ours: Sequence[Framework]) -> Installed:
    """Read the entry points of all distributions on the path.

    Args:
        ours: The frameworks that otel-limits itself limits, which need no other binding.
    """
    used: dict[str, EntryPoint] = {}
    broken: list[str] = []
    unused: list[str] = []
    lines: list[tuple[str, str, Distribution]] = []
    seen = set()
    for distribution in distributions():
        try:
            found = list(_lines(distribution))
        except Exception as error:  # noqa: BLE001  of this distribution alone
            unused.append(
                f"{_name_of(distribution)}: its entry points cannot be read ({error!r}). If it "
                "limits a framework, reinstall it."
            )
            continue
        name = _name_of(distribution) if found else ""
        key = re.sub(r"[-_.]+", "-", name).lower()
        if name == UNNAMED or key not in seen:  # else the same one is earlier on the path
            lines += [(name, line, distribution) for line in found]
            seen.add(key)
    # Sorted, so that the same one of two is used wherever they are installed.
    for name, line, distribution in sorted(lines, key=lambda each: each[:2]):
        if (entry := LINE.fullmatch(line)) is None:
            broken.append(
                f"{name}: its entry point {line!r:.200} in {GROUP} is not of the form "
                "'module = binding:OBJECT'. Correct it, or uninstall the distribution."
            )
            continue
        waits_for, module, path = entry.groups()
        package = waits_for.partition(".")[0]
        if any(package in (each.name, *each.packages) for each in ours):
            unused.append(
                f"{name}: its entry point {line!r} is not used, as otel-limits itself limits "
                f"{package}. Uninstall the distribution, or wait for another module."
            )
        elif waits_for in used:
            first = used[waits_for].distribution
            unused.append(
                f"{name}: its entry point {line!r} is not used, as {first} limits {waits_for}. "
                "Uninstall one of them."
            )
        else:
            framework = name
            with contextlib.suppress(Exception):  # of damaged metadata; it is only for display
                framework = _distribution_of(waits_for, distribution) or name
            used[waits_for] = EntryPoint(waits_for, module, path, name, framework)
    return Installed(tuple(used.values()), tuple(broken), tuple(unused))


def _lines(distribution: Distribution) -> Iterator[str]:
    """Yield the lines of our group, so that an error in another one does not matter."""
    text, group = distribution.read_text("entry_points.txt") or "", ""
    for line in map(str.strip, text.splitlines() if GROUP in text else ()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif group == GROUP and line and not line.startswith(("#", ";")):
            yield line


def _name_of(distribution: Distribution) -> str:
    try:
        name = distribution.metadata["Name"] or ""
    except Exception:  # noqa: BLE001  its entry points are readable
        name = ""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII) or UNNAMED


def _distribution_of(module: str, binding: Distribution) -> str | None:
    """Return the distribution of a module; `None` if it is that of the binding, or unknown."""
    package = module.partition(".")[0]
    files = {each.parts[0].removesuffix(".py") for each in binding.files or () if each.parts}
    if package in files:
        return None
    with contextlib.suppress(PackageNotFoundError):  # usually, it has the name of its package
        version(package)
        return package
    # Not `packages_distributions`, which takes a fifth of a second and knows only packages, such
    # as `google`. https://packaging.python.org/en/latest/specifications/recording-installed-packages
    records = [each for folder in sys.path for each in Path(folder).glob("*.dist-info/RECORD")]
    path = module.replace(".", "/")
    for record in sorted(records, key=lambda each: package not in each.parent.name.lower()):
        with contextlib.suppress(OSError, ValueError):
            text = "\n" + record.read_text(encoding="utf-8")
            if f"\n{path}.py," in text or f"\n{path}/" in text:
                return record.parent.name.partition("-")[0].replace("_", "-")
    return None


def _is_installed(point: EntryPoint) -> bool:
    """Return whether the distribution of a binding, or at least its module, is in this environment.

    The metadata of some is damaged or deleted.
    """
    try:
        return bool(version(point.distribution))
    except PackageNotFoundError:
        return exists(point.module)


# --- the frameworks -------------------------------------------------------------------------------


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
