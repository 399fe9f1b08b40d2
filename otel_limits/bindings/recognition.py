"""Recognizes frameworks and finds missing names, with and without importing them.

A user's own package may have the name of a framework's. Names of modules that are not imported are
read from their compiled code.
"""

from __future__ import annotations

import contextlib
import dis
import json
import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from otel_limits.bindings.framework import Gap
from otel_limits.core.installing import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType

    from otel_limits.bindings.framework import Framework


# The file that waits for the first import of a framework has the same table: it works where
# otel-limits is not installed.
CLASSES: Final = {
    "strands.agent.agent": (
        ("strands.agent.agent", "Agent"),
        ("strands.hooks.registry", "HookRegistry"),
        ("strands.models.model", "Model"),
        ("strands.tools.registry", "ToolRegistry"),
    ),
    "langgraph.pregel.main": (
        ("langgraph.pregel.main", "Pregel"),
        ("langgraph.errors", "GraphRecursionError"),
        ("langgraph.graph.state", "StateGraph"),
        ("langgraph.pregel.protocol", "PregelProtocol"),
    ),
    "agents.run": (
        ("agents.run", "AgentRunner"),
        ("agents.agent", "AgentBase"),
        ("agents.guardrail", "InputGuardrail"),
        ("agents.lifecycle", "RunHooksBase"),
        ("agents.models.interface", "ModelTracing"),
    ),
}
"""Modules and classes by which each framework is recognized outside its distribution, by two of
them: another release may have moved or renamed one."""


def is_of(name: str, distribution: str) -> bool:
    """Return whether the package of a module is imported, and that of a distribution.

    A user's own package may have the name of a framework's.
    """
    package = sys.modules.get(name.partition(".")[0])
    if package is None:
        return False
    places = list(getattr(package, "__path__", ())) or [getattr(package, "__file__", None) or ""]
    return _are_in(places, _roots(distribution)) or is_recognized(name)


def is_importable(name: str, distribution: str) -> bool:
    """Return whether the import of a module's package would be that of a distribution."""
    # Frozen programs lack the metadata, and some have compiled code instead of Python's.
    is_frozen = getattr(sys, "frozen", False) or "__compiled__" in globals()
    return (
        is_released(name, distribution)
        or (is_frozen and exists(name.partition(".")[0]))
        or is_recognized(name)
    )


def is_released(name: str, distribution: str) -> bool:
    """Return whether the package of a module is a distribution's that states its release."""
    spec = spec_of(name.partition(".")[0])
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return _are_in(places, _roots(distribution))


def is_recognized(name: str) -> bool:
    """Return whether the package of a framework's module is that framework, by its classes.

    Tools that make small images delete the metadata, and a checkout on the path has none. That of
    another distribution is known by the name of its module alone.
    """
    try:
        if name not in CLASSES:
            return exists(name.partition(".")[0])
        found = [each for each in CLASSES[name] if has_name(*each)]
    except Exception:  # noqa: BLE001  of another package's finder
        return False
    return len(found) > 1


def exists(name: str) -> bool:
    """Return whether a module exists, without importing the packages around it."""
    return name in sys.modules or spec_of(name) is not None


def spec_of(name: str) -> ModuleSpec | None:
    """Return the specification of a module, without importing the packages around it."""
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    for end in [at for at, sign in enumerate(name + ".") if sign == "."]:
        module = sys.modules.get(name[:end])
        if end < len(name) and module is not None:
            path = list(getattr(module, "__path__", ()))
            continue
        if path is not None and not path:  # within a module
            return None
        spec = _ask_finders(name[:end], path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if find is None:
            continue
        try:
            spec = find(name, path)
        except KeyError:  # a namespace package in a package that is not imported
            spec = find(name.rpartition(".")[2], path)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def has_name(module: str, path: str) -> bool | None:
    """Return whether a module has a name such as `Agent.add_hook`, without importing it.

    Its compiled code is read. Attributes of classes may be inherited, and modules may create names
    when they are imported, so `None` is returned if only an import could show it.
    """
    if module in sys.modules:
        value: Any = sys.modules[module]
        for name in path.split("."):
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    if not exists(module):
        return False
    code = code_of(module)
    for depth, name in enumerate(path.split(".")):
        if code is None:
            return None
        if name not in code.co_names:
            makes_names = "__getattr__" in code.co_names or ("*",) in code.co_consts
            return None if depth or makes_names else False
        code = _class_in(code, name)
    return True


def code_of(name: str) -> Any:
    """Return the compiled code of a module, without executing it, or `None` if it has none."""
    spec = spec_of(name)
    try:
        return spec.loader.get_code(name)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001  not Python, or with an error that its import raises
        return None


def _class_in(code: Any, name: str) -> Any:
    """Return the code of a class in that of its module."""
    for each in code.co_consts:
        if hasattr(each, "co_name"):
            if each.co_name == name:
                return each
            if each.co_name == f"<generic parameters of {name}>":
                return _class_in(each, name)
    return None


def _are_in(places: Sequence[str], roots: Sequence[tuple[Path, bool]]) -> bool:
    directories = [Path(place).parent.resolve() for place in places]
    return any(
        directory == root or (is_tree and directory.is_relative_to(root))
        for directory in directories
        for root, is_tree in roots
    )


def _roots(distribution: str) -> list[tuple[Path, bool]]:
    """Return the directories from which a distribution is imported.

    The second value is true for a directory of an editable installation, which contains them.
    """
    roots: list[tuple[str, bool]] = []
    with contextlib.suppress(Exception):  # of metadata that cannot be read
        for found in distributions(name=distribution):
            roots.append((str(found.locate_file("")), False))
            if origin := found.read_text("direct_url.json"):
                roots.append((_editable_directory(origin), True))
    return [(Path(root).resolve(), is_tree) for root, is_tree in roots if root]


def _editable_directory(origin: str) -> str:
    """Return the directory of an editable installation: PEP 610."""
    # Imported here, as it imports clients and servers that most processes never use.
    from urllib.request import url2pathname

    installed = json.loads(origin)
    is_editable = installed.get("dir_info", {}).get("editable")
    return url2pathname(urlsplit(installed["url"]).path) if is_editable else ""


# --- releases and missing names -------------------------------------------------------------------


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
