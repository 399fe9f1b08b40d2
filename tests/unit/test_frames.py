"""Our stack depth: a runaway agent is deep in recursion when it calls us."""

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
"""Our nested frames in a span callback. A processor that needed 25 missed the last
calls of a runaway that died of recursion; one that needed 9 missed none."""

MOST_IN_A_HOOK = 13
"""The same in a hook or at a model call: four more for the path that all frameworks share."""

MOST_FOR_A_PRICE = 16
"""The same while the price of a call is looked up: an error there leaves the call unpriced, but
everything else about it is counted."""


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of the package."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class Depths:
    """Records how many of our frames each callback nests."""

    def __init__(self) -> None:
        self.callback: FrameType | None = None
        self.deepest: dict[str, tuple[int, list[str]]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Trace calls and returns."""
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


PASS_THROUGH = {"_follow", "_follow_leg", "_follow_response", "streamed", "next_of"}
PASS_THROUGH |= {"stream_async"}
"""Our functions between Strands and other code, on the stack of every event."""

WRAPPERS = {"start", "end", "stream"}
"""Our wrappers around methods of Strands."""


def is_entrance(frame: FrameType) -> bool:
    """Return whether the framework, the SDK or a pass-through function called our code."""
    if not is_ours(frame) or frame.f_code.co_name in PASS_THROUGH | WRAPPERS:
        return False
    caller = frame.f_back
    return caller is None or not is_ours(caller) or caller.f_code.co_name in PASS_THROUGH


def run(agent: Agent, depths: Depths) -> None:
    """Invoke `agent` while `depths` traces it."""

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
    """Return the maximum depth of a callback."""
    if callback.endswith(" price"):
        return MOST_FOR_A_PRICE
    return MOST_IN_A_SPAN if callback.startswith("on_") else MOST_IN_A_HOOK


@pytest.mark.parametrize("model_id", ["scripted", "gpt-4o"])
def test_callbacks_stay_shallow(source: str, model_id: str, make_agent: MakeAgent) -> None:
    """A span callback or hook must fit in the few frames that a runaway has left."""
    enable(EVERY_LIMIT)
    model = ScriptedModel(endless(uses("search")), model_id, base_url="https://api.openai.com")
    agent = make_agent(model, tools=[search])
    agent("go")  # the traced runs find all one-time lookups cached
    depths = Depths()
    run(agent, depths)
    expected = {"message_added", "before_tools", "after_tools"}
    expected |= {"on_start", "on_end"} if source == "spans" else {"settle"}
    assert expected <= set(depths.deepest)
    too_deep = {
        name: names for name, (depth, names) in depths.deepest.items() if depth > most(name)
    }
    assert too_deep == {}
