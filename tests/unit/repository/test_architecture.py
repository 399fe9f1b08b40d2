"""The structure of the package: which room may import what, and that there is no circle."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import otel_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(otel_limits.__file__).parent
EVERY_MODULE = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
MODULES = {
    # Python runs `startup` before anything else: it reads the environment itself.
    module: path
    for module, path in EVERY_MODULE.items()
    if "startup" not in path.parts
}
TESTS = ROOT.parent / "tests"
CONTRIBUTING = ROOT.parent / ".github" / "CONTRIBUTING.md"

OUTSIDE = {
    "opentelemetry.sdk": ("otel", "observers"),
    "prometheus_client": ("observers", "top"),
    "sqlalchemy": ("ledger", "audit", "observers"),
    "redis": ("quotas",),
    "strands": ("bindings",),
    "langchain_core": ("bindings",),
    "langgraph": ("bindings",),
    "agents": ("bindings",),
    "openai": ("bindings",),
    "yaml": ("settings", "vendors"),
    "pydantic": ("core", "quotas", "settings", "bindings"),
    "rich": ("cli", "demo"),
}
"""Third-party packages, and the rooms that may import them."""

PYTHON_FILE_NAMES = {"__init__.py", "__main__.py"}

NO_FOR_NOT = re.compile(
    r"(?<!here )\b(is|are|was|were) no (?!longer\b|more\b|matter\b|other\b)[a-z]+"
)

PUBLIC_NAMES_OF_EXCEPTIONS = {
    "MaxIterationsReachedException",
    "MaxTokenBudgetReachedException",
    "MaxTurnsReachedException",
}
"""Exceptions that keep Strands' spelling."""


def room(module: str) -> str:
    """Return the part of the package that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def order() -> dict[str, int]:
    """Return the line of each room in the table of rooms. A room imports from those above it."""
    table = CONTRIBUTING.read_text("utf-8").partition("## Rooms\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {
        name.removesuffix(".py"): line
        for line, cell in enumerate(cells)
        for name in re.findall("`(.*?)`", cell)
    }


def is_for_types(node: ast.AST) -> bool:
    """Return whether a node is only there for type checkers."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_in(tree: ast.AST, *, functions: bool, types: bool) -> Iterator[str]:
    """Yield what a module imports, on request also in functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) or (is_for_types(node) and not types):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        yield from imports_in(node, functions=functions, types=types)


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


SAFE = re.compile(
    r"(written or )?(quote_value|_quoted|len|scheme_of|' and '\.join)\("
    r"|(written|got|shown|until|end)$"
)
"""Quoted values, and others that have no text of a user."""


def test_each_given_value_is_quoted_by_one_function() -> None:
    """A message that quotes a value with `repr` could show a secret."""
    found = [
        f"{module}:{value.lineno}: {ast.unparse(value.value)}"
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.JoinedStr)
        for before, value in itertools.pairwise(node.values)
        if isinstance(before, ast.Constant) and re.search("got ['\"]?$", str(before.value))
        if isinstance(value, ast.FormattedValue) and not SAFE.match(ast.unparse(value.value))
    ]
    assert not found, "Use `quote_value` of `core/secrets.py`."


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """Drop half a million objects, which each garbage collection of later tests would look at."""
    yield
    parsed.cache_clear()


@cache
def imports_of(path: Path, *, functions: bool = False, types: bool = False) -> tuple[str, ...]:
    """Return what a module imports, cached because several tests need it."""
    return tuple(imports_in(parsed(path), functions=functions, types=types))


def test_every_room_has_one_place_in_the_order() -> None:
    """A contributor finds it in the table, and what it may import follows from its line."""
    assert order().keys() == {room(module) for module in EVERY_MODULE}


def test_modules_import_only_from_their_room_and_those_before_it() -> None:
    """A room can be read, tested and changed without those that follow in the order."""
    against = {
        (module, name)
        for module, path in EVERY_MODULE.items()
        for name in imports_of(path, functions=True, types=True)
        if name in EVERY_MODULE and order()[room(name)] > order()[room(module)]
    }
    assert against == set()


def test_startup_is_imported_only_to_be_copied() -> None:
    """It waits where nothing else of the package may be installed, and is no library."""
    importers = {
        module
        for module, path in EVERY_MODULE.items()
        if any("otel_limits_startup" in name for name in imports_of(path, functions=True))
    }
    on_path = "otel_limits.startup.on_path.sitecustomize"
    assert importers == {"otel_limits.runtime.autoload", on_path}


def test_third_party_packages_are_imported_by_few_rooms() -> None:
    """A change of their API is a change in one place."""
    elsewhere = [
        (module, package)
        for module, path in MODULES.items()
        for package, rooms in OUTSIDE.items()
        for name in imports_of(path, functions=True)
        if f"{name}.".startswith(f"{package}.") and room(module) not in rooms
    ]
    assert elsewhere == []


def test_only_settings_read_the_environment() -> None:
    """Every setting has one name, one parser and one place in the documentation."""
    readers = [
        module
        for module, path in MODULES.items()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            for node in ast.walk(parsed(path))
        )
    ]
    assert readers == ["otel_limits.settings.variables"]


OWN_TIME = {
    "runs/clock.py",
    "quotas/store_worker.py",
    "quotas/recovery.py",
    "quotas/redis_store.py",
}
"""The clock, and three that measure the silence and the recovery of a server."""


PLAIN_LOCKS = {
    "observers/otlp_observer.py",
    "observers/prometheus.py",
    "settings/policy/file.py",
}
"""Two locks without waiting threads, and those of prometheus_client in a child process."""


def test_time_limits_and_waits_read_one_clock() -> None:
    """Tests advance it. `time` would pass in addition."""
    own = {
        path.relative_to(ROOT).as_posix()
        for room in ("runs", "bindings", "quotas")
        for path in (ROOT / room).rglob("*.py")
        if "time.monotonic" in path.read_text("utf-8")
    }
    assert own == OWN_TIME


def test_locks_are_reentrant() -> None:
    """The garbage collector may end an invocation in a thread that has any of them."""
    own = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"\bLock\(\)", path.read_text("utf-8"))
    }
    assert own == PLAIN_LOCKS


def test_no_modules_import_each_other() -> None:
    """Not in functions or for types either: they would be one subject in several files."""
    needs = {
        module: {
            name
            for name in imports_of(path, functions=True, types=True)
            if name in EVERY_MODULE and not f"{module}.".startswith(f"{name}.")  # its own package
        }
        for module, path in EVERY_MODULE.items()
    }
    while leaves := {module for module, needed in needs.items() if not needed & needs.keys()}:
        for leaf in leaves:
            del needs[leaf]
    # What only imports a circle is not part of it.
    while roots := needs.keys() - {name for needed in needs.values() for name in needed}:
        for root in roots:
            del needs[root]
    assert sorted(needs) == []


def test_every_file_name_occurs_once() -> None:
    """A reader who sees `spans.py` in a traceback or a review knows which one it is."""
    counts = Counter(path.name for path in EVERY_MODULE.values())
    repeated = {name for name, number in counts.items() if number > 1}
    assert repeated - PYTHON_FILE_NAMES == set()


def test_unit_tests_of_a_room_are_named_after_its_files() -> None:
    """A contributor who opens `ledger/spill.py` finds its tests in `ledger/test_spill.py`."""
    strays = [
        path.relative_to(TESTS).as_posix()
        for path in sorted((TESTS / "unit").rglob("test_*.py"))
        if (ROOT / path.parent.name).is_dir()
        and path.stem.removeprefix("test_") not in names_in(path.parent.name)
    ]
    assert strays == []


def names_in(room: str) -> set[str]:
    """Return names of files and folders: `page`, `show` and `show_page` for `show/page.py`."""
    roots = [ROOT / room] + [ROOT.parent / room] * (room == "dashboards")
    parts = [
        path.relative_to(root).with_suffix("").parts
        for root in roots
        for path in root.rglob("*.py")
    ]
    return {name for each in parts for name in (each[0], each[-1], "_".join(each))}


def test_every_exception_is_named_error() -> None:
    """Readers recognize an exception by its name, public or not."""
    classes = {
        node.name: [ast.unparse(base) for base in node.bases]
        for path in EVERY_MODULE.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    raised = ("Error", "Exception")
    exceptions = {name for name, bases in classes.items() if any(b.endswith(raised) for b in bases)}
    assert len(exceptions) > 20
    assert {name for name in exceptions if not name.endswith("Error")} == PUBLIC_NAMES_OF_EXCEPTIONS


def test_every_class_name_occurs_once() -> None:
    """Readers can only distinguish two classes of one name by opening both files."""
    modules: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in (
            () if module.endswith((".scripted_model", ".script")) else parsed(path).body
        ):  # a public API
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


def test_text_uses_not_instead_of_no() -> None:
    """Readers stumble over "is no link" where "is not a link" is meant."""
    texts = [*ROOT.rglob("*.py"), *ROOT.rglob("*.md")]
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts
        for match in NO_FOR_NOT.finditer(path.read_text("utf-8"))
    }
    assert found == set()


def test_module_docstrings_are_sentences() -> None:
    """The first line of a file states its subject."""
    docstrings = {module: ast.get_docstring(parsed(path)) or "" for module, path in MODULES.items()}
    others = [
        module
        for module, docstring in docstrings.items()
        if docstring.split("\n")[0].rstrip()[-1:] not in (".", ":", ",") and "\n" not in docstring
    ]
    assert others == []


def test_contributing_page_names_existing_files_and_tables() -> None:
    """A contributor who follows the page finds every file and every table where it says."""
    page = CONTRIBUTING.read_text("utf-8")
    files = set(re.findall(r"[\w./]+/[\w/]+\.(?:py|md|yaml)", page))
    missing = [
        name
        for name in files
        if not any(
            (folder / name).exists() for folder in (ROOT, ROOT.parent, ROOT.parent / ".github")
        )
    ]
    assert missing == []
    tables = re.findall(r"`([A-Z]+)` of `([\w/]+\.py)`", page)
    assert len(tables) >= 5
    for table, name in tables:
        folder = ROOT.parent if name.startswith("tests/") else ROOT
        assert f"\n{table}: Final" in (folder / name).read_text("utf-8")


def test_public_names_are_sorted_and_exist() -> None:
    """`__all__` is a table of contents: constants, classes and functions, each in order."""
    names = otel_limits.__all__
    groups = [
        [name for name in names if name.isupper()],
        [name for name in names if name[0].isupper() and not name.isupper()],
        [name for name in names if name[0].islower()],
    ]
    assert names == [name for group in groups for name in sorted(group)]
    assert all(hasattr(otel_limits, name) for name in names)


def test_public_names_are_complete() -> None:
    """Nothing else is public by accident."""
    public = {
        name
        for name, value in vars(otel_limits).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("otel_limits.")
    }
    assert public <= set(otel_limits.__all__)


# --- what tests may touch -------------------------------------------------------------------------

OF_OTHERS = {
    "_agent_stream": "Strands",
    "_events": "Strands",
    "_handlers": "Strands",
    "_lock": "redis",
    "_loop": "OpenTelemetry",
    "_registry": "Strands",
    "_replace": "named tuples",
    "_retry": "Strands",
}
"""Private names of other packages that tests read, where ours has the same name."""

A_LINE_IN_A_TABLE = "a contributor adds a line to this table, as the test does"
EXCEPTIONS = {
    "nightly/test_faults.py: _copy": "it lets each function of the package fail in turn",
    "price_lists/compare.py: _entry_of": "it generates the tables that this look-up reads",
    "price_lists/compare.py: _loose_entry_of": "it generates the tables of that look-up",
    "programs/audit/test_questions.py: QUESTIONS": A_LINE_IN_A_TABLE,
    "programs/ledger/test_writer.py: GATHER_SECONDS": "it kills a program within this second",
    "quotas/fleets.py: _clock_offset": "a window of a year begins during an outage",
    "quotas/worker.py: RENEW_SECONDS": "slots of killed processes are held for seconds",
    "quotas/worker.py: SLOT_LEASE_SECONDS": "slots of killed processes are held for seconds",
    "unit/quotas/test_stores.py: STORES": A_LINE_IN_A_TABLE,
    "unit/observers/test_counting.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/demo/test_main.py: SCENARIOS": A_LINE_IN_A_TABLE,
    "unit/observers/test_protocol.py: OBSERVERS": A_LINE_IN_A_TABLE,
    "unit/runtime/test_enable.py: ALL_WITH_OWN": "other tests keep agents with plugins",
    "unit/settings/test_settings_reader.py: SETTINGS": A_LINE_IN_A_TABLE,
    "unit/bindings/test_framework.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/bindings/test_third_party.py: FOUND": "`autoload install` writes it into its copy",
    "unit/bindings/test_third_party.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/bindings/test_third_party.py: PACKAGES": A_LINE_IN_A_TABLE,
}
"""What tests touch nevertheless, each with the reason."""

DEFINED = re.compile(
    r"^ *(?:async )?(?:def|class) (_[a-zA-Z]\w*)"
    r"|\b(?:self|cls)\.(_[a-zA-Z]\w*)(?:: .*)? =|^(_[a-zA-Z]\w*)\b.* =",
    re.MULTILINE,
)
"""Where the package, or a test's own class, defines a private name."""

READ = re.compile(
    r"(?<!\bself)(?<!\bcls)(?<!super\(\))\.(_[a-zA-Z]\w*)"
    r"|from otel_limits[\w.]* import .*\b(_[a-zA-Z]\w*)"
)
CONSTANT = re.compile(r"^([A-Z][A-Z_]+)\b.* = ", re.MULTILINE)
SET = re.compile(
    r"(?:setattr|patch\.object)\(\s*[^\s()]+\s+\"(_[a-z]\w*|[A-Z][A-Z_]+)\""
    r"|(?:setattr|patch)\(\s*\"[\w.]+\.(_[a-z]\w*|[A-Z][A-Z_]+)\""
    r"|^ *(?!builtins)[\w.]+\.([A-Z][A-Z_]+) = ",
    re.MULTILINE,
)


def names(pattern: re.Pattern[str], texts: Iterable[str]) -> set[str]:
    """Return the names that a pattern finds."""
    return {"".join(found) for text in texts for found in pattern.findall(text)}


def test_tests_read_no_private_name_and_set_no_constant() -> None:
    """What is proven then is what ships, and tests survive changes of the code inside."""
    package = [path.read_text("utf-8") for path in EVERY_MODULE.values()]
    forbidden = (names(DEFINED, package) | names(CONSTANT, package)) - OF_OTHERS.keys()
    touched = {
        f"{path.relative_to(TESTS).as_posix()}: {name}"
        for path in TESTS.rglob("*.py")
        for text in [path.read_text("utf-8")]
        for name in forbidden & (names(READ, [text]) | names(SET, [text]))
        if name not in names(DEFINED, [text])
    }
    assert touched - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - touched == set()  # an exception ends with its last use
