"""Builds programs with LangChain."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from typing import TYPE_CHECKING, Any, Final

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send

from otel_limits.testing import ScriptedChatModel
from tests.compositions.program import ATTEMPTS
from tests.compositions.run import Framework
from tests.compositions.ways import BUILDERS, one
from tests.langchain.retries import ModelRetries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from langchain_core.outputs import ChatGenerationChunk, ChatResult

    from otel_limits.testing import Answer
    from tests.compositions import program as described
    from tests.compositions.judge import Entry
    from tests.compositions.program import Call
    from tests.compositions.run import Run

ASK: Final[Any] = {"messages": [("user", "go")]}

THREAD: Final[Any] = {"configurable": {"thread_id": "1"}}


class BusyError(Exception):
    """A vendor is busy."""


class Model(ScriptedChatModel):
    """A model whose answers have one token."""

    max_tokens: int = 1

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        super().__init__(script, **fields)

    async def _agenerate(self, *arguments: Any, **named: Any) -> ChatResult:
        """Answer without a thread, after other tasks have run."""
        await asyncio.sleep(0)
        return self._generate(*arguments, **named)

    async def _astream(self, *arguments: Any, **named: Any) -> AsyncIterator[ChatGenerationChunk]:
        """Do the same in parts."""
        for chunk in self._stream(*arguments, **named):
            await asyncio.sleep(0)
            yield chunk


class LangChainProgram:
    """The agents of a program, of which the first one keeps its conversation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._models: dict[str, Model] = {}
        self._states: list[tuple[str, list[Any]]] = []
        """The last state of each call of an agent that does not keep its own."""
        self._options: Any = {
            "recursion_limit": 200,
            **({} if run.program.is_concurrent else {"max_concurrency": 1}),
        }
        self._first = self._agent(run.program.agents[0].name, checkpointer=InMemorySaver())

    async def call(self, how: Call, prompt: str) -> Any:
        """Call the first agent, and answer its interrupts, a few times."""
        given: Any = {"messages": [("user", prompt)]}
        chance = random.Random(0)  # noqa: S311  chance, no secret
        for _ in range(3):
            state = await self._call(how, given)
            if not self._first.get_state(THREAD).interrupts:
                break
            answers = ("stop", {"extend": {"max_turns": 2, "max_token_budget": 20}})
            given = Command(resume=chance.choice(answers))
        return state

    async def _call(self, how: Call, given: Any) -> Any:
        options = {**self._options, **THREAD}
        if how == "sync":
            return await asyncio.to_thread(self._first.invoke, given, options)
        if how == "async":
            return await self._first.ainvoke(given, options)
        modes = ["updates", "messages", "values"]
        chunks = [each async for each in self._first.astream(given, options, stream_mode=modes)]
        return next(state for mode, state in reversed(chunks) if mode == "values")

    def is_waiting(self) -> bool:
        """Return False: nothing is left that makes no events."""
        return False

    def requests(self) -> dict[str, int]:
        """Return how many requests each model has received."""
        return {name: model.calls for name, model in self._models.items() if model.calls}

    def histories(self) -> Iterator[tuple[str, list[Entry]]]:
        """Return every conversation of each agent."""
        state = self._first.get_state(THREAD).values
        for name, messages in (*self._states, (self._first.name, state["messages"])):
            yield name, list(history_of(messages))

    # --- agents -----------------------------------------------------------------------------------

    def _model(self, agent: described.Agent) -> Model:
        model = Model(self._run.script.of(agent), model=agent.name)
        self._models[agent.name] = model
        return model

    def _agent(self, name: str, **options: Any) -> Any:
        asked = self._run.program[name]
        retries = ModelRetries(
            max_retries=ATTEMPTS - 1,
            retry_on=(BusyError,),
            on_failure="error",
            initial_delay=0,
            jitter=False,
        )
        return create_agent(
            self._model(asked),
            [self._tool(each) for each in asked.tools],
            name=name,
            middleware=[retries],
            **options,
        )

    # --- tools ------------------------------------------------------------------------------------

    def _tool(self, asked: described.Tool) -> Any:
        callees: Any = [self._callee(name) for name in asked.agents]
        if asked.way == "branches":
            agents = callees
            callees = [self._called("branches", lambda name: branching(name, agents))]
        built = BUILDERS.get(asked.way, one)(self._run, callees, asked)
        later: Any = built.later
        return StructuredTool(
            name=asked.name,
            description="Ask.",
            func=built.now or (lambda: asyncio.run(later())),
            coroutine=later,
            args_schema={"type": "object", "properties": {}},
        )

    def _callee(self, name: str) -> Called | Asked:
        called = self._run.program[name]
        return Asked(self._model(called)) if called.is_model else self._called(name, self._agent)

    def _called(self, name: str, make: Callable[[str], Any]) -> Called:
        return Called(name, make, self._options, self._states)


class Called:
    """A graph that a tool calls. It is compiled at its first call, as many have none."""

    def __init__(
        self, name: str, make: Callable[[str], Any], options: Any, states: list[Any]
    ) -> None:
        self.name = name
        self._make = make
        self._options = options
        self._states = states
        self._lock = threading.Lock()

    @functools.cached_property
    def graph(self) -> Any:
        """The graph."""
        with self._lock:
            return vars(self).get("graph") or self._make(self.name)

    def now(self) -> Any:
        """Call it, and block."""
        return self._kept(self.graph.invoke(ASK, self._options))

    async def later(self) -> Any:
        """Call it in a task."""
        return self._kept(await self.graph.ainvoke(ASK, self._options))

    def stream(self) -> Any:
        """Return its events."""
        modes: Any = ["messages", "updates"]
        return self.graph.astream(ASK, self._options, stream_mode=modes)

    def _kept(self, state: Any) -> Any:
        """Keep the conversation of a state."""
        self._states.append((self.name, state["messages"]))
        return state


class Asked:
    """A model that a tool calls itself."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name = model.model

    def now(self) -> Any:
        """Call it, and block."""
        return self._model.invoke("go")

    async def later(self) -> Any:
        """Call it in a task."""
        return await self._model.ainvoke("go")

    def stream(self) -> Any:
        """Return the parts of its answer."""
        return self._model.astream("go")


def branching(name: str, agents: list[Called]) -> Any:
    """Make a graph with each agent in its own branch."""
    builder = StateGraph(MessagesState)
    for agent in agents:
        builder.add_node(agent.name, agent.graph)
    sends = [Send(agent.name, ASK) for agent in agents]
    builder.add_conditional_edges(START, lambda _: sends, [agent.name for agent in agents])
    return builder.compile(name=name)


def history_of(messages: Any) -> Iterator[Entry]:
    """Describe a conversation."""
    for message in messages:
        if isinstance(message, ToolMessage):
            yield "answered", message.tool_call_id
        elif isinstance(message, AIMessage) and message.tool_calls:
            for each in message.tool_calls:
                yield "requested", each["id"] or ""
        else:
            yield "other", ""


LANGCHAIN: Final = Framework(
    build=LangChainProgram, busy=BusyError, repeats_last=True, own_ways=("branches",)
)
