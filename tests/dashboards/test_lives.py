"""An agent that halts before its first scrape in every life, before a real Prometheus 3."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from otel_limits.dashboards import panels
from otel_limits.dashboards.api import Prometheus
from otel_limits.dashboards.files import directory
from otel_limits.dashboards.panels import TimeRange
from tests.dashboards.reconciling import INPUT, OUTPUT, POLICY, agent_of, dollars, model_of
from tests.dashboards.servers import RULES, newer, until, value_of, watched
from tests.dashboards.test_reconciled import Process, Truth, answer
from tests.processes import free_port

LIVES = 3
NUMBER = 1
"""An agent that is halted by max_turns after three turns."""

FEATURE = "created-timestamp-zero-ingestion"


@dataclass(frozen=True)
class Lived:
    """A Prometheus that watched every life, and for how long."""

    prometheus: Prometheus
    window: TimeRange


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    """A supervised process: it halts, is scraped for the first time, and is killed."""
    newer("prometheus")
    place, port = tmp_path_factory.mktemp("lives"), free_port()
    (place / "limits.yaml").write_text(POLICY, encoding="utf-8")
    with watched(place, {"agents": port}, find=newer, features=FEATURE) as url:
        prometheus, start = Prometheus(url), time.time()
        for _ in range(LIVES):
            process = Process(
                place,
                Truth(),
                OTEL_LIMITS_PROMETHEUS_PORT=str(port),
                OTEL_LIMITS_METRICS_CREATED="true",
            )
            try:
                process.hear("ready")
                process.ask([NUMBER])
                process.hear("played")
                scraped_since(prometheus, time.time())
            finally:
                process.kill()
            # Otherwise a scrape may fail between the next creation and the first scrape of it: what
            # such a scrape writes is younger than that 0, which Prometheus drops then.
            until(lambda: value_of(prometheus, "up") == 0, "the end is noticed")
        end = time.time()
        yield Lived(prometheus, TimeRange(start=start, end=end, step=1.0, scrape_interval=1.0))


def scraped_since(prometheus: Prometheus, moment: float) -> None:
    """Wait until Prometheus has seen the halt."""
    query = f'timestamp(otel_limits_stops_total{{agent="{agent_of(NUMBER)}"}} > 0) > {moment}'
    until(lambda: value_of(prometheus, query), "the process is scraped")


def test_every_life_begins_at_zero(lived: Lived) -> None:
    """No scrape saw one: it is put where `_created` says that the counter began."""
    halts = 'otel_limits_stops_total{reason="max_turns",action="halted"}'
    (changes,) = lived.prometheus.query(f"changes({halts}[15m])", lived.window.end)
    (least,) = lived.prometheus.query(f"min_over_time({halts}[15m])", lived.window.end)
    assert (changes.last, least.last) == (2 * LIVES - 1, 0)


def test_the_time_of_creation_is_not_a_series_of_its_own(lived: Lived) -> None:
    """A Prometheus that understands it keeps no `_created`."""
    created = 'count({__name__=~"otel_limits_.+_created"})'
    assert value_of(lived.prometheus, created) == 0


def test_the_rule_counts_every_halt(lived: Lived) -> None:
    """Exactly, and the alert says how many there were."""
    (rule,) = (
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if rule.get("record") == "job_agent_reason:otel_limits_stops:increase15m"
    )
    found = lived.prometheus.query(rule["expr"], lived.window.end)
    assert {(line.labels["reason"], line.last) for line in found} == {("max_turns", LIVES)}


SHOWN = {
    ("agent-limits", "Limits stopped these agents, for these reasons"): (
        f"{agent_of(NUMBER)}: max_turns",
        LIVES,
    ),
    ("agent-limits", "max_turns stopped"): ("", LIVES),
    ("agent-limits", "Limits halted these agents; a diamond leads to the trace"): (
        f"{agent_of(NUMBER)}: max_turns",
        LIVES,
    ),
    ("agent-limits", "These agents took the most turns"): (agent_of(NUMBER), 3 * LIVES),
    ("token-spend", "Agents used these tokens"): ("", 3 * LIVES * (INPUT + OUTPUT)),
    ("token-spend", "These agents cost most"): (
        agent_of(NUMBER),
        dollars(model_of(NUMBER), 3 * LIVES),
    ),
}


@pytest.mark.parametrize(("place", "expected"), SHOWN.items(), ids=[title for _, title in SHOWN])
def test_a_panel_counts_every_life(
    lived: Lived, place: tuple[str, str], expected: tuple[str, float]
) -> None:
    """Halts, turns, tokens and dollars."""
    (target,) = (
        target
        for board in panels.read_all(directory())
        for panel in board.panels
        for target in panel.targets
        if (board.name, panel.title) == place
    )
    name, value = expected
    assert answer(lived.prometheus, lived.window, target) == {name: pytest.approx(value)}
