"""Models whose methods return the stream of another model, and streams that fail to begin."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from agents import Model as SdkModel
from agents import ModelResponse, Runner, function_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command

from otel_limits import Limits, ModelCall, Stop, Turn, disable, enable, stop_of
from otel_limits.testing import ScriptedAgentsModel, ScriptedChatModel, endless, says, uses
from tests.features.page import SUBJECTS
from tests.langchain import graphs
from tests.openai_agents import runs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from otel_limits import Event
    from tests.features.subject import Subject


class Delegating(ScriptedChatModel):
    """A model of LangChain whose methods are plain functions that call another one."""

    inner: Any

    def __init__(self, *, inner: Any) -> None:
        super().__init__(endless(says("more")), inner=inner)

    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Return the stream of the other model."""
        stream: Iterator[Any] = self.inner.stream(*args, **options)
        return stream

    def astream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Return the stream of the other model."""
        stream: AsyncIterator[Any] = self.inner.astream(*args, **options)
        return stream


class DelegatingSdkModel(SdkModel):
    """The same with the OpenAI Agents SDK."""

    def __init__(self, inner: SdkModel) -> None:
        self.inner = inner

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Return the response of the other model."""
        return await self.inner.get_response(*args, **options)

    def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Return the stream of the other model."""
        return self.inner.stream_response(*args, **options)


def looping_node(ask: Callable[[], object], times: int = 9) -> Any:
    """Make a graph whose node calls a model repeatedly."""
    asked = itertools.count(1)

    def node(_: Any) -> Command[Any]:
        ask()
        return Command(goto=END if next(asked) == times else "node")

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node, destinations=("node", END))
    graph.add_edge(START, "node")
    return graph.compile(name="boss")


def stream_in_node() -> int:
    """Stream the model of LangChain in a node."""
    inner = ScriptedChatModel(endless(says("more")))
    model = Delegating(inner=inner)
    graph = looping_node(lambda: list(model.stream("go")))
    graphs.halt_of(graph.invoke(graphs.ASK, graphs.STEPS))
    return inner.calls


def astream_in_node() -> int:
    """Stream it in an event loop."""
    inner = ScriptedChatModel(endless(says("more")))
    model = Delegating(inner=inner)

    async def read() -> None:
        async for _ in model.astream("go"):
            pass

    graph = looping_node(lambda: asyncio.run(read()))
    graphs.halt_of(graph.invoke(graphs.ASK, graphs.STEPS))
    return inner.calls


def stream_of_run() -> int:
    """Stream a run of the SDK."""
    inner = ScriptedAgentsModel(endless(uses("search")))

    async def main() -> None:
        agent = runs.agent(DelegatingSdkModel(inner))
        result = Runner.run_streamed(agent, "go", **runs.options_of({}))
        async for _ in result.stream_events():
            pass

    asyncio.run(main())
    return inner.calls


@pytest.mark.parametrize(
    "run", [stream_in_node, astream_in_node, stream_of_run], ids=lambda each: each.__name__
)
def test_delegated_stream_is_one_call(run: Callable[[], int], events: list[Event]) -> None:
    """Of the model further in, and one turn."""
    enable(max_turns=3, observers=[events.append])
    assert run() == 3
    kinds = [type(each) for each in events]
    assert (kinds.count(ModelCall), kinds.count(Turn)) == (3, 3)


class Failing(Delegating):
    """A model that fails before it has a stream."""

    def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        """Fail."""
        raise ConnectionError("no stream")


class FailingSdkModel(DelegatingSdkModel):
    """The same with the OpenAI Agents SDK."""

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Fail."""
        raise ConnectionError("no stream")


def fail_in_node() -> None:
    """Fail three times in one invocation, whose node continues after each."""
    model = Failing(inner=None)

    def ask() -> None:
        with pytest.raises(ConnectionError):
            list(model.stream("go"))

    looping_node(ask, times=3).invoke(graphs.ASK, graphs.STEPS)


def fail_in_run() -> None:
    """Fail once: it ends the run."""

    async def main() -> None:
        agent = runs.agent(FailingSdkModel(ScriptedAgentsModel([])))
        async for _ in Runner.run_streamed(agent, "go", **runs.options_of({})).stream_events():
            pass

    with pytest.raises(ConnectionError):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("run", "calls"), [(fail_in_node, 3), (fail_in_run, 1)], ids=["langchain", "openai-agents"]
)
def test_stream_that_cannot_begin_is_a_failed_call(
    run: Callable[[], None], calls: int, events: list[Event]
) -> None:
    """Settled when it fails, so that it reserves nothing of what is left."""
    enable(max_turns=3, observers=[events.append])
    run()
    made = [each for each in events if isinstance(each, ModelCall)]
    assert [each.kind for each in made] == ["failed"] * calls
    assert [each.usage.total for each in made] == [0] * calls


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda each: each.name)
def test_disable_in_a_tool_ends_spans_once(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent continues without limits, and the SDK of OpenTelemetry logs no warning."""
    enable(max_turns=3)

    def work() -> str:
        disable()
        return "done"

    model = subject.model([uses("ask"), says("done")])
    assert subject.call(subject.agent(model, subject.doing(work))).text.strip() == "done"
    assert [each for each in caplog.messages if "ended span" in each] == []


# --- models that call others in a group of tasks --------------------------------------------------


class GroupedSdkModel(DelegatingSdkModel):
    """A model that calls another one twice at the same time."""

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        """Return the first of two responses."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.inner.get_response(*args, **options)) for _ in range(2)]
        return tasks[0].result()


def called_by_model() -> Any:
    """Call the model of an agent."""
    return runs.agent(GroupedSdkModel(runs.looping()))


def called_by_tool() -> Any:
    """Call agents in a tool whose exceptions end the run."""

    @function_tool(failure_error_function=None)
    async def ask() -> None:
        """Ask."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                helper = runs.agent(runs.looping(), name="helper")
                group.create_task(Runner.run(helper, "go", **runs.options_of({})))

    return runs.agent(ScriptedAgentsModel(endless(uses("ask"))), ask)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no task groups")
@pytest.mark.parametrize(
    "build", [called_by_model, called_by_tool], ids=["by a model", "by a tool"]
)
def test_halt_in_a_task_group_ends_the_run(build: Callable[[], Any], events: list[Event]) -> None:
    """It wraps the exception of the limit in another one."""
    enable(tree=Limits(max_model_calls=3), action="raise", observers=[events.append])
    with pytest.raises(Exception) as raised:  # noqa: PT011  the SDK wraps that of a tool
        runs.call_run(build())
    stop = stop_of(raised.value)
    assert stop is not None
    assert (stop.agent, stop.reason) == ("boss", "max_model_calls")
    ends = [(each.agent, each.reason) for each in events if isinstance(each, Stop)]
    assert ends[-1] == ("boss", "max_model_calls")
