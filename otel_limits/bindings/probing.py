"""Finds the names of a framework that are needed but missing, with and without importing it."""

from __future__ import annotations

import dis
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.recognition import code_of, exists, has_name, is_released
from otel_limits.core.installing import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType

    from otel_limits.bindings.framework import Framework


def release(framework: Framework) -> str:
    """Return what is imported, e.g. `strands-agents 1.62.0`; a checkout states no release."""
    number = release_number(framework)
    return framework.distribution if number is None else f"{framework.distribution} {number}"


def release_number(framework: Framework) -> str | None:
    """Return the release of the package that is imported, if it states one.

    A checkout on the path states none, although it may hide an installed release.
    """
    try:
        number = version(framework.distribution)
    except PackageNotFoundError:
        return None
    return number if is_released(framework.module, framework.distribution) else None


def outside_supported(framework: Framework) -> str | None:
    """Return a warning if the installed release is not one that otel-limits is tested with."""
    number = release_number(framework)
    ours = rf"{framework.distribution} *([<>][^;]*);.*extra == .{framework.name}."
    found = next(filter(None, (re.match(ours, each) for each in _own_requirements())), None)
    if number is None or found is None:
        return None
    bounds = found[1].replace(" ", "")
    if all(_is_within(number, bound) for bound in bounds.split(",")):
        return None
    way = install_command(framework.name)
    return f"{framework.distribution} {number} is not a supported release ({bounds}). Run: {way}"


def _own_requirements() -> Sequence[str]:
    try:
        return requires("otel-limits") or ()
    except PackageNotFoundError:  # tools that make small images delete the metadata
        return ()


def _is_within(number: str, bound: str) -> bool:
    """Return whether a release has a bound, which our own requirements state: `>=1.62` or `<2`."""
    release, limit = (
        [int(each) for each in re.findall(r"\d+", text)[:3]] for text in (number, bound)
    )
    return release < limit if bound.startswith("<") else release >= limit


def gaps_on_disk(framework: Framework) -> tuple[list[Gap], bool]:
    """Read, without an import, which modules, classes and functions are missing.

    Returns:
        The gaps, and whether only an import could show others.
    """
    states = {each: has_name(*each) for each in (*_looked_up(framework), *_imported(framework))}
    missing = [each for each, is_there in states.items() if is_there is False]
    return _gaps(framework, missing), None in states.values()


def vital_gaps(framework: Framework) -> list[Gap]:
    """Import the framework, and return the missing names without which no agent can be limited.

    Raises:
        ImportError: It is not installed.
    """
    package = framework.module.partition(".")[0]
    if not exists(package):
        raise ImportError(f"{framework.distribution} is not installed", name=package)
    module = ""
    try:
        for module in (*framework.needed, *framework.importers):
            import_module(module)
    except ImportError as error:
        # The error may name something else, e.g. a module that imports a missing one.
        gaps, _ = gaps_on_disk(framework)
        is_theirs = module in framework.needed
        name = f"importable {module} ({error})" if is_theirs else name_in(error)
        return gaps or [_gap(framework, name)]
    return _gaps(framework, [each for each in _looked_up(framework) if not has_name(*each)])


def name_in(error: ImportError) -> str:
    """Return the name that could not be imported, without a file path."""
    name = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{name[1]}" if name else str(error.name or error)


def _gaps(framework: Framework, missing: Iterable[tuple[str, str]]) -> list[Gap]:
    names = dict.fromkeys(_missing_part(module, name) for module, name in missing)
    return [_gap(framework, name) for name in names]


def _gap(framework: Framework, name: str) -> Gap:
    return Gap(
        name=name, version=release(framework), without=framework.without, still_limited="none"
    )


def _missing_part(module: str, name: str) -> str:
    """Return what is missing: a module, a class or a method."""
    if not exists(module):
        return module
    owner, _, _ = name.partition(".")
    return f"{module}.{name if has_name(module, owner) else owner}"


def _looked_up(framework: Framework) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that are looked up in the framework."""
    for module, names in framework.needed.items():
        for name in names:
            yield module, name


def _imported(framework: Framework) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that the binding imports."""
    unread, read = list(framework.importers), set[str]()
    while unread:
        ours = unread.pop()
        package = ours.rpartition(".")[0]
        if ours in read:
            continue
        read.add(ours)
        for module, names in _imports(code_of(ours)):
            if module == package:
                unread += [f"{module}.{name}" for name in names]
            elif module.startswith(f"{package}."):
                unread.append(module)
            elif module.partition(".")[0] in framework.packages:
                yield from ((module, name) for name in names)


def _imports(code: CodeType | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules and names that a module imports when it is imported, from its code.

    Those that only type checkers import are left out.
    """
    names: Sequence[str] = ()
    end, is_for_checkers = 0, False
    for each in dis.get_instructions(code) if code is not None else ():
        if each.offset < end:
            continue
        if each.opname == "LOAD_NAME":
            is_for_checkers = each.argval == "TYPE_CHECKING"
        elif is_for_checkers and "JUMP_IF_FALSE" in each.opname:
            end, is_for_checkers = each.argval, False
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, tuple):
            names = each.argval  # before the module that they are imported from
        elif each.opname == "IMPORT_NAME":
            yield each.argval, names
            names = ()
