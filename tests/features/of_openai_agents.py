"""Agents of the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolGuardrailFunctionOutput,
    function_tool,
    tool_input_guardrail,
)
from agents.models.interface import ModelTracing

from otel_limits.bindings import openai_agents
from otel_limits.testing import ScriptedAgentsModel, uses
from tests.compositions.of_openai_agents import history_of
from tests.features.private_names import private_names_in
from tests.features.subject import Ending
from tests.openai_agents.runs import call_run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from agents import RunResultBase

    from otel_limits.testing import Answer
    from tests.compositions.judge import Entry
    from tests.features.subject import Pause

MAX_TURNS: Final = 99
"""The SDK's own limit, which is never reached."""

CONFIG: Final = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")

OPTIONS: Final[Any] = {"max_turns": MAX_TURNS, "run_config": CONFIG}


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


def look(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


search = function_tool(look, name_override="search")


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

    def __init__(self) -> None:
        self.ways: Mapping[str, Callable[[Any], Ending]] = {
            "run": lambda agent: asyncio.run(self.call_later(agent)),
            "run_sync": self.call,
            "run_streamed": lambda agent: asyncio.run(self.stream(agent)),
        }

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

    def calling(self, agent: Any, wrap: Callable[[str], str] | None = None) -> Any:
        """Return an agent as a tool."""

        async def extract(result: RunResultBase) -> str:
            return (wrap or str)(str(result.final_output))

        extractor = extract if wrap is not None else None
        return agent.agent.as_tool("ask", "Ask.", custom_output_extractor=extractor, **OPTIONS)

    def delegating(self, model: Any, agent: Any) -> Any:
        """Return an agent that stops at the tool."""
        boss = self.agent(model, self.calling(agent))
        boss.agent.tool_use_behavior = {"stop_at_tool_names": ["ask"]}
        return boss

    def doing(self, work: Callable[[], str]) -> Any:
        """Return a tool that calls a function."""

        @function_tool
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
        """Return an agent with a guardrail that rejects the input of its tool."""

        @tool_input_guardrail
        def deny(_: Any) -> ToolGuardrailFunctionOutput:
            """Reject everything."""
            return ToolGuardrailFunctionOutput.reject_content("denied")

        denied = function_tool(look, name_override="search", tool_input_guardrails=[deny])
        return Conversing(Agent[Any]("boss", model=model, tools=[denied]), SQLiteSession("1"))

    def asking_first(self, model: Any) -> Any:
        """Return an agent whose tool needs an approval."""
        gated = function_tool(look, name_override="search", needs_approval=True)
        return Conversing(Agent[Any]("boss", model=model, tools=[gated]), SQLiteSession("1"))

    def accept(self, agent: Any, ending: Ending) -> Ending:
        """Approve the interruption."""
        return self.approve(agent, ending, None)

    def reject(self, agent: Any, ending: Ending) -> Ending:
        """Reject the interruption."""
        state = ending.result.to_state()
        state.reject(ending.question)
        return self.call(agent, state)

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
        return ending_of(call_run_sync(agent.agent, prompt, session=agent.session, **OPTIONS))

    async def call_later(self, agent: Any) -> Ending:
        """Call an agent in an event loop."""
        return ending_of(await Runner.run(agent.agent, "go", session=agent.session, **OPTIONS))

    async def stream(self, agent: Any, reading: Pause | None = None) -> Ending:
        """Read the stream of an agent."""
        result = Runner.run_streamed(agent.agent, "go", session=agent.session, **OPTIONS)
        events = []
        async for event in result.stream_events():
            events.append(event)
            if reading is not None:
                await reading()
        deltas = [each.data for each in events if each.type == "raw_response_event"]
        texts = [each.delta for each in deltas if each.type == "response.output_text.delta"]
        return Ending(result, "".join(texts), message=result)

    async def leave(self, agent: Any) -> None:
        """Cancel a stream after its first event."""
        result = Runner.run_streamed(agent.agent, "go", session=agent.session, **OPTIONS)
        async for _ in result.stream_events():
            result.cancel()

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:  # noqa: ARG002
        """Approve the interruption, which has no place for an amount."""
        state = ending.result.to_state()
        state.approve(ending.question)
        return self.call(agent, state)

    def stored(self, agent: Any) -> Any:
        """Return the last item of the session."""
        return asyncio.run(agent.session.get_items())[-1]

    def history(self, request: Any) -> Iterable[Entry]:
        """Describe items."""
        return history_of(request)

    def results(self, request: Any) -> list[str]:
        """Return the outputs of functions."""
        return [str(each["output"]) for each in request if "output" in each]


def ending_of(result: RunResultBase) -> Ending:
    """Describe the result of a run."""
    output = result.final_output
    question = next(iter(result.interruptions), None)
    typed = None if isinstance(output, str) else output
    return Ending(result, str(output), typed, question, result)
