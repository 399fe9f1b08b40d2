"""The entry points by which other distributions name the frameworks that they limit.

    [project.entry-points."otel_limits.frameworks"]
    bots = "bots_limits:BOTS"

The name is the module to wait for. `otel-limits run`, `otel-limits autoload install` and `enable()`
read these entry points, and hand them as text to the processes that wait for the modules.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Final

from otel_limits.bindings.recognition import exists

OWN_PACKAGES: Final[Mapping[str, str]] = {
    "strands": "strands-agents",
    "langchain": "langgraph",
    "langchain_core": "langgraph",
    "langgraph": "langgraph",
    "agents": "openai-agents",
}
"""The packages of the frameworks that otel-limits itself limits, which need no other binding, and
their distributions. A test compares them with the frameworks, whose import takes longer."""

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


def installed_entry_points() -> Installed:
    """Read the frameworks of other distributions in this environment."""
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
        if package in OWN_PACKAGES:
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
