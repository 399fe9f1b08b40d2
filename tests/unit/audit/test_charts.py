"""Charts of a report: axes that fit their data, and bars that fit the page."""

from __future__ import annotations

import re
from types import SimpleNamespace

from otel_limits.audit.answer import Answer, CellKind, Chart, ChartSeries
from otel_limits.audit.charts import stops_chart
from otel_limits.cli.show.page import as_page, draw, scale_of, tick


def test_an_axis_ends_just_above_its_data() -> None:
    """With four to six round steps, in one precision."""
    for highest, whole, step, ticks in (
        (1.47, False, "$0.25", 6),
        (273, True, "50", 6),
        (7, True, "2", 4),
        (3, True, "1", 3),
        (11.2, False, "$2", 6),
        (0.0031, False, "$0.001", 4),
        (0, True, "1", 1),
    ):
        length, number = scale_of(highest, whole=whole)
        assert (tick(length, length, "count" if whole else "money"), number) == (step, ticks)
        assert highest <= length * number
    assert [tick(each, 0.25, "money") for each in (0, 0.5, 1.25)] == ["$0.00", "$0.50", "$1.25"]


def test_the_longest_bar_and_its_value_fit_the_card() -> None:
    """Lengths are in percent, and no series without a value is drawn."""
    series = [ChartSeries("one", [4000.0, 0.0]), ChartSeries("two", [1000.0, 2.0])]
    drawn = draw(Chart(name="x", title="X", labels=["a", "b"], series=series, horizontal=True))
    bars = re.findall(r'x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"', drawn)
    assert len(bars) == drawn.count("<rect") == 3
    assert max(float(x) + float(width) for x, width in bars) < 85


def test_killed_invocations_have_their_own_series() -> None:
    """Neither a limit nor the agent ended them."""
    rows = [
        SimpleNamespace(reason=reason, action=action, invocations=number)
        for reason, action, number in (
            ("end_turn", "none", 5), ("max_turns", "halted", 2), ("killed", "killed", 1)
        )
    ]  # fmt: skip
    shown = {each.name: (each.tone, each.values) for each in stops_chart(rows).series}
    assert shown == {
        "finished": ("", [5, 0, 0]),
        "halted": ("halted", [0, 2, 0]),
        "killed": ("killed", [0, 0, 1]),
    }


def test_totals_leave_few_places_of_the_last_row_empty() -> None:
    """By the width of the screen; 13 of them were 6, 6 and 1."""
    for count, columns in ((13, "7; --few: 5"), (17, "6; --few: 3"), (12, "6; --few: 4")):
        totals: list[tuple[str, CellKind, int]] = [(str(n), "count", n) for n in range(count)]
        page = as_page(Answer(question="x", title="X", about="", totals=totals))
        assert f'style="--many: {columns}"' in page
