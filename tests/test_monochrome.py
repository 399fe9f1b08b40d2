"""What a colour says, words or a pattern say too: for print, and for who sees no colour."""

from __future__ import annotations

import io
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from otel_limits.cli.quotas import table_of
from otel_limits.cli.show.charts import COLOURS, HATCHES, colour, hatches
from otel_limits.quotas.key_use import KeyUse, Uses


def plain(shown: Any) -> list[str]:
    """Return the lines of something on a screen without colours."""
    screen = Console(file=io.StringIO(), width=100, no_color=True, record=True)
    screen.print(shown)
    return screen.export_text().splitlines()


@pytest.mark.parametrize(("remaining", "state"), [(0, "used up"), (20, "nearly used up"), (21, "")])
def test_a_quota_near_its_end_says_so(remaining: int, state: str) -> None:
    """In a column of its own, as it is red or yellow in a terminal."""
    row = KeyUse(
        quota="users",
        key="joe",
        unit="tokens",
        used=100 - remaining,
        reserved=0,
        remaining=remaining,
        limit=100,
        resets=None,
    )
    (line,) = [line for line in plain(table_of(Uses([row], 0))) if "joe" in line]
    assert line.split("tokens")[1].strip() == state


def test_every_series_of_a_chart_but_the_first_has_a_pattern() -> None:
    """The style sheet fills it with that, and a line around it, in the legend as in the chart."""
    style = files("otel_limits.cli.show").joinpath("page.css").read_text(encoding="utf-8")
    tiles = hatches()
    series: Any = SimpleNamespace(tone="")
    for number in range(1, COLOURS):
        assert colour(number, series) in HATCHES
    for name in HATCHES:
        assert f".{name} {{ fill: url(#hatch-{name}); stroke: var(--{name}); }}" in style
        assert f'id="hatch-{name}"' in tiles
    assert len(set(HATCHES.values())) == len(HATCHES)
