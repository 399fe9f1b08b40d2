"""Behavior in each framework: one table of rows and frameworks."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import pytest
from strands.telemetry import tracer as strands_tracer

from tests.features import rows_of_langchain
from tests.features.behaviours import ROWS
from tests.features.faults import FAULT_ROWS, faults_in, shared_functions
from tests.features.page import SUBJECTS
from tests.features.seen import turn_of
from tests.rotation import EVERY_WAY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

    from tests.features.seen import Row

HOOKS: Final = "strands-hooks"
"""Strands without recorded spans: invocations are followed through hooks."""

COLUMNS: Final[Mapping[str, Any]] = {HOOKS: SUBJECTS[0], **{each.name: each for each in SUBJECTS}}

BY_SOURCE: Final = (HOOKS, SUBJECTS[0].name)
"""The columns of one framework."""

OWN_ROWS: Final[Mapping[str, Mapping[str, Row]]] = {"langchain": rows_of_langchain.ROWS}
"""By column, the rows that it alone has."""


# --- the table ------------------------------------------------------------------------------------


def rows_of(column: str) -> Mapping[str, Row]:
    """Return the rows of a column; without spans, none about them."""
    rows = {**ROWS, **OWN_ROWS.get(column, {})}
    return {name: row for name, row in rows.items() if column != HOOKS or "span" not in name}


CELLS: Final = [
    (column, name) for column in COLUMNS for name in rows_of(column) if column not in BY_SOURCE
]
ROWS_ABOUT_SPANS: Final = [name for name in ROWS if "span" in name]
FAULT_CELLS: Final = [(column, name) for column in COLUMNS for name in FAULT_ROWS]


def source_of(column: str) -> str:
    """Return where the invocations of a column are followed, as the fixture `source` does."""
    return "hooks" if column == HOOKS else "spans"


def check(column: str, row: Row, request: pytest.FixtureRequest) -> None:
    """Check a cell."""
    if column == HOOKS:
        request.getfixturevalue("hooks_only")
    row(COLUMNS[column])


def check_in_turn(column: str, name: str, request: pytest.FixtureRequest) -> None:
    """Check a cell in two of the ways to call an agent."""
    rows = rows_of(column)
    turn = nullcontext() if request.config.getoption(EVERY_WAY) else turn_of(list(rows).index(name))
    with turn:
        check(column, rows[name], request)


@pytest.mark.parametrize(
    ("column", "name"), [*CELLS, *((SUBJECTS[0].name, name) for name in ROWS_ABOUT_SPANS)]
)
def test_behavior(column: str, name: str, request: pytest.FixtureRequest) -> None:
    """Frameworks differ, and what limits do to their agents does not."""
    check_in_turn(column, name, request)


@pytest.mark.parametrize("name", rows_of(HOOKS))
def test_behavior_by_source(name: str, source: str, request: pytest.FixtureRequest) -> None:
    """The same with spans and without."""
    check_in_turn(HOOKS if source == "hooks" else SUBJECTS[0].name, name, request)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(("column", "name"), FAULT_CELLS)
def test_fault_is_not_felt(column: str, name: str, request: pytest.FixtureRequest) -> None:
    """An agent works and is halted whatever fails in otel-limits."""
    check(column, FAULT_ROWS[name], request)


@pytest.mark.usefixtures("faulty")
def test_fault_in_a_shared_function_is_not_felt(
    monkeypatch: pytest.MonkeyPatch, tracers: Mapping[str, Any]
) -> None:
    """Each function in one of the frameworks that call it; nightly tests try it in all."""
    called: dict[str, Mapping[CodeType, str]] = {}
    columns: dict[CodeType, list[str]] = {}
    for column in COLUMNS:
        monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers[source_of(column)])
        called[column] = shared_functions(COLUMNS[column])
        for code in called[column]:
            columns.setdefault(code, []).append(column)
    chosen: defaultdict[str, dict[CodeType, str]] = defaultdict(dict)
    for number, (code, names) in enumerate(columns.items()):
        column = names[number % len(names)]
        chosen[column][code] = called[column][code]
    for column, functions in chosen.items():
        monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers[source_of(column)])
        assert (column, faults_in(COLUMNS[column], functions)) == (column, {})
