"""The garbage collector may end a forgotten stream anywhere, also where the thread has a lock."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import enable
from otel_limits.runs.registry import LIVE
from tests.langchain.graphs import ASK, agent, config, looping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import CodeType, FrameType

POLICY = """
defaults:
  limits: {max_turns: 3, max_identical_tool_calls: 9, max_duration_seconds: 600, max_cost_usd: 5}
  conversation: {max_turns: 50_000}
quotas:
  daily: {tokens: 100_000_000, window: day}
  parallel: {concurrency: 5}
"""

PLACES = (
    "/otel_limits/runs/",
    "/otel_limits/quotas/",
    "/otel_limits/observers/",
    "/prometheus_client/metrics.py",
)
"""Files with the locks of an agent's calls."""

PATIENCE = 30
"""Seconds until a thread is taken for blocked, which takes milliseconds otherwise."""


def is_ours(code: CodeType) -> bool:
    """Whether code is in one of these files."""
    return any(each in code.co_filename for each in PLACES)


def call_beside_forgotten(
    number: int,
    is_wanted: Callable[[CodeType], bool],
    at_line: Callable[[CodeType, int, Any], None],
) -> int:
    """Call an agent while another one's stream is left; return the number of its model calls.

    Args:
        number: Of the call, for the names of its agents and conversation.
        is_wanted: Whether the lines of code are of interest.
        at_line: Called before each of these lines, with the stream.
    """
    model, options, name = looping(), config(f"thread {number}"), f"agent-{number}"
    stream = agent(looping(), name=name).stream(ASK, options)
    next(stream)

    def in_frame(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line(frame.f_code, frame.f_lineno, stream)
        return in_frame

    sys.settrace(lambda frame, *_: in_frame if is_wanted(frame.f_code) else None)
    try:
        agent(model, name=name).invoke(ASK, options)
    finally:
        sys.settrace(None)
    stream.close()
    return model.calls


@pytest.mark.timeout(900)
def test_stream_may_be_closed_at_any_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent that runs there has its limit, no thread is blocked, and nothing is left."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    caplog.set_level(logging.ERROR)
    lines: dict[tuple[CodeType, int], None] = {}
    call_beside_forgotten(0, is_ours, lambda code, line, _: lines.setdefault((code, line)))
    calls = {}

    def close_at(number: int, place: tuple[CodeType, int]) -> None:
        def at_line(code: CodeType, line: int, stream: Any) -> None:
            if (code, line) == place:
                sys.settrace(None)
                closed.append(place)
                stream.close()

        calls[place] = call_beside_forgotten(number, lambda code: code is place[0], at_line)

    closed: list[tuple[CodeType, int]] = []
    for number, place in enumerate(lines, 1):
        thread = threading.Thread(target=close_at, args=(number, place), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"blocked by a close at {place}"
    assert len(set(closed)) > 0.9 * len(lines) > 500  # some happen once in a process
    assert calls == dict.fromkeys(lines, 3)
    assert len(LIVE) == 0
    assert caplog.records == []
