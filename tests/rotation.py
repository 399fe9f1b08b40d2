"""Hooks of pytest with which the cases of a unit test take turns in the ways to call an agent.

An agent is followed through spans or hooks, and called in several ways. Limits use the same code in
all of them, so each case is tested in one way, and each way has a case. With the option
`--every-way`, which `.ci/nightly` gives, each case is tested in each way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

EVERY_WAY: Final = "--every-way"

WAYS: Final = ("source", "call", "how")
"""Fixtures and arguments of tests with a way in each parameter."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(EVERY_WAY, action="store_true", help="test each case in each way")


def choose_ways(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the ways whose turn it is not, unless a test is asked for by its parameters."""
    if config.getoption(EVERY_WAY) or any("[" in argument for argument in config.args):
        return
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    chosen = {
        item
        for name, cells in functions.items()
        for item in (in_turn(cells) if name.startswith("tests/unit/") else cells)
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def in_turn(cells: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Choose one way for each case of a test, or a case for each way if these are more."""
    ways = [name for name in WAYS if name in parameters(cells[0])]
    if not ways:
        return cells
    by_case: defaultdict[tuple[int, ...], dict[tuple[int, ...], pytest.Item]] = defaultdict(dict)
    for cell in cells:
        # A case has the same objects in each way.
        places = {name: id(value) for name, value in parameters(cell).items()}
        way = tuple(places.pop(name) for name in ways)
        by_case[tuple(places.values())][way] = cell
    cases = list(by_case.values())
    values = [list(dict.fromkeys(each)) for each in zip(*cases[0], strict=True)]
    if {len(each) for each in cases} != {math.prod(map(len, values))} or any(
        each.keys() != cases[0].keys() for each in cases
    ):
        return cells  # some cases have other ways
    turns = range(max(len(cases), *map(len, values)))
    # Shifted after each round, so that a way does not always meet the same value of a case.
    return [
        cases[turn % len(cases)][
            tuple(each[(turn + turn // len(each)) % len(each)] for each in values)
        ]
        for turn in turns
    ]


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test."""
    called = getattr(item, "callspec", None)
    return {} if called is None else called.params
