"""Halts and questions of graphs that are stored in an asynchronous database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command

from otel_limits import (
    enable,
    is_synthetic,
)
from tests.langchain.graphs import (
    ASK,
    agent,
    config,
    looping,
    unanswered,
)

if TYPE_CHECKING:
    from pathlib import Path


# --- AsyncSqliteSaver -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ainvoke", "astream"])
def test_halt_is_stored_in_an_asynchronous_database(method: str, tmp_path: Path) -> None:
    """Another process continues the thread."""
    enable(max_turns=2)
    model = looping()

    async def call(text: str) -> Any:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads")) as saver:
            graph = agent(model, checkpointer=saver)
            given = {"messages": [("user", text)]}
            if method == "ainvoke":
                await graph.ainvoke(given, config("1"))
            else:
                async for _ in graph.astream(given, config("1")):
                    pass
            return await graph.aget_state(config("1"))

    for calls, text in ((2, "go"), (4, "again")):
        state = asyncio.run(call(text))
        assert (model.calls, state.next) == (calls, ())
        assert is_synthetic(state.values["messages"][-1])
        assert unanswered(state.values["messages"]) == []


def test_question_is_stored_in_an_asynchronous_database(tmp_path: Path) -> None:
    """A human answers after a restart."""
    enable(max_turns=2, action="ask")
    model = looping()

    async def call(given: Any) -> Any:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads")) as saver:
            graph = agent(model, checkpointer=saver)
            await graph.ainvoke(given, config("1"))
            return await graph.aget_state(config("1"))

    assert len(asyncio.run(call(ASK)).interrupts) == 1
    state = asyncio.run(call(Command(resume={"extend": {"max_turns": 1}})))
    assert (model.calls, len(state.interrupts)) == (3, 1)
    state = asyncio.run(call(Command(resume="no")))
    assert (model.calls, state.next) == (3, ())
    assert is_synthetic(state.values["messages"][-1])
    assert unanswered(state.values["messages"]) == []
