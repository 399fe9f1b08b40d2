"""Deadlines and kills during silence: in a provider, a middleware or between attempts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from strands import ModelRetryStrategy, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterModelCallEvent
from strands.middleware import InvokeModelStage
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import otel_limits
from otel_limits import Limits, ModelCall, Stop, enable, kill
from otel_limits.bindings.strands.leg_stage import LegWait
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from otel_limits.testing import FakeTime
    from tests.conftest import Call, MakeAgent

CAP_SECONDS = 30

FIRST_CHUNKS: list[StreamEvent] = [
    {"messageStart": {"role": "assistant"}},
    {"contentBlockStart": {"start": {}}},
    {"contentBlockDelta": {"delta": {"text": "Once upon"}}},
    {"contentBlockStop": {}},
    {"messageStop": {"stopReason": "end_turn"}},
]


class Stuck(ScriptedModel):
    """Sends the given chunks of its first response and then hangs; later calls answer."""

    def __init__(self, sent: int, on_hang: Callable[[], object] = lambda: None) -> None:
        super().__init__(endless(says("Here I am again.")))
        self.sent = sent
        self.on_hang = on_hang
        self.waits = threading.Event()

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the chunks."""
        if self.calls:
            async for event in super().stream(*arguments, **named):
                yield event
            return
        self.calls += 1
        for event in FIRST_CHUNKS[: self.sent]:
            yield event
        await self.hang()

    async def hang(self) -> None:
        """Wait forever."""
        self.waits.set()
        self.on_hang()
        await asyncio.Event().wait()


@pytest.fixture
def time_is_up(fake_time: FakeTime) -> Callable[[], None]:
    """Let time pass until the deadline."""
    return partial(fake_time.advance, CAP_SECONDS)


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
def test_deadline_ends_hanging_provider(
    make_agent: MakeAgent,
    source: str,
    call: Call,
    sent: int,
    open_spans: Callable[[], list[str]],
    time_is_up: Callable[[], None],
) -> None:
    """The invocation ends in time with valid history and ended spans; the next one works."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    agent = make_agent(Stuck(sent, time_is_up))
    result = call(agent)
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_duration", True)
    assert is_valid(agent.messages)
    assert open_spans() == []
    assert call(agent).stop_reason == "end_turn"


def test_interrupted_response_is_estimated(
    make_agent: MakeAgent, events: list[Event], time_is_up: Callable[[], None]
) -> None:
    """The provider billed the input and the chunks received, but reported no usage."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[events.append])
    make_agent(Stuck(3, time_is_up))("go")
    (booked,) = [event for event in events if isinstance(event, ModelCall)]
    assert (booked.kind, booked.estimated, booked.usage.output) == ("failed", True, 2)
    assert booked.usage.input == pytest.approx(66, rel=0.2)


def test_call_that_is_never_sent_is_not_counted(
    make_agent: MakeAgent, events: list[Event], time_is_up: Callable[[], None]
) -> None:
    """The time was up before, while a middleware ran."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[events.append])
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)
    agent("go")  # middleware registered after the first invocation runs within our stage

    async def dawdle(context: Any, next_fn: Any) -> Any:
        time_is_up()
        async for event in next_fn(context):
            yield event

    agent.add_middleware(InvokeModelStage, dawdle)
    events.clear()
    assert (agent("go").stop_reason, model.calls) == ("max_duration", 1)
    assert [event for event in events if isinstance(event, ModelCall)] == []


def test_complete_answer_is_kept(
    make_agent: MakeAgent, source: str, time_is_up: Callable[[], None]
) -> None:
    """If a provider hangs after its last chunk, only the usage is lost, not the answer."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    result = make_agent(Stuck(5, time_is_up))("go")
    assert str(result).strip() == "Once upon"


@pytest.mark.parametrize("sent", [0, 3])
def test_kill_ends_hanging_provider(
    make_agent: MakeAgent, source: str, call: Call, sent: int
) -> None:
    """From any thread, without delay."""
    enable(Limits(max_turns=50))
    model = Stuck(sent)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(call(make_agent(model))))
    thread.start()
    assert model.waits.wait(PATIENCE_SECONDS)
    assert kill(all=True) == 1
    thread.join(PATIENCE_SECONDS)
    assert ended[0].stop_reason == "killed"


def test_kill_from_same_event_loop_ends_invocation(make_agent: MakeAgent) -> None:
    """A web server kills an invocation that another task awaits; that task continues."""
    enable(Limits(max_turns=50))

    async def serve() -> list[str]:
        model = Stuck(0)
        task = asyncio.ensure_future(make_agent(model).invoke_async("go"))
        await asyncio.to_thread(model.waits.wait, PATIENCE_SECONDS)
        kill(all=True)
        result = await task
        return [result.stop_reason, str(getattr(task, "cancelling", int)())]

    assert asyncio.run(serve()) == ["killed", "0"]


def test_action_raise_raises_at_deadline(
    make_agent: MakeAgent, source: str, time_is_up: Callable[[], None]
) -> None:
    """As after any other halt."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), action="raise")
    with pytest.raises(otel_limits.MaxDurationReachedError):
        make_agent(Stuck(0, time_is_up))("go")


def test_concurrently_hanging_agents_all_end(
    make_agent: MakeAgent, time_is_up: Callable[[], None]
) -> None:
    """Several agents in one loop each end on their own."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    numbers = itertools.count(1)

    def hang() -> None:
        if next(numbers) == 20:
            time_is_up()

    async def gather() -> list[str]:
        agents = [make_agent(Stuck(number % 4, hang)) for number in range(20)]
        results = await asyncio.gather(*(agent.invoke_async("go") for agent in agents))
        return [result.stop_reason for result in results]

    assert asyncio.run(gather()) == ["max_duration"] * 20


# --- who cancels ----------------------------------------------------------------------------------


def test_cancellation_by_caller_stays_a_cancellation(make_agent: MakeAgent) -> None:
    """A timeout of the application is raised to it even if a kill arrives at the same moment."""
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


def test_timeout_around_agent_still_works(
    make_agent: MakeAgent, time_is_up: Callable[[], None]
) -> None:
    """Whichever comes first ends the invocation."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def within(seconds: float, on_hang: Callable[[], object]) -> str:
        agent = make_agent(Stuck(0, on_hang))
        try:
            result = await asyncio.wait_for(agent.invoke_async("go"), seconds)
        except asyncio.TimeoutError:
            return "timeout"
        return result.stop_reason

    assert asyncio.run(within(0.01, lambda: None)) == "timeout"
    assert asyncio.run(within(PATIENCE_SECONDS, time_is_up)) == "max_duration"


class Stubborn(Stuck):
    """A provider that mistakes cancellation for a lost connection and waits again."""

    async def hang(self) -> None:
        """Wait, twice if cancelled."""
        try:
            await super().hang()
        except asyncio.CancelledError:
            await super().hang()


class Wrapping(Stuck):
    """A provider that turns every exception into its own error."""

    async def hang(self) -> None:
        """Wait, and raise its own error."""
        try:
            await super().hang()
        except BaseException as error:
            raise OSError("the line is dead") from error


class Answering(Stuck):
    """A provider that returns a partial answer when cancelled."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream, and continue after a cancellation."""
        try:
            async for event in super().stream(*arguments, **named):
                yield event
        except asyncio.CancelledError:
            for event in FIRST_CHUNKS:
                yield event
            await asyncio.Event().wait()


@pytest.mark.parametrize("model", [Stubborn, Wrapping, Answering])
@pytest.mark.parametrize("sent", [0, 3])
def test_uncancellable_provider_is_abandoned(
    make_agent: MakeAgent,
    model: type[Stuck],
    sent: int,
    open_spans: Callable[[], list[str]],
    time_is_up: Callable[[], None],
) -> None:
    """The invocation ends anyway, and the caller's task is left without a pending cancellation."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def run() -> tuple[str, int]:
        result = await make_agent(model(sent, time_is_up)).invoke_async("go")
        return result.stop_reason, getattr(asyncio.current_task(), "cancelling", int)()

    assert asyncio.run(run()) == ("max_duration", 0)
    assert open_spans() == []


# --- a synchronous SDK ----------------------------------------------------------------------------


class InThread(Stuck):
    """A provider whose SDK blocks in a thread of the event loop's executor."""

    def __init__(self, on_hang: Callable[[], object]) -> None:
        super().__init__(0, on_hang)
        self.release = threading.Event()
        self.has_returned = False

    async def hang(self) -> None:
        """Wait for the thread."""
        self.on_hang()
        await asyncio.to_thread(self.block)

    def block(self) -> None:
        """Wait in the thread."""
        self.has_returned = self.release.wait(PATIENCE_SECONDS)


def test_blocking_thread_is_abandoned(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, time_is_up: Callable[[], None]
) -> None:
    """The coroutine ends in time; the thread continues until its call returns."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    model = InThread(time_is_up)

    async def run() -> tuple[str, bool]:
        result = await make_agent(model).invoke_async("go")
        had_returned = model.has_returned
        model.release.set()
        return result.stop_reason, had_returned

    assert asyncio.run(run()) == ("max_duration", False)
    gc.collect()
    assert "destroyed" not in caplog.text


def test_synchronous_call_waits_for_blocking_thread(
    make_agent: MakeAgent, time_is_up: Callable[[], None]
) -> None:
    """`asyncio.run` joins the executor's threads; the stop still has the time limit as reason."""
    model = InThread(time_is_up)

    def release(event: Event) -> None:
        if isinstance(event, Stop):
            model.release.set()

    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[release])
    assert make_agent(model)("go").stop_reason == "max_duration"
    assert model.has_returned


# --- elsewhere on the way to a response -----------------------------------------------------------


def test_deadline_ends_retry_delay(
    make_agent: MakeAgent,
    source: str,
    call: Call,
    open_spans: Callable[[], list[str]],
    time_is_up: Callable[[], None],
) -> None:
    """Strands waits before it retries a throttled provider."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    model = ScriptedModel([fails(ModelThrottledException("busy")), says("late")])
    agent = make_agent(model, retry_strategy=ModelRetryStrategy(initial_delay=3600))
    # Called before that of the strategy, which sleeps.
    agent.hooks.add_callback(AfterModelCallEvent, lambda _: time_is_up())
    result = call(agent)
    assert model.calls == 1
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_duration", True)
    assert is_valid(agent.messages)
    assert open_spans() == []
    assert call(agent).stop_reason == "end_turn"


def test_deadline_ends_delaying_middleware(
    make_agent: MakeAgent,
    source: str,
    open_spans: Callable[[], list[str]],
    time_is_up: Callable[[], None],
) -> None:
    """The call was not sent and never is."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    model = ScriptedModel([says("late")])
    agent = make_agent(model)

    async def rate_limiter(context: Any, next_fn: Any) -> Any:
        time_is_up()
        await asyncio.Event().wait()
        async for event in next_fn(context):
            yield event

    agent.add_middleware(InvokeModelStage, rate_limiter)
    result = agent("go")
    assert (result.stop_reason, model.calls, open_spans()) == ("max_duration", 0, [])


def test_side_call_past_deadline_raises_limit_error(
    make_agent: MakeAgent, source: str, events: list[Event], time_is_up: Callable[[], None]
) -> None:
    """The tool gets the limit's error, and no model call follows."""
    enable(Limits(max_duration_seconds=CAP_SECONDS), observers=[events.append])

    @tool
    async def consults() -> str:
        """Call a hanging model without an agent."""
        ask: Any = [{"role": "user", "content": [{"text": "help"}]}]
        async for _ in Stuck(1, time_is_up).stream(ask):
            pass
        return "advised"

    model = ScriptedModel(endless(uses("consults")))
    agent = make_agent(model, tools=[consults])
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("max_duration", 1)
    assert is_valid(agent.messages)
    assert len([event for event in events if isinstance(event, ModelCall)]) == 2


def test_deadline_ends_hanging_summary(
    make_agent: MakeAgent,
    source: str,
    open_spans: Callable[[], list[str]],
    time_is_up: Callable[[], None],
) -> None:
    """The loop needs the summary before it can respond; the conversation stays unchanged."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    too_long = fails(ContextWindowOverflowException("too long"))
    talk: Any = [
        {"role": role, "content": [{"text": "word"}]} for role in ["user", "assistant"] * 10
    ]

    class Overflowing(ScriptedModel):
        """Overflows on the conversation, then hangs on the summary of it."""

        async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
            async for event in super().stream(*arguments, **named):
                yield event
            time_is_up()
            await asyncio.Event().wait()

    model = Overflowing([too_long, says("summary")])
    agent = make_agent(model, messages=talk, conversation_manager=SummarizingConversationManager())
    assert agent("go").stop_reason == "max_duration"
    assert (model.calls, len(agent.messages), is_valid(agent.messages)) == (2, 22, True)
    assert open_spans() == []


def test_hook_after_answer_is_not_interrupted(
    make_agent: MakeAgent, time_is_up: Callable[[], None]
) -> None:
    """Only waits are interrupted: after an answer, the application's code runs undisturbed."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))
    finished: list[str] = []

    async def stores(event: AfterModelCallEvent) -> None:
        time_is_up()
        await asyncio.sleep(2 * LegWait.grace_seconds)
        finished.append("stored")

    agent = make_agent(ScriptedModel([says("done")]))
    agent.hooks.add_callback(AfterModelCallEvent, stores)
    assert (agent("go").stop_reason, finished) == ("end_turn", ["stored"])


def test_slow_reader_is_not_interrupted(
    make_agent: MakeAgent, time_is_up: Callable[[], None]
) -> None:
    """The code that reads a stream runs in the same task and is never cancelled."""
    enable(Limits(max_duration_seconds=CAP_SECONDS))

    async def read() -> list[str]:
        seen = []
        async for event in make_agent(Stuck(3)).stream_async("go"):
            if "data" in event:
                time_is_up()
                await asyncio.sleep(2 * LegWait.grace_seconds)
                seen.append("read")
            if "result" in event:
                seen.append(event["result"].stop_reason)
        return seen

    # The second text is that of the halt.
    assert asyncio.run(read()) == ["read", "read", "max_duration"]
