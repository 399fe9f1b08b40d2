"""The shape of the house: who may import what, and how long anything may be."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import otel_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(otel_limits.__file__).parent
EVERY_MODULE = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
MODULES = {
    # What Python runs at every start knows nothing of the rooms, and reads the environment itself.
    module: path
    for module, path in EVERY_MODULE.items()
    if "startup" not in path.parts
}

FLOORS = (
    ("core",),
    ("usage",),
    ("runs",),
    ("otel", "bindings", "observers", "ledger", "quotas"),
    ("settings",),
    ("runtime",),
    ("plugin", "testing", "instrumentor", "environment_variables", "audit", "dashboards", "docs"),
    ("top",),
    ("cli",),
    ("demo",),
)
"""From the bottom up: what stands on one floor may import from its own and those below."""

OUTSIDE = {
    "opentelemetry.sdk": ("otel", "observers"),
    "prometheus_client": ("observers", "top"),
    "sqlalchemy": ("ledger", "audit", "observers"),
    "redis": ("quotas",),
    "strands": ("bindings", "demo"),
    "yaml": ("settings",),
    "rich": ("cli", "demo"),
}
"""One outside world, one room; names are those of packages and of the rooms that may know them."""

STUMBLE = re.compile(r"(?<!here )\b(is|are|was|were) no (?!longer\b|more\b|matter\b|other\b)[a-z]+")

LONGEST_FUNCTION = 40
LONGEST_CLASS = 250
LONGEST_FILE = 500


def room(module: str) -> str:
    """Return the part of the house that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def floor(module: str) -> int:
    """Return the floor of a module; the table of contents stands on the roof."""
    here = [number for number, rooms in enumerate(FLOORS) if room(module) in rooms]
    return here[0] if here else len(FLOORS)


def is_for_types(node: ast.AST) -> bool:
    """Tell whether a node is only there for type checkers."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def run_time_imports(tree: ast.AST, *, inside: bool) -> Iterator[str]:
    """Yield what is imported when a module runs; `inside` functions as well."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node) or (not inside and isinstance(node, ast.FunctionDef)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        yield from run_time_imports(node, inside=inside)


def parsed(path: Path) -> ast.Module:
    """Parse a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path, *, inside: bool) -> tuple[str, ...]:
    """What a module imports: looked up once, as it is asked for by several tests."""
    return tuple(run_time_imports(parsed(path), inside=inside))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    """A module imports from its own floor and from those below, never from above."""
    above = [
        name
        for name in imports_of(MODULES[module], inside=False)
        if name in MODULES and name != "otel_limits" and floor(name) > floor(module)
    ]
    assert above == []


@pytest.mark.parametrize("package", OUTSIDE)
def test_one_outside_world_one_room(package: str) -> None:
    """What is foreign is known in one place, so that a change there is a change in one place."""
    knowing = {
        room(module)
        for module, path in MODULES.items()
        for name in imports_of(path, inside=True)
        if name == package or name.startswith(f"{package}.")
    }
    assert knowing <= set(OUTSIDE[package])


def test_only_the_configuration_reads_the_environment() -> None:
    """`os.environ` stands in one module."""
    readers = [
        module
        for module, path in MODULES.items()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            for node in ast.walk(parsed(path))
        )
    ]
    assert readers == ["otel_limits.settings.variables"]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its name."""
    for module, path in EVERY_MODULE.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{module}.{node.name}", node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Count the lines of a function or a class, its docstring included."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_long() -> None:
    """One of more than 40 lines does more than one thing."""
    assert [name for name, node in functions() if length(node) > LONGEST_FUNCTION] == []


def test_no_class_is_long() -> None:
    """One of more than 250 lines has more than one reason to change."""
    assert [
        f"{module}.{node.name}"
        for module, path in EVERY_MODULE.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and length(node) > LONGEST_CLASS
    ] == []


def test_no_file_is_long() -> None:
    """One of more than 500 lines cannot say in its first line what it is for."""
    lengths = {
        module: len(path.read_text("utf-8").splitlines()) for module, path in EVERY_MODULE.items()
    }
    assert {module: lines for module, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_modules_import_each_other() -> None:
    """When one is imported, nothing that it needs is only half there."""
    needs = {
        module: {
            name
            for name in imports_of(path, inside=False)
            if name in MODULES and not f"{module}.".startswith(f"{name}.")  # a package of its own
        }
        for module, path in MODULES.items()
    }
    while leaves := {module for module, needed in needs.items() if not needed & needs.keys()}:
        for leaf in leaves:
            del needs[leaf]
    assert sorted(needs) == []


KNOWN_AS = {
    "MaxIterationsReachedException",
    "MaxTokenBudgetReachedException",
    "MaxTurnsReachedException",
}
"""Exceptions that keep the names by which users know them."""


def test_every_exception_is_an_error() -> None:
    """Its name ends so, whether it is public or not."""
    classes = {
        node.name: [ast.unparse(base) for base in node.bases]
        for path in EVERY_MODULE.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    raised = ("Error", "Exception")
    exceptions = {name for name, bases in classes.items() if any(b.endswith(raised) for b in bases)}
    assert len(exceptions) > 20
    assert {name for name in exceptions if not name.endswith("Error")} == KNOWN_AS


def test_one_meaning_per_word() -> None:
    """Two classes of one name are told apart by a reader only after opening both files."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in () if module.endswith(".testing") else parsed(path).body:  # what users import
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_nothing_is_no_something() -> None:
    """A reader stumbles over "is no link" where "is not a link" is meant."""
    texts = [*ROOT.rglob("*.py"), *ROOT.rglob("*.md")]
    found = {
        f"{path.relative_to(ROOT)}: {stumble.group()}"
        for path in texts
        for stumble in STUMBLE.finditer(path.read_text("utf-8"))
    }
    assert found == set()


def test_functions_are_short() -> None:
    """Half of them have fewer than 10 lines."""
    lengths = sorted(length(node) for _, node in functions())
    assert lengths[len(lengths) // 2] < 10


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_says_what_it_is_for(module: str) -> None:
    """Its first line is a sentence."""
    docstring = ast.get_docstring(parsed(MODULES[module])) or ""
    assert docstring.split("\n")[0].rstrip()[-1:] in (".", ":", ",") or "\n" in docstring


def test_the_page_for_contributors_leads_to_what_is_there() -> None:
    """Every file that it names exists, and every table stands in the file that it is said to."""
    page = (ROOT.parent / ".github" / "CONTRIBUTING.md").read_text("utf-8")
    files = set(re.findall(r"[\w./]+/[\w/]+\.(?:py|md|yaml)", page))
    missing = [
        name
        for name in files
        if not any(
            (place / name).exists() for place in (ROOT, ROOT.parent, ROOT.parent / ".github")
        )
    ]
    assert missing == []
    tables = re.findall(r"`([A-Z]+)` of `([\w/]+\.py)`", page)
    assert len(tables) >= 5
    assert all(f"\n{table}: Final" in (ROOT / name).read_text("utf-8") for table, name in tables)


def test_the_public_names_are_sorted_and_there() -> None:
    """`__all__` is a table of contents: constants, classes, functions, each in order."""
    names = otel_limits.__all__
    groups = [
        [name for name in names if name.isupper()],
        [name for name in names if name[0].isupper() and not name.isupper()],
        [name for name in names if name[0].islower()],
    ]
    assert names == [name for group in groups for name in sorted(group)]
    assert all(hasattr(otel_limits, name) for name in names)


def test_the_public_names_are_all() -> None:
    """Nothing else is public by accident."""
    public = {
        name
        for name, value in vars(otel_limits).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("otel_limits.")
    }
    assert public <= set(otel_limits.__all__)
