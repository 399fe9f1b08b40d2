"""Deadlines and kills while nothing comes: from a provider, a middleware, or between attempts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterModelCallEvent
from strands.middleware import InvokeModelStage
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import otel_limits
from otel_limits import Limits, ModelCall, enable, kill
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.clock import Clock
from tests.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterator

    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent

AIM_SECONDS = 0.5
"""How much later than its deadline an invocation may end."""

CAP_SECONDS = 0.3

BEGINNING: list[StreamEvent] = [
    {"messageStart": {"role": "assistant"}},
    {"contentBlockStart": {"start": {}}},
    {"contentBlockDelta": {"delta": {"text": "Once upon"}}},
    {"contentBlockStop": {}},
    {"messageStop": {"stopReason": "end_turn"}},
]


class Stuck(ScriptedModel):
    """Sends so many chunks of its first response and then nothing more; answers after that."""

    def __init__(self, sent: int) -> None:
        super().__init__(endless(says("Here I am again.")))
        self.sent = sent
        self.waits = threading.Event()

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream what there is."""
        if self.calls:
            async for event in super().stream(*arguments, **named):
                yield event
            return
        self.calls += 1
        for event in BEGINNING[: self.sent]:
            yield event
        await self.hang()

    async def hang(self) -> None:
        """Wait for what never comes."""
        self.waits.set()
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def warm(make_agent: MakeAgent) -> None:
    """Let the first invocation of a process, which imports much, be none that is timed."""
    enable(Limits(max_turns=5))
    make_agent(ScriptedModel([says("warm")]))("go")
    otel_limits.disable()


@contextlib.contextmanager
def in_time(cap: float = CAP_SECONDS, aim: float = AIM_SECONDS) -> Iterator[None]:
    """Have an invocation that is to end by its deadline, or not much later."""
    with Clock() as clock:
        yield
        assert clock() < cap + aim


def is_valid(messages: Any) -> bool:
    """Return whether a provider accepts a conversation: roles alternate, each use has a result."""
    roles = [message["role"] for message in messages]
    blocks = [block for message in messages for block in message["content"]]
    asked = [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]
    results = [block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block]
    alternates = all(one != other for one, other in itertools.pairwise(roles))
    return alternates and asked == results and all(m["content"] for m in messages)


# --- a provider that hangs ------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1, 3], ids=["before-first", "after-start", "within-text"])
def test_the_deadline_ends_a_provider_that_hangs(
    make_agent: MakeAgent, source: str, call: Call, sent: int, open_spans: Callable[[], list[str]]
) -> None:
    """The invocation ends in time, its history is valid and its spans end; the next one works."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    agent = make_agent(Stuck(sent))
    with in_time():
        result = call(agent)
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_duration", True)
    assert is_valid(agent.messages)
    assert open_spans() == []
    enable(Limits(max_duration_seconds=60))
    assert call(agent).stop_reason == "end_turn"


def test_what_was_cut_off_is_billed_by_estimate(make_agent: MakeAgent, events: list[Event]) -> None:
    """Nobody knows what the provider counts: its input was sent, and what came back is known."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[events.append])
    make_agent(Stuck(3))("go")
    (booked,) = [event for event in events if isinstance(event, ModelCall)]
    assert (booked.kind, booked.estimated, booked.usage.output) == ("unmeasured", True, 2)
    assert booked.usage.input == pytest.approx(66, rel=0.2)


def test_an_answer_that_is_complete_is_kept(make_agent: MakeAgent, source: str) -> None:
    """A provider that hangs after the end of its answer costs the usage, and not the answer."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    with in_time():
        result = make_agent(Stuck(5))("go")
    assert str(result).strip() == "Once upon"


@pytest.mark.parametrize("sent", [0, 3])
def test_kill_ends_a_provider_that_hangs(
    make_agent: MakeAgent, source: str, call: Call, sent: int
) -> None:
    """From any thread, at once."""
    enable(Limits(max_turns=50))
    model = Stuck(sent)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(call(make_agent(model))))
    thread.start()
    assert model.waits.wait(PATIENCE_SECONDS)
    with in_time(cap=0):
        assert kill(all=True) == 1
        thread.join(PATIENCE_SECONDS)
    assert ended[0].stop_reason == "killed"


def test_a_kill_in_the_same_loop_ends_it(make_agent: MakeAgent) -> None:
    """A web server kills what another of its tasks waits for; that task goes on."""
    enable(Limits(max_turns=50))

    async def serve() -> list[str]:
        model = Stuck(0)
        task = asyncio.ensure_future(make_agent(model).invoke_async("go"))
        await asyncio.to_thread(model.waits.wait, PATIENCE_SECONDS)
        kill(all=True)
        result = await task
        return [result.stop_reason, str(getattr(task, "cancelling", int)())]

    assert asyncio.run(serve()) == ["killed", "0"]


def test_raise_raises_in_time(make_agent: MakeAgent, source: str) -> None:
    """The action is taken as after any other halt."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), action="raise")
    with in_time(), pytest.raises(otel_limits.MaxDurationReachedError):
        make_agent(Stuck(0))("go")


def test_agents_that_hang_together_all_end(make_agent: MakeAgent) -> None:
    """Each is ended for itself, in one loop."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def gather() -> list[str]:
        agents = [make_agent(Stuck(number % 4)) for number in range(20)]
        results = await asyncio.gather(*(agent.invoke_async("go") for agent in agents))
        return [result.stop_reason for result in results]

    with in_time(aim=2 * AIM_SECONDS):
        assert asyncio.run(gather()) == ["max_duration"] * 20


# --- who cancels ----------------------------------------------------------------------------------


def test_the_callers_own_cancellation_is_a_cancellation(make_agent: MakeAgent) -> None:
    """A timeout of the application's own is raised to it, also when a kill comes at that moment."""
    enable(Limits(max_turns=5))

    async def both(*, kills: bool) -> str:
        model = Stuck(0)
        task = asyncio.ensure_future(make_agent(model).invoke_async("go"))
        await asyncio.to_thread(model.waits.wait, PATIENCE_SECONDS)
        task.cancel()
        if kills:
            kill(all=True)
        try:
            return (await task).stop_reason
        except asyncio.CancelledError:
            return "cancelled by the caller"

    assert asyncio.run(both(kills=False)) == "cancelled by the caller"
    assert asyncio.run(both(kills=True)) == "cancelled by the caller"


def test_a_timeout_around_the_agent_still_works(make_agent: MakeAgent) -> None:
    """What ends first ends it."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def within(seconds: float) -> str:
        try:
            result = await asyncio.wait_for(make_agent(Stuck(0)).invoke_async("go"), seconds)
        except asyncio.TimeoutError:
            return "timeout"
        return result.stop_reason

    assert [asyncio.run(within(0.1)), asyncio.run(within(60))] == ["timeout", "max_duration"]


class Stubborn(Stuck):
    """A provider that takes cancellation for a broken line, and waits again."""

    async def hang(self) -> None:
        """Wait, and once more."""
        try:
            await super().hang()
        except asyncio.CancelledError:
            await super().hang()


class Wrapping(Stuck):
    """A provider that makes an error of its own of whatever happens."""

    async def hang(self) -> None:
        """Wait, and complain."""
        try:
            await super().hang()
        except BaseException as error:
            raise OSError("the line is dead") from error


class Answering(Stuck):
    """A provider that answers what it has when it is cancelled."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream, and go on after a cancellation."""
        try:
            async for event in super().stream(*arguments, **named):
                yield event
        except asyncio.CancelledError:
            for event in BEGINNING:
                yield event
            await asyncio.Event().wait()


@pytest.mark.parametrize("model", [Stubborn, Wrapping, Answering])
@pytest.mark.parametrize("sent", [0, 3])
def test_a_provider_that_does_not_let_itself_be_cancelled(
    make_agent: MakeAgent, model: type[Stuck], sent: int, open_spans: Callable[[], list[str]]
) -> None:
    """It ends anyway, and nothing of it is left to the caller's task."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def run() -> tuple[str, int]:
        result = await make_agent(model(sent)).invoke_async("go")
        return result.stop_reason, getattr(asyncio.current_task(), "cancelling", int)()

    with in_time():
        assert asyncio.run(run()) == ("max_duration", 0)
    assert open_spans() == []


# --- a synchronous SDK ----------------------------------------------------------------------------


class InThread(Stuck):
    """A provider whose SDK blocks, in a thread of the loop's."""

    release = threading.Event()

    async def hang(self) -> None:
        """Wait for the thread."""
        self.waits.set()
        await asyncio.to_thread(self.release.wait, 20)


def test_a_thread_that_blocks_is_left_to_itself(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The coroutine ends in time; the thread lives on until its call returns."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def run() -> str:
        with in_time():
            result = await make_agent(InThread(0)).invoke_async("go")
        InThread.release.set()
        return str(result.stop_reason)

    assert asyncio.run(run()) == "max_duration"
    gc.collect()
    assert "destroyed" not in caplog.text


def test_a_synchronous_call_waits_for_the_thread_as_python_does(make_agent: MakeAgent) -> None:
    """`asyncio.run` joins the threads of its loop; the stop is the time limit's anyway."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    InThread.release.clear()
    begun = time.monotonic()
    with in_time(cap=4 * CAP_SECONDS):
        threading.Timer(4 * CAP_SECONDS, InThread.release.set).start()
        assert make_agent(InThread(0))("go").stop_reason == "max_duration"
    assert time.monotonic() - begun >= 4 * CAP_SECONDS


# --- elsewhere on the way to a response -----------------------------------------------------------


def test_a_pause_between_attempts_is_ended(
    make_agent: MakeAgent, source: str, call: Call, open_spans: Callable[[], list[str]]
) -> None:
    """Strands waits four seconds and more before it asks a provider again that was busy."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    agent = make_agent(ScriptedModel([fails(ModelThrottledException("busy")), says("late")]))
    with in_time():
        result = call(agent)
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_duration", True)
    assert is_valid(agent.messages)
    assert open_spans() == []
    enable(Limits(max_duration_seconds=60))
    assert call(agent).stop_reason == "end_turn"


async def waits_in_line(context: Any, next_fn: Any) -> Any:
    """Hold calls back, as a rate limiter does."""
    await asyncio.sleep(60)
    async for event in next_fn(context):
        yield event


def test_a_middleware_that_holds_a_call_back_is_ended(
    make_agent: MakeAgent, source: str, open_spans: Callable[[], list[str]]
) -> None:
    """The call has not gone out, and never does."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    model = ScriptedModel([says("late")])
    agent = make_agent(model)
    agent.add_middleware(InvokeModelStage, waits_in_line)
    with in_time():
        result = agent("go")
    assert (result.stop_reason, model.calls, open_spans()) == ("max_duration", 0, [])


@tool
async def consults() -> str:
    """Ask a model that hangs, without an agent."""
    async for _ in Stuck(1).stream([{"role": "user", "content": [{"text": "help"}]}]):
        pass
    return "advised"


def test_a_model_that_a_tool_asks_is_ended_with_the_error_of_the_limit(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The tool learns of it, and no model is called after it."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[events.append])
    model = ScriptedModel(endless(uses("consults")))
    agent = make_agent(model, tools=[consults])
    with in_time():
        result = agent("go")
    assert (result.stop_reason, model.calls) == ("max_duration", 1)
    assert is_valid(agent.messages)
    assert len([event for event in events if isinstance(event, ModelCall)]) == 2


class Overflowing(ScriptedModel):
    """Refuses the conversation as too long, and hangs when it is to write a summary of it."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Fail, then hang."""
        async for event in super().stream(*arguments, **named):
            yield event
        await asyncio.Event().wait()


def test_a_summary_that_hangs_is_ended(
    make_agent: MakeAgent, source: str, open_spans: Callable[[], list[str]]
) -> None:
    """The loop asks for it on its way to a response; the conversation stays as it was."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    too_long = fails(ContextWindowOverflowException("too long"))
    talk: Any = [
        {"role": role, "content": [{"text": "word"}]} for role in ["user", "assistant"] * 10
    ]
    model = Overflowing([too_long, says("summary")])
    agent = make_agent(model, messages=talk, conversation_manager=SummarizingConversationManager())
    with in_time():
        assert agent("go").stop_reason == "max_duration"
    assert (model.calls, len(agent.messages), is_valid(agent.messages)) == (2, 22, True)
    assert open_spans() == []


def test_a_hook_after_an_answer_is_not_interrupted(make_agent: MakeAgent) -> None:
    """What an application does with an answer that has come is its own: only waits are ended."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    finished: list[str] = []

    async def stores(event: AfterModelCallEvent) -> None:
        await asyncio.sleep(2 * CAP_SECONDS)
        finished.append("stored")

    agent = make_agent(ScriptedModel([says("done")]))
    agent.hooks.add_callback(AfterModelCallEvent, stores)
    assert (agent("go").stop_reason, finished) == ("end_turn", ["stored"])


def test_a_reader_that_is_slow_is_not_interrupted(make_agent: MakeAgent) -> None:
    """The code that reads a stream runs in the same task, and is never cancelled."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def read() -> list[str]:
        seen = []
        async for event in make_agent(Stuck(3)).stream_async("go"):
            if "data" in event:
                await asyncio.sleep(2 * CAP_SECONDS)
                seen.append("read")
            if "result" in event:
                seen.append(event["result"].stop_reason)
        return seen

    assert asyncio.run(read()) == ["read", "max_duration"]
