"""An interrupt that is answered in another process continues its task."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.forking import NEEDED_BY_SDK, forking
from tests.launching import execute
from tests.paths import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Mapping


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


# --- runs of the OpenAI Agents SDK ----------------------------------------------------------------

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
