"""Agents of Strands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strands import Agent, tool
from strands.multiagent import Swarm

from otel_limits.bindings.strands.private import PRIVATE_NAMES
from otel_limits.testing import ScriptedModel, says, uses
from tests.features.subject import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable

    from strands.types.streaming import StreamEvent

    from otel_limits.testing import Answer
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
    """With public names in private modules: `tests/unit/test_private_names.py`."""

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

    def calling(self, agent: Any) -> Any:
        """Return an agent as a tool."""
        return agent.as_tool(name="ask", description="Ask.")

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

    async def stream(self, agent: Any) -> Ending:
        """Read the stream of an agent."""
        events = [event async for event in agent.stream_async("go")]
        (result,) = [event["result"] for event in events if "result" in event]
        return Ending(result, "".join(event.get("data", "") for event in events))

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:
        """Answer the interrupt."""
        more = {} if more_turns is None else {"max_turns": more_turns}
        answer = {"interruptId": ending.question.id, "response": {"extend": more}}
        return self.call(agent, [{"interruptResponse": answer}])

    def stored(self, agent: Any) -> Any:
        """Return the last message."""
        return agent.messages[-1]


def ending_of(result: Any) -> Ending:
    """Describe the result of an agent, or of a swarm."""
    return Ending(
        result,
        str(result),
        getattr(result, "structured_output", None),
        next(iter(result.interrupts or ()), None),
    )
