"""Recognizes frameworks and their names, also without importing them.

A user's own package may have the name of a framework's. Names of modules that are not imported are
read from their compiled code.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

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
