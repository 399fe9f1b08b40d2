"""A graph that a limit ends shows that: in its result, or by an exception."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, cast

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, after_model
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

from otel_limits import (
    Event,
    LimitReachedError,
    Limits,
    ModelCall,
    Stop,
    enable,
    is_synthetic,
    kill,
    stop_of,
)
from otel_limits.testing import ScriptedChatModel, says, uses
from tests.langchain.graphs import AINVOKE, ASK, CALLS, STEPS, config, halt_of, search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from otel_limits.testing import Answer

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

TURNS = 3

LAST = "what I know"
"""The model's answer if it is asked for a last one."""


class Route(BaseModel):
    """The decision of a router."""

    next: Literal["worker", "done"]


class Honest(ScriptedChatModel):
    """Answers in text if it is asked for a last answer, as a provider would."""

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        super().__init__((self.answer(each) for each in script), **fields)

    def answer(self, answer: Answer) -> Answer:
        """Return an answer, or a text if it is the last one."""
        return says(LAST) if self.was_asked else answer

    @property
    def was_asked(self) -> bool:
        """True if the last request asks for a last answer."""
        return "final answer" in str(self.requests[-1][-1].content)


def searching() -> Iterator[Answer]:
    """Request the same tool forever."""
    while True:
        yield uses("search", arguments={"query": "x"})


def routing() -> Iterator[Answer]:
    """Send every finding back to work."""
    while True:
        yield uses("Route", arguments={"next": "worker"})
        yield says("a finding")


# --- where the last answer is asked ---------------------------------------------------------------


def loop(
    model: Any,
    condition: Any = None,
    *,
    binding: Any = None,
    state: Any = MessagesState,
    after: str = "",
    **more: Any,
) -> Any:
    """The loop of tools that people write by hand."""
    bound = model.bind_tools([search], **(binding or {}))

    def think(state: Any) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    def goes_on(state: Any) -> Any:
        return "tools" if state["messages"][-1].tool_calls else (after or END)

    builder = StateGraph(state, **more)
    builder.add_node("think", think)
    builder.add_node("tools", ToolNode([search]))
    builder.add_edge(START, "think").add_edge("tools", "think")
    builder.add_conditional_edges("think", goes_on, *([condition] if condition else []))
    if after:
        builder.add_node(after, lambda _: {"messages": []}).add_edge(after, END)
    return builder.compile(name="boss")


def commanded(model: Any) -> Any:
    """The same with nodes that name the next one."""
    bound = model.bind_tools([search])

    def think(state: Any) -> Command[Literal["tools", "__end__"]]:
        answer = bound.invoke(state["messages"])
        goto: Any = "tools" if answer.tool_calls else END
        return Command(goto=goto, update={"messages": [answer]})

    builder = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think")
    builder.add_node("tools", ToolNode([search])).add_edge("tools", "think")
    return builder.compile(name="boss")


def functional(model: Any) -> Any:
    """The same as a function."""
    bound = model.bind_tools([search])

    @entrypoint()
    def boss(messages: list[Any]) -> Any:
        while True:
            answer = bound.invoke(messages)
            messages = [*messages, answer]
            if not answer.tool_calls:
                return messages
            messages += [
                ToolMessage(search(), tool_call_id=each["id"]) for each in answer.tool_calls
            ]

    return boss


def threaded(model: Any) -> Any:
    """The same, with model calls in threads that know no node."""
    ask = model.bind_tools([search]).invoke

    def think(state: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            return {"messages": [pool.submit(ask, state["messages"]).result()]}

    builder = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think")
    builder.add_node("tools", ToolNode([search])).add_edge("tools", "think")
    builder.add_conditional_edges("think", tools_condition)
    return builder.compile(name="boss")


@after_model
def watch(state: Any, runtime: Any) -> None:
    """A node between the model's and the end."""


def in_node(graph: Any, state: Any = MessagesState) -> Any:
    """A graph with another one as its node."""
    builder = StateGraph(state).add_node("inner", graph).add_edge(START, "inner")
    return builder.compile(name="outer")


def called_in_node(graph: Any) -> Any:
    """A graph with a node that calls another one."""

    def node(state: Any) -> Any:
        return {"messages": graph.invoke(state, STEPS)["messages"]}

    return in_node(node)


def router(model: Any, **options: Any) -> Any:
    """A worker and a router, which ends only if the router says so."""
    asked = model.with_structured_output(Route, **options)

    def route(state: Any) -> Any:
        return {"messages": [("user", f"next: {asked.invoke(state['messages']).next}")]}

    builder = StateGraph(MessagesState).add_node("route", route).add_edge(START, "route")
    builder.add_node("worker", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_conditional_edges(
        "route", lambda state: END if "done" in state["messages"][-1].text else "worker"
    )
    return builder.add_edge("worker", "route").compile(name="boss")


def summarizing(model: Any) -> Any:
    """An agent whose conversation is too long after its third turn."""
    options: Any = {"trigger": ("messages", 7), "keep": ("messages", 1)}
    if "trigger" not in inspect.signature(SummarizationMiddleware).parameters:  # LangChain 1.0
        options = {
            "max_tokens_before_summary": 7,
            "messages_to_keep": 1,
            "token_counter": len,
        }
    middleware: Any = [SummarizationMiddleware(model, **options)]
    return create_agent(model, [search], middleware=middleware, name="boss")


ASKED: dict[str, Callable[[Any], Any]] = {
    "create_agent": lambda model: create_agent(model, [search], name="boss"),
    "create_agent-with-a-node-after-the-model": lambda model: create_agent(
        model,
        [search],
        middleware=[watch],
        name="boss",
    ),
    "create_agent-with-a-type": lambda model: create_agent(
        model, [search], response_format=ToolStrategy(Route), name="boss"
    ),
    "create_react_agent": lambda model: create_react_agent(model, [search], name="boss"),
    "loop": loop,
    "loop-with-a-map": lambda model: loop(model, {"tools": "tools", END: END}),
    "loop-with-commands": commanded,
    "functional": functional,
    "free-choice": lambda model: loop(model, binding={"tool_choice": {"type": "auto"}}),
}
"""Graphs that can end with a last answer."""

NOT_ASKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "router": (router, "the call in node 'worker' offers no tools"),
    "router-by-function": (
        lambda model: router(model, method="function_calling"),
        "the call in node 'worker' offers no tools",
    ),
    "forced": (lambda model: loop(model, binding={"tool_choice": "any"}), "more than text"),
    "forced-tool": (
        lambda model: loop(model, binding={"tool_choice": {"name": "search"}}),
        "more than text",
    ),
    "schema": (lambda model: loop(model, binding={"response_format": Route}), "more than text"),
    "no-way-to-the-end": (
        lambda model: loop(model, {"tools": "tools", "publish": "publish"}, after="publish"),
        "no edge from node 'think' leads to END",
    ),
    "node": (lambda model: in_node(ASKED["create_agent"](model)), "'boss' is a part of another"),
    "called-in-node": (
        lambda model: called_in_node(ASKED["create_agent"](model)),
        "'boss' is a part of another",
    ),
    "loop-in-node": (lambda model: in_node(loop(model)), "'boss' is a part of another"),
    "thread": (threaded, "the node of the call is unknown"),
    "summary": (summarizing, "offers no tools"),
}
"""Graphs in which something else would take the last answer."""


def given_to(graph: Any) -> Any:
    """Return the input of a graph."""
    return ASK if "messages" in graph.channels else [HumanMessage("go")]


@pytest.mark.parametrize("build", ASKED.values(), ids=ASKED)
def test_graph_that_can_end_with_a_last_answer_does(build: Callable[[Any], Any]) -> None:
    """The answer of a loop of tools is the graph's result."""
    enable(max_turns=TURNS, action="wrap_up")
    graph = build(model := Honest(searching()))
    result = graph.invoke(given_to(graph), STEPS)
    assert (model.calls, model.was_asked) == (TURNS + 1, True)
    messages = result["messages"] if isinstance(result, dict) else result
    assert messages[-1].text == LAST
    assert halt_of(result).action == "wrapped_up"


@pytest.mark.parametrize(("build", "reason"), NOT_ASKED.values(), ids=NOT_ASKED)
def test_graph_that_expects_more_than_text_is_halted_plainly(
    build: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that gets nothing of its call would go on with it, and the log says why it is none."""
    enable(max_turns=TURNS, action="wrap_up")
    script = routing() if "route" in build(Honest(())).nodes else searching()
    graph = build(model := Honest(script))
    state = graph.invoke(ASK, STEPS)
    assert (model.calls, model.was_asked) == (TURNS, False)
    assert is_synthetic(state["messages"][-1])
    assert halt_of(state).reason == "max_turns"
    assert reason in halt_of(state).sentence
    assert halt_of(state).sentence in caplog.text


@pytest.mark.parametrize("turns", range(1, 7))
def test_router_never_gets_nothing(turns: int) -> None:
    """Neither an odd nor an even limit reaches a node."""
    enable(max_turns=turns, action="wrap_up")
    graph = router(model := Honest(routing()))
    stop = halt_of(graph.invoke(ASK, STEPS))
    assert (stop.turns, model.calls) == (turns, turns)
    assert ("'route' must return more than text" in stop.sentence) == (turns % 2 == 0)


def test_agent_in_a_tool_of_a_graph_gives_its_last_answer() -> None:
    """Its answer is the tool's result, so no code takes it for a finished one."""
    enable(max_turns=TURNS, action="wrap_up")
    inner = ASKED["create_agent"](model := Honest(searching()))

    def ask() -> str:
        """Ask."""
        return str(inner.invoke(ASK, STEPS)["messages"][-1].text)

    outer: Any = create_agent(ScriptedChatModel([uses("ask"), says("done")]), [ask], name="outer")
    state = outer.invoke(ASK, STEPS)
    assert [each.text for each in state["messages"] if each.type == "tool"] == [LAST]
    assert (model.calls, stop_of(state)) == (TURNS + 1, None)


def test_supervisor_writes_the_last_answer_of_the_tree() -> None:
    """When it is entered again: an agent that it has called does not, and is halted."""
    from langgraph_supervisor import create_supervisor

    enable(tree=Limits(max_turns=5), action="wrap_up")
    helper = create_agent(Honest(searching()), [search], name="helper")
    boss = Honest([uses("transfer_to_helper"), says("what I know")])
    team = create_supervisor([helper], model=boss, supervisor_name="boss")
    graph: Any = team.compile(name="team")
    state = graph.invoke(ASK, STEPS)
    assert (halt_of(state).reason, halt_of(state).agent) == ("max_turns", "boss")
    assert state["messages"][-1].text == "what I know"
    assert not is_synthetic(state["messages"][-1])


def test_turns_without_requests_are_not_refused_turns() -> None:
    """A graph that writes two texts and then requests a tool beyond its cap continues."""
    enable(max_calls_per_tool={"search": 1})
    texts = [says("a plan"), says("a better plan")]
    model = Honest([uses("search"), *texts, uses("search"), says("done")])

    def think(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def route(state: MessagesState) -> str:
        last: Any = state["messages"][-1]
        return "tools" if last.tool_calls else END if last.text == "done" else "think"

    builder = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think")
    builder.add_node("tools", ToolNode([search])).add_edge("tools", "think")
    builder.add_conditional_edges("think", route)
    state = builder.compile(name="thinker").invoke(ASK, STEPS)
    assert (state["messages"][-1].text, stop_of(state)) == ("done", None)


@pytest.mark.parametrize("name", ["agent", None])
def test_unnamed_agents_do_not_answer_for_the_tree(name: str | None) -> None:
    """All of them have one name, so it is not known which of them the tree has begun with."""
    enable(tree=Limits(max_turns=2), action="wrap_up")
    model = Honest([says("done")] * 9)
    named = [{} if name is None else {"name": f"{name} {n}"} for n in range(3)]
    builder = StateGraph(MessagesState)
    builder.add_sequence(
        [(f"step {n}", create_agent(model, [search], **named[n])) for n in range(3)]
    )
    builder.add_edge(START, "step 0")
    state: Any = builder.compile(name="pipeline").invoke(ASK, STEPS)
    assert model.calls == 2
    assert is_synthetic(state["messages"][-1])


# --- states ---------------------------------------------------------------------------------------


class Replaced(TypedDict):
    """A state whose messages are replaced by each node."""

    messages: list[AnyMessage]


class Typed(BaseModel):
    """A state of pydantic, with a field like that of LangGraph's results."""

    messages: Annotated[list[AnyMessage], add_messages] = []
    value: int = 0


@dataclasses.dataclass
class Data:
    """A state as a dataclass."""

    messages: Annotated[list[AnyMessage], add_messages] = dataclasses.field(default_factory=list)


class Texts(TypedDict):
    """A state whose messages are texts."""

    messages: Annotated[list[str], operator.add]


class Other(TypedDict):
    """A state without messages."""

    notes: Annotated[list[str], operator.add]


class Report(TypedDict):
    """An output without messages."""

    report: str


class Full(MessagesState):
    """A state with more than messages."""

    report: str


def endless_in(state: Any, write: Callable[[Any], Any], **more: Any) -> Callable[[Any], Any]:
    """Build a graph of one node that calls the model with tools until it requests none."""

    def build(model: Any) -> Any:
        bound = model.bind_tools([search])

        def think(_: Any) -> Any:
            answer = bound.invoke("go")
            way = "think" if answer.tool_calls else END
            # Only what is no request is stored, so the conversation stays valid.
            return Command(goto=way, update={} if answer.tool_calls else write(answer))

        builder: Any = StateGraph(state, **more)
        builder.add_node("think", think).add_edge(START, "think")
        return builder.compile(name="boss")

    return build


def flow(result: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Build a function that calls the model with tools until it requests none."""

    def build(model: Any) -> Any:
        bound = model.bind_tools([search])

        @entrypoint()
        def boss(asked: Any) -> Any:
            while (answer := bound.invoke(str(asked))).tool_calls:
                pass
            return result(answer)

        return boss

    return build


STATES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "messages": (endless_in(MessagesState, lambda it: {"messages": [it]}), True),
    "replaced": (endless_in(Replaced, lambda it: {"messages": [it]}), True),
    "pydantic": (endless_in(Typed, lambda it: {"messages": [it]}), True),
    "dataclass": (endless_in(Data, lambda it: {"messages": [it]}), True),
    "dict": (endless_in(dict, lambda it: {"messages": [it]}), False),
    "texts": (endless_in(Texts, lambda it: {"messages": [it.text]}), False),
    "other": (endless_in(Other, lambda it: {"notes": [it.text]}), False),
    "output": (
        endless_in(Full, lambda it: {"report": it.text}, output_schema=Report),
        False,
    ),
    "copied": (endless_in(MessagesState, lambda it: {"messages": [("ai", it.text)]}), True),
    "changed": (endless_in(MessagesState, lambda it: {"messages": [("ai", f"{it.text}!")]}), True),
    "dropped": (endless_in(MessagesState, lambda _: {"messages": []}), True),
    "asked-again": (
        endless_in(MessagesState, lambda it: {"messages": [it, HumanMessage("more?")]}),
        True,
    ),
    "function-of-messages": (flow(lambda it: [it]), False),
    "function-of-a-state": (flow(lambda it: {"messages": [it]}), False),
    "function-of-a-text": (flow(lambda it: it.text), False),
    "function-of-a-number": (flow(lambda it: len(it.text)), False),
}
"""Shapes of a state, and whether it can show every halt."""


each_state = pytest.mark.parametrize(("build", "shows"), STATES.values(), ids=STATES)


@each_state
def test_graph_ended_by_a_limit_shows_it_or_raises(
    build: Callable[[Any], Any], *, shows: bool
) -> None:
    """A cut result must not pass for a finished one."""
    shows_halt_or_raises(build, "v2", "halt", shows=shows)


@each_state
@pytest.mark.parametrize("how", [("v1", "halt"), ("v2", "raise"), ("v1", "wrap_up"), ("v2", "ask")])
def test_graph_ended_by_another_action_shows_it_or_raises(
    build: Callable[[Any], Any], how: tuple[Any, Any], *, shows: bool
) -> None:
    """The same, also in the older form of a result."""
    shows_halt_or_raises(build, *how, shows=shows)


def shows_halt_or_raises(
    build: Callable[[Any], Any], version: Any, action: Any, *, shows: bool
) -> None:
    """End a graph, and look for its halt."""
    enable(max_turns=TURNS, action=action)
    graph = build(model := Honest(searching()))
    given: Any = ASK if "messages" in graph.channels else {}
    if build is STATES["texts"][0]:
        given = {"messages": ["go"]}
    try:
        stop = stop_of(graph.invoke(given, STEPS, version=version))
    except LimitReachedError as error:
        stop = error.stop
        assert action == "raise" or not shows
        assert stop is not None
        assert stop.action == ("wrapped_up" if action == "wrap_up" else "raised")
    else:
        assert action != "raise"
    assert stop is not None
    assert stop.reason == "max_turns"
    assert model.calls == TURNS + (action == "wrap_up")


@pytest.mark.parametrize("name", ["copied", "asked-again"])
def test_last_answer_is_in_the_result_once(name: str) -> None:
    """A node that stores a copy of it has stored it."""
    enable(max_turns=TURNS, action="wrap_up")
    state = STATES[name][0](Honest(searching())).invoke(ASK, STEPS)
    assert [each.text for each in state["messages"]].count(LAST) == 1
    assert not is_synthetic(next(each for each in state["messages"] if each.text == LAST))


@pytest.mark.parametrize("keys", [["report"], "report", "messages"])
def test_caller_who_asks_for_other_keys_gets_the_exception(keys: Any) -> None:
    """Its result has no place for our message."""
    enable(max_turns=TURNS)
    graph = endless_in(Full, lambda it: {"report": it.text})(Honest(searching()))
    with pytest.raises(LimitReachedError):
        graph.invoke(ASK, STEPS, output_keys=keys)


def test_stored_conversation_without_a_reducer_is_kept() -> None:
    """An update would replace it."""
    enable(max_turns=TURNS)
    graph = loop(Honest(searching()), state=Replaced)
    graph.checkpointer = InMemorySaver()
    graph.invoke(ASK, config("1"))
    kept = graph.get_state(config("1")).values["messages"]
    assert is_synthetic(kept[-1])
    assert len(kept) > 1


# --- what nodes do --------------------------------------------------------------------------------


def streaming(model: Any, read: Callable[[Any], Any], **options: Any) -> Any:
    """A graph whose node reads the model's stream itself."""
    bound = model.bind_tools([search])

    def think(state: Any) -> Any:
        return {"messages": [read(bound.stream(state["messages"]))]}

    builder = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think")
    builder.add_node("tools", ToolNode([search])).add_edge("tools", "think")
    builder.add_conditional_edges(
        "think", lambda state: "tools" if state["messages"][-1].tool_calls else END
    )
    return builder.compile(name="boss", **options)


def merged(chunks: Any) -> Any:
    """The answer that a node makes of a stream."""
    first, *rest = chunks
    return first.__add__(rest) if rest else first


def test_last_answer_merged_by_a_node_shows_the_halt() -> None:
    """The node never sees the message that we mark; the thread stores the mark, too."""
    enable(max_turns=TURNS, action="wrap_up")
    graph = streaming(Honest(searching()), merged, checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config("1"))
    assert [each.text for each in state["messages"]].count(LAST) == 1
    assert halt_of(state).action == "wrapped_up"
    kept = graph.get_state(config("1"))
    assert halt_of(kept.values).action == "wrapped_up"
    assert len(kept.values["messages"]) == len(state["messages"])
    assert kept.next == ()


def with_note(text: AnyMessage, **options: Any) -> Any:
    """A tool loop by hand, whose last answer is followed by a message of another node."""
    model = Honest(searching())

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools([search]).invoke(state["messages"])]}

    def chosen(state: MessagesState) -> str:
        return tools_condition(cast("Any", state)).replace(END, "note")

    builder = StateGraph(MessagesState)
    builder.add_node("model", call)
    builder.add_node("tools", ToolNode([search]))
    builder.add_node("note", lambda _: {"messages": [text]})
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", chosen, ["tools", "note", END])
    builder.add_edge("tools", "model")
    return builder.compile(**options)


@pytest.mark.parametrize("text", [HumanMessage("thanks"), AIMessage("bye")], ids=["user", "model"])
@pytest.mark.parametrize("how", ["invoke", AINVOKE])
def test_thread_shows_the_halt_whatever_follows_the_last_answer(text: Any, how: str) -> None:
    """Its state is that of the result, with the answer once."""
    enable(max_turns=TURNS, action="wrap_up")
    graph = with_note(text, checkpointer=InMemorySaver())
    result = CALLS[how](graph, ASK, config("1"))
    stored = graph.get_state(config("1"))
    assert (halt_of(result).reason, halt_of(stored.values).reason) == ("max_turns", "max_turns")
    assert [each.text for each in stored.values["messages"]] == [
        each.text for each in result["messages"]
    ]
    assert [each.text for each in stored.values["messages"]].count(LAST) == 1
    assert stored.next == ()


def test_last_answer_beside_a_refused_branch_is_in_the_result_and_the_thread() -> None:
    """The refusal ends the graph before the step with the answer has ended."""
    enable(max_turns=1, action="wrap_up")
    model = Honest(says("a finding") for _ in range(9))
    bound = model.bind_tools([search])

    def think(state: Any) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    for name in "abc":
        builder.add_node(name, think).add_edge(START, name)
    graph: Any = builder.compile(name="boss", checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config("1", max_concurrency=1))
    assert model.calls == 2
    stored = graph.get_state(config("1"))
    assert (stored.next, halt_of(stored.values).action) == ((), "wrapped_up")
    assert halt_of(state).action == "wrapped_up"
    assert LAST in [each.text for each in state["messages"]]


@pytest.mark.parametrize("action", ["halt", "raise", "wrap_up"])
def test_node_that_handles_the_refusal_does_not_hide_it(action: Any, events: list[Event]) -> None:
    """`gather` returns even what is no `Exception`."""
    enable(max_turns=1, action=action, observers=[events.append])
    model = Honest(says("a finding") for _ in range(9))

    async def think(state: Any) -> Any:
        asked = [model.ainvoke(state["messages"]) for _ in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {"messages": [each for each in found if isinstance(each, AIMessage)]}

    graph = in_node(think)
    if action == "raise":
        with pytest.raises(LimitReachedError):
            asyncio.run(graph.ainvoke(ASK, STEPS))
    else:
        state = asyncio.run(graph.ainvoke(ASK, STEPS))
        assert halt_of(state).reason == "max_turns"
        assert is_synthetic(state["messages"][-1])
    assert [each.reason for each in events if isinstance(each, Stop)] == ["max_turns"]
    assert model.calls == 1


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_kill_after_the_last_call_shows_in_the_result(action: Any) -> None:
    """The answer stays, as with other frameworks."""
    enable(max_turns=9, action=action)
    graph = StateGraph(MessagesState)
    model = Honest([says("done")])
    graph.add_node("think", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("late", lambda _: {"messages": [] if kill(agent="boss") else ["missed"]})
    graph.add_edge(START, "think").add_edge("think", "late")
    boss: Any = graph.compile(name="boss")
    if action == "raise":
        with pytest.raises(LimitReachedError):
            boss.invoke(ASK, STEPS)
    else:
        state = boss.invoke(ASK, STEPS)
        assert (state["messages"][-1].text, halt_of(state).reason) == ("done", "killed")
        assert not is_synthetic(state["messages"][-1])


# --- formatting an answer -------------------------------------------------------------------------

FINE = "It is fine."


def formatting(model: Any, **options: Any) -> Any:
    """A loop of tools, then a node that gives its answer another form."""
    asked = model.with_structured_output(Route)
    if retries := options.pop("retries", 0):
        asked = asked.with_retry(stop_after_attempt=retries, wait_exponential_jitter=False)

    class Formatted(MessagesState):
        route: Route

    graph = loop(model, after="publish", state=Formatted).builder
    graph.nodes.pop("publish")
    graph.add_node("publish", lambda state: {"route": asked.invoke(state["messages"])})
    return graph.compile(name="boss", **options)


FORMATTING: dict[str, Callable[..., Any]] = {
    "create_react_agent": lambda model, **options: create_react_agent(
        model, [search], response_format=Route, name="boss", **options
    ),
    "by-hand": formatting,
}


def answering(*forms: Answer) -> ScriptedChatModel:
    """A model that answers after a tool, and then gives its answer another form."""
    forms = forms or (uses("Route", arguments={"next": "done"}),)
    return ScriptedChatModel([uses("search", arguments={"query": "x"}), says(FINE), *forms])


@pytest.mark.parametrize("name", ["max_turns", "max_iterations", "tree"])
@pytest.mark.parametrize("how", ["invoke", AINVOKE, "stream"])
@pytest.mark.parametrize("build", FORMATTING.values(), ids=FORMATTING)
def test_formatting_an_answer_is_not_a_turn(
    build: Callable[..., Any], how: str, name: str, events: list[Event]
) -> None:
    """The agent has answered with its last turn, and the user would read that it has not."""
    limits: Any = {"tree": Limits(max_turns=2)} if name == "tree" else {name: 2}
    enable(**limits, observers=[events.append])
    model = answering()
    state = CALLS[how](build(model), ASK, STEPS)
    assert stop_of(state) is None
    assert state.get("structured_response", state.get("route")) == Route(next="done")
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (model.calls, stop.model_calls, stop.turns) == (3, 3, 2)
    assert [each.side for each in events if isinstance(each, ModelCall)] == [False, False, True]


@pytest.mark.parametrize("action", ["halt", "raise", "wrap_up"])
@pytest.mark.parametrize("how", ["invoke", AINVOKE, "stream", "v2"])
@pytest.mark.parametrize("build", FORMATTING.values(), ids=FORMATTING)
def test_answer_stays_readable_if_formatting_it_is_refused(
    build: Callable[..., Any], how: str, action: Any
) -> None:
    """It has the stop as well, in the result and in the thread."""
    enable(max_model_calls=2, action=action)
    model = answering()
    graph = build(model, checkpointer=InMemorySaver())
    if action == "raise":
        with pytest.raises(LimitReachedError):
            CALLS[how](graph, ASK, config("1"))
    else:
        state = CALLS[how](graph, ASK, config("1"))
        assert (state["messages"][-1].text, halt_of(state).reason) == (FINE, "max_model_calls")
        assert not is_synthetic(state["messages"][-1])
    assert model.calls == 2
    stored = graph.get_state(config("1"))
    assert [each.type for each in stored.values["messages"]] == ["human", "ai", "tool", "ai"]
    assert (stored.values["messages"][-1].text, stored.next) == (FINE, ())
    assert halt_of(stored.values).reason == "max_model_calls"


@pytest.mark.parametrize("how", ["invoke", AINVOKE, "stream"])
@pytest.mark.parametrize("build", FORMATTING.values(), ids=FORMATTING)
def test_last_answer_is_not_left_to_be_formatted(build: Callable[..., Any], how: str) -> None:
    """The thread ends with it, and a call without input pays for nothing."""
    enable(max_turns=1, action="wrap_up")
    model = answering()
    graph = build(model, checkpointer=InMemorySaver())
    state = CALLS[how](graph, ASK, config("1"))
    assert (state["messages"][-1].text, halt_of(state).reason) == (FINE, "max_turns")
    stored = graph.get_state(config("1"))
    assert (stored.values["messages"], stored.next) == (state["messages"], ())
    graph.invoke(None, config("1"))
    assert model.calls == 2


def test_reader_of_a_stream_gets_an_answer_once_if_formatting_it_is_refused() -> None:
    """Only the mark follows."""
    enable(max_model_calls=2)
    graph = FORMATTING["create_react_agent"](answering())
    parts = [part for part, _ in graph.stream(ASK, STEPS, stream_mode="messages")]
    assert "".join(each.text for each in parts if isinstance(each, AIMessage)) == FINE
    assert halt_of(parts[-1]).reason == "max_model_calls"


def test_formatting_again_is_a_turn() -> None:
    """Limits on turns see a model whose output never has the form."""
    enable(max_turns=4)
    model = answering(*[uses("Route", arguments={"next": "nowhere"}) for _ in range(9)])
    state = formatting(model, retries=9).invoke(ASK, STEPS)
    assert (state["messages"][-1].text, halt_of(state).reason) == (FINE, "max_turns")
    assert (model.calls, halt_of(state).turns) == (5, 4)


def test_formatting_by_two_calls_is_not_a_turn(events: list[Event]) -> None:
    """Both are within the call that formats the answer."""
    route = uses("Route", arguments={"next": "done"})
    script = [uses("search"), uses("search"), says(FINE), says(FINE), route, route]
    inner = ScriptedChatModel(script)

    class Twice(ScriptedChatModel):
        def _generate(self, messages: Any, *_: Any, **options: Any) -> ChatResult:
            options.pop("run_manager", None)
            answers = [inner.invoke(messages, **options) for _ in range(2)]
            return ChatResult(generations=[ChatGeneration(message=answers[-1])])

    enable(max_turns=2, observers=[events.append])
    made: Any = Twice
    state = formatting(made([])).invoke(ASK, STEPS)
    assert (stop_of(state), state.get("route")) == (None, Route(next="done"))
    (stop,) = [each for each in events if isinstance(each, Stop)]
    assert (inner.calls, stop.model_calls, stop.turns) == (6, 6, 2)


def test_human_is_asked_before_formatting_is_refused() -> None:
    """Like any call of the graph."""
    enable(max_model_calls=2, action="ask")
    model = answering()
    graph = FORMATTING["create_react_agent"](model, checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config("1"))
    assert "__interrupt__" in state
    state = graph.invoke(Command(resume="yes"), config("1"))
    assert (stop_of(state), state["structured_response"]) == (None, Route(next="done"))


# --- streams --------------------------------------------------------------------------------------

MODES: list[Any] = ["values", "updates", "messages", ["messages", "custom"], ["updates", "values"]]


@pytest.mark.parametrize("action", ["halt", "wrap_up"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_of_a_stream_shows_the_halt(mode: Any, action: Any) -> None:
    """Its reader need not read the state as well."""
    enable(max_turns=TURNS, action=action)
    graph = loop(Honest(searching()))
    last = list(graph.stream(ASK, STEPS, stream_mode=mode))[-1]
    if isinstance(mode, list):
        last = last[1]
    if isinstance(last, tuple):
        last = last[0]
    if "messages" not in last and isinstance(last, dict):
        (last,) = last.values()
    assert halt_of(last).reason == "max_turns"


@pytest.mark.parametrize("action", ["halt", "wrap_up"])
@pytest.mark.parametrize(
    "mode", ["updates", "messages", ["updates"], ["values", "updates"], ["messages"]], ids=str
)
def test_parts_of_a_stream_that_invoke_returns_show_the_halt(mode: Any, action: Any) -> None:
    """With a mode, its result is their list."""
    enable(max_turns=TURNS, action=action)
    result = loop(Honest(searching())).invoke(ASK, STEPS, stream_mode=mode)
    assert isinstance(result, list)
    assert halt_of(result).reason == "max_turns"


@pytest.mark.parametrize("action", ["halt", "wrap_up"])
@pytest.mark.parametrize("mode", ["custom", "debug", ["custom", "tasks"]], ids=str)
def test_mode_without_messages_raises(mode: Any, action: Any) -> None:
    """Otherwise the stream would just end."""
    enable(max_turns=TURNS, action=action)
    graph = endless_in(MessagesState, lambda _: {})(Honest(searching()))
    with pytest.raises(LimitReachedError):
        list(graph.stream(ASK, STEPS, stream_mode=mode))


def test_text_of_a_last_answer_is_streamed_once() -> None:
    """Only the mark follows."""
    enable(max_turns=TURNS, action="wrap_up")
    graph = loop(Honest(searching()))
    parts = [part for part, _ in graph.stream(ASK, STEPS, stream_mode="messages")]
    assert "".join(each.text for each in parts if each.type == "AIMessageChunk") == LAST


def unmapped_router(chosen: list[str], **compiled: Any) -> Any:
    """A graph whose unmapped edge reads the tool that its model requests."""
    model = Honest(uses("worker") for _ in range(20)).bind_tools([search])

    def choose(state: MessagesState) -> str:
        last: Any = state["messages"][-1]
        chosen.append(str(last.tool_calls[0]["name"]))
        return chosen[-1]

    def work(state: MessagesState) -> Any:
        last: Any = state["messages"][-1]
        return {"messages": [ToolMessage("done", tool_call_id=last.tool_calls[0]["id"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("worker", work)
    graph.add_edge(START, "model")
    graph.add_edge("worker", "model")
    graph.add_conditional_edges("model", choose)
    return graph.compile(name="g", **compiled)


def test_edges_do_not_run_when_a_halt_is_stored() -> None:
    """They would read our message, or call a model after the halt."""
    enable(max_turns=TURNS)
    chosen: list[str] = []
    graph = unmapped_router(chosen, checkpointer=InMemorySaver())
    assert halt_of(graph.invoke(ASK, config("1"))).reason == "max_turns"
    assert chosen == ["worker"] * TURNS
    assert is_synthetic(graph.get_state(config("1")).values["messages"][-1])


def test_graph_that_cannot_use_the_last_answer_raises_the_limit() -> None:
    """A router finds no route in a text; its own error is the cause."""
    enable(max_turns=TURNS, action="wrap_up")
    with pytest.raises(LimitReachedError) as raised:
        unmapped_router([]).invoke(ASK, STEPS)
    assert halt_of(raised.value).reason == "max_turns"
    assert isinstance(raised.value.__cause__, IndexError)
