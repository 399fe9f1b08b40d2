"""Builds programs with the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    ModelTracing,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolExecutionConfig,
    function_tool,
    handoff,
)
from pydantic import BaseModel

from otel_limits.testing import ScriptedAgentsModel
from tests.compositions.program import ATTEMPTS
from tests.compositions.run import Framework
from tests.compositions.ways import BUILDERS, Functions, one, outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from otel_limits.testing import Answer
    from tests.compositions import program as described
    from tests.compositions.judge import Entry
    from tests.compositions.program import Call
    from tests.compositions.run import Run

HANDOFF: Final = "handoff"
CANCEL: Final = "cancel"
STEPS: Final = 1000
"""`max_turns` of the SDK, which agents as tools have in any case."""


class BusyError(Exception):
    """A vendor is busy."""


class Done(BaseModel):
    """The output of an agent that must not be text."""

    text: str


class Model(ScriptedAgentsModel):
    """A model that answers after other tasks have run."""

    async def get_response(self, *arguments: Any, **named: Any) -> Any:
        """Answer."""
        await asyncio.sleep(0)
        return await super().get_response(*arguments, **named)

    async def stream_response(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        """Do the same in parts."""
        async for event in super().stream_response(*arguments, **named):
            await asyncio.sleep(0)
            yield event


class AgentsProgram:
    """The agents of a program, of which the first one keeps its conversation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._models: dict[str, Model] = {}
        self._inputs: list[tuple[str, list[Any]]] = []
        """The conversation after each call of an agent that does not keep its own."""
        concurrency = None if run.program.is_concurrent else 1
        self._config = RunConfig(
            tracing_disabled=True,
            tool_execution=ToolExecutionConfig(max_function_tool_concurrency=concurrency),
        )
        self._options: Any = {"max_turns": STEPS, "run_config": self._config}
        self._session = SQLiteSession("1")
        self._first = self._agent(run.program.agents[0].name)

    async def call(self, how: Call, prompt: str) -> Any:
        """Call the first agent, and answer its interruptions, a few times."""
        given: Any = prompt
        chance = random.Random(0)  # noqa: S311  chance, no secret
        for _ in range(3):
            result = await self._call(how, given)
            if not result.interruptions:
                break
            given = result.to_state()
            for each in result.interruptions:
                chance.choice((given.approve, given.reject))(each)
        else:  # only its state can continue it, not another call
            await self._session.clear_session()
        return result

    async def _call(self, how: Call, given: Any) -> Any:
        options = {**self._options, "session": self._session}
        if how == "sync":
            return await asyncio.to_thread(run_sync, self._first, given, options)
        if how == "async":
            return await Runner.run(self._first, given, **options)
        result = Runner.run_streamed(self._first, given, **options)
        async for _ in result.stream_events():
            pass
        return result

    def is_waiting(self) -> bool:
        """Return False: nothing is left that makes no events."""
        return False

    def requests(self) -> dict[str, int]:
        """Return how many requests each model has received."""
        return {name: model.calls for name, model in self._models.items() if model.calls}

    def histories(self) -> Iterator[tuple[str, list[Entry]]]:
        """Return every conversation of each agent."""
        items = asyncio.run(self._session.get_items())
        self._session.close()
        for name, each in (*self._inputs, (self._first.name, items)):
            yield name, list(history_of(each))

    # --- agents -----------------------------------------------------------------------------------

    def _model(self, agent: described.Agent) -> Model:
        # The arguments of agents as tools.
        script: Iterator[Answer] = map(_with_input, self._run.script.of(agent))
        model = self._models[agent.name] = Model(script, agent.name)
        return model

    def _agent(self, name: str) -> Agent[Any]:
        asked = self._run.program[name]
        retries = ModelRetrySettings(
            max_retries=ATTEMPTS - 1,
            policy=lambda context: isinstance(context.error, BusyError),
            backoff={"initial_delay": 0, "jitter": False},
        )
        stops: Any = "stop_on_first_tool" if "stops at a tool" in asked.traits else "run_llm_again"
        return Agent(
            name=name,
            model=self._model(asked),
            model_settings=ModelSettings(max_tokens=1, retry=retries),
            tools=[
                self._tool(each, asks="asks" in asked.traits and each.way == "look")
                for each in asked.tools
                if each.way != HANDOFF
            ],
            handoffs=[
                handoff(self._agent(each.agents[0]), tool_name_override=each.name)
                for each in asked.tools
                if each.way == HANDOFF
            ],
            tool_use_behavior=stops,
            output_type=Done if "typed" in asked.traits else None,
        )

    # --- tools ------------------------------------------------------------------------------------

    def _tool(self, asked: described.Tool, *, asks: bool) -> Any:
        callees: Any = [self._callee(name) for name in asked.agents]
        if asked.way == "be" and isinstance(callees[0], Called):
            return callees[0].agent.as_tool(asked.name, "Ask.", max_turns=STEPS)
        if asked.way == CANCEL:
            built = canceling(self._run, callees, asked)
        else:
            built = BUILDERS.get(asked.way, one)(self._run, callees, asked)
        function: Any = built.later or built.now
        named: Any = function_tool(
            name_override=asked.name, description_override="Ask.", needs_approval=asks
        )
        return named(function)

    def _callee(self, name: str) -> Called | Asked:
        called = self._run.program[name]
        if called.is_model:
            return Asked(self._model(called))
        return Called(self._agent(name), self._options, self._inputs)


class Called:
    """An agent that a tool calls."""

    def __init__(self, agent: Agent[Any], options: Any, inputs: list[Any]) -> None:
        self.agent = agent
        self.name = agent.name
        self._options = options
        self._inputs = inputs

    def now(self) -> Any:
        """Call it, and block."""
        return self._kept(run_sync(self.agent, "go", self._options))

    async def later(self) -> Any:
        """Call it in a task."""
        return self._kept(await Runner.run(self.agent, "go", **self._options))

    def streamed(self) -> Any:
        """Start it in a task, and return its result."""
        return Runner.run_streamed(self.agent, "go", **self._options)

    def stream(self) -> Any:
        """Return its events."""
        return self.streamed().stream_events()

    def _kept(self, result: Any) -> Any:
        """Keep the conversation of a result, unless it waits for an approval."""
        if not result.interruptions:
            self._inputs.append((self.name, result.to_input_list()))
        return result


class Asked:
    """A model that a tool calls itself."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name = model.model

    def now(self) -> Any:
        """Call it, and block."""
        return asyncio.run(self.later())

    async def later(self) -> Any:
        """Call it in a task."""
        return await self._model.get_response(*ASKED, **UNSTORED)

    def stream(self) -> Any:
        """Return the parts of its answer."""
        return self._model.stream_response(*ASKED, **UNSTORED)


ASKED: Final[Any] = (None, "go", ModelSettings(max_tokens=1), [], None, [], ModelTracing.DISABLED)
UNSTORED: Final[Any] = {"previous_response_id": None, "conversation_id": None, "prompt": None}


def run_sync(agent: Agent[Any], given: Any, options: Any) -> Any:
    """Call `Runner.run_sync`, and close the event loop that it leaves open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return Runner.run_sync(agent, given, **options)
    finally:
        left = asyncio.all_tasks(loop)  # of streams that were left
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


def canceling(run: Run, callees: Sequence[Any], asked: described.Tool) -> Functions:
    """Read an agent's stream for a while, cancel it, read its rest, and call another one."""
    first, second, *_ = callees

    async def later() -> str:
        with run.work():
            result, events = first.streamed(), 0
            async for _ in result.stream_events():
                events += 1
                if events == asked.events:
                    result.cancel("immediate" if asked.is_closed else "after_turn")
            return await outcome(second)

    return Functions(None, later)


def history_of(items: Any) -> Iterator[Entry]:
    """Describe a conversation."""
    for item in items:
        kind = item.get("type")
        if kind == "function_call":
            yield "requested", item["call_id"]
        elif kind == "function_call_output":
            yield "answered", item["call_id"]
        else:
            yield "other", ""


def _with_input(answer: Answer) -> Answer:
    if answer.text:
        return replace(answer, text='{"text": "done"}')  # a typed output, too
    return replace(answer, tools=tuple((name, {"input": "go"}) for name, _ in answer.tools))


OPENAI_AGENTS: Final = Framework(
    build=AgentsProgram,
    busy=BusyError,
    own_ways=(HANDOFF, CANCEL),
    own_traits=("asks", "stops at a tool", "typed"),
)
