"""`total()` of dashboards/queries.py, by a real Prometheus over scripted samples."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import pytest

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

SERIES: dict[str, tuple[Samples, float | None]] = {
    "existed before the window": (OLD, 60),
    "constant": (counter(BEFORE, END, 1000, 10**9), 0),
    "born at 0": (counter(BIRTH, END, 0, 60), 20),
    "born at 7": (counter(BIRTH, END, 7, 60), 27),
    "born with its only sample": ({BIRTH: 2}, 2),
    "ended before the window": (counter(BEFORE, END - WINDOW - 600, 1000, 60), None),
    "one sample in the window": (without(OLD, END - WINDOW - INTERVAL, END - INTERVAL), None),
    "restarted": (OLD | counter(BIRTH, END, 0, 60), 60),
    "Prometheus down in the window": (without(OLD, END - 2400, END - 1200), 60),
    "unreachable before the window": (without(OLD, END - WINDOW - 1800, END - WINDOW), 60),
    "unreachable at the start of the window": (
        without(OLD, END - WINDOW - 900, END - WINDOW + 900),
        45,
    ),
    # The documented gap of the form: the first life is missing.
    "born and restarted": (counter(BIRTH, BIRTH + 600, 5, 60) | counter(END - 300, END, 0, 60), 5),
}
"""Samples, and the expected total over the window."""


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
    # `increase()` extrapolates by up to one interval, and misses the events of one.
    assert found == ([] if expected is None else [pytest.approx(expected, abs=1.5)])
