"""`total()` of dashboards/queries.py, by a real Prometheus over scripted samples."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards.panels import TimeRange
from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import RELEASES, Find, remembering
from tests.paths import ROOT

queries = runpy.run_path(str(ROOT / "dashboards/queries.py"))
"""The dashboards package has the same name as the folder of these tests."""

INTERVAL = 30
END = 1_750_003_600
WINDOW = 3600
BEFORE = END - 3 * 3600
"""Start of old series, long before the window."""

Samples = dict[int, int]
"""Values by time."""


def counter(start: int, end: int, first: int, seconds_per_event: int) -> Samples:
    """Count up from `first` at each scrape from `start` to `end`."""
    return {
        time: first + (time - start) // seconds_per_event
        for time in range(start, end + 1, INTERVAL)
    }


def without(samples: Samples, start: int, end: int) -> Samples:
    """Drop the scrapes in between, which failed."""
    return {time: value for time, value in samples.items() if not start < time <= end}


OLD = counter(BEFORE, END, 1000, 60)
BIRTH = END - 1200

RESTARTED = OLD | counter(BIRTH, END, 0, 60)
BORN_AND_RESTARTED = counter(BIRTH, BIRTH + 600, 5, 60) | counter(END - 300, END, 0, 60)

SERIES: dict[str, tuple[Samples, float | None]] = {
    "existed before the window": (OLD, 60),
    "constant": (counter(BEFORE, END, 1000, 10**9), 0),
    "born at 0": (counter(BIRTH, END, 0, 60), 20),
    "born at 7": (counter(BIRTH, END, 7, 60), 27),
    "born with its only sample": ({BIRTH: 2}, 2),
    "ended before the window": (counter(BEFORE, END - WINDOW - 600, 1000, 60), None),
    "one sample in the window": (without(OLD, END - WINDOW - INTERVAL, END - INTERVAL), 61),
    "restarted": (RESTARTED, 60),
    "restarted before its first sample in the window": (
        without(OLD, END - WINDOW - INTERVAL, END) | counter(END - WINDOW + 60, END, 0, 60),
        59,
    ),
    "Prometheus down in the window": (without(OLD, END - 2400, END - 1200), 60),
    # The events in a gap count when they are seen.
    "unreachable before the window": (without(OLD, END - WINDOW - 1800, END - WINDOW), 90),
    "unreachable at the start of the window": (
        without(OLD, END - WINDOW - 900, END - WINDOW + 900),
        75,
    ),
    # The documented gap of the form: what the first life had at its first sample is missing.
    "born and restarted": (BORN_AND_RESTARTED, 15),
}
"""Samples, and the expected total over the window."""

ESTIMATED = ("restarted", "born and restarted")
"""`increase()` extrapolates by up to one interval."""


@pytest.fixture(scope="module", params=RELEASES)
def prometheus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Run a Prometheus with all series."""
    find: Find = request.param
    lines = [
        f'otel_limits_stops_total{{case="{case}"}} {value} {time}'
        for case, (samples, _) in SERIES.items()
        for time, value in sorted(samples.items())
    ]
    text = "\n".join(("# TYPE otel_limits_stops counter", *lines, "# EOF", ""))
    with remembering(tmp_path_factory.mktemp("prometheus"), text, find=find) as url:
        yield Prometheus(url)


@pytest.mark.parametrize("case", SERIES)
def test_total_of_a_window(prometheus: Prometheus, case: str) -> None:
    """New series count from 0, and no other series counts what it had before the window."""
    expr = queries["total"](f'otel_limits_stops_total{{case="{case}"}}', f"{WINDOW}s")
    found = [line.last for line in prometheus.query(expr, END)]
    _, expected = SERIES[case]
    tolerance = 1.5 if case in ESTIMATED else 0
    assert found == ([] if expected is None else [pytest.approx(expected, abs=tolerance, rel=0)])


@pytest.mark.parametrize("case", [case for case in SERIES if case not in ESTIMATED])
def test_steps_add_up_to_the_total(prometheus: Prometheus, case: str) -> None:
    """Each step of a graph counts whole events, and no event is in two of them."""
    step = 300
    selector = f'otel_limits_stops_total{{case="{case}"}}'
    ahead = queries["total"](selector, f"{step}s", ahead=True)
    starts = range(END - WINDOW, END, step)
    counts = [line.last for start in starts for line in prometheus.query(ahead, start)]
    _, expected = SERIES[case]
    assert all(count == int(count) for count in counts)
    assert sum(counts) == (expected or 0)


@pytest.mark.parametrize(("age", "expected"), [(25, 24 * 60), (23, None)])
def test_cost_is_projected_after_a_day(age: int, expected: float | None, tmp_path: Path) -> None:
    """The pace of the last 24 hours; an hour of data would say anything."""
    samples = counter(END - age * 3600, END, 100, 60)
    lines = [f"otel_limits_cost_usd_total {value} {time}" for time, value in samples.items()]
    text = "\n".join(("# TYPE otel_limits_cost_usd counter", *lines, "# EOF", ""))
    window = TimeRange(start=END - WINDOW, end=END, step=300, scrape_interval=INTERVAL)
    with remembering(tmp_path, text) as url:
        found = Prometheus(url).query(window.fill(queries["PROJECTED_COST"]), END)
        (left,) = Prometheus(url).query(queries["SECONDS_LEFT_IN_MONTH"], END)
    assert [line.last for line in found] == (
        [] if expected is None else [pytest.approx(expected / 86400 * left.last)]
    )
