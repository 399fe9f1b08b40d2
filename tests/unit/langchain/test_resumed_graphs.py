"""An answer to an interrupt of a graph continues its task, also from its checkpoint alone."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, get_args

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.middleware.human_in_the_loop import DecisionType
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from otel_limits import Event, LimitReachedError, Limits, ModelCall, Started, Stop, enable
from otel_limits.runs.tasks import MAX_DAYS
from otel_limits.testing import ScriptedChatModel, endless, says, uses
from tests.langchain.event_loops import in_loop, with_context
from tests.langchain.graphs import AINVOKE, ASK, CALLS, agent, config, halt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.testing import FakeTime

APPROVE: Final[Any] = Command(resume={"decisions": [{"type": "approve"}]})


@pytest.fixture
def restart(fake_time: FakeTime) -> Callable[[], None]:
    """Forget what is in memory, as a restart does."""
    return lambda: fake_time.advance(MAX_DAYS * 24 * 60 * 60 + 1)


@tool
def send() -> str:
    """Send."""
    return "sent"


def careful(model: Any, **options: Any) -> Any:
    """An agent whose tool waits for a person."""
    asking: Any = HumanInTheLoopMiddleware(interrupt_on={"send": True})
    options = {"checkpointer": InMemorySaver(), "middleware": [asking], **options}
    return agent(model, send, **options)


def sending() -> ScriptedChatModel:
    """A model that requests the tool forever."""
    return ScriptedChatModel(endless(uses("send")))


def approve_all(graph: Any, call: Any, options: Any, between: Any = lambda: None) -> Any:
    """Answer until there are no more interrupts."""
    state = call(graph, ASK, options)
    for _ in range(9):
        if not graph.get_state(options).interrupts:
            return state
        between()
        state = call(graph, APPROVE, options)
    raise AssertionError("The graph never ends.")


@pytest.mark.parametrize("durability", ["async", "sync", "exit"])
@pytest.mark.parametrize("how", ["invoke", in_loop("ainvoke"), "stream", in_loop("astream"), "v2"])
def test_checkpoint_continues_task_after_restart(
    how: str, durability: str, restart: Callable[[], None], events: list[Event]
) -> None:
    """LangGraph continues there, and so does the budget; each invocation reports its own part."""
    enable(max_tool_calls=2, observers=[events.append])
    model = sending()
    graph = careful(model).with_config(durability=durability)
    state = approve_all(graph, CALLS[how], config("1"), restart)
    assert (model.calls, halt_of(state).reason) == (3, "max_tool_calls")
    stops = [each for each in events if isinstance(each, Stop)]
    assert [each.turns for each in stops] == [1, 1, 1, 0]
    assert len({each.invocation.task_id for each in stops if each.invocation}) == 1


DECISIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "edit": {"edited_action": {"name": "send", "args": {}}},
    "reject": {"message": "not now"},
    "respond": {"message": "it was sent"},
}


@pytest.mark.parametrize("kind", [each for each in DECISIONS if each in get_args(DecisionType)])
def test_every_decision_continues_the_task(kind: str, restart: Callable[[], None]) -> None:
    """Not approvals alone."""
    enable(max_turns=2)
    graph = careful(model := sending())
    graph.invoke(ASK, config("1"))
    for _ in range(2):
        restart()
        decision = {"type": kind, **DECISIONS[kind]}
        state = graph.invoke(Command(resume={"decisions": [decision]}), config("1"))
    assert (model.calls, halt_of(state).reason) == (2, "max_turns")


def test_new_message_after_restart_begins_new_task(restart: Callable[[], None]) -> None:
    """The person has changed her mind, and asks for something else."""
    enable(max_turns=1)
    graph = careful(ScriptedChatModel([uses("send"), says("done")]))
    graph.invoke(ASK, config("1"))
    restart()
    assert graph.invoke(ASK, config("1"))["messages"][-1].text == "done"


def test_checkpoint_looks_the_same_to_the_graph() -> None:
    """Nothing but the interrupt is pending, and updates and forks work as without otel-limits."""
    enable(max_turns=9)
    graph = careful(ScriptedChatModel([uses("send"), says("done"), says("done again")]))
    graph.invoke(ASK, config("1"))
    state = graph.get_state(config("1"))
    (waiting,) = state.tasks
    assert (state.next, waiting.error, len(waiting.interrupts)) == ((waiting.name,), None, 1)
    graph.invoke(APPROVE, config("1"))
    again = graph.invoke(APPROVE, state.config)
    assert again["messages"][-1].text == "done again"
    forked = graph.update_state(state.config, {"messages": [("user", "and?")]})
    assert graph.get_state(forked).values["messages"][-1].text == "and?"
    history = [*graph.get_state_history(config("1"))]
    assert not [name for each in history for name in each.values if "limits" in name]


def test_each_fork_continues_from_its_interrupt(restart: Callable[[], None]) -> None:
    """Two answers to one interrupt do not add up."""
    enable(max_turns=2)
    model = sending()
    graph = careful(model)
    graph.invoke(ASK, config("1"))
    first = graph.get_state(config("1")).config
    for calls in (2, 3):
        restart()
        state = graph.invoke(APPROVE, first)
        assert (model.calls, state["messages"][-1].tool_calls != []) == (calls, True)
        assert halt_of(graph.invoke(APPROVE, config("1"))).turns == 0


@pytest.mark.parametrize("how", ["invoke", in_loop("ainvoke")])
def test_answer_after_an_update_of_the_state_continues_its_task(
    how: str, restart: Callable[[], None]
) -> None:
    """A person corrects the state first, which makes another checkpoint without the interrupt."""
    enable(max_turns=2)
    graph = careful(model := sending())
    graph.invoke(ASK, config("1"))
    for text in ("hurry", "please"):
        graph.update_state(config("1"), {"messages": [("user", text)]}, as_node="model")
    restart()
    state = CALLS[how](graph, APPROVE, config("1"))
    assert model.calls == 2
    assert halt_of(CALLS[how](graph, APPROVE, config("1"))).turns == 0
    assert state["messages"][-1].tool_calls


@pytest.mark.parametrize("how", ["invoke", AINVOKE])
def test_interrupt_in_sub_agent_continues_its_task_after_restart(
    how: str, restart: Callable[[], None], events: list[Event]
) -> None:
    """The outermost graph's checkpoint has the tasks of both."""
    enable(Limits(max_turns=9), tree=Limits(max_model_calls=4), observers=[events.append])
    helper = careful(sending(), name="helper", checkpointer=None)

    @tool
    async def ask() -> str:
        """Let another agent do it."""
        return str((await helper.ainvoke(ASK))["messages"][-1].text)

    @tool("ask")
    def ask_at_once() -> str:
        """Let another agent do it."""
        return str(helper.invoke(ASK)["messages"][-1].text)

    boss = create_agent(
        ScriptedChatModel([uses("ask"), says("done")]),
        [ask_at_once if how == "invoke" else ask],
        name="boss",
        checkpointer=InMemorySaver(),
    )
    approve_all(boss, CALLS[how], config("1"), restart)
    assert len([each for each in events if isinstance(each, ModelCall)]) == 4
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert len({each.task_id for each in started}) == 2


class Both(TypedDict):
    """The state of a graph with two branches."""

    texts: Annotated[list[str], operator.add]


def waiting_in(graph: Any, options: Any) -> list[Any]:
    """Return the interrupts without an answer; old versions of LangGraph list the others, too."""
    tasks = graph.get_state(options).tasks
    return [each for task in tasks if task.result is None for each in task.interrupts]


@pytest.mark.parametrize("is_stored", [True, False])
def test_parallel_interrupts_continue_one_task(
    *, is_stored: bool, restart: Callable[[], None]
) -> None:
    """Each answer runs its branch, and the other one waits further in the same checkpoint."""
    enable(max_model_calls=2)
    model = ScriptedChatModel(endless(says("yes")))

    def branch(_: Both) -> Any:
        return {"texts": [f"{interrupt('May it run?')}: {model.invoke('go').text}"]}

    graph: Any = StateGraph(Both)
    for name in "abc":
        graph.add_node(name, branch)
        graph.add_edge(START, name)
    graph = graph.compile(checkpointer=InMemorySaver(), name="branches")
    graph.invoke({"texts": []}, config("1"))
    stop = None
    for _ in range(3):
        if is_stored:
            restart()
        one, *_ = waiting_in(graph, config("1"))
        try:
            graph.invoke(Command(resume={one.id: "ok"}), config("1"))
        except LimitReachedError as error:
            stop = error.stop
    assert (model.calls, stop and stop.reason) == (2, "max_model_calls")


@with_context
def test_reader_that_leaves_at_the_interrupt_does_not_lose_the_task(
    restart: Callable[[], None],
) -> None:
    """A server closes the stream once it has the question."""
    enable(max_turns=1)
    graph = careful(model := sending())
    for chunk in graph.stream(ASK, config("1"), stream_mode="updates"):
        if "__interrupt__" in chunk:
            break

    async def answer() -> None:
        async for _ in graph.astream(APPROVE, config("1")):
            pass

    restart()
    asyncio.run(answer())
    assert model.calls == 1


@pytest.mark.usefixtures("faulty")
def test_tampered_checkpoint_begins_new_task(
    restart: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The graph continues, and the log says with which budget."""
    enable(max_turns=1)
    saver: Any = InMemorySaver()
    graph = careful(model := sending(), checkpointer=saver)
    graph.invoke(ASK, config("1"))
    saved = saver.get_tuple(config("1"))
    assert saved is not None
    (channel,) = [name for _, name, _ in saved.pending_writes or () if "otel_limits" in name]
    saver.delete_thread("1")
    saver.put(
        {**saved.config, "configurable": {"thread_id": "1", "checkpoint_ns": ""}},
        saved.checkpoint,
        saved.metadata,
        saved.checkpoint["channel_versions"],
    )
    for task, name, value in saved.pending_writes or ():
        saver.put_writes(saved.config, [(name, {"turns": 0} if name == channel else value)], task)
    restart()
    graph.invoke(APPROVE, config("1"))
    assert model.calls == 2
    assert "it is not a text but dict" in caplog.text


def test_interrupts_of_parallel_agents_are_answered_one_after_the_other() -> None:
    """An agent whose interrupt is not answered yet runs again, and waits with its own task."""
    enable(Limits(max_turns=2))
    models = [sending(), sending()]
    builder: Any = StateGraph(MessagesState)
    for number, model in enumerate(models):
        worker = careful(model, name=f"worker-{number}", checkpointer=None)
        builder.add_node(f"node-{number}", worker)
        builder.add_edge(START, f"node-{number}")
    graph, options = builder.compile(checkpointer=InMemorySaver(), name="boss"), config("1")
    graph.invoke(ASK, options)
    answers = 0
    while (interrupts := waiting_in(graph, options)) and answers < 9:
        graph.invoke(Command(resume={interrupts[0].id: APPROVE.resume}), options)
        answers += 1
    assert (answers, [each.calls for each in models]) == (4, [2, 2])
