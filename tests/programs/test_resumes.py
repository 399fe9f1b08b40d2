"""An interrupt that is answered in another process continues its task."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.launching import execute

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LANGGRAPH: Final = """
import otel_limits, sys
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command
from otel_limits.testing import ScriptedChatModel, endless, uses

def send() -> str:
    "Send."
    return "sent"

otel_limits.enable(max_turns=2)
model, asking = ScriptedChatModel(endless(uses("send"))), {"send": True}
with SqliteSaver.from_conn_string(sys.argv[1] + "/checkpoints.db") as saver:
    agent = create_agent(
        model,
        [send],
        name="boss",
        checkpointer=saver,
        middleware=[HumanInTheLoopMiddleware(interrupt_on=asking)],
    )
    thread = {"configurable": {"thread_id": "1"}}
    waits = agent.get_state(thread).interrupts
    answer = Command(resume={"decisions": [{"type": "approve"}]})
    stop = otel_limits.stop_of(agent.invoke(answer if waits else {"messages": "go"}, thread))
print(model.calls, stop and stop.reason)
"""

STRANDS: Final = """
import otel_limits, sys
from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.session import FileSessionManager
from otel_limits.testing import ScriptedModel, endless, uses

@tool
def send() -> str:
    "Send."
    return "sent"

def wait(event: BeforeToolCallEvent) -> None:
    if event.interrupt("approval") != "yes":
        event.cancel_tool = "no"

otel_limits.enable(max_turns=2)
manager = FileSessionManager(session_id="1", storage_dir=sys.argv[1])
model = ScriptedModel(endless(uses("send")))
agent = Agent(
    model=model, tools=[send], name="boss", session_manager=manager, callback_handler=None
)
agent.hooks.add_callback(BeforeToolCallEvent, wait)
snapshot = agent.take_snapshot(include=["interrupt_state"]).data["interrupt_state"]
waits = [{"interruptId": each, "response": "yes"} for each in snapshot["interrupts"]]
stop = otel_limits.stop_of(agent([{"interruptResponse": each} for each in waits] or "go"))
print(model.calls, stop and stop.reason)
"""

PROGRAMS: Final[Mapping[str, str]] = {"langgraph": LANGGRAPH, "strands": STRANDS}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_other_processes_continue_a_task(framework: str, tmp_path: Path) -> None:
    """A web application has several workers, and is deployed while persons decide."""
    program = (sys.executable, "-c", PROGRAMS[framework], str(tmp_path))
    ended = [execute(*program) for _ in range(3)]
    assert [each.output.splitlines()[-1:] for each in ended] == [
        ["1 None"],
        ["1 None"],
        ["0 max_turns"],
    ], ended[-1].log
