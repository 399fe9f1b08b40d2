"""Agents of Strands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import Swarm

from otel_limits.bindings.strands.private import PRIVATE_NAMES
from otel_limits.testing import ScriptedModel, says, uses
from tests.compositions.of_strands import history_of
from tests.features.subject import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Mapping

    from strands.types.streaming import StreamEvent

    from otel_limits.testing import Answer
    from tests.compositions.judge import Entry
    from tests.features.subject import Pause


class PausingModel(ScriptedModel):
    """A model that may pause before it answers."""

    pause: Pause | None = None

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        if self.pause is not None:
            await self.pause()
        async for event in super().stream(*arguments, **named):
            yield event


@tool
def search(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


class StrandsSubject:
    """Builds and calls agents of Strands."""

    title = "Strands"
    name = "strands"
    private_names = len(PRIVATE_NAMES)
    """With public names in private modules: `tests/unit/strands/test_private.py`."""

    def __init__(self) -> None:
        self.ways: Mapping[str, Callable[[Any], Ending]] = {
            "call": self.call,
            "invoke_async": lambda agent: asyncio.run(self.call_later(agent)),
            "stream_async": lambda agent: asyncio.run(self.stream(agent)),
        }

    def model(self, script: Iterable[Answer], pause: Pause | None = None) -> Any:
        """Return a model."""
        model = PausingModel(script)
        model.pause = pause
        return model

    def agent(self, model: Any, *tools: Any, name: str = "boss", output: Any = None) -> Any:
        """Return an agent."""
        return Agent(
            model=model,
            tools=[*tools, search],
            name=name,
            callback_handler=None,
            structured_output_model=output,
        )

    def agent_with_plugin(self, model: Any, plugin: Any) -> Any:
        """Return an agent with a plugin."""
        return Agent(model=model, tools=[search], callback_handler=None, plugins=[plugin])

    def calling(self, agent: Any, wrap: Callable[[str], str] | None = None) -> Any:
        """Return an agent as a tool, or a tool that calls it."""
        if wrap is not None:
            return self.doing(lambda: wrap(self.call(agent).text))
        return agent.as_tool(name="ask", description="Ask.")

    def delegating(self, model: Any, agent: Any) -> Any:
        """Return an agent that delegates."""
        return self.agent(model, agent.as_tool(name="ask", description="Ask.", delegate=True))

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
            raise ValueError("no network")

        return self.doing(fail)

    def denying(self, model: Any) -> Any:
        """Return an agent with a hook that cancels tools."""

        def deny(event: BeforeToolCallEvent) -> None:
            event.cancel_tool = "denied"

        agent = self.agent(model)
        agent.hooks.add_callback(BeforeToolCallEvent, deny)
        return agent

    def asking_first(self, model: Any) -> Any:
        """Return an agent with a hook that interrupts tools."""

        def ask(event: BeforeToolCallEvent) -> None:
            if event.interrupt("approval", reason="May it run?") != "yes":
                event.cancel_tool = "rejected"

        agent = self.agent(model)
        agent.hooks.add_callback(BeforeToolCallEvent, ask)
        return agent

    def accept(self, agent: Any, ending: Ending) -> Ending:
        """Answer the interrupt with yes."""
        answer = {"interruptId": ending.question.id, "response": "yes"}
        return self.call(agent, [{"interruptResponse": answer}])

    def reject(self, agent: Any, ending: Ending) -> Ending:
        """Answer the interrupt with no."""
        answer = {"interruptId": ending.question.id, "response": "no"}
        return self.call(agent, [{"interruptResponse": answer}])

    def asking(self, model: Any) -> Any:
        """Return a tool that calls a model."""

        @tool
        async def ask() -> str:
            """Ask."""
            messages: Any = [{"role": "user", "content": [{"text": "go"}]}]
            return str([event async for event in model.stream(messages)])

        return ask

    def handing_off(self, models: tuple[Any, Any]) -> Any:
        """Return a swarm."""
        return Swarm(
            [self.agent(model, name=name) for name, model in zip("ab", models, strict=True)]
        )

    def hand_off_to(self, name: str) -> list[Answer]:
        """Script a hand-off, after which an agent still ends its own invocation."""
        arguments = {"agent_name": name, "message": "go", "context": {}}
        return [uses("handoff_to_agent", arguments=arguments), says("over to you")]

    def call(self, agent: Any, prompt: Any = "go") -> Ending:
        """Call an agent, or a swarm."""
        return ending_of(agent(prompt))

    async def call_later(self, agent: Any) -> Ending:
        """Call an agent in an event loop."""
        return ending_of(await agent.invoke_async("go"))

    async def stream(self, agent: Any, reading: Pause | None = None) -> Ending:
        """Read the stream of an agent."""
        events = []
        async for event in agent.stream_async("go"):
            events.append(event)
            if reading is not None:
                await reading()
        (result,) = [event["result"] for event in events if "result" in event]
        text = "".join(event.get("data", "") for event in events)
        return Ending(result, text, message=result.message)

    async def leave(self, agent: Any) -> None:
        """Close the stream of an agent after its first event."""
        stream = agent.stream_async("go")
        await anext(stream)
        await stream.aclose()

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:
        """Answer the interrupt."""
        more = {} if more_turns is None else {"max_turns": more_turns}
        answer = {"interruptId": ending.question.id, "response": {"extend": more}}
        return self.call(agent, [{"interruptResponse": answer}])

    def stored(self, agent: Any) -> Any:
        """Return the last message."""
        return agent.messages[-1]

    def history(self, request: Any) -> Iterable[Entry]:
        """Describe messages."""
        return history_of(request)

    def results(self, request: Any) -> list[str]:
        """Return the texts of the tool results."""
        blocks = [block for message in request for block in message["content"]]
        found = [block["toolResult"] for block in blocks if "toolResult" in block]
        return ["".join(part.get("text", "") for part in each["content"]) for each in found]


def ending_of(result: Any) -> Ending:
    """Describe the result of an agent, or of a swarm."""
    return Ending(
        result,
        str(result),
        getattr(result, "structured_output", None),
        next(iter(getattr(result, "interrupts", None) or ()), None),
        getattr(result, "message", None),
    )
