"""Responses that are no longer read: they release their reservation with their invocation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from otel_limits import Event, Limits, enable
from otel_limits.runs.run import Run
from otel_limits.testing import ScriptedModel, endless, says, tokens
from tests.unit.test_tracked_requests import asking, calls, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pytest

PROMPT: Any = [{"role": "user", "content": [{"text": "go"}]}]


def helper() -> ScriptedModel:
    """A model for direct calls by a tool."""
    return ScriptedModel(endless(says("hint", usage=tokens(100))), model_id="helper")


def test_paused_call_of_ended_invocation_reserves_nothing(
    source: str, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree around the ended invocation has as much left as if the call had never been made."""
    enable(tree=Limits(max_model_calls=6), observers=[events.append])
    model, kept, seen = helper(), list[Any](), list[tuple[int, int]]()

    async def keep() -> str:
        stream = model.stream(PROMPT)
        kept.append(stream)
        await anext(stream)  # type: ignore[call-overload]
        return "kept"

    inner = asking(keep)

    async def ask() -> str:
        await inner.invoke_async("go")  # two calls, plus the paused one
        tree = outer_run[0].trees[0]
        seen.append((tree.reserved.model_calls, tree.reserved.tokens))
        for _ in range(2):
            await read(model)
        await kept[0].aclose()
        seen.append((tree.reserved.model_calls, tree.tally.model_calls))
        return "done"

    outer_run: list[Run] = []
    begin = Run.__init__

    def note(run: Run, *args: Any, **named: Any) -> None:
        begin(run, *args, **named)
        outer_run.append(run)

    monkeypatch.setattr(Run, "__init__", note)
    outer = asking(ask)
    outer.name = "outer"
    outer("go")
    assert seen == [(0, 0), (0, 6)]  # of the outer one 1, of the inner one 2, kept 1, others 2
    assert len([each for each in calls(events) if each.model == "helper"]) == 3


def test_paused_call_read_later_is_counted_once(source: str, events: list[Event]) -> None:
    """Its reader was busy when the invocation ended, and then reads it to its end."""
    enable(Limits(max_model_calls=9), observers=[events.append])
    model = helper()

    async def main() -> None:
        tasks, ended = list[asyncio.Task[None]](), asyncio.Event()

        async def later(stream: AsyncGenerator[Any, None]) -> None:
            async for _ in stream:
                await ended.wait()

        async def leave() -> str:
            tasks.append(asyncio.create_task(later(model.stream(PROMPT))))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            return "begun"

        await asking(leave).invoke_async("go")
        ended.set()
        await tasks[0]

    asyncio.run(main())
    late = [each for each in calls(events) if each.model == "helper"]
    assert [(each.kind, each.usage.total) for each in late] == [("measured", 100)]
