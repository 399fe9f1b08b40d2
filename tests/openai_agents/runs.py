"""Agents of the OpenAI Agents SDK with scripted models, and every way to run one."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from agents import Agent, RunConfig, Runner, function_tool

from otel_limits import Stop, stop_of
from otel_limits.testing import ScriptedAgentsModel, endless, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS = 60
"""`max_turns` of the SDK: an agent that is not halted ends soon."""
UNTRACED = RunConfig(tracing_disabled=True)


@function_tool
def search(query: str = "") -> str:
    """Search."""
    return f"nothing about {query}"


def looping(**options: Any) -> ScriptedAgentsModel:
    """A model that requests the same tool forever."""
    return ScriptedAgentsModel(endless(uses("search", arguments={"query": "x"})), **options)


def agent(model: Any, *tools: Any, name: str = "boss", **options: Any) -> Agent[Any]:
    """An agent with the tool `search`."""
    return Agent(name=name, model=model, tools=[*tools, search], **options)


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a run."""
    return {"max_turns": STEPS, "run_config": UNTRACED, **given}


def call_run(agent: Any, given: Any = "go", **options: Any) -> Any:
    """`Runner.run`."""
    return asyncio.run(Runner.run(agent, given, **options_of(options)))


def call_run_sync(agent: Any, given: Any = "go", **options: Any) -> Any:
    """`Runner.run_sync`, in a separate thread, as it leaves its event loop open."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            results.append(Runner.run_sync(agent, given, **options_of(options)))
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def streamed(agent: Any, given: Any = "go", **options: Any) -> Any:
    """The result of `Runner.run_streamed`, once its stream was read."""
    result = Runner.run_streamed(agent, given, **options_of(options))
    async for _ in result.stream_events():
        pass
    return result


def call_run_streamed(agent: Any, given: Any = "go", **options: Any) -> Any:
    """`Runner.run_streamed`."""
    return asyncio.run(streamed(agent, given, **options))


CALLS: dict[str, Callable[..., Any]] = {
    "run": call_run,
    "run_sync": call_run_sync,
    "run_streamed": call_run_streamed,
}


def halt_of(result: Any) -> Stop:
    """The halt that a run ended with."""
    stop = stop_of(result)
    assert stop is not None
    return stop


def unanswered(items: Sequence[Any]) -> list[str]:
    """IDs of function calls without a result: no vendor accepts such a conversation."""
    calls = [each["call_id"] for each in items if each.get("type") == "function_call"]
    results = [each["call_id"] for each in items if each.get("type") == "function_call_output"]
    return [each for each in calls if each not in results]
