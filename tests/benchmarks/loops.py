"""The agent loops that are timed, each with and without something that limits it.

A loop takes a number of turns and runs an agent of exactly that many: every turn but the last asks
for one tool. No limit is ever reached, so that both sides of a ratio do the same work.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.testing import Answer, ScriptedModel, says, uses

if TYPE_CHECKING:
    from strands import Agent

Run: TypeAlias = Callable[[int], object]
"""Runs an agent of that many turns."""

FAR_AWAY: Final = 10**9
"""A cap that is checked at every turn and never reached."""


class LeanModel(ScriptedModel):
    """Keeps no copy of what it is asked: copying would make every ratio look better."""

    def _keep(self, *_: object) -> None:
        """Let go of it."""


def script(turns: int) -> Iterator[Answer]:
    """Ask for a tool in every turn but the last."""
    for _ in range(turns - 1):
        yield uses("look_up")
    yield says("done")


def strands(
    model: type[LeanModel] = LeanModel,
    dress: Callable[[Agent], object] = id,
    **arguments: Any,
) -> Run:
    """Run Strands agents, each of which `dress` is called with; `arguments` go into the call."""
    from strands import Agent, tool

    @tool
    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        agent = Agent(model=model(script(turns)), tools=[look_up], callback_handler=None)
        dress(agent)
        return agent("go", **arguments)

    return run


def set_provider() -> None:
    """Set an SDK tracer provider that records and exports nothing: the harshest baseline."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())


def enable() -> None:
    """Switch otel-limits on with every limit set and metrics on."""
    import otel_limits

    otel_limits.enable(
        otel_limits.Limits(max_iterations=FAR_AWAY, max_turns=FAR_AWAY, max_token_budget=FAR_AWAY)
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
    """The same with a ledger."""
    path = Path(tempfile.mkdtemp(prefix="otel-limits-benchmark-"), "ledger.db")
    atexit.register(shutil.rmtree, path.parent)
    os.environ["OTEL_LIMITS_LEDGER"] = str(path)
    return strands_traced_limited()


def strands_limited() -> Run:
    """Strands without an SDK provider, and otel-limits: the hooks alone."""
    enable()
    return strands()


def strands_native() -> Run:
    """Strands without an SDK provider, with its own limits."""
    return strands(limits={"turns": FAR_AWAY, "total_tokens": FAR_AWAY})


def strands_doors() -> Run:
    """Strands with as many hooks and stages as we have, all empty: what its doors cost alone."""
    from strands.middleware import ExecuteToolStage, InvokeModelStage

    from otel_limits.bindings.strands.attach import HOOKS
    from otel_limits.bindings.strands.private import AgentStreamStage

    async def passed_on(events: AsyncIterable[Any]) -> AsyncIterator[Any]:
        async for event in events:
            yield event

    class WrappedModel(LeanModel):
        """Its stream is wrapped, too."""

        def stream(self, *asked: Any, **more: Any) -> AsyncIterator[Any]:
            return passed_on(super().stream(*asked, **more))

    def empty_hook(_: Any) -> None:
        pass

    def empty_stage(context: Any, go_on: Any) -> Any:
        return passed_on(go_on(context))

    def dress(agent: Agent) -> None:
        for kind, _, order in HOOKS:
            agent.add_hook(empty_hook, kind, order=order)
        stages: tuple[Any, ...] = (AgentStreamStage, InvokeModelStage, ExecuteToolStage)
        for stage in stages:
            agent.add_middleware(stage, empty_stage)

    return strands(WrappedModel, dress)


def strands_served() -> Run:
    """Strands with an SDK provider, against a model server that streams an answer in 250 ms."""
    from strands import Agent, tool
    from strands.models.llamacpp import LlamaCppModel

    set_provider()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.served"], stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.terminate)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"

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
    """The same with otel-limits."""
    enable()
    return strands_served()


def langchain(*middleware: Any) -> Run:
    """Run LangChain agents."""
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
    from langchain_core.messages import AIMessage

    class Model(FakeMessagesListChatModel):  # type: ignore[misc]  # optional, so untyped
        def bind_tools(self, tools: Any, **_: Any) -> Any:  # noqa: ARG002
            return self

    def look_up() -> str:
        """Look something up."""
        return "found"

    def run(turns: int) -> object:
        asks = [
            AIMessage("", tool_calls=[{"name": "look_up", "args": {}, "id": f"call-{number}"}])
            for number in range(turns - 1)
        ]
        model = Model(responses=[*asks, AIMessage("done")])
        agent = create_agent(model, tools=[look_up], middleware=middleware)
        asked = {"messages": [{"role": "user", "content": "go"}]}
        return asyncio.run(agent.ainvoke(asked, {"recursion_limit": 10 * turns + 10}))

    return run


def langchain_limited() -> Run:
    """LangChain with its model call limit."""
    from langchain.agents.middleware import ModelCallLimitMiddleware

    return langchain(ModelCallLimitMiddleware(run_limit=FAR_AWAY, thread_limit=FAR_AWAY))


LOOPS: Final[dict[str, Callable[[], Run]]] = {
    "strands": strands,
    "strands_native": strands_native,
    "strands_doors": strands_doors,
    "strands_limited": strands_limited,
    "strands_traced": strands_traced,
    "strands_traced_limited": strands_traced_limited,
    "strands_traced_recorded": strands_traced_recorded,
    "strands_served": strands_served,
    "strands_served_limited": strands_served_limited,
    "langchain": langchain,
    "langchain_limited": langchain_limited,
}
"""Each prepares its process and returns what is to be timed."""

FAMILIES: Final = (
    ("strands", "strands_native", "strands_doors", "strands_limited"),
    ("strands_traced", "strands_traced_limited", "strands_traced_recorded"),
    ("langchain", "langchain_limited"),
)
"""Loops that are compared with each other."""

SERVED: Final = ("strands_served", "strands_served_limited")
"""The same, for loops that wait for a model server."""


def has_langchain() -> bool:
    """Tell whether the extra `bench` is installed."""
    return find_spec("langchain") is not None
