"""The structure of the package: which room may import what, and that there is no circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

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

PUBLIC_NAMES_OF_A_LINE_IN_A_TABLE = "a contributor adds a line to this table, as the test does"
EXCEPTIONS = {
    "nightly/test_faults.py: _copy": "it lets each function of the package fail in turn",
    "price_lists/compare.py: _entry_of": "it generates the tables that this look-up reads",
    "price_lists/compare.py: _loose_entry_of": "it generates the tables of that look-up",
    "programs/ledger/test_audit.py: QUESTIONS": A_LINE_IN_A_TABLE,
    "programs/ledger/test_durability.py: GATHER_SECONDS": "it kills a program within this second",
    "quotas/fleets.py: _clock_offset": "a window of a year begins during an outage",
    "quotas/worker.py: RENEW_SECONDS": "slots of killed processes are held for seconds, not minutes",
    "quotas/worker.py: SLOT_LEASE_SECONDS": "slots of killed processes are held for seconds",
    "unit/quotas/test_store_table.py: STORES": A_LINE_IN_A_TABLE,
    "unit/test_counting.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/test_demo.py: SCENARIOS": A_LINE_IN_A_TABLE,
    "unit/test_observers.py: OBSERVERS": A_LINE_IN_A_TABLE,
    "unit/test_plugin.py: ALL_WITH_OWN": "other tests of the process keep agents with plugins",
    "unit/test_reading.py: SETTINGS": A_LINE_IN_A_TABLE,
    "unit/test_second_framework.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/test_third_party.py: FOUND": "`autoload install` writes it into its copy of the module",
    "unit/test_third_party.py: FRAMEWORKS": A_LINE_IN_A_TABLE,
    "unit/test_third_party.py: PACKAGES": A_LINE_IN_A_TABLE,
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
