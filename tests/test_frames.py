"""How deep we go: a runaway agent is far down in recursion when it calls us."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits import Limits, enable
from otel_limits.testing import ScriptedModel, endless, uses

if TYPE_CHECKING:
    from types import FrameType

    from strands import Agent

    from tests.conftest import MakeAgent

PACKAGE = str(Path(otel_limits.__file__).parent)

MOST_IN_A_SPAN = 9
"""Frames of ours on top of each other in a span callback. A processor that needed 25 lost the last
calls of a runaway that died of recursion; one that needed 9 lost none."""

MOST_IN_A_HOOK = 10
"""The same in a hook: two more where a halt is logged, or results are compared."""

MOST_FOR_A_PRICE = 13
"""The same where the price of a call is looked up: a fault there leaves the call unpriced, and
everything else about it is booked."""


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of the package."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class Depths:
    """Notes how many frames of ours each callback has on top of each other."""

    def __init__(self) -> None:
        self.callback: FrameType | None = None
        self.deepest: dict[str, tuple[int, list[str]]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Follow calls and returns."""
        if self.callback is None and event == "call" and is_entrance(frame):
            self.callback = frame
        elif event == "return" and frame is self.callback:
            self.callback = None
        elif self.callback is not None and event == "call" and is_ours(frame):
            self._note([each for each in self._down_from(frame) if is_ours(each)])

    def _down_from(self, frame: FrameType) -> list[FrameType]:
        frames = [frame]
        while frames[-1] is not self.callback and frames[-1].f_back is not None:
            frames.append(frames[-1].f_back)
        return frames[::-1]

    def _note(self, frames: list[FrameType]) -> None:
        names = [frame.f_code.co_name for frame in frames]
        name = next(name for name in names if name != "guarded")
        name += " price" if "quote" in names else ""
        if len(names) > self.deepest.get(name, (0, []))[0]:
            self.deepest[name] = (len(names), names)


PASSAGES = {"_follow", "_follow_call", "_follow_leg", "next_of"}
"""What of ours stands between Strands and the rest, and is gone through at every event."""

AROUND = {"start", "end", "stream"}
"""What is wrapped around methods of Strands."""


def is_entrance(frame: FrameType) -> bool:
    """Return whether the framework, the SDK or a passage between it and us has called us."""
    if not is_ours(frame) or frame.f_code.co_name in PASSAGES | AROUND:
        return False
    caller = frame.f_back
    return caller is None or not is_ours(caller) or caller.f_code.co_name in PASSAGES


def run(agent: Agent, depths: Depths) -> None:
    """Invoke `agent` while `depths` looks on."""

    async def invoke() -> None:
        sys.setprofile(depths)
        try:
            await agent.invoke_async("go")
        finally:
            sys.setprofile(None)

    asyncio.run(invoke())


EVERY_LIMIT = Limits(
    max_turns=4,
    max_iterations=99,
    max_token_budget=10**9,
    max_tool_calls=99,
    max_duration_seconds=600,
    max_identical_tool_calls=99,
)


def most(callback: str) -> int:
    """How deep a callback may go."""
    if callback.endswith(" price"):
        return MOST_FOR_A_PRICE
    return MOST_IN_A_SPAN if callback.startswith("on_") else MOST_IN_A_HOOK


@pytest.mark.parametrize("model_id", ["scripted", "gpt-4o"])
def test_no_callback_is_deep(source: str, model_id: str, make_agent: MakeAgent) -> None:
    """No span callback and no hook stacks more frames of ours than a runaway has left."""
    enable(EVERY_LIMIT)
    agent = make_agent(ScriptedModel(endless(uses("search")), model_id=model_id), tools=[search])
    agent("go")  # what is looked up once is not looked up in the depth
    depths = Depths()
    run(agent, depths)
    expected = {"message_added", "before_tools", "after_tools"}
    expected |= {"on_start", "on_end"} if source == "spans" else {"finish"}
    assert expected <= set(depths.deepest)
    too_deep = {
        name: names for name, (depth, names) in depths.deepest.items() if depth > most(name)
    }
    assert too_deep == {}
