"""Agents of the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from agents.models.interface import ModelTracing

from otel_limits.bindings import openai_agents
from otel_limits.testing import ScriptedAgentsModel, uses
from tests.features.private_names import private_names_in
from tests.features.subject import Ending
from tests.openai_agents.runs import UNTRACED, call_run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from agents import RunResultBase

    from otel_limits.testing import Answer
    from tests.features.subject import Pause

MAX_TURNS: Final = 99
"""The SDK's own limit, which is never reached."""


class PausingModel(ScriptedAgentsModel):
    """A model that may pause before it answers."""

    pause: Pause | None = None

    async def get_response(self, *args: Any, **options: Any) -> Any:
        """Answer with the next answer of the script."""
        if self.pause is not None:
            await self.pause()
        return await super().get_response(*args, **options)

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Stream the next answer of the script."""
        if self.pause is not None:
            await self.pause()
        async for event in super().stream_response(*args, **options):
            yield event


@function_tool
def search(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


@dataclass
class Conversing:
    """An agent with its session."""

    agent: Agent[Any]
    session: SQLiteSession

    def __post_init__(self) -> None:
        """Close the session with the last use of it."""
        weakref.finalize(self, self.session.close)


class OpenAIAgentsSubject:
    """Builds and calls agents of the SDK, each with one session."""

    title = "OpenAI Agents SDK"
    name = "openai-agents"
    private_names = len(private_names_in(openai_agents))

    def model(self, script: Iterable[Answer], pause: Pause | None = None) -> Any:
        """Return a model."""
        model = PausingModel(script)
        model.pause = pause
        return model

    def agent(self, model: Any, *tools: Any, name: str = "boss", output: Any = None) -> Any:
        """Return an agent."""
        agent = Agent[Any](name, model=model, tools=[*tools, search], output_type=output)
        return Conversing(agent, SQLiteSession("1"))

    def agent_with_plugin(self, model: Any, plugin: Any) -> Any:
        """Return an agent with hooks."""
        agent = Agent[Any]("boss", model=model, tools=[search], hooks=plugin)
        return Conversing(agent, SQLiteSession("1"))

    def calling(self, agent: Any) -> Any:
        """Return an agent as a tool."""
        return agent.agent.as_tool("ask", "Ask.", run_config=UNTRACED, max_turns=MAX_TURNS)

    def asking(self, model: Any) -> Any:
        """Return a tool that calls a model."""

        @function_tool
        async def ask() -> str:
            """Ask."""
            return str(
                await model.get_response(
                    *(None, "go", ModelSettings(), [], None, [], ModelTracing.DISABLED),
                    previous_response_id=None,
                    conversation_id=None,
                    prompt=None,
                )
            )

        return ask

    def handing_off(self, models: tuple[Any, Any]) -> Any:
        """Return the first of two agents."""
        first, second = (
            Agent[Any](name, model=each) for name, each in zip("ab", models, strict=True)
        )
        first.handoffs, second.handoffs = [second], [first]
        return Conversing(first, SQLiteSession("1"))

    def hand_off_to(self, name: str) -> list[Answer]:
        """Script a hand-off."""
        return [uses(f"transfer_to_{name}")]

    def call(self, agent: Any, prompt: Any = "go") -> Ending:
        """Call an agent."""
        result = call_run_sync(agent.agent, prompt, session=agent.session, max_turns=MAX_TURNS)
        return ending_of(result)

    async def call_later(self, agent: Any) -> Ending:
        """Call an agent in an event loop."""
        options: Any = {"max_turns": MAX_TURNS, "run_config": UNTRACED}
        return ending_of(await Runner.run(agent.agent, "go", session=agent.session, **options))

    async def stream(self, agent: Any) -> Ending:
        """Read the stream of an agent."""
        options: Any = {"max_turns": MAX_TURNS, "run_config": UNTRACED}
        result = Runner.run_streamed(agent.agent, "go", session=agent.session, **options)
        events = [event async for event in result.stream_events()]
        deltas = [each.data for each in events if each.type == "raw_response_event"]
        texts = [each.delta for each in deltas if each.type == "response.output_text.delta"]
        return Ending(result, "".join(texts))

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:  # noqa: ARG002
        """Approve the interruption, which has no place for an amount."""
        state = ending.result.to_state()
        state.approve(ending.question)
        return self.call(agent, state)

    def stored(self, agent: Any) -> Any:
        """Return the last item of the session."""
        return asyncio.run(agent.session.get_items())[-1]


def ending_of(result: RunResultBase) -> Ending:
    """Describe the result of a run."""
    output = result.final_output
    question = next(iter(result.interruptions), None)
    return Ending(result, str(output), None if isinstance(output, str) else output, question)
