"""An answer to an interrupt of a Strands agent continues its task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent, HookProvider
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager, SnapshotSessionManager
from strands.storage import LocalFileStorage

from otel_limits import (
    Event,
    Limits,
    MaxModelCallsReachedError,
    ModelCall,
    Started,
    Stop,
    enable,
    stop_of,
)
from otel_limits.runs.tasks import MAX_DAYS
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.unit.strands.test_group_calls import Asking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from strands.hooks import HookRegistry

    from otel_limits.testing import FakeTime

pytestmark = pytest.mark.usefixtures("source")


@tool
def send() -> str:
    """Send."""
    return "sent"


class Approval(HookProvider):
    """Waits for a person before each tool."""

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        """Register."""
        registry.add_callback(BeforeToolCallEvent, self.wait)

    def wait(self, event: BeforeToolCallEvent) -> None:
        """Wait."""
        if event.interrupt("approval", reason="May it run?") != "yes":
            event.cancel_tool = "rejected"


def sending(times: int = 20) -> ScriptedModel:
    """A model that requests the tool with other words each time."""
    return ScriptedModel([*[uses("send")] * times, says("done")])


def careful(model: Any, **options: Any) -> Agent:
    """An agent whose tool waits for a person."""
    options = {"tools": [send], "name": "boss", "hooks": [Approval()], **options}
    return Agent(model=model, callback_handler=None, **options)


def approve(agent: Any, result: Any) -> Any:
    """Answer all interrupts with yes."""
    return agent(
        [
            {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
            for each in result.interrupts
        ]
    )


def approve_all(agent: Any, result: Any, most: int = 9) -> tuple[int, Any]:
    """Answer until there are no more interrupts; return the number of answers."""
    approvals = 0
    while result.interrupts and approvals < most:
        approvals, result = approvals + 1, approve(agent, result)
    return approvals, result


def test_new_message_begins_new_task() -> None:
    """A conversation has as many tasks as messages of the user."""
    enable(Limits(max_turns=2))
    agent = careful(ScriptedModel([uses("send"), says("done"), uses("send"), says("done")]))
    for _ in range(2):
        approvals, result = approve_all(agent, agent("go"))
        assert (approvals, result.stop_reason) == (1, "end_turn")


def test_agents_do_not_share_a_task() -> None:
    """Two users, whose models give their tool calls the same IDs."""
    enable(Limits(max_turns=2))
    agents = [careful(ScriptedModel([uses("send"), says("done")])) for _ in range(2)]
    results = [agent("go") for agent in agents]
    for agent, result in zip(agents, results, strict=True):
        assert approve(agent, result).stop_reason == "end_turn"


def test_restored_session_continues_its_task(tmp_path: Path) -> None:
    """A web server creates the agent again for each request."""
    enable(Limits(max_turns=2))
    model = sending()
    result: Any = None
    for _ in range(3):
        manager = FileSessionManager(session_id="1", storage_dir=str(tmp_path))
        agent = careful(model, session_manager=manager)
        result = agent("go") if result is None else approve(agent, result)
    assert (result.stop_reason, model.calls) == ("max_turns", 2)


def test_hook_that_resumes_continues_consecutive_calls() -> None:
    """The legs of one invocation and the answers of persons are different things."""
    enable(Limits(max_consecutive_same_tool=3))
    model = ScriptedModel([uses("send"), says("and"), uses("send"), uses("send"), says("done")])
    agent = careful(model)
    resumes: list[AfterInvocationEvent] = []

    def resume(event: AfterInvocationEvent) -> None:
        if event.result is not None and str(event.result).strip() == "and" and not resumes:
            resumes.append(event)
            event.resume = "go on"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    approvals, result = approve_all(agent, agent("go"))
    assert (approvals, result.stop_reason) == (3, "end_turn")


def test_interrupt_in_sub_agent_continues_its_task_and_its_tree(events: list[Event]) -> None:
    """An agent that is a tool waits for a person through the agent around it."""
    enable(Limits(max_turns=4), tree=Limits(max_model_calls=4), observers=[events.append])
    helper = careful(sending(), name="helper")
    boss = Agent(
        model=ScriptedModel([uses("ask", arguments={"input": "go"}), says("done")]),
        name="boss",
        tools=[helper.as_tool(name="ask", description="Ask.")],
        callback_handler=None,
    )
    approvals, result = approve_all(boss, boss("go"))
    assert len([each for each in events if isinstance(each, ModelCall)]) == 4
    assert (approvals, result.stop_reason) == (3, "max_model_calls")
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert {(each.agent, each.task_id) for each in started} == {
        (each.agent, each.task_id) for each in started[:2]
    }


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_interrupt_in_group_continues_its_tree(kind: str, events: list[Event]) -> None:
    """A graph and a swarm have no model calls themselves, but a tree."""
    enable(tree=Limits(max_model_calls=3), observers=[events.append])
    model = sending()
    agent = careful(model)
    group: Any
    if kind == "graph":
        builder = GraphBuilder()
        builder.set_execution_timeout(60)
        builder.add_node(agent, "boss")
        builder.set_entry_point("boss")
        group = builder.build()
    else:
        group = Swarm([agent])
    approvals, result = approve_all(group, group("go"))
    assert (approvals, model.calls) == (3, 3)
    assert (stop := stop_of(result)) is not None
    assert stop.reason == "max_model_calls"
    assert sum(each.turns for each in events if isinstance(each, Stop)) == 3


def test_resumed_graph_continues_model_calls_outside_agents() -> None:
    """Nodes that are not agents have the limits of their graph."""
    enable(Limits(max_model_calls=3))
    first, last = Asking(endless_hints(), 2, "first"), Asking(endless_hints(), 9, "last")
    builder = GraphBuilder()
    builder.set_execution_timeout(60)
    builder.set_graph_id("team")
    nodes: dict[str, Any] = {"first": first, "boss": careful(sending(1)), "last": last}
    for name, node in nodes.items():
        builder.add_node(node, name)
    builder.set_entry_point("first")
    builder.add_edge("first", "boss")
    builder.add_edge("boss", "last")
    graph = builder.build()
    approve_all(graph, graph("go"))
    assert (first.model.calls, last.model.calls) == (2, 1)
    assert isinstance(last.error, MaxModelCallsReachedError)


def endless_hints() -> ScriptedModel:
    """A model that always answers."""
    return ScriptedModel(endless(says("hint")))


def test_extension_outlives_a_further_interrupt() -> None:
    """The next answer is about a tool, and the limit stays extended."""
    enable(Limits(max_turns=2), action="ask")
    agent = careful(sending(3))
    result, asked = agent("go"), []
    while result.interrupts:
        (question,) = result.interrupts
        is_ours = question.name == "otel_limits"
        asked.append(question.reason["limit"] if is_ours else "tool")
        answer: Any = {"extend": 5} if is_ours else "yes"
        response: Any = {"interruptId": question.id, "response": answer}
        given: Any = [{"interruptResponse": response}]
        result = agent(given)
    assert (asked, result.stop_reason) == (["tool", "tool", "max_turns", "tool"], "end_turn")


def test_loop_over_answers_is_a_loop() -> None:
    """A person who always says yes does not see the other answers."""
    enable(Limits(max_identical_tool_calls=3))
    model = ScriptedModel(endless(uses("send")))
    agent = careful(model)
    approvals, result = approve_all(agent, agent("go"))
    assert (approvals, result.stop_reason, model.calls) == (3, "loop_detected", 3)


# --- after a restart ------------------------------------------------------------------------------


@pytest.fixture
def restart(fake_time: FakeTime) -> Callable[[], None]:
    """Forget what is in memory, as a restart does."""
    return lambda: fake_time.advance(MAX_DAYS * 24 * 60 * 60 + 1)


def files(folder: Path) -> Any:
    """A session manager that keeps each message."""
    return FileSessionManager(session_id="1", storage_dir=str(folder))


def snapshots(folder: Path) -> Any:
    """A session manager that keeps the agent as a whole."""
    return SnapshotSessionManager("1", storage=LocalFileStorage(str(folder)))


def answer_all(create: Callable[[], Any], restart: Callable[[], None]) -> Any:
    """Answer with a new agent or group each time, until there are no more interrupts."""
    result = create()("go")
    for _ in range(9):
        if not result.interrupts:
            return result
        restart()
        result = approve(create(), result)
    raise AssertionError("It never ends.")


async def read_stream(agent: Agent, given: Any) -> Any:
    """Return the result at the end of a stream."""
    return [event async for event in agent.stream_async(given)][-1]["result"]


CALLS: Final[Mapping[str, Callable[[Agent, Any], Any]]] = {
    "call": lambda agent, given: agent(given),
    "invoke_async": lambda agent, given: asyncio.run(agent.invoke_async(given)),
    "stream_async": lambda agent, given: asyncio.run(read_stream(agent, given)),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("manager", [files, snapshots])
def test_session_continues_its_task_after_restart(
    manager: Any, how: str, tmp_path: Path, restart: Callable[[], None], events: list[Event]
) -> None:
    """The interrupt is kept with what was used before it."""
    enable(Limits(max_tool_calls=2), observers=[events.append])
    model = sending()

    def create() -> Any:
        agent = careful(model, session_manager=manager(tmp_path))
        return lambda given: CALLS[how](agent, given)

    result = answer_all(create, restart)
    assert (result.stop_reason, model.calls) == ("max_tool_calls", 3)
    stops = [each for each in events if isinstance(each, Stop)]
    assert [each.turns for each in stops] == [1, 1, 1, 0]
    assert len({each.invocation.task_id for each in stops if each.invocation}) == 1


def test_parallel_interrupts_continue_one_task(tmp_path: Path, restart: Callable[[], None]) -> None:
    """Each answer lets one tool run, and the turn ends with the last one."""
    enable(Limits(max_turns=2))
    model = ScriptedModel(endless(uses("send", "send")))

    def answer(result: Any) -> Any:
        restart()
        agent, (one, *_) = careful(model, session_manager=files(tmp_path)), result.interrupts
        response: Any = {"interruptId": one.id, "response": "yes"}
        given: Any = [{"interruptResponse": response}]
        return agent(given)

    result, answers = careful(model, session_manager=files(tmp_path))("go"), 0
    while result.interrupts and answers < 9:
        answers, result = answers + 1, answer(result)
    assert (answers, result.stop_reason, model.calls) == (4, "max_turns", 2)


def test_snapshot_continues_its_task_after_restart(restart: Callable[[], None]) -> None:
    """An application stores agents itself."""
    enable(Limits(max_turns=2))
    model = sending()
    stored: list[Any] = []

    def create() -> Any:
        agent = careful(model)
        if stored:
            agent.load_snapshot(stored.pop())

        def call(given: Any) -> Any:
            result = agent(given)
            stored.append(agent.take_snapshot(preset="session"))
            return result

        return call

    assert answer_all(create, restart).stop_reason == "max_turns"
    assert model.calls == 2


def test_finished_task_leaves_nothing_in_the_session(tmp_path: Path) -> None:
    """The application's own state of the agent is never touched."""
    enable(Limits(max_turns=9))
    agent = careful(sending(1), session_manager=files(tmp_path))
    result = agent("go")
    assert agent.state.get() == {}
    approve(agent, result)
    stored = [each.read_text() for each in tmp_path.rglob("agent.json")]
    assert [text for text in stored if "otel_limits" in text] == []


def test_sub_agent_continues_its_task_after_restart(
    tmp_path: Path, restart: Callable[[], None], events: list[Event]
) -> None:
    """The session of the agent around it has the tasks of both."""
    enable(Limits(max_turns=4), tree=Limits(max_model_calls=4), observers=[events.append])
    helping, asking = sending(), ScriptedModel([uses("ask", arguments={"input": "go"})])

    def create() -> Agent:
        helper = careful(helping, name="helper")
        tools = [helper.as_tool(name="ask", description="Ask.")]
        manager = files(tmp_path)
        return careful(asking, name="boss", tools=tools, session_manager=manager, hooks=[])

    assert answer_all(create, restart).stop_reason == "max_model_calls"
    assert (asking.calls, helping.calls) == (1, 3)
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert len({each.task_id for each in started}) == 2


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_group_continues_its_tree_after_restart(
    kind: str, tmp_path: Path, restart: Callable[[], None]
) -> None:
    """The session of a group has the usage of its tree."""
    enable(tree=Limits(max_model_calls=3))
    model = sending()

    def create() -> Any:
        manager = files(tmp_path)
        if kind == "swarm":
            return Swarm([careful(model)], id="team", session_manager=manager)
        builder = GraphBuilder()
        builder.set_execution_timeout(60)
        builder.set_graph_id("team")
        builder.set_session_manager(manager)
        builder.add_node(careful(model), "boss")
        builder.set_entry_point("boss")
        return builder.build()

    result = answer_all(create, restart)
    assert model.calls == 3
    assert (stop := stop_of(result)) is not None
    assert stop.reason == "max_model_calls"


@pytest.mark.usefixtures("faulty")
def test_tampered_session_begins_new_task(
    tmp_path: Path, restart: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The agent continues, and the log says with which budget."""
    enable(Limits(max_turns=1))
    model = sending(1)
    result = careful(model, session_manager=files(tmp_path))("go")
    (path,) = tmp_path.rglob("agent.json")
    path.write_text(path.read_text().replace("turns", "tvrns"))
    restart()
    result = approve(careful(model, session_manager=files(tmp_path)), result)
    assert (result.stop_reason, model.calls) == ("end_turn", 2)
    assert "it was changed after it was written" in caplog.text
