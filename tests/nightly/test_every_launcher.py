"""Every launcher with every way to enable otel-limits, and every kind of worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from tests.matrix import CELLS, OFTEN, Cell, documented, running
from tests.programs.runtime.test_workers import (
    METHODS,
    SERVERS,
    WAYS,
    capped_by_console_script,
    capped_in_children,
    capped_in_workers,
    environment,
)

if TYPE_CHECKING:
    from tests.programs.runtime.test_autoload import Environment

__all__ = ["environment"]


OTHERS = [cell for cell in CELLS if cell not in OFTEN]


@pytest.fixture(scope="module")
def cells() -> Iterator[Mapping[Cell, Future[str]]]:
    """The cells, which begin in the order of the tests."""
    with running(OTHERS) as cells:
        yield cells


@pytest.mark.parametrize("cell", OTHERS, ids=": ".join)
def test_other_cell_of_the_page_is_what_happens(
    cell: Cell, cells: Mapping[Cell, Future[str]]
) -> None:
    """Run `python -m tests.generate launchers` if this fails, and review the changes."""
    assert cells[cell].result() == documented()[cell]


@pytest.mark.parametrize("way", WAYS)
def test_cap_holds_in_children_by_every_method(way: str, environment: Environment) -> None:
    """In one program, after an agent of the parent."""
    capped_in_children(way, METHODS, "strands", environment)


def test_cap_holds_in_workers_of_another_framework(environment: Environment) -> None:
    """In a child of the standard library, and in a worker of a server."""
    capped_in_children("run", ["spawn"], "openai-agents", environment)
    capped_by_console_script("openai-agents")


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("way", ["run, instrument", "autoload, instrument"])
def test_cap_holds_in_workers_by_every_way(way: str, server: str, environment: Environment) -> None:
    """Each worker is limited by itself."""
    capped_in_workers(way, server, environment)
