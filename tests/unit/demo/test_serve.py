"""Tests of the fleet of `otel-limits demo --serve`: its agents end as planned in each framework."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

import pytest

from otel_limits.bindings.known import OURS
from otel_limits.core.events import Event, ModelCall, Stop
from otel_limits.demo.sample_fleet import AGENTS, INCIDENTS, plan_invocation
from otel_limits.demo.serve import LiveFleet, live_policy
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.bindings.framework import Framework

ENDS = {
    ("sales-analyst", 0, 1): {"sales-analyst": ("max_turns", "halted")},
    ("code-reviewer", 2, 0): {"code-reviewer": ("loop_detected", "halted")},
    ("code-reviewer", 3, 1): {"code-reviewer": ("killed", "killed")},
    ("delivery-watcher", 0, 3): {"delivery-watcher": ("error", "observed")},
    ("support-assistant", 2, 3): {"support-assistant": ("error", "none")},
    ("research-lead", 0, 0): {
        "research-lead": ("end_turn", "none"),
        "research-reader": ("end_turn", "none"),
    },
}
"""Agent, week and weekday: how its first invocation of the day ends, and those of sub-agents."""


class Hurried:
    """An event that is never waited for."""

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        """Return immediately."""
        return False

    is_set = wait


@pytest.mark.parametrize("framework", OURS, ids=lambda each: each.name)
def test_agents_end_as_planned_in_each_framework(framework: Framework, tmp_path: Path) -> None:
    """Their limits halt them, not their scripts. Each has a cost, and some input is cached."""
    path = tmp_path / "limits.yaml"
    path.write_text(json.dumps(live_policy()), encoding="utf-8")
    events: list[Event] = []
    policy_file = PolicyFile(str(path))
    assert policy_file.mistakes == ()
    RUNTIME.start(
        read_settings({"OTEL_LIMITS_QUIET": "true"}).settings, [events.append], policy_file
    )
    fleet = LiveFleet(framework)
    fleet.stopping = Hurried()  # type: ignore[assignment]
    ends, cached = {}, 0
    try:
        for key in ENDS:
            agent, incident = key[0], INCIDENTS.get(key)
            chance = Random(agent)  # noqa: S311  no secret
            fleet.call(plan_invocation(AGENTS[agent], 0.0, chance, (1, 1), incident), chance)
            stops = [event for event in events if isinstance(event, Stop)]
            ends[key] = {each.agent: (each.reason, each.action) for each in stops}
            assert all(each.cost for each in stops)
            calls = [event for event in events if isinstance(event, ModelCall)]
            cached += sum(call.usage.cache_read for call in calls)
            events.clear()
    finally:
        RUNTIME.stop()
    assert ends == ENDS
    assert cached > 0
