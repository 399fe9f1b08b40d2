"""Annotations mark the right moments, in a real Prometheus."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest
from strands.hooks import BeforeModelCallEvent

import otel_limits
from otel_limits.dashboards.exported_files import directory
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.dashboards.panels import TimeRange
from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import MINUTE, SCRAPES, past, program, remembering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_limits.testing import FakeTime
    from tests.conftest import MakeAgent

STEP = MINUTE * SCRAPES

MARKS_BY_EVENT: dict[str, set[str]] = {
    "started": {"Deployments: agents: version 1.2.3"},
    "changed": {"Policy files: Policy file accepted"},
    "invalid": {"Policy files: Policy file refused"},
    "fixed": {"Policy files: Policy file accepted"},
    "killed": {"Kills: worker was killed"},
    "halted": {"Halts: worker: max_turns"},
    "quiet": set(),
}
"""Events between two scrapes, and their marks."""


@pytest.mark.usefixtures("faulty")
def test_events_are_marked_in_their_step_only(
    make_agent: MakeAgent, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Deployments, new policy files, kills and halts, on every dashboard."""
    program("promtool")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=1.2.3")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(tmp_path / "limits.yaml"))
    events = cause_events(make_agent, fake_time, tmp_path / "limits.yaml")
    scrapes = [served() for _ in events]
    end = time.time() // STEP * STEP
    with remembering(tmp_path, past(scrapes, end)) as url:
        for board in (directory() / "grafana/dashboards").glob("*.json"):
            annotations = json.loads(board.read_text("utf-8"))["annotations"]["list"]
            found = {
                event: set(marked(Prometheus(url), annotations, end - STEP * ago))
                for ago, event in enumerate(reversed(MARKS_BY_EVENT))
            }
            assert found == MARKS_BY_EVENT


def served() -> str:
    """Return the page that a scrape would get."""
    text: bytes = generate_latest(REGISTRY)  # type: ignore[no-untyped-call]
    return text.decode()


def cause_events(make_agent: MakeAgent, fake_time: FakeTime, policy: Path) -> Iterator[None]:
    """Cause each event in turn."""
    policy.write_text("defaults: {limits: {max_turns: 9}}")
    otel_limits.enable()
    finish(make_agent)
    yield
    for text in ("limits: {max_turns: 8}", "action: stop", "limits: {max_turns: 1}"):
        policy.write_text(f"defaults: {{{text}}}")
        # The file is checked at most once a second, when an invocation starts.
        fake_time.advance(1)
        finish(make_agent)
        yield
    killed = make_agent(ScriptedModel([says("done")]), name="worker")
    killed.hooks.add_callback(BeforeModelCallEvent, kill)
    assert killed("go").stop_reason == "killed"
    yield
    runaway = make_agent(ScriptedModel(endless(uses("search"))), name="worker")
    assert runaway("go").stop_reason == "max_turns"
    yield
    yield


def kill(event: BeforeModelCallEvent) -> None:
    """Kill the agent."""
    assert otel_limits.kill(agent=event.agent.name) == 1


def finish(make_agent: MakeAgent) -> None:
    """Run an agent to its natural end."""
    assert make_agent(ScriptedModel([says("done")]), name="worker")("go").stop_reason == "end_turn"


def marked(prometheus: Prometheus, annotations: list[dict[str, Any]], when: float) -> Iterator[str]:
    """Yield the marks of the step that ends then."""
    step = TimeRange(start=when - STEP, end=when, step=STEP, scrape_interval=MINUTE / 2)
    for each in annotations:
        for line in prometheus.query(step.fill(each["expr"]), when):
            # Without the version of otel-limits, which changes with each release
            mark = line.named(each["titleFormat"]).partition(", otel-limits")[0]
            yield f"{each['name']}: {mark}"
