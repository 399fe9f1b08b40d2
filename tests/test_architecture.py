"""The shape of the house: who may import what, and how long a function may be."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import otel_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(otel_limits.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if "startup" not in path.parts
}

FLOORS = (
    ("core",),
    ("runs",),
    ("otel", "bindings", "observers", "ledger", "quotas"),
    ("settings",),
    ("runtime",),
    ("plugin", "testing", "instrumentor", "environment_variables", "audit", "dashboards", "docs"),
    ("cli",),
    ("demo",),
)
"""From the bottom up: what stands on one floor may import from its own and those below."""

OUTSIDE = {
    "opentelemetry.sdk": ("otel", "observers"),
    "prometheus_client": ("observers",),
    "sqlalchemy": ("ledger", "audit", "observers"),
    "redis": ("quotas",),
    "strands": ("bindings", "demo"),
    "yaml": ("settings",),
    "rich": ("cli", "demo"),
}
"""One outside world, one room; names are those of packages and of the rooms that may know them."""

LONGEST_FUNCTION = 40


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


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    """A module imports from its own floor and from those below, never from above."""
    above = [
        name
        for name in run_time_imports(parsed(MODULES[module]), inside=False)
        if name in MODULES and name != "otel_limits" and floor(name) > floor(module)
    ]
    assert above == []


@pytest.mark.parametrize("package", OUTSIDE)
def test_one_outside_world_one_room(package: str) -> None:
    """What is foreign is known in one place, so that a change there is a change in one place."""
    knowing = {
        room(module)
        for module, path in MODULES.items()
        for name in run_time_imports(parsed(path), inside=True)
        if name == package or name.startswith(f"{package}.")
    }
    assert knowing <= set(OUTSIDE[package])


def test_only_the_configuration_reads_the_environment() -> None:
    """`os.environ` stands in one module."""
    readers = [
        module
        for module, path in MODULES.items()
        if "os.environ" in path.read_text(encoding="utf-8") or "getenv" in path.read_text("utf-8")
    ]
    assert readers == ["otel_limits.settings.variables"]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]:
    """Yield every function with its name and the lines of its module."""
    for module, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{module}.{node.name}", node, lines


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function without its docstring."""
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return whole
    return whole - ((first.end_lineno or first.lineno) - first.lineno + 1)


def test_no_function_is_long_without_a_reason() -> None:
    """A function of more than 40 lines says why: `# long because …` within it."""
    long = [
        name
        for name, node, lines in functions()
        if code_lines(node) > LONGEST_FUNCTION
        and "# long because " not in "\n".join(lines[node.lineno - 1 : node.end_lineno])
    ]
    assert long == []


def test_functions_are_short() -> None:
    """Half of them have fewer than 10 lines."""
    lengths = sorted(code_lines(node) for _, node, _ in functions())
    assert lengths[len(lengths) // 2] < 10


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_says_what_it_is_for(module: str) -> None:
    """Its first line is a sentence."""
    docstring = ast.get_docstring(parsed(MODULES[module])) or ""
    assert docstring.split("\n")[0].rstrip()[-1:] in (".", ":", ",") or "\n" in docstring


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
