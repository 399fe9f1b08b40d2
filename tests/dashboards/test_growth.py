"""How much counters went up, by a real Prometheus over samples whose truth is known."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from otel_limits.dashboards.api import Prometheus
from tests.dashboards.servers import ROOT, Find, newer, program, remembering

queries = runpy.run_path(str(ROOT / "dashboards/queries.py"))
"""The code of the dashboards: as a package it has the name of the folder of these tests."""

START = 1_750_000_800
"""The beginning of what was scraped: a full hour, so that steps of any length end on it."""

HOURS = 6
STEP = 120
SELECTOR = "otel_limits_stops_total"


@dataclass
class Series:
    """One process, as it was scraped."""

    name: str
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Time and value of each scrape that succeeded."""
    seen: Counter[int] = field(default_factory=Counter)
    """Events by the time of the scrape that saw them first."""

    def scrape(self, time: int, value: int, events: int) -> None:
        """Add one sample."""
        self.samples.append((time, value))
        self.seen[time] += events


def sparse(interval: int, *, restarts: int = 0, born_at: int = 0) -> Series:
    """A process with an event now and then, some failed scrapes, and restarts."""
    random = Random(f"{interval} {restarts} {born_at}")  # noqa: S311  a script, no secret
    series = Series(f"r{restarts}b{born_at}")
    value, unseen = born_at, born_at
    scrapes = range(START + (3600 if born_at else 0), START + HOURS * 3600, interval)
    begins_again = set(random.sample(scrapes[20:-20], restarts))
    for time in scrapes:
        begins = time in begins_again
        if begins:
            value = unseen = 0
        # A 1 after a 1 is the same 1: what happens at once after a restart cannot be seen.
        happened = not begins and random.random() < interval / 600
        value, unseen = value + happened, unseen + happened
        if random.random() < 0.05 and time not in (scrapes[0], scrapes[-1]):
            continue  # nobody answered
        series.scrape(time, value, unseen)
        unseen = 0
    return series


RESTARTED = "restarted"


def restarted(interval: int) -> Series:
    """A process that begins again every two minutes, when it has counted to one, and says so."""
    series = Series(RESTARTED)
    for time in range(START, START + 3600 + interval, interval):
        begins = (time - START) % 120 == 0
        series.scrape(time, int(not begins), int((time - START) % 120 == interval))
    return series


CRASHING = "crashing"
CRASH_SECONDS = 240


def crashing(interval: int) -> Series:
    """A process that begins again every four minutes, with an event between any two scrapes."""
    series = Series(CRASHING)
    value = 0
    for time in range(START, START + 3600 + interval, interval):
        begins = (time - START) % CRASH_SECONDS == 0
        value = 0 if begins else value + 1
        series.scrape(time, value, int(not begins))
    return series


def written(series: list[Series]) -> str:
    """What promtool makes a database of."""
    lines = [f"# TYPE {SELECTOR.removesuffix('_total')} counter"]
    for each in series:
        lines += [f'{SELECTOR}{{name="{each.name}"}} {value} {t}' for t, value in each.samples]
    return "\n".join((*lines, "# EOF", ""))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((15, program), id="every 15 s"),
        pytest.param((30, program), id="every 30 s"),
        pytest.param((60, program), id="every 60 s"),
        # A window of Prometheus 3 does not have the sample at its left edge.
        pytest.param((30, newer), id="every 30 s, Prometheus 3"),
    ],
)
def scraped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, dict[str, Series]]]:
    """A Prometheus that scraped several processes at one interval."""
    interval: int
    find: Find
    interval, find = request.param
    series = [
        sparse(interval),
        sparse(interval, restarts=3),
        sparse(interval, born_at=7),
        sparse(interval, restarts=1, born_at=2),
        crashing(interval),
        restarted(interval),
    ]
    place = tmp_path_factory.mktemp("prometheus")
    with remembering(place, written(series), find=find) as url:
        yield Prometheus(url), {each.name: each for each in series}


def growth(name: str, over: str) -> str:
    """How much a process counted within a window, as panels and rules ask for it."""
    expr: str = queries["growth"](f'{SELECTOR}{{name="{name}"}}', over)
    return f"sum({expr})"


def bars(prometheus: Prometheus, name: str) -> dict[float, float]:
    """What the steps of a panel show, by the time at which each ends."""
    expr = growth(name, f"{STEP}s")
    return {
        time: line.last
        for time in range(START, START + HOURS * 3600 + STEP, STEP)
        for line in prometheus.query(expr, time)
    }


def truth(series: Series) -> Counter[int]:
    """The same, as it was scripted."""
    counted: Counter[int] = Counter()
    for time, events in series.seen.items():
        counted[-(-time // STEP) * STEP] += events
    return counted


@pytest.mark.parametrize("name", ["r0b0", "r0b7"])
def test_each_step_shows_what_happened_in_it(
    scraped: tuple[Prometheus, dict[str, Series]], name: str
) -> None:
    """To the event, with failed scrapes, and from the first event on."""
    prometheus, series = scraped
    shown, scripted = bars(prometheus, name), truth(series[name])
    assert {time: value for time, value in shown.items() if value} == +scripted


@pytest.mark.parametrize("name", ["r3b0", "r1b2"])
def test_steps_add_up_also_where_a_process_began_again(
    scraped: tuple[Prometheus, dict[str, Series]], name: str
) -> None:
    """No event goes undrawn where none was in doubt, and the sum is that of the counter."""
    prometheus, series = scraped
    shown, scripted = bars(prometheus, name), truth(series[name])
    undrawn = [time for time in +scripted if not shown.get(time)]

    assert undrawn == []
    assert sum(shown.values()) == pytest.approx(scripted.total(), rel=0.01)


@pytest.mark.parametrize("name", ["r0b0", "r3b0", "r0b7", "r1b2"])
def test_a_total_is_that_of_the_counter(
    scraped: tuple[Prometheus, dict[str, Series]], name: str
) -> None:
    """Over the whole time, the first event included; to the event where nothing began again.

    Where something did, several times or to more than it had been, `increase()` stretches what it
    saw: by half an interval at each end, of hundreds.
    """
    prometheus, series = scraped
    expr = growth(name, f"{HOURS + 1}h")
    (line,) = prometheus.query(expr, START + HOURS * 3600)

    stretched = 0 if "r0" in name else 0.005
    assert line.last == pytest.approx(series[name].seen.total(), rel=stretched)


@pytest.mark.parametrize("window", [300, 900])
def test_a_process_that_crashes_again_and_again_is_stretched_a_little(
    scraped: tuple[Prometheus, dict[str, Series]], window: int
) -> None:
    """By 2.2 scrape intervals of its window at most, and what the first of them saw is missing.

    `increase()` stretches what it saw to the edges of its window where these are no more than 1.1
    intervals away, and by half an interval otherwise. No function of Prometheus gives the first
    value of a window, with which one could take that back.
    """
    prometheus, series = scraped
    seen = series[CRASHING].seen
    times = sorted(seen)
    interval = times[1] - times[0]
    for end in range(START + 2 * window + 7, START + 3600, 60):  # not on a scrape
        within = [time for time in times if end - window <= time <= end]
        counted = sum(seen[time] for time in within)
        (line,) = prometheus.query(growth(CRASHING, f"{window}s"), end)
        stretch = 1 + 2.2 * interval / (within[-1] - within[0])
        assert counted - 1 <= line.last <= counted * stretch


def test_a_process_that_is_restarted_at_its_every_halt_is_counted_exactly(
    scraped: tuple[Prometheus, dict[str, Series]],
) -> None:
    """It cannot have halted more often than once in each of its lives."""
    prometheus, series = scraped
    seen = series[RESTARTED].seen
    for lives in (3, 7, 29):
        # From before the first zero of a life to after the last one of another.
        begin = START + 120 - 7
        end = begin + lives * 120
        (line,) = prometheus.query(growth(RESTARTED, f"{end - begin}s"), end)
        assert line.last == sum(seen[time] for time in seen if begin <= time <= end) == lives
