"""Streams that fail, that readers cancel or leave, and vendors that stream in their own ways."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from agents import ModelBehaviorError, Runner, SQLiteSession
from openai.types.responses import Response, ResponseIncompleteEvent

from otel_limits import Event, Limits, ModelCall, Stop, ToolCall, enable, stop_of
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedAgentsModel, endless, says, uses
from tests.openai_agents.runs import UNTRACED, agent, halt_of, looping, streamed, unanswered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def stops(events: list[Event]) -> list[tuple[str, int]]:
    """The reason of each stop and its turns."""
    return [(each.reason, each.turns) for each in events if isinstance(each, Stop)]


# --- vendors --------------------------------------------------------------------------------------


class StreamingItems(ScriptedAgentsModel):
    """A vendor whose last event contains no items, as the SDK supports."""

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream the items, and leave them out at the end."""
        async for event in super().stream_response(*args, **options):
            if event.type == "response.completed":
                event.response.output = []
            yield event


def test_tools_of_a_stream_without_items_at_its_end_are_limited(events: list[Event]) -> None:
    """The items that were streamed count."""
    enable(max_tool_calls=3, observers=[events.append])
    model = StreamingItems(endless(uses("search", "search")))
    result = asyncio.run(streamed(agent(model)))
    assert (model.calls, halt_of(result).reason) == (2, "max_tool_calls")
    used = [each.status for each in events if isinstance(each, ToolCall)]
    assert used == ["success", "success", "success", "refused"]


def test_last_answer_of_a_stream_without_items_at_its_end_is_kept() -> None:
    """It is not taken for an empty one."""
    enable(max_turns=1, action="wrap_up")
    model = StreamingItems([uses("search"), says("what I know")])
    result = asyncio.run(streamed(agent(model)))
    assert (result.final_output, halt_of(result).action) == ("what I know", "wrapped_up")


class Incomplete(ScriptedAgentsModel):
    """A vendor that breaks its answer off and bills it."""

    broken = ""

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream the answer, and end it as incomplete if it is the broken one."""
        async for event in super().stream_response(*args, **options):
            if event.type == "response.completed" and event.response.output[-1].type == "message":
                response: Response = event.response
                response.status = "incomplete"
                yield ResponseIncompleteEvent.model_construct(
                    type="response.incomplete", response=response, sequence_number=0
                )
            else:
                yield event


def test_incomplete_answer_is_measured(events: list[Event]) -> None:
    """The SDK raises, and the vendor has reported what it bills."""
    enable(max_turns=9, observers=[events.append])
    with pytest.raises(ModelBehaviorError):
        asyncio.run(streamed(agent(Incomplete([uses("search"), says("half")]))))
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [(each.usage.total, each.estimated) for each in calls] == [(15, False), (15, False)]
    assert stops(events) == [("error", 1)]


def test_incomplete_last_answer_is_replaced() -> None:
    """The run ends with its limit, not with an error of the vendor."""
    enable(max_turns=1, action="wrap_up")
    result = asyncio.run(streamed(agent(Incomplete([uses("search"), says("half")]))))
    assert (halt_of(result).action, halt_of(result).reason) == ("halted", "max_turns")
    assert result.final_output.startswith("This request could not be completed")


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(12))
def test_stream_cancelled_at_any_event_leaves_nothing(number: int, events: list[Event]) -> None:
    """Each call is counted once, and no reservation or invocation remains."""
    enable(tree=Limits(max_turns=3, max_token_budget=999), observers=[events.append])
    model = looping()

    async def main() -> None:
        result = Runner.run_streamed(agent(model), "go", run_config=UNTRACED)
        seen = 0
        async for _ in result.stream_events():
            if seen == number:
                result.cancel()
            seen += 1

    asyncio.run(main())
    assert len([each for each in events if isinstance(each, ModelCall)]) == model.calls
    assert len([each for each in events if isinstance(each, Stop)]) == 1
    assert len(LIVE) == 0


@pytest.mark.parametrize("number", range(12))
def test_session_of_a_stream_cancelled_after_a_turn_goes_on(number: int) -> None:
    """The turn ends with its tools, also if it reaches a limit."""
    enable(max_turns=2)
    model = looping()
    session = SQLiteSession("1")

    async def main() -> Any:
        result = Runner.run_streamed(agent(model), "go", run_config=UNTRACED, session=session)
        seen = 0
        async for _ in result.stream_events():
            if seen == number:
                result.cancel("after_turn")
            seen += 1
        items: list[Any] = list(await session.get_items())
        return result, items

    result, items = asyncio.run(main())
    assert unanswered(items) == []
    assert model.calls <= 2
    if result.final_output is not None:
        assert halt_of(result).reason == "max_turns"
    enable()
    model = ScriptedAgentsModel([says("go on")])
    assert asyncio.run(streamed(agent(model), session=session)).final_output == "go on"
    session.close()


def test_reader_that_leaves_ends_nothing(events: list[Event]) -> None:
    """The SDK's task continues, under its limits."""
    enable(max_turns=3, observers=[events.append])
    model = looping()

    async def main() -> Any:
        result = Runner.run_streamed(agent(model), "go", max_turns=60, run_config=UNTRACED)
        async for _ in result.stream_events():
            break
        assert result.run_loop_task is not None
        await result.run_loop_task
        return result

    result = asyncio.run(main())
    assert (model.calls, halt_of(result).reason) == (3, "max_turns")
    assert stops(events) == [("max_turns", 3)]


def test_unread_stream_is_limited(events: list[Event]) -> None:
    """It runs in its own task."""
    enable(max_turns=3, observers=[events.append])
    model = looping()

    async def main() -> Any:
        result = Runner.run_streamed(agent(model), "go", max_turns=60, run_config=UNTRACED)
        assert result.run_loop_task is not None
        await result.run_loop_task
        return result

    result = asyncio.run(main())
    assert (model.calls, stop_of(result) is not None) == (3, True)
    assert stops(events) == [("max_turns", 3)]


def test_stream_whose_event_loop_ends_is_aborted(events: list[Event]) -> None:
    """The program ends before its agent."""
    enable(tree=Limits(max_turns=3), observers=[events.append])

    async def main() -> None:
        Runner.run_streamed(agent(looping()), "go", run_config=UNTRACED)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [reason for reason, _ in stops(events)] == ["aborted"]
    assert len(LIVE) == 0
