"""Launchers and ways to enable otel-limits: the table on the page is what happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import pytest

from tests.matrix import (
    COMMANDS,
    NOT_LIMITED,
    NOTHING_RUNS,
    OFTEN,
    WAYS,
    Cell,
    documented,
    running,
)


@pytest.fixture(scope="module")
def cells() -> Iterator[Mapping[Cell, Future[str]]]:
    """The cells, which begin in the order of the tests."""
    with running(OFTEN) as cells:
        yield cells


@pytest.mark.parametrize("cell", OFTEN, ids=": ".join)
def test_cell_of_the_page_is_what_happens(cell: Cell, cells: Mapping[Cell, Future[str]]) -> None:
    """Run `python -m tests.generate launchers` if this fails, and review the changes."""
    assert cells[cell].result() == documented()[cell]


def test_agents_are_unlimited_only_where_nothing_of_ours_runs() -> None:
    """Everywhere else they are limited, or a message reports that they are not."""
    unlimited = {cell for cell, text in documented().items() if text == NOT_LIMITED}
    assert unlimited == NOTHING_RUNS


def test_often_run_cells_cover_programs_ways_and_outcomes() -> None:
    """The other cells are run at night."""
    assert {launcher for launcher, _ in OFTEN} == set(COMMANDS) - {"workers of `celery`"}
    assert {way for _, way in OFTEN} == set(WAYS)
    page = documented()
    assert {page[cell] for cell in OFTEN} == set(page.values())
