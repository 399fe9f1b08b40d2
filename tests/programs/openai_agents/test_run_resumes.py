"""Runs that wait for a human and continue in another process, under limits in each of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forking import NEEDED_BY_SDK, forking
from tests.paths import SCRIPTS

QUESTION = "otel_limits_continue"
PROGRAM = SCRIPTS / "resumed_run.py"


Resumed = Callable[..., Any]


@pytest.fixture(scope="module")
def resumed() -> Iterator[Resumed]:
    """Begin or continue a run in a new process, and return what it has printed."""
    with forking(NEEDED_BY_SDK) as python:

        def resumed(state: Path, way: str, **variables: str) -> Any:
            program = PROGRAM.read_text(encoding="utf-8")
            ended = python.run(program, str(state), way, **variables)
            assert ended.status == 0, ended.log
            return json.loads(ended.output.splitlines()[-1])

        yield resumed


each_way = pytest.mark.parametrize("way", ["run", "run_streamed"])


@each_way
def test_task_continues_in_another_process_with_its_limits(
    resumed: Resumed, way: str, tmp_path: Path
) -> None:
    """The tool that waits runs and counts there, after the first one; the session stays valid."""
    state = tmp_path / "state.json"
    first = resumed(state, way, OTEL_LIMITS_MAX_TURNS="9")
    assert (first["waiting"], first["calls"], first["open"]) == (["delete"], 1, 1)
    second = resumed(state, way, OTEL_LIMITS_MAX_TOOL_CALLS="2")
    assert (second["reason"], second["tools"], second["calls"]) == ("max_tool_calls", 1, 1)
    assert (second["waiting"], second["open"]) == ([], 0)


@each_way
def test_question_is_answered_in_another_process(
    resumed: Resumed, way: str, tmp_path: Path
) -> None:
    """The action there may be another one by now, without which no agent has our tool."""
    state = tmp_path / "state.json"
    asking = {"OTEL_LIMITS_MAX_TURNS": "1", "OTEL_LIMITS_ACTION": "ask"}
    assert resumed(state, way, **asking)["waiting"] == ["delete"]
    assert resumed(state, way, **asking)["waiting"] == [QUESTION]
    ended = resumed(state, way, OTEL_LIMITS_MAX_TURNS="2")
    assert (ended["reason"], ended["calls"], ended["open"]) == ("max_turns", 1, 0)
