"""Agents of LangChain."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, wrap_tool_call
from langchain.tools import InjectedState, InjectedToolCallId
from langchain_core.messages import ToolMessage
from langchain_core.tools import ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from langgraph_swarm import create_swarm

from otel_limits.bindings import langchain
from otel_limits.testing import ScriptedChatModel, uses
from tests.compositions.of_langchain import history_of
from tests.features.private_names import private_names_in
from tests.features.subject import Ending
from tests.langchain.graphs import CALLS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from otel_limits.testing import Answer
    from tests.compositions.judge import Entry
    from tests.features.subject import Pause


OPTIONS: Final[Any] = {"recursion_limit": 99, "configurable": {"thread_id": "1"}}
"""The configuration of each call: every agent has its own checkpointer."""


def handing_to(agent: str) -> Any:
    """Return a tool that hands over; LangChain 1.0 gives that of langgraph-swarm no state."""
    name = f"transfer_to_{agent}"

    @tool(name)
    def transfer(
        state: Annotated[Any, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]
    ) -> Any:
        """Hand over."""
        message = ToolMessage(f"handed over to {agent}", name=name, tool_call_id=tool_call_id)
        update = {"messages": [*state["messages"], message], "active_agent": agent}
        return Command(goto=agent, graph=Command.PARENT, update=update)

    return transfer


class PausingModel(ScriptedChatModel):
    """A model that may pause before it answers."""

    pause: Any = None

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        super().__init__(script, **fields)

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        if self.pause is not None:
            asyncio.run(self.pause())
        return super()._generate(*arguments, **named)

    async def _agenerate(self, *arguments: Any, **named: Any) -> Any:
        if self.pause is not None:
            await self.pause()
        return super()._generate(*arguments, **named)

    async def _astream(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        if self.pause is not None:
            await self.pause()
        for chunk in self._stream(*arguments, **named):
            yield chunk


@tool
def search(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


class LangChainSubject:
    """Builds and calls agents of LangChain, each with one thread."""

    title = "LangChain and LangGraph"
    name = "langchain"
    private_names = len(private_names_in(langchain))

    def __init__(self) -> None:
        self.ways: Mapping[str, Callable[[Any], Ending]] = {
            name: partial(called, call) for name, call in CALLS.items()
        }

    def model(self, script: Iterable[Answer], pause: Pause | None = None) -> Any:
        """Return a model."""
        return PausingModel(script, pause=pause)

    def agent(self, model: Any, *tools: Any, name: str = "boss", output: Any = None) -> Any:
        """Return an agent."""
        return create_agent(
            model, [*tools, search], name=name, response_format=output, checkpointer=InMemorySaver()
        )

    def agent_with_plugin(self, model: Any, plugin: Any) -> Any:
        """Return an agent with a middleware."""
        return create_agent(model, [search], middleware=[plugin], checkpointer=InMemorySaver())

    def calling(self, agent: Any, wrap: Callable[[str], str] | None = None) -> Any:
        """Return a tool that calls an agent."""
        return self.doing(lambda: (wrap or str)(self.call(agent).text))

    def delegating(self, model: Any, agent: Any) -> Any:
        """Return an agent whose tool returns directly."""
        ask = self.calling(agent)
        ask.return_direct = True
        return self.agent(model, ask)

    def doing(self, work: Callable[[], str]) -> Any:
        """Return a tool that calls a function."""

        @tool
        def ask() -> str:
            """Ask."""
            return work()

        return ask

    def raising(self) -> Any:
        """Return a tool that raises."""

        def fail() -> str:
            raise ToolException("no network")

        ask = self.doing(fail)
        ask.handle_tool_error = True
        return ask

    def denying(self, model: Any) -> Any:
        """Return an agent with a middleware that answers for its tools."""

        @wrap_tool_call
        def deny(request: Any, _: Any) -> ToolMessage:
            identity = request.tool_call["id"]
            return ToolMessage("denied", tool_call_id=identity, name="search", status="error")

        return create_agent(
            model, [search], name="boss", middleware=[deny], checkpointer=InMemorySaver()
        )

    def asking_first(self, model: Any) -> Any:
        """Return an agent with a human in the loop."""
        middleware: Any = HumanInTheLoopMiddleware(interrupt_on={"search": True})
        return create_agent(
            model, [search], name="boss", middleware=[middleware], checkpointer=InMemorySaver()
        )

    def accept(self, agent: Any, ending: Ending) -> Ending:
        """Answer yes, to LangChain's question or to ours."""
        is_ours = "action_requests" not in str(ending.question)
        answer = "yes" if is_ours else {"decisions": [{"type": "approve"}]}
        return self.call(agent, Command(resume=answer))

    def reject(self, agent: Any, ending: Ending) -> Ending:
        """Answer no, to LangChain's question or to ours."""
        is_ours = "action_requests" not in str(ending.question)
        answer = "no" if is_ours else {"decisions": [{"type": "reject"}]}
        return self.call(agent, Command(resume=answer))

    def asking(self, model: Any) -> Any:
        """Return a tool that calls a model."""

        @tool
        def ask() -> str:
            """Ask."""
            return str(model.invoke("go"))

        return ask

    def handing_off(self, models: tuple[Any, Any]) -> Any:
        """Return a swarm."""
        agents: Any = [
            create_agent(model, [handing_to(other)], name=name)
            for model, name, other in zip(models, "ab", "ba", strict=True)
        ]
        swarm = create_swarm(agents, default_active_agent="a")
        return swarm.compile(checkpointer=InMemorySaver(), name="swarm")

    def hand_off_to(self, name: str) -> list[Answer]:
        """Script a hand-off."""
        return [uses(f"transfer_to_{name}")]

    def call(self, agent: Any, prompt: Any = "go") -> Ending:
        """Call an agent, or a swarm."""
        return ending_of(agent.invoke(asked(prompt), OPTIONS))

    async def call_later(self, agent: Any) -> Ending:
        """Call an agent in an event loop."""
        return ending_of(await agent.ainvoke(asked("go"), OPTIONS))

    async def stream(self, agent: Any, reading: Pause | None = None) -> Ending:
        """Read the stream of an agent."""
        modes = ["messages", "values"]
        chunks = []
        async for chunk in agent.astream(asked("go"), OPTIONS, stream_mode=modes):
            chunks.append(chunk)
            if reading is not None:
                await reading()
        state = next(payload for mode, payload in reversed(chunks) if mode == "values")
        texts = [payload[0] for mode, payload in chunks if mode == "messages"]
        text = "".join(str(each.content) for each in texts if each.type != "tool")
        return Ending(state, text, message=state["messages"][-1])

    async def leave(self, agent: Any) -> None:
        """Close the stream of an agent after its first part."""
        stream = agent.astream(asked("go"), OPTIONS, stream_mode="updates")
        await anext(stream)
        await stream.aclose()

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:  # noqa: ARG002
        """Answer the interrupt."""
        more = {} if more_turns is None else {"max_turns": more_turns}
        return self.call(agent, Command(resume={"extend": more}))

    def stored(self, agent: Any) -> Any:
        """Return the state of the thread."""
        return agent.get_state(OPTIONS).values

    def history(self, request: Any) -> Iterable[Entry]:
        """Describe messages."""
        return history_of(request)

    def results(self, request: Any) -> list[str]:
        """Return the texts of the tool messages."""
        return [str(each.content) for each in request if each.type == "tool"]


def called(call: Callable[..., Any], agent: Any) -> Ending:
    """Call an agent in one of the ways."""
    return ending_of(call(agent, asked("go"), OPTIONS))


def asked(prompt: Any) -> Any:
    """Return the input of a graph."""
    return {"messages": [("user", prompt)]} if isinstance(prompt, str) else prompt


def ending_of(state: Any) -> Ending:
    """Describe the state of a graph."""
    question = next(iter(state.get("__interrupt__", ())), None)
    text = str(state["messages"][-1].content)
    output = state.get("structured_response")
    return Ending(state, text, output, question, state["messages"][-1])
