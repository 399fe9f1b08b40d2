"""Builds programs with Strands."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.tools.executors import SequentialToolExecutor
from strands.types.exceptions import ConcurrencyException, ModelThrottledException

from otel_limits.testing import ScriptedModel
from tests.compositions.program import ATTEMPTS
from tests.compositions.run import Framework
from tests.compositions.ways import BUILDERS, one

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator

    from strands.types.streaming import StreamEvent

    from tests.compositions import program as described
    from tests.compositions.judge import Entry
    from tests.compositions.program import Call
    from tests.compositions.run import Run

INPUT: Final = 3
"""Tokens of a request in concurrent programs."""


class Yielding(ScriptedModel):
    """Lets other tasks run while it answers; the size of its requests is known in advance."""

    async def count_tokens(self, *_: Any, **__: Any) -> int:
        """Return the size of the input."""
        return INPUT

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        async for event in super().stream(*arguments, **named):
            await asyncio.sleep(0)
            yield event


class StrandsProgram:
    """The agents of a program, each with its conversation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._models: dict[str, Yielding] = {}
        self._agents: dict[str, Agent] = {}
        self._first = self._agent(run.program.agents[0].name)

    async def call(self, how: Call, prompt: str) -> Any:
        """Call the first agent, and answer its interrupts, a few times."""
        chance = random.Random(0)  # noqa: S311  chance, no secret
        asked: Any = prompt
        with patch.object(asyncio, "wait_for", wait_for):
            for _ in range(3):
                result = await self._call(how, asked)
                if result.stop_reason != "interrupt":
                    break
                answers = ("stop", {"extend": {"max_turns": 2, "max_token_budget": 20}})
                asked = [
                    {
                        "interruptResponse": {
                            "interruptId": each.id,
                            "response": chance.choice(answers),
                        }
                    }
                    for each in result.interrupts
                ]
        return result

    async def _call(self, how: Call, prompt: Any) -> Any:
        if how == "sync":
            # Strands leaves it to the loop to close the stream of an agent that is a tool, and
            # refuses another call of it until then. A thread may be faster than this loop.
            for _ in range(3):
                await asyncio.sleep(0)
            return await asyncio.to_thread(self._first, prompt)
        if how == "async":
            return await self._first.invoke_async(prompt)
        results = [
            event["result"] async for event in self._first.stream_async(prompt) if "result" in event
        ]
        return results[-1]

    def is_waiting(self) -> bool:
        """Return whether tools in the background wait for a slot, or to be reported as ended."""
        tasks = [each.state.get("strands.background_tasks") or () for each in self._agents.values()]
        return any(each["status"] in ("queued", "working") for some in tasks for each in some)

    def requests(self) -> dict[str, int]:
        """Return how many requests each model has received."""
        return {name: model.calls for name, model in self._models.items() if model.calls}

    def histories(self) -> Iterator[tuple[str, list[Entry]]]:
        """Return the conversation of each agent."""
        for name, agent in self._agents.items():
            yield name, list(history_of(agent.messages))

    # --- agents -----------------------------------------------------------------------------------

    def _model(self, agent: described.Agent) -> Yielding:
        model = self._models[agent.name] = Yielding(self._run.script.of(agent), agent.name)
        model.config["max_tokens"] = 1  # type: ignore[assignment]
        return model

    def _agent(self, name: str) -> Agent:
        program = self._run.program
        asked = program[name]
        tools = [self._tool(each) for each in asked.tools]
        in_background: Any = {
            "always": tools[-1:],
            "wait_for_completion": len(asked.replies) % 2 == 0,
            "max_concurrency": 1 if len(asked.replies) % 3 == 0 else 100,
        }
        is_sequential = not program.is_concurrent or "sequential" in asked.traits
        agent = self._agents[name] = Agent(
            model=self._model(asked),
            tools=tools,
            name=name,
            callback_handler=None,
            retry_strategy=ModelRetryStrategy(max_attempts=ATTEMPTS, initial_delay=0, max_delay=0),
            background_tasks=in_background if "in background" in asked.traits else None,
            tool_executor=SequentialToolExecutor() if is_sequential else None,
        )
        if "validated" in asked.traits:
            agent.hooks.add_callback(AfterModelCallEvent, self._validator(asked))
        if "resumed" in asked.traits:
            resumes = iter(["go on"] * (len(asked.replies) % 3 + 1))
            agent.hooks.add_callback(
                AfterInvocationEvent, lambda event: setattr(event, "resume", next(resumes, None))
            )
        return agent

    def _validator(self, asked: described.Agent) -> Any:
        """Retry a response now and then."""
        chance, script = random.Random(asked.name), self._run.script  # noqa: S311

        def validate(event: AfterModelCallEvent, **_: Any) -> None:
            if event.stop_response is not None and chance.random() < 0.3:
                event.retry = not script.is_over
            elif event.stop_response is not None and chance.random() < 0.3:
                event.stop_response.message.pop("metadata", None)

        return validate

    # --- tools ------------------------------------------------------------------------------------

    def _tool(self, asked: described.Tool) -> Any:
        named: Any = tool(name=asked.name, description="Ask.")
        callees: Any = [self._callee(name) for name in asked.agents]
        if asked.way == "be" and isinstance(callees[0], Called):
            return callees[0].agent.as_tool(name=asked.name, description="Ask.")
        if asked.way in GROUPS:
            callees = [CalledGroup(GROUPS[asked.way]([each.agent for each in callees]))]
        built = BUILDERS.get(asked.way, one)(self._run, callees, asked)
        return named(built.later or built.now)

    def _callee(self, name: str) -> Called | Asked:
        called = self._run.program[name]
        return Asked(self._model(called)) if called.is_model else Called(self._agent(name))


class Called:
    """An agent that a tool calls."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.name: str = getattr(agent, "name", "group")

    def now(self) -> Any:
        """Call it, and block."""
        return self.agent("go")

    async def later(self) -> Any:
        """Call it in a task."""
        return await self.agent.invoke_async("go")

    def stream(self) -> Any:
        """Return its events."""
        return self.agent.stream_async("go")


class CalledGroup(Called):
    """A graph or swarm that a tool calls.

    It begins with new conversations of its agents, also if these are in the middle of another run.
    So it refuses a second concurrent call, as agents do themselves.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._is_free = threading.Lock()

    async def later(self) -> Any:
        """Call it in a task."""
        if not self._is_free.acquire(blocking=False):
            raise ConcurrencyException("busy")
        try:
            return await super().later()
        finally:
            self._is_free.release()


class Asked:
    """A model that a tool calls itself."""

    def __init__(self, model: Yielding) -> None:
        self._model = model
        self.name = model.config["model_id"]

    def now(self) -> Any:
        """Read the whole answer, and block."""
        return asyncio.run(self.later())

    async def later(self) -> Any:
        """Read the whole answer."""
        return [each async for each in self.stream()]

    def stream(self) -> Any:
        """Return the parts of the answer."""
        return self._model.stream([{"role": "user", "content": [{"text": "go"}]}])


def graph_of(nodes: list[Agent]) -> Any:
    """Make a graph: two entries, and one node behind the first."""
    builder = GraphBuilder()
    for node in nodes:
        builder.add_node(node, node.name)
    builder.set_entry_point(nodes[0].name)
    builder.set_entry_point(nodes[1].name)
    builder.add_edge(nodes[0].name, nodes[2].name)
    builder.set_max_node_executions(5)
    return builder.build()


def swarm_of(nodes: list[Agent]) -> Any:
    """Make a swarm."""
    return Swarm(nodes, max_iterations=3)


GROUPS: Final[dict[str, Any]] = {"graph": graph_of, "swarm": swarm_of}


def history_of(messages: Any) -> Iterator[Entry]:
    """Describe a conversation."""
    for message in messages:
        for block in message["content"]:
            if "toolUse" in block:
                yield "requested", block["toolUse"]["toolUseId"]
            elif "toolResult" in block:
                yield "answered", block["toolResult"]["toolUseId"]
            elif message["role"] == "user":
                yield "other", ""


async def wait_for(waited: Any, timeout: float) -> Any:
    """Wait like `asyncio.wait_for` since Python 3.12.

    Before that it may swallow a cancellation (python/cpython#86296), and a graph that is cancelled
    within a graph then waits forever. Strands polls by it, which need not take 0.1 s.
    """
    task = asyncio.ensure_future(waited)
    try:
        await asyncio.wait({task}, timeout=min(timeout, 0.003))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise asyncio.TimeoutError
    return task.result()


STRANDS: Final = Framework(
    build=StrandsProgram,
    busy=ModelThrottledException,
    own_ways=tuple(GROUPS),
    own_traits=("validated", "resumed", "in background", "sequential"),
)
