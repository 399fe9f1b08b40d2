"""The agent loops that the benchmark times, with and without limits.

A loop runs an agent for an exact number of turns: each turn but the last calls one tool. No limit
is reached, so both sides of a ratio do the same work.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

from otel_limits.testing import Answer, ScriptedModel, says, tokens, uses

Run: TypeAlias = Callable[[int], object]
"""Runs an agent for a number of turns."""

UNREACHED: Final = 10**9
"""A limit that is checked in each turn and never reached."""


class LeanModel(ScriptedModel):
    """A model that keeps no requests: copying them would make every ratio look better."""

    def _keep(self, *_: object) -> None:
        """Do nothing."""


def script(turns: int) -> Iterator[Answer]:
    """Yield a tool call for each turn but the last."""
    for turn in range(turns - 1):
        yield uses("look_up", usage=tokens(100 + turn))  # as of a conversation that grows
    yield says("done")


def strands(**arguments: Any) -> Run:
    """Strands alone. The arguments go into the call of the agent."""
    from strands import Agent, tool

    @tool
    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        agent = Agent(model=LeanModel(script(turns)), tools=[look_up], callback_handler=None)
        return agent("go", **arguments)

    return run


def set_provider() -> None:
    """Set an SDK tracer provider that records spans and exports nothing."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())


def enable() -> None:
    """Enable otel-limits with limits and metrics."""
    import otel_limits

    otel_limits.enable(
        otel_limits.Limits(
            max_iterations=UNREACHED, max_turns=UNREACHED, max_token_budget=UNREACHED
        )
    )


def strands_traced() -> Run:
    """Strands with an SDK provider."""
    set_provider()
    return strands()


def strands_traced_limited() -> Run:
    """Strands with an SDK provider and otel-limits."""
    set_provider()
    enable()
    return strands()


def strands_traced_recorded() -> Run:
    """Strands with an SDK provider, otel-limits and its ledger."""
    path = Path(tempfile.mkdtemp(prefix="otel-limits-benchmark-"), "ledger.db")
    atexit.register(shutil.rmtree, path.parent)
    os.environ["OTEL_LIMITS_LEDGER"] = str(path)
    return strands_traced_limited()


def strands_limited() -> Run:
    """Strands with otel-limits and no SDK provider, so through hooks alone."""
    enable()
    return strands()


def strands_native() -> Run:
    """Strands with its own limits."""
    return strands(limits={"turns": UNREACHED, "total_tokens": UNREACHED})


def serve() -> str:
    """Start a model server that streams an answer in 250 ms, and return its address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.served"], stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.terminate)
    assert server.stdout is not None
    return f"http://127.0.0.1:{int(server.stdout.readline())}"


def strands_served() -> Run:
    """Strands with an SDK provider and the model server."""
    from strands import Agent, tool
    from strands.models.llamacpp import LlamaCppModel

    set_provider()
    url = serve()

    @tool
    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        model = LlamaCppModel(base_url=url, model_id="served")
        agent = Agent(model=model, tools=[look_up], callback_handler=None)
        return agent(str(turns - 1))

    return run


def strands_served_limited() -> Run:
    """Strands with the model server and otel-limits."""
    enable()
    return strands_served()


def langchain(*middleware: Any, is_measured: bool = True) -> Run:
    """LangChain with a middleware, or alone.

    Args:
        middleware: Middleware of the agent.
        is_measured: The model reports its usage, which grows with the conversation.
    """
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
    from langchain_core.messages import AIMessage

    class Model(FakeMessagesListChatModel):  # optional, so untyped
        def bind_tools(self, tools: Any, **_: Any) -> Any:  # noqa: ARG002
            return self

    def look_up() -> str:
        """Look something up."""
        return "found"

    def answer(turn: int, text: str, *calls: Any) -> AIMessage:
        tokens = {"input_tokens": 100 + turn, "output_tokens": 10, "total_tokens": 110 + turn}
        usage: Any = tokens if is_measured else None
        return AIMessage(text, tool_calls=list(calls), usage_metadata=usage)

    def run(turns: int) -> object:
        asks = [
            answer(turn, "", {"name": "look_up", "args": {}, "id": f"call-{turn}"})
            for turn in range(turns - 1)
        ]
        model = Model(responses=[*asks, answer(turns, "done")])
        agent: Any = create_agent(model, tools=[look_up], middleware=middleware)
        asked = {"messages": [{"role": "user", "content": "go"}]}
        return asyncio.run(agent.ainvoke(asked, {"recursion_limit": 10 * turns + 10}))

    return run


def langchain_native() -> Run:
    """LangChain with its middleware that limits model calls."""
    from langchain.agents.middleware import ModelCallLimitMiddleware

    return langchain(ModelCallLimitMiddleware(run_limit=UNREACHED, thread_limit=UNREACHED))


def langchain_limited() -> Run:
    """LangChain with otel-limits."""
    enable()
    return langchain()


def langchain_unmeasured_limited() -> Run:
    """LangChain with otel-limits and a model that reports no usage, so that it is estimated."""
    enable()
    return langchain(is_measured=False)


def langchain_served() -> Run:
    """LangChain with the model server."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    settings: Any = {"base_url": f"{serve()}/v1", "api_key": "x", "streaming": True}

    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        agent: Any = create_agent(ChatOpenAI(model="served", **settings), tools=[look_up])
        asked = {"messages": [{"role": "user", "content": str(turns - 1)}]}
        return asyncio.run(agent.ainvoke(asked, {"recursion_limit": 10 * turns + 10}))

    return run


def langchain_served_limited() -> Run:
    """LangChain with the model server and otel-limits."""
    enable()
    return langchain_served()


def openai_agents(max_turns: int | None = None, *, is_measured: bool = True) -> Run:
    """The OpenAI Agents SDK without its traces, which would make every ratio look better.

    Args:
        max_turns: The SDK's own limit.
        is_measured: The model reports its usage, which grows with the conversation.
    """
    from agents import Agent, ModelResponse, RunConfig, Runner, Usage, function_tool
    from agents.models.interface import Model
    from openai.types.responses import ResponseFunctionToolCall

    from otel_limits.bindings.openai_agents.halt_responses import message_of

    class InstantModel(Model):  # optional, so untyped
        def __init__(self, turns: int) -> None:
            self._turns, self._turn = turns, 0

        async def get_response(self, *_: Any, **__: Any) -> Any:
            self._turn += 1
            usage = Usage(requests=1, input_tokens=100 + self._turn, output_tokens=10)
            item: Any = message_of("done")
            if self._turn < self._turns:
                item = ResponseFunctionToolCall(
                    call_id=f"call-{self._turn}",
                    name="look_up",
                    arguments="{}",
                    type="function_call",
                )
            return ModelResponse(
                output=[item], usage=usage if is_measured else Usage(), response_id=None
            )

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    @function_tool
    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        agent = Agent("researcher", model=InstantModel(turns), tools=[look_up])
        config = RunConfig(tracing_disabled=True)
        return asyncio.run(Runner.run(agent, "go", max_turns=max_turns, run_config=config))

    return run


def openai_agents_native() -> Run:
    """The OpenAI Agents SDK with its own limit on turns."""
    return openai_agents(UNREACHED)


def openai_agents_limited() -> Run:
    """The OpenAI Agents SDK with otel-limits."""
    enable()
    return openai_agents()


def openai_agents_unmeasured_limited() -> Run:
    """The OpenAI Agents SDK with otel-limits and a model that reports no usage."""
    enable()
    return openai_agents(is_measured=False)


def openai_agents_served() -> Run:
    """The OpenAI Agents SDK with the model server."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        RunConfig,
        Runner,
        function_tool,
    )
    from openai import AsyncOpenAI

    url = serve()

    @function_tool
    def look_up() -> str:
        """Look something up."""
        return "found"

    async def stream(turns: int) -> object:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
        settings = ModelSettings(include_usage=True)
        model = OpenAIChatCompletionsModel("served", client)
        agent = Agent("researcher", model=model, model_settings=settings, tools=[look_up])
        config = RunConfig(tracing_disabled=True)
        result = Runner.run_streamed(agent, str(turns - 1), max_turns=None, run_config=config)
        async for _ in result.stream_events():
            pass
        await client.close()
        return result

    return lambda turns: asyncio.run(stream(turns))


def openai_agents_served_limited() -> Run:
    """The OpenAI Agents SDK with the model server and otel-limits."""
    enable()
    return openai_agents_served()


LOOPS: Final[dict[str, Callable[[], Run]]] = {
    "strands": strands,
    "strands_native": strands_native,
    "strands_limited": strands_limited,
    "strands_traced": strands_traced,
    "strands_traced_limited": strands_traced_limited,
    "strands_traced_recorded": strands_traced_recorded,
    "strands_served": strands_served,
    "strands_served_limited": strands_served_limited,
    "langchain": langchain,
    "langchain_native": langchain_native,
    "langchain_limited": langchain_limited,
    "langchain_unmeasured_limited": langchain_unmeasured_limited,
    "langchain_served": langchain_served,
    "langchain_served_limited": langchain_served_limited,
    "openai_agents": openai_agents,
    "openai_agents_native": openai_agents_native,
    "openai_agents_limited": openai_agents_limited,
    "openai_agents_unmeasured_limited": openai_agents_unmeasured_limited,
    "openai_agents_served": openai_agents_served,
    "openai_agents_served_limited": openai_agents_served_limited,
}
"""Each function prepares its process and returns the loop to time."""

STRANDS: Final = (
    (
        *("strands", "strands_native", "strands_limited"),
        *("strands_traced", "strands_traced_limited", "strands_traced_recorded"),
    ),
)
"""Loops that are compared with each other and run one after the other."""

OTHERS: Final = (
    ("langchain", "langchain_native", "langchain_limited", "langchain_unmeasured_limited"),
    (
        *("openai_agents", "openai_agents_native"),
        *("openai_agents_limited", "openai_agents_unmeasured_limited"),
    ),
)
"""Those of other frameworks, which take other numbers of turns."""

SERVED: Final = (
    ("strands_served", "strands_served_limited"),
    ("langchain_served", "langchain_served_limited"),
    ("openai_agents_served", "openai_agents_served_limited"),
)
"""Loops that wait for a model server."""

OPTIONAL: Final = {"langchain": ("langchain", "langchain_openai"), "openai_agents": ("agents",)}
"""The modules that the loops of a framework need, if it need not be installed."""


def installed(families: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the families whose framework is installed."""
    missing = tuple(name for name, needed in OPTIONAL.items() if not all(map(find_spec, needed)))
    return [each for each in families if not each[0].startswith(missing)]
