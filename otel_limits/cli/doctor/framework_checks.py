"""Checks the installed agent frameworks, and which of them a program imports."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_limits.bindings.known import FRAMEWORKS, missing_framework
from otel_limits.bindings.recognition import gaps_on_disk, outside_supported
from otel_limits.bindings.third_party import ThirdPartyFramework
from otel_limits.cli.doctor.finding import Finding, fail, warn
from otel_limits.cli.run_command import first_line
from otel_limits.runtime.autoload import OUTDATED, RENEW, installed_autoload, outdated_autoload
from otel_limits.runtime.guard import Enforcement, obstacles, probed

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework, Gap
    from otel_limits.cli.doctor.finding import Context


NOT_ENFORCED = "Limits cannot be enforced: {}"


def bindings(context: Context) -> Iterator[Finding]:
    """Report bindings of other distributions that are not used."""
    found = context.third_party
    for sentence in found.broken:
        yield fail("bindings", NOT_ENFORCED.format(sentence))
    for sentence in (*found.unused, *found.absent):
        yield warn("bindings", sentence)


def needed_names(context: Context) -> Iterator[Finding]:
    """Report what the frameworks lack."""
    found = (probed if context.probe else _read_on_disk)(context.frameworks)
    for sentence in found.fallbacks:
        yield warn("frameworks", f"{sentence} Limits are still enforced.")
    for sentence in found.obstacles:
        yield fail("frameworks", NOT_ENFORCED.format(sentence))


def _read_on_disk(frameworks: Sequence[Framework]) -> Enforcement:
    """Look for what the frameworks lack without importing them, unless only that could show it."""
    known: list[Gap] = []
    unclear = []
    broken: list[str] = []
    for framework in frameworks:
        if isinstance(framework, ThirdPartyFramework):
            if (sentence := framework.obstacle_on_disk()) is not None:
                broken.append(sentence)
            continue
        gaps, is_unclear = gaps_on_disk(framework)
        known += gaps
        if is_unclear and not gaps:
            unclear.append(framework)
    found = probed(unclear)
    return replace(found, obstacles=(*obstacles(known), *found.obstacles, *broken))


def releases(context: Context) -> Iterator[Finding]:
    """Report releases that otel-limits is not tested with."""
    for framework in context.frameworks:
        if (sentence := outside_supported(framework)) is not None:
            yield warn("releases", sentence)


def autoload(_: Context) -> Iterator[Finding]:
    """Report that autoload is outdated."""
    if (reason := outdated_autoload()) is not None:
        yield warn("autoload", OUTDATED.format(path=installed_autoload(), reason=reason), RENEW)


def missing(_: Context) -> Iterator[Finding]:
    """Report that no framework is installed."""
    # Only a warning: the programs may have their own environment.
    if (sentence := missing_framework()) is not None:
        yield warn("missing framework", sentence)


# --- the frameworks that a program imports --------------------------------------------------------
# The program's source is parsed, and those of the modules that it imports from its directory, the
# current one and PYTHONPATH. Other packages import what their distributions require.

MODULE: Final = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::.*)?", re.DOTALL)
"""A module in a command, such as the `app.main:app` of a server."""

CODE_OPTION: Final = re.compile(r"-[^-\Wm]*c(.*)", re.DOTALL)
REQUIREMENT: Final = re.compile(r"[\w.-]+")
"""The name at the beginning of a requirement."""

MODULE_OPTION: Final = re.compile(r"-[^-\Wc]*m(.*)", re.DOTALL)


class Imports(NamedTuple):
    """The imports of a program."""

    shown: str = ""
    """The files and modules of its command that were read; empty if there are none."""
    frameworks: frozenset[str] = frozenset()
    """The names of the frameworks that it imports."""


class _Source(NamedTuple):
    """The source of a module."""

    text: bytes
    package: str = ""
    """The package to which relative imports refer."""


def read_imports(program: Sequence[str], environ: Mapping[str, str]) -> Imports:
    """Return which frameworks a program imports.

    Args:
        program: The words after a Python and its options, or a command and its arguments. Only the
            program knows what its arguments mean, so each that names a Python file or one of the
            program's modules is read.
        environ: The program's variables.
    """
    shown: dict[str, list[_Source]] = {}
    words = list(program)
    if words and (code := CODE_OPTION.fullmatch(words[0])):
        shown["-c"] = [_Source((code[1] or "".join(words[1:2])).encode())]
        words = []
    elif words and (module := MODULE_OPTION.fullmatch(words[0])):
        words[:1] = [module[1]]
    folders = _folders(words, environ)
    for word in words:
        name = word.rpartition("=")[2]
        file = Path(name.partition(":")[0]).name
        shown[file] = list(_named(name, folders, is_command=word is program[0]))
    shown = {name: sources for name, sources in shown.items() if sources}
    packages = _foreign_packages([each for found in shown.values() for each in found], folders)
    needed = packages | _with_requirements(packages)
    used = [
        framework.name
        for framework in FRAMEWORKS
        if not needed.isdisjoint({*framework.packages, framework.distribution})
    ]
    return Imports(", ".join(shown), frozenset(used))


def _folders(words: Iterable[str], environ: Mapping[str, str]) -> list[Path]:
    """Return the directories with the program's own modules."""
    scripts = [str(Path(word).parent) for word in words if word.endswith(".py")]
    paths = [*scripts, ".", *environ.get("PYTHONPATH", "").split(os.pathsep)]
    folders = [Path(path) for path in dict.fromkeys(paths) if path]
    # Installed packages may be on PYTHONPATH.
    return [folder for folder in folders if not any(folder.glob("*.dist-info"))]


def _named(word: str, folders: Sequence[Path], *, is_command: bool) -> Iterator[_Source]:
    """Yield the sources of a file or a module in a command."""
    path = Path(word)
    is_script = is_command and any("python" in each for each in first_line(word))
    if (word.endswith(".py") or is_script) and path.is_file():
        yield from _read(path)
    elif (module := MODULE.fullmatch(word)) is not None:
        yield from _own_module(module[1], folders)
        yield from _own_module(f"{module[1]}.__main__", folders)


def _read(path: Path, package: str = "") -> Iterator[_Source]:
    try:
        yield _Source(path.read_bytes(), package)
    except OSError:
        return


def _own_module(name: str, folders: Iterable[Path]) -> Iterator[_Source]:
    """Yield the sources of a module of the program and of the packages around it."""
    parts = name.split(".")
    for folder in folders:
        for end in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:end])
            package = ".".join(parts[: end - 1])
            yield from _read(place.with_suffix(".py"), package)
            yield from _read(place / "__init__.py", ".".join(parts[:end]))


def _foreign_packages(sources: Iterable[_Source], folders: Sequence[Path]) -> set[str]:
    """Return the packages of others that modules import, and the modules that those import."""
    waiting, seen, foreign = list(sources), set[_Source](), set[str]()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        for name in _imports(source):
            package = name.partition(".")[0]
            # A checkout of otel-limits next to the program is not a part of it.
            own = [] if package == "otel_limits" else list(_own_module(name, folders))
            waiting += own
            if not own:
                foreign.add(package)
    return foreign


def _imports(source: _Source) -> Iterator[str]:
    """Yield the names of the modules that a module imports, also within functions."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):
        return  # its start will show the same problem
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = source.package.split(".") if node.level else []
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*base, node.module]))
            # What is imported from a package may be a module of it.
            yield from (f"{module}.{each.name}".strip(".") for each in node.names)


def _with_requirements(packages: Iterable[str]) -> set[str]:
    """Add the names of what packages require, by the requirements of their distributions."""
    waiting, found = list(packages), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        # Usually, a distribution has the name of its package.
        with contextlib.suppress(PackageNotFoundError):
            lines = [line for line in requires(name) or () if "extra ==" not in line]
            waiting += [match[0] for line in lines if (match := REQUIREMENT.match(line))]
    return found
