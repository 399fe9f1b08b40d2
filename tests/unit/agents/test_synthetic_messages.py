"""A message counts as synthetic if, and only if, a halt has added it to a conversation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypedDict

import pytest
from agents import SQLiteSession
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic import BaseModel
from strands import Agent, tool

from otel_limits import LimitReachedError, Stop, enable, stop_of
from otel_limits.cli import main
from otel_limits.testing import ScriptedChatModel, ScriptedModel, endless, says, uses
from tests.langchain import graphs
from tests.openai_agents import runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.core.events import Event
    from tests.conftest import Metric
    from tests.ledger.fixtures import LedgerFile

OURS = "This request could not be completed because it took too many steps."


class Opinion(BaseModel):
    """An output that cannot be text."""

    good: bool


class Counter(TypedDict):
    """A state without messages."""

    count: int


def strands() -> str:
    """An agent of Strands, whose last message is the last of its history."""
    search = tool(name="search", description="Search.")(lambda: "Nothing found.")
    model = ScriptedModel(endless(uses("search")))
    agent = Agent(model=model, tools=[search], name="boss", callback_handler=None)
    with contextlib.suppress(LimitReachedError):
        agent("go")
    return str(agent.messages[-1])


def langchain() -> str:
    """An agent of LangChain, which keeps its conversation only in its result."""
    with contextlib.suppress(LimitReachedError):
        return str(graphs.agent(graphs.looping()).invoke(graphs.ASK, graphs.STEPS))
    return ""


def thread() -> str:
    """One whose conversation is in a thread."""
    agent = graphs.agent(graphs.looping(), checkpointer=InMemorySaver())
    with contextlib.suppress(LimitReachedError):
        agent.invoke(graphs.ASK, graphs.config("1"))
    return str(agent.get_state(graphs.config("1")).values["messages"][-1])


def branches() -> str:
    """One whose thread keeps the refused branches pending, without our message."""
    model = ScriptedChatModel(endless(says("x")))

    def find(_: Any) -> Any:
        model.invoke("go")
        return {"messages": []}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("find", find)
    builder.add_conditional_edges(START, lambda state: [Send("find", state)] * 5)
    graph: Any = builder.compile(name="boss", checkpointer=InMemorySaver())
    options = graphs.config("1", max_concurrency=1)
    with contextlib.suppress(LimitReachedError):
        return str(graph.invoke(graphs.ASK, options))
    assert graph.get_state(options).next == ("find", "find")
    return str(graph.get_state(options).values)


def counter() -> str:
    """A graph whose state has no messages."""
    model = ScriptedChatModel(endless(says("x")))

    def count(state: Any) -> Any:
        return {"count": state["count"] + len(model.invoke("go").text)}

    builder = StateGraph(Counter).add_node("count", count).add_edge(START, "count")
    builder.add_conditional_edges("count", lambda _: "count")
    graph: Any = builder.compile(name="boss")
    with contextlib.suppress(LimitReachedError):
        return str(graph.invoke({"count": 0}, graphs.STEPS))
    return ""


def openai(**options: Any) -> str:
    """An agent of the OpenAI Agents SDK, whose conversation is in a session."""
    session = SQLiteSession("1")
    with contextlib.suppress(LimitReachedError):
        runs.CALLS["run"](runs.agent(runs.looping(), **options), session=session)
    items = asyncio.run(session.get_items())
    session.close()
    return str(items[-1])


def typed() -> str:
    """One whose output is not text."""
    return openai(output_type=Opinion)


CASES = [
    (strands, "halt", True),
    (strands, "raise", True),
    (langchain, "halt", True),
    (langchain, "raise", False),
    (thread, "halt", True),
    (thread, "raise", True),
    (branches, "halt", True),
    (branches, "raise", False),
    (counter, "halt", False),
    (counter, "raise", False),
    (openai, "halt", True),
    (openai, "raise", False),
    (typed, "halt", False),
    (typed, "raise", False),
]
each_end = pytest.mark.parametrize(
    ("run", "action", "is_added"), CASES, ids=[f"{run.__name__}-{how}" for run, how, _ in CASES]
)


@each_end
def test_synthetic_messages_are_those_that_were_added(
    run: Callable[[], str], action: Any, events: list[Event], metric: Metric, *, is_added: bool
) -> None:
    """An auditor who reads the conversation finds as many."""
    enable(max_turns=3, action=action, observers=[events.append])
    assert (OURS in run()) == is_added
    (stop,) = (each for each in events if isinstance(each, Stop))
    assert (stop.synthetic, stop.action == "raised") == (is_added, stop.raised)
    labels = {"agent": "boss", "reason": "max_turns"}
    assert metric("otel_limits_synthetic_messages_total", **labels) == is_added


@each_end
def test_ledger_counts_the_synthetic_messages(
    run: Callable[[], str],
    action: Any,
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    *,
    is_added: bool,
) -> None:
    """`audit stops` counts them, whatever the action was."""
    enable(max_turns=3, action=action)
    run()
    capsys.readouterr()
    assert main(["audit", "stops", "--format", "csv"]) == 0
    head, row = (line.split(",") for line in capsys.readouterr().out.splitlines()[:2])
    assert dict(zip(head, row, strict=True))["synthetic_halts"] == str(int(is_added))


def test_error_of_a_halt_has_no_message_in_a_session() -> None:
    """An application that catches it knows what its user will read."""
    enable(max_turns=1, action="raise")
    with pytest.raises(LimitReachedError) as raised:
        runs.CALLS["run"](runs.agent(runs.looping()))
    stop = stop_of(raised.value)
    assert stop is not None
    assert (stop.raised, stop.synthetic) == (True, False)
