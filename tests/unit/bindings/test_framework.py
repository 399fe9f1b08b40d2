"""Only bindings depend on a framework: a second one is limited by the same runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from prometheus_client import REGISTRY

import otel_limits
from otel_limits import Cycle, Event, Halt, Limits, ModelCall, Started, Stop, ToolCall, Turn
from otel_limits.bindings import known
from otel_limits.bindings.class_patches import Patches
from otel_limits.bindings.entry_points import EntryPoint
from otel_limits.bindings.third_party import ThirdPartyFramework
from otel_limits.core.policy import Policy
from otel_limits.frameworks import (
    follow,
    follow_parts,
    follow_run,
    follow_run_async,
    follow_run_parts,
    follow_run_parts_async,
    follow_tool,
    follow_tool_parts,
    follow_tool_parts_async,
)
from otel_limits.ledger.address import parse
from otel_limits.runs.current import current
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import Runtime
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.table import Settings
from otel_limits.testing import FakeTime
from tests.bots import Bot, Ending, Model, Reply
from tests.second_framework import BOTS, BotCall, BotRun, BotTool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

ROOT = Path(otel_limits.__file__).parent


def install(path: Path, name: str, *, editable: bool = False, place: Path = ROOT.parent) -> None:
    """Write the metadata of a distribution: next to its modules, or of a source tree `place`."""
    metadata = path / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if editable:
        origin = {"url": place.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(origin))


class Scripted(Model):
    """A model with a script; `None` requests the tool `look`."""

    def __init__(self, *script: str | None, ask: Callable[[int], object] = id) -> None:
        self.script, self.calls, self.on_call = list(script), 0, ask
        self.asked: list[tuple[list[Any], list[str]]] = []

    async def ask(self, messages: Any, tools: Any) -> Reply:
        """Answer, and repeat the last answer."""
        self.asked.append((list(messages), list(tools)))
        if inspect.isawaitable(waited := self.on_call(self.calls)):
            await waited
        text = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        tools = [(str(self.calls), "look", "around")] if text is None else []
        return Reply(text or "thought", tools, (10, 5))


async def look(_: Any) -> str:
    """A tool."""
    return "nothing"


def bot(*script: str | None, **options: Any) -> Bot:
    """Make a bot with a tool and a scripted model."""
    return Bot("bob", Scripted(*script, **options), {"look": look})


def run(bot: Bot, text: Any = "go", **options: Any) -> Ending:
    """Run a bot."""
    return asyncio.run(bot.run(text, **options))


def named() -> ThirdPartyFramework:
    """The second framework, as the entry point of a distribution would name it."""
    point = EntryPoint("tests.bots", "tests.second_framework", "BOTS", "bots-limits", "bots")
    return ThirdPartyFramework(point)


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThirdPartyFramework]:
    """The second framework, registered with the readers of halt markers."""
    framework = named()
    monkeypatch.setattr(known, "FRAMEWORKS", [*known.FRAMEWORKS, framework])
    yield framework
    BOTS.release()


@pytest.fixture
def runtime(framework: ThirdPartyFramework) -> Iterator[Runtime]:
    """A runtime of that framework alone."""
    runtime = Runtime(LIVE, (framework,))
    yield runtime
    runtime.stop()


def settings(path: Path, limits: Limits) -> Settings:
    """Limits and a ledger."""
    ledger = parse("ledger", str(path), path.parent)
    return Settings(policy=Policy(limits=limits), ledger=ledger)


def test_second_framework_is_limited(runtime: Runtime, events: list[Event], tmp_path: Path) -> None:
    """Turns, tokens, a halt, events, metrics and a ledger row work as with Strands."""
    path = tmp_path / "ledger.db"
    runtime.start(settings(path, Limits(max_turns=3)), [events.append])
    one = bot(None)

    ending = run(one)

    assert [each["text"] for each in one.said] == [
        *("go", *["thought", "nothing"] * 3),
        "This request could not be completed because it took too many steps.",
    ]
    stop = otel_limits.stop_of(ending)
    assert stop is not None
    assert (stop.reason, stop.turns, stop.usage.total) == ("max_turns", 3, 45)
    assert otel_limits.is_synthetic(ending.message)
    kinds = [type(event) for event in events]
    counted = (Started, Cycle, ModelCall, Turn, ToolCall, Halt, Stop)
    assert [kinds.count(each) for each in counted] == [1, 3, 3, 3, 3, 1, 1]
    assert value("stops_total", reason="max_turns", action="halted") == 1
    assert value("turns_total") == 3
    assert value("tokens_total", model="Scripted", type="input") == 30
    runtime.stop()
    assert rows_of(path) == [("bob", "max_turns", 3, 30, 15)]


def test_natural_end_keeps_framework_stop_reason(runtime: Runtime, tmp_path: Path) -> None:
    """The stop reason of the framework passes through, in the metrics as well."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_turns=3)))
    assert run(bot("done")).reason == "done"
    assert value("stops_total", reason="done", action="none") == 1


LIMITED: Final[dict[str, tuple[Limits, str, int]]] = {
    "tokens": (Limits(max_token_budget=30), "max_token_budget", 2),
    "tool calls": (Limits(max_tool_calls=2), "max_tool_calls", 3),
    "loops": (Limits(max_identical_tool_calls=3), "loop_detected", 3),
}


@pytest.mark.parametrize("name", LIMITED)
def test_limits_hold(name: str, runtime: Runtime, tmp_path: Path) -> None:
    """They use the same counts as in any framework."""
    limits, reason, calls = LIMITED[name]
    runtime.start(settings(tmp_path / "ledger.db", limits))
    one = bot(None)
    assert (run(one).reason, one.model.calls) == (reason, calls)


def test_unknown_tool_is_a_loop(runtime: Runtime, tmp_path: Path) -> None:
    """Although no tool runs."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_identical_tool_calls=3)))
    one = Bot("bob", Scripted(None))
    assert (run(one).reason, one.model.calls) == ("loop_detected", 3)


def test_quota_limits_second_framework(runtime: Runtime, tmp_path: Path) -> None:
    """A binding that uses the shared path cannot forget quotas."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 2, window: P1D}}")
    runtime.start(settings(tmp_path / "ledger.db", Limits()), policy_file=PolicyFile(str(policy)))
    one = bot(None)
    assert (run(one).reason, one.model.calls) == ("quota_exceeded", 2)


def test_calls_wait_for_a_quota(runtime: Runtime, tmp_path: Path) -> None:
    """One after the other."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {slots: {concurrency: 1, on_exceeded: wait}}")
    runtime.start(settings(tmp_path / "ledger.db", Limits()), policy_file=PolicyFile(str(policy)))
    inside, most = 0, []

    async def wait(_: int) -> None:
        nonlocal inside
        inside += 1
        most.append(inside)
        await asyncio.sleep(0)
        inside -= 1

    async def main() -> list[Ending]:
        return list(await asyncio.gather(*(bot("done", ask=wait).run("go") for _ in range(3))))

    assert [each.reason for each in asyncio.run(main())] == ["done"] * 3
    assert most == [1, 1, 1]


def test_kill_ends_second_framework(runtime: Runtime, tmp_path: Path) -> None:
    """Also in the middle of a model call."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_turns=9)))

    async def hang(step: int) -> None:
        if step == 1:
            otel_limits.kill(agent="bob")
            await asyncio.Event().wait()

    one = bot(None, ask=hang)
    assert (run(one).reason, one.model.calls) == ("killed", 1)


def test_deadline_ends_a_model_call(runtime: Runtime, tmp_path: Path) -> None:
    """That never answers."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_duration_seconds=30)))

    async def hang(_: int) -> None:
        clock.advance(31)
        await asyncio.Event().wait()

    with FakeTime() as clock:
        assert run(bot("done", ask=hang)).reason == "max_duration"


def test_last_answer_ends_a_bot(runtime: Runtime, tmp_path: Path) -> None:
    """It is asked for without tools, and shown as the end."""
    limits = Settings(policy=Policy(limits=Limits(max_turns=2), action="wrap_up"))
    runtime.start(limits)
    one = bot(None, None, "what I know")
    shown: list[str] = []
    ending = run(one, show=shown.append)
    assert (ending.reason, ending.message["text"]) == ("max_turns", "what I know")
    assert "".join(shown).endswith("whatIknow")
    assert [tools for _, tools in one.model.asked] == [["look"], ["look"], []]
    assert not otel_limits.is_synthetic(ending.message)


def test_agent_that_calls_a_model_after_the_last_answer_ends_with_that(runtime: Runtime) -> None:
    """Its framework does not take that for the end."""

    class Restless(Bot):
        async def run(self, text: Any, show: Any = len) -> Ending:
            await super().run(text, show)
            return await super().run("Are you sure?", show)

    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="wrap_up")))
    one = Restless("bob", Scripted(None, None, "an answer"), {"look": look})
    patches = Patches()
    patches.wrap(Bot, "run", lambda of_bots: of_bots.__wrapped__)
    patches.wrap(Restless, "run", follow_run_async(BotRun.begin))
    try:
        ending = run(one)
    finally:
        patches.restore()
    assert (ending.message["text"], one.model.calls) == ("an answer", 3)
    stop = otel_limits.stop_of(ending)
    assert stop is not None
    assert (stop.reason, stop.action) == ("max_turns", "wrapped_up")
    assert not otel_limits.is_synthetic(ending.message)


def test_action_raise_raises(runtime: Runtime) -> None:
    """The limit's error."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="raise")))
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        run(bot(None))


def test_same_halts_in_a_row_are_refused(runtime: Runtime) -> None:
    """The binding passes the input, of which the shared path keeps a hash."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=1, max_repeated_failures=2))))
    one = bot(None)
    stops = [otel_limits.stop_of(run(one)) for _ in range(4)]
    assert [stop and stop.reason for stop in stops] == ["max_turns"] * 2 + ["loop_detected"] * 2
    assert one.model.calls == 2
    run(one, "another input")
    assert one.model.calls == 3


def test_person_extends_a_limit(runtime: Runtime) -> None:
    """The next run continues with the answer to the question."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="ask")))
    one = bot(None)
    assert (run(one).reason, one.model.calls) == ("paused", 2)
    assert (run(one, {"extend": {"max_turns": 1}}).reason, one.model.calls) == ("paused", 3)
    assert (run(one, "no").reason, one.model.calls) == ("max_turns", 3)


def test_answer_continues_the_task(runtime: Runtime) -> None:
    """Limits that the answer does not extend count on."""
    limits = Limits(max_turns=2, max_model_calls=3)
    runtime.start(Settings(policy=Policy(limits=limits, action="ask")))
    one = bot(None)
    assert (run(one).reason, one.model.calls) == ("paused", 2)
    ending = run(one, {"extend": {"max_turns": 9}})
    assert (ending.message["asked"]["limit"], one.model.calls) == ("max_model_calls", 3)


@dataclass(eq=False)
class WaitingRun(BotRun):
    """A run of a bot that waits for a person after each tool."""

    @classmethod
    def begin(cls, bot: Any, text: Any) -> WaitingRun | None:
        """Begin a run, which answers the interrupt before it, if it has that name."""
        return cls.start_if_on(BOTS.host, bot.name, answers=[text], bot=bot)

    def interrupts_of(self, result: Ending) -> Iterable[str]:
        """Return a key, as the next run also has it."""
        return [result.message["waits"]] if "waits" in result.message else ()


class Waiter(Bot):
    """A bot that waits for a person after each tool."""

    async def run(self, text: Any) -> Ending:  # type: ignore[override]
        """Call the model once, and wait."""
        reply = await self.model.ask([{"by": "user", "text": text}], ())
        return Ending("paused", {"text": reply.text, "waits": f"{self.name}-1"})


@pytest.mark.parametrize(("answer", "calls"), [("bob-1", 2), ("something else", 3)])
def test_answer_to_an_interrupt_of_the_framework_continues_the_task(
    answer: str, calls: int, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework says which interrupts an agent ends with, and which ones a run answers."""
    monkeypatch.setattr(Waiter, "run", follow_run_async(WaitingRun.begin)(Waiter.run))
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2))))
    one = Waiter("bob", Scripted(None))
    endings = [asyncio.run(one.run(each)) for each in ("go", answer, answer)]
    assert [each.reason for each in endings[:2]] == ["paused", "paused"]
    assert one.model.calls == calls


def team() -> tuple[Bot, Bot]:
    """A bot whose tool runs another one."""
    helper = Bot("helper", Scripted(None), {"look": look})

    async def ask(_: Any) -> str:
        return str((await helper.run("go")).message["text"])

    return Bot("bob", Scripted(None, "done"), {"look": ask}), helper


def test_tree_caps_a_bot_and_the_one_that_its_tool_runs(runtime: Runtime) -> None:
    """Both together; the caller reads a sentence for it."""
    runtime.start(Settings(policy=Policy(tree=Limits(max_turns=4))))
    boss, helper = team()
    assert run(boss).reason == "max_turns"
    assert (boss.model.calls, helper.model.calls) == (1, 3)
    assert boss.said[2]["text"].startswith("Agent 'helper' stopped before it finished")


def test_bot_that_another_one_runs_asks_no_person(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """The other's model would get the question."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="ask")))
    boss, helper = team()
    assert run(boss).reason == "done"
    assert (boss.model.calls, helper.model.calls) == (2, 2)
    assert boss.said[2]["text"].startswith("Agent 'helper' stopped before it finished")
    (line,) = [each for each in caplog.messages if "instead of asking" in each]
    assert line.endswith(
        "'helper' is halted instead of asking, because another agent has called it."
    )


def test_framework_may_let_inner_agents_ask(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it hands their question to the person."""
    monkeypatch.setattr(BotRun, "can_ask_within", True)
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="ask")))
    boss, _ = team()
    run(boss)
    assert boss.said[2]["text"].startswith("This request is paused because it took too many steps")


def test_model_call_of_a_tool_is_refused(runtime: Runtime) -> None:
    """And the refusal halts the bot."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_model_calls=1))))
    other = Scripted("an answer")

    async def ask(_: Any) -> str:
        return (await other.ask([], ())).text

    boss = Bot("bob", Scripted(None), {"look": ask})
    assert (run(boss).reason, other.calls) == ("max_model_calls", 0)


class BlockingModel(Model):
    """A model that blocks its thread, and requests a tool."""

    calls = 0

    def answer(self, messages: Any, tools: Any) -> Reply:  # noqa: ARG002
        """Answer a conversation."""
        self.calls += 1
        return Reply("thought", [(str(self.calls), "look", messages[0]["text"])], (10, 5))

    def parts(self, messages: Any, tools: Any) -> Iterator[Any]:
        """Stream an answer."""
        yield "thought"
        yield self.answer(messages, tools)


class BlockingBot(Bot):
    """A bot that blocks its thread."""

    def work(self, text: Any, method: str) -> Ending:
        """Do what `run` does."""
        self.said.append({"by": "user", "text": str(text)})
        while True:
            found = getattr(self.model, method)(self.said, list(self.tools))
            reply = found if isinstance(found, Reply) else list(found)[-1]
            for identity, name, argument in reply.tools:
                result = self.call(identity, name, argument)
                self.said.append({"by": "tool", "id": identity, "text": result})

    def call(self, identity: str, name: str, argument: Any) -> str:
        """Call a tool."""
        return f"nothing {name} {argument} {identity}"


@pytest.mark.parametrize("method", ["answer", "parts"])
@pytest.mark.parametrize("action", ["halt", "raise"])
def test_framework_that_blocks_its_thread_is_limited(
    runtime: Runtime, method: str, action: Any
) -> None:
    """By wrappers of methods, and of generators, that are not coroutines."""
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3), action=action)))
    patches = Patches()
    patches.wrap(BlockingBot, "work", follow_run(BotRun.begin))
    patches.wrap(BlockingBot, "call", follow_tool(BotTool.begin))
    patches.wrap(BlockingModel, "answer", follow(BotCall.begin))
    patches.wrap(BlockingModel, "parts", follow_parts(BotCall.begin))
    one = BlockingBot("bob", BlockingModel(), {"look": look})
    try:
        reason = one.work("go", method).reason
    except otel_limits.MaxTurnsReachedException as error:
        reason = "raised" if error.turns == 3 else ""
    finally:
        patches.restore()
    assert (reason, one.model.calls) == ("raised" if action == "raise" else "max_turns", 3)
    assert [each["by"] for each in one.said] == ["user", *["tool"] * 3, "bot"]


class TalkingModel(BlockingModel):
    """A model that requests a tool in its first answers, if it has one."""

    def __init__(self, most: int = 9) -> None:
        self.most = most

    def answer(self, messages: Any, tools: Any) -> Reply:
        """Answer a conversation."""
        reply = super().answer(messages, tools)
        return reply if tools and self.calls <= self.most else Reply("an answer", (), (10, 5))

    async def ask(self, messages: Any, tools: Any) -> Reply:
        """Do the same as a coroutine."""
        return self.answer(messages, tools)


class TalkingBot(BlockingBot):
    """A bot whose run yields its answers, and then its ending; its reader may send it a text."""

    def talk(self, text: Any) -> Iterator[Any]:
        """Run in a thread that may block."""
        self.said.append({"by": "user", "text": str(text)})
        reply = Reply(tools=[("", "", "")])
        while reply.tools:
            reply = self.model.answer(self.said, list(self.tools))
            yield from self.show(reply)
            for identity, name, argument in reply.tools:
                result = self.call(identity, name, argument)
                self.said.append({"by": "tool", "id": identity, "text": result})
        yield Ending("done", {"by": "bot", "text": reply.text})

    async def talk_async(self, text: Any) -> AsyncIterator[Any]:
        """Do the same with an event loop."""
        self.said.append({"by": "user", "text": str(text)})
        reply = Reply(tools=[("", "", "")])
        while reply.tools:
            reply = await self.model.ask(self.said, list(self.tools))
            try:
                sent = yield reply.text
            except TimeoutError:
                sent = "too late"
            self.said += [] if sent is None else [{"by": "user", "text": sent}]
            for identity, name, argument in reply.tools:
                result = await self.use(identity, name, argument)
                self.said.append({"by": "tool", "id": identity, "text": result})
        yield Ending("done", {"by": "bot", "text": reply.text})

    def show(self, reply: Reply) -> Iterator[Any]:
        """Yield a text, and add what the reader sends."""
        try:
            sent = yield reply.text
        except TimeoutError:
            sent = "too late"
        self.said += [] if sent is None else [{"by": "user", "text": sent}]


class TalkingRun(BotRun):
    """One run of such a bot."""

    def is_result(self, part: Any) -> bool:
        """The ending is the only part that is no text."""
        return isinstance(part, Ending)


@pytest.fixture
def talking(runtime: Runtime) -> Iterator[Runtime]:
    """A runtime of bots whose runs yield parts."""
    patches = Patches()
    patches.wrap(TalkingBot, "talk", follow_run_parts(TalkingRun.begin))
    patches.wrap(TalkingBot, "talk_async", follow_run_parts_async(TalkingRun.begin))
    patches.wrap(BlockingBot, "call", follow_tool(BotTool.begin))
    patches.wrap(TalkingModel, "answer", follow(BotCall.begin))
    yield runtime
    patches.restore()


async def step(parts: Any, way: str = "next", *args: Any) -> Any:
    """Read a part of a run, or do something else with its generator."""
    if hasattr(parts, "aclose"):
        return await getattr(parts, "__anext__" if way == "next" else f"a{way}")(*args)
    try:
        return getattr(parts, "__next__" if way == "next" else way)(*args)
    except StopIteration:
        raise StopAsyncIteration from None


async def read(parts: Any) -> list[Any]:
    """Read all parts."""
    found = []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            found.append(await step(parts))
    return found


TALKS: Final = ["talk", "talk_async"]


def talking_bot(method: str, most: int = 9) -> tuple[Any, Any]:
    """Return a bot, and its run."""
    one = TalkingBot("bob", TalkingModel(most), {"look": look})
    return one, getattr(one, method)("go")


@pytest.mark.parametrize("method", TALKS)
def test_run_that_yields_parts_is_limited(talking: Runtime, method: str) -> None:
    """It ends with the result of the halt as its last part."""
    talking.start(Settings(policy=Policy(limits=Limits(max_turns=3))))
    one, parts = talking_bot(method)
    *texts, ending = asyncio.run(read(parts))
    assert (texts, one.model.calls) == (["thought"] * 3, 3)
    assert ending.reason == "max_turns"
    stop = otel_limits.stop_of(ending)
    assert stop is not None
    assert (stop.reason, stop.turns, stop.tool_calls) == ("max_turns", 3, 3)


@pytest.mark.parametrize("method", TALKS)
def test_run_that_yields_parts_raises(talking: Runtime, method: str) -> None:
    """With the action `raise`."""
    talking.start(Settings(policy=Policy(limits=Limits(max_turns=3), action="raise")))
    _, parts = talking_bot(method)
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        asyncio.run(read(parts))


@pytest.mark.parametrize("method", TALKS)
def test_last_answer_ends_a_run_that_yields_parts(talking: Runtime, method: str) -> None:
    """The stop is in the part that is its result."""
    talking.start(Settings(policy=Policy(limits=Limits(max_turns=2), action="wrap_up")))
    one, parts = talking_bot(method)
    *texts, ending = asyncio.run(read(parts))
    assert (texts, one.model.calls) == (["thought"] * 2 + ["an answer"], 3)
    assert (ending.reason, ending.message["text"]) == ("max_turns", "an answer")


LEFT: Final[dict[str, tuple[int, str, tuple[Any, ...], str]]] = {
    "closed": (1, "close", (), "aborted"),
    "closed after its result": (3, "close", (), "done"),
    "exception": (1, "throw", (KeyError("reader"),), "error"),
}
"""How many parts are read, what its reader does then, and why it ended."""


@pytest.mark.parametrize("method", TALKS)
@pytest.mark.parametrize("name", LEFT)
def test_run_lasts_until_its_parts_are_read_or_left(
    talking: Runtime, events: list[Event], name: str, method: str
) -> None:
    """From the first part, not before."""
    number, way, args, reason = LEFT[name]
    talking.start(Settings(policy=Policy(limits=Limits(max_turns=9))), [events.append])
    _, parts = talking_bot(method, 1)

    async def main() -> None:
        assert not any(isinstance(each, Started) for each in events)
        for _ in range(number):
            await step(parts)
            assert not any(isinstance(each, Stop) for each in events)
        with contextlib.suppress(KeyError):
            await step(parts, way, *args)

    asyncio.run(main())
    assert [each.reason for each in events if isinstance(each, Stop)] == [reason]
    assert not len(talking.runs)


@pytest.mark.parametrize("method", TALKS)
def test_failure_of_a_run_that_yields_parts_is_its_end(
    talking: Runtime, events: list[Event], method: str
) -> None:
    """And the reader gets it."""
    talking.start(Settings(policy=Policy(limits=Limits(max_turns=9))), [events.append])
    one, parts = talking_bot(method)
    one.tools = {"look": look}
    one.model.answer = None
    one.model.ask = None
    with pytest.raises(TypeError):
        asyncio.run(read(parts))
    assert [each.reason for each in events if isinstance(each, Stop)] == ["error"]


@pytest.mark.parametrize("method", TALKS)
def test_reader_of_parts_is_outside_of_the_run(talking: Runtime, method: str) -> None:
    """An agent that it runs between two parts has its own budget."""
    talking.start(Settings(policy=Policy(tree=Limits(max_turns=3))))
    one, parts = talking_bot(method)

    async def main() -> list[int]:
        others = []
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await step(parts)
                assert current() is None
                other, answers = talking_bot(method)
                await read(answers)
                others.append(other.model.calls)
        return others

    assert asyncio.run(main()) == [3] * 4
    assert one.model.calls == 3


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("method", TALKS)
def test_run_gets_what_its_reader_sends_and_throws(
    talking: Runtime, method: str, *, is_on: bool
) -> None:
    """As if it was not limited."""
    if is_on:
        talking.start(Settings(policy=Policy(limits=Limits(max_turns=3))))
    one, parts = talking_bot(method)

    async def main() -> list[Any]:
        first = await step(parts)
        second = await step(parts, "send", "faster")
        return [first, second, await step(parts, "throw", TimeoutError()), await read(parts)]

    *texts, rest = asyncio.run(main())
    assert texts == ["thought"] * 3
    assert [each["text"] for each in one.said if each["by"] == "user"] == [
        "go",
        "faster",
        "too late",
    ]
    assert rest[-1].reason == ("max_turns" if is_on else "done")


# --- tools that yield parts -----------------------------------------------------------------------


@dataclass
class Found:
    """The result of a tool, after texts that show its progress."""

    text: str
    failed: bool = False


class StreamingBot(BlockingBot):
    """A bot whose tools yield parts."""

    def call(self, identity: str, name: str, argument: Any) -> str:
        """Call a tool in a thread that may block."""
        return self.text_of(list(self.steps(identity, name, argument)))

    async def use(self, identity: str, name: str, argument: Any) -> str:
        """Do the same with an event loop."""
        return self.text_of([each async for each in self.steps_async(identity, name, argument)])

    def steps(self, identity: str, name: str, argument: Any) -> Iterator[Any]:  # noqa: ARG002
        """Yield the parts of a tool."""
        yield "looking"
        found: Any = self.tools[name](argument)
        yield asyncio.run(found)

    async def steps_async(self, identity: str, name: str, argument: Any) -> AsyncIterator[Any]:  # noqa: ARG002
        """Do the same with an event loop."""
        yield "looking"
        yield await self.tools[name](argument)

    def text_of(self, parts: list[Any]) -> str:
        """Return the last part as a text."""
        return str(getattr(parts[-1], "text", parts[-1]))


class StreamedTool(BotTool):
    """One call of such a tool."""

    def is_result(self, part: Any) -> bool:
        """Only the result is no text."""
        return isinstance(part, Found)

    def text_of(self, result: Any) -> str:
        """The last text is the result of a tool that has no other."""
        return str(getattr(result, "text", result))

    def with_text(self, result: Any, text: str) -> Any:
        """Return another result."""
        return Found(text) if isinstance(result, Found) else text

    def is_error(self, result: Any) -> bool:
        """Only an object can say so."""
        return getattr(result, "failed", False)


async def fails_to_look(_: Any) -> Any:
    """A tool whose result is a failure."""
    return Found("no network", failed=True)


async def raises(_: Any) -> Any:
    """A tool that raises."""
    raise ValueError("no network")


async def asks_another(_: Any) -> Any:
    """A tool that runs another bot."""
    return Found(str((await bot(None).run("go")).message["text"]))


STREAMED: Final[dict[str, tuple[Any, Limits, str, int, str]]] = {
    "a text": (look, Limits(max_identical_tool_calls=3), "loop_detected", 3, "nothing"),
    "a failure": (
        fails_to_look,
        Limits(max_consecutive_tool_failures=2),
        "loop_detected",
        2,
        "no network",
    ),
    "an exception": (raises, Limits(max_turns=9), "error", 1, ""),
    "a refusal": (look, Limits(max_tool_calls=2), "max_tool_calls", 3, "Not run: 2 of 2"),
    "a halted bot": (asks_another, Limits(max_turns=2), "max_turns", 2, "Agent 'bob' stopped"),
}
"""By result: the tool, the limits, the reason of the end, the model calls of the bot, and the
beginning of the last text for the model."""


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("method", ["work", "run"])
def test_tool_that_yields_parts_is_limited(
    runtime: Runtime, events: list[Event], name: str, method: str
) -> None:
    """Its code belongs to it, and its result is counted, refused and worded."""
    tool, limits, reason, calls, text = STREAMED[name]
    runtime.start(Settings(policy=Policy(limits=limits)), [events.append])
    patches = Patches()
    patches.wrap(BlockingBot, "work", follow_run(BotRun.begin))
    patches.wrap(StreamingBot, "steps", follow_tool_parts(StreamedTool.begin))
    patches.wrap(StreamingBot, "steps_async", follow_tool_parts_async(StreamedTool.begin))
    patches.wrap(TalkingModel, "answer", follow(BotCall.begin))
    one = StreamingBot("bob", TalkingModel(), {"look": tool})
    try:
        with contextlib.suppress(ValueError):
            one.work("go", "answer") if method == "work" else run(one)
    finally:
        patches.restore()
    *_, stop = [each for each in events if isinstance(each, Stop)]
    assert (stop.reason, one.model.calls) == (reason, calls)
    texts = [each["text"] for each in one.said if each["by"] == "tool"]
    assert not text or texts[-1].startswith(text)


def value(name: str, **labels: str) -> float | None:
    """One sample of bob's metrics."""
    return REGISTRY.get_sample_value(f"otel_limits_{name}", {"agent": "bob", **labels})


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Ledger row of each invocation."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(path)) as ledger:
        return ledger.execute(
            "SELECT i.agent, i.reason, count(*), sum(c.input_tokens), sum(c.output_tokens)"
            " FROM otel_limits_invocations i JOIN otel_limits_model_calls c"
            " ON c.invocation_id = i.id GROUP BY 1, 2"
        ).fetchall()


STRANDS_WORDS = re.compile(
    r"strands\.telemetry|execute_event_loop_cycle|^\s*(import|from) strands|limit_turns",
    re.MULTILINE,
)


def test_strands_is_used_by_its_binding_only() -> None:
    """Not its modules, span names or stop reasons; the demo may, as a program that uses it."""
    known_in = {
        path.relative_to(ROOT).parts[:2]
        for path in ROOT.rglob("*.py")
        if STRANDS_WORDS.search(path.read_text(encoding="utf-8"))
    }
    assert {place for place in known_in if place[0] != "demo"} == {("bindings", "strands")}
