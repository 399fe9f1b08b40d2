"""Launchers and ways to enable otel-limits: the table on the page is what happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import pytest

from tests.matrix import LAUNCHERS, NOT_LIMITED, NOTHING_RUNS, WAYS, documented, running


@pytest.fixture(scope="module")
def cells() -> Iterator[Mapping[tuple[str, str], Future[str]]]:
    """All cells, which begin in the order of the tests."""
    with running() as cells:
        yield cells


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_cell_of_the_page_is_what_happens(
    launcher: str, way: str, cells: Mapping[tuple[str, str], Future[str]]
) -> None:
    """Run `python -m tests.generate launchers` if this fails, and review the changes."""
    assert cells[launcher, way].result() == documented()[launcher, way]


def test_agents_are_unlimited_only_where_nothing_of_ours_runs() -> None:
    """Everywhere else they are limited, or a message reports that they are not."""
    unlimited = {cell for cell, text in documented().items() if text == NOT_LIMITED}
    assert unlimited == NOTHING_RUNS
