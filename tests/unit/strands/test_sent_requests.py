"""Every request to a provider is counted once, for its invocation, even after the end of it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from pydantic import BaseModel
from strands import Agent, tool

from otel_limits import Event, Limits, ModelCall, Stop, enable
from otel_limits.testing import ScriptedModel, fails, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.conftest import MakeAgent

QUESTION: Any = [{"role": "user", "content": [{"text": "a question of about ten tokens or so"}]}]


class Report(BaseModel):
    """A structured output."""

    text: str = "some text of about ten tokens, as it seems"


class ByItself(ScriptedModel):
    """Gets structured output from its own API instead of `stream`, as most providers do."""

    async def structured_output(
        self, output_model: Any, *_: Any, **__: Any
    ) -> AsyncGenerator[Any, None]:
        """Answer without a stream."""
        self.calls += 1
        yield {"output": output_model()}


def calls(events: list[Event]) -> list[ModelCall]:
    """Model calls, in the order of their ends."""
    return [fact for fact in events if isinstance(fact, ModelCall)]


def stops(events: list[Event]) -> dict[str, Stop]:
    """Stops of all agents."""
    return {fact.agent: fact for fact in events if isinstance(fact, Stop)}


async def read(model: Any) -> str:
    """Call a model without an agent, as an application may."""
    return "".join(
        [
            event["contentBlockDelta"]["delta"].get("text", "")
            async for event in model.stream(QUESTION)
            if "contentBlockDelta" in event
        ]
    )


async def extract(model: Any, output_model: Any = Report) -> Any:
    """Request structured output from a model."""
    return [
        event["output"]
        async for event in model.structured_output(output_model, QUESTION, system_prompt="be brief")
        if "output" in event
    ][-1]


def asking(ask: Callable[[], Any], *, model: Any = None, **arguments: Any) -> Agent:
    """Make an agent whose one tool runs `ask`."""

    @tool
    async def think() -> str:
        """Call another model."""
        return str(await ask())

    scripted = model or ScriptedModel([uses("think"), says("done")])
    return Agent(model=scripted, tools=[think], callback_handler=None, name="thinker", **arguments)


# --- structured output ----------------------------------------------------------------------------


def test_structured_output_in_tool_is_counted(source: str, events: list[Event]) -> None:
    """A provider's own API for it is tracked like `stream`, and estimated from its texts."""
    enable(observers=[events.append])
    helper = ByItself([], model_id="helper")
    asking(lambda: extract(helper))("go")
    (call,) = (each for each in calls(events) if each.model == "helper")
    assert (helper.calls, call.kind, call.estimated, call.side) == (1, "estimated", True, True)
    assert (call.usage.input > 20, call.usage.output > 8) == (True, True)
    assert stops(events)["thinker"].model_calls == 3


def test_structured_output_through_stream_is_one_call(source: str, events: list[Event]) -> None:
    """A class that uses its own `stream` makes one request, with the usage reported there."""

    class Streaming(ScriptedModel):
        async def structured_output(
            self, output_model: Any, prompt: Any, *_: Any, **__: Any
        ) -> AsyncGenerator[Any, None]:
            async for event in self.stream(prompt):
                yield event
            yield {"output": output_model()}

    enable(observers=[events.append])
    helper = Streaming([says("{}", usage=tokens(70))], model_id="helper")
    asking(lambda: extract(helper))("go")
    counted = [(each.kind, each.usage.total) for each in calls(events) if each.model == "helper"]
    assert (helper.calls, counted) == (1, [("measured", 70)])


def test_structured_output_from_coroutine_is_counted(events: list[Event]) -> None:
    """A class that breaks the protocol works as without us, and is counted."""

    class Coroutine(ScriptedModel):
        async def structured_output(  # type: ignore[override]
            self, *_: Any, **__: Any
        ) -> Any:
            self.calls += 1
            return {"output": Report()}

    enable(observers=[events.append])
    helper = Coroutine([], model_id="helper")

    async def ask() -> Any:
        return (await helper.structured_output(Report, QUESTION))["output"]

    asking(ask)("go")
    assert [each.kind for each in calls(events) if each.model == "helper"] == ["estimated"]


def test_instrumented_client_reports_structured_output_usage(events: list[Event]) -> None:
    """The span of a client within the request completes it instead of being a second call."""

    class Instrumented(ScriptedModel):
        async def structured_output(
            self, output_model: Any, *_: Any, **__: Any
        ) -> AsyncGenerator[Any, None]:
            usage = {"gen_ai.usage.input_tokens": 900, "gen_ai.usage.output_tokens": 100}
            tracer = trace.get_tracer("opentelemetry.instrumentation.openai_v2")
            with tracer.start_as_current_span("chat gpt", attributes=usage):
                pass
            yield {"output": output_model()}

    enable(observers=[events.append])
    helper = Instrumented([], model_id="helper")
    asking(lambda: extract(helper))("go")
    counted = [each for each in calls(events) if each.model != "scripted"]
    assert [(each.kind, each.usage.total) for each in counted] == [("measured", 1000)]


def test_failed_structured_output_is_a_failed_call(events: list[Event]) -> None:
    """Its error reaches the caller."""

    class Failing(ScriptedModel):
        async def structured_output(self, *_: Any, **__: Any) -> Any:
            if self.config:
                raise ConnectionError("no route")
            yield {}

    enable(observers=[events.append])
    helper = Failing([], model_id="helper")
    agent = asking(lambda: extract(helper))
    agent("go")
    assert "no route" in str(agent.messages[2])
    assert [each.kind for each in calls(events) if each.model == "helper"] == ["failed"]


# --- classes --------------------------------------------------------------------------------------


def test_model_class_defined_mid_run_is_tracked(events: list[Event]) -> None:
    """The tool that calls it defines it, too."""
    enable(observers=[events.append])

    async def ask() -> Any:
        class Late(ByItself):
            async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
                async for event in super().stream(*args, **kwargs):
                    yield event

            async def structured_output(
                self, output_model: Any, *_: Any, **__: Any
            ) -> AsyncGenerator[Any, None]:
                yield {"output": output_model()}

        late = Late([says("hint")], model_id="late")
        await read(late)
        return await extract(late)

    asking(ask)("go")
    assert [each.kind for each in calls(events) if each.model == "late"] == [
        "measured",
        "estimated",
    ]


def test_chain_of_parent_classes_makes_one_request(events: list[Event]) -> None:
    """Each class calls its parent's `stream`, at any depth."""

    class First(ScriptedModel):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            async for event in super().stream(*args, **kwargs):
                yield event

    class Second(First):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            async for event in super().stream(*args, **kwargs):
                yield event

    enable(observers=[events.append])
    helper = Second([says("hint", usage=None)], model_id="helper")
    asking(lambda: read(helper))("go")
    (call,) = (each for each in calls(events) if each.model == "helper")
    assert (call.kind, call.usage.output) == ("estimated", 1)


class Around(ScriptedModel):
    """A model that calls others: the first that answers, or all of them."""

    def __init__(self, *models: ScriptedModel, together: bool = False) -> None:
        super().__init__([])
        self.config = {}
        self.models, self.together = models, together

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Call them."""
        if self.together:
            answers = await asyncio.gather(*(self.collect(each) for each in self.models))
            for event in answers[-1]:
                yield event
            return
        for model in self.models:
            try:
                async for event in model.stream(*args, **kwargs):
                    yield event
            except ConnectionError:
                continue
            return

    async def collect(self, model: ScriptedModel) -> list[Any]:
        """Read an answer to its end."""
        return [event async for event in model.stream(QUESTION)]


def test_delegating_model_makes_one_request(source: str, events: list[Event]) -> None:
    """It counts for the inner model, which has the price."""
    enable(observers=[events.append])
    inner = ScriptedModel([says("done")], model_id="inner")
    Agent(model=Around(inner), callback_handler=None)("go")
    assert [(each.model, each.usage.total, each.side) for each in calls(events)] == [
        ("inner", 15, False)
    ]


def test_falling_back_model_makes_two_requests(source: str, events: list[Event]) -> None:
    """Both the failed one and the answered one are calls."""
    enable(observers=[events.append])
    broken = ScriptedModel([fails(ConnectionError("down"))], model_id="broken")
    inner = ScriptedModel([says("done")], model_id="inner")
    result = Agent(model=Around(broken, inner), callback_handler=None, name="a")("go")
    assert result.stop_reason == "end_turn"
    assert [(each.model, each.kind) for each in calls(events)] == [
        ("broken", "failed"),
        ("inner", "measured"),
    ]
    assert (stops(events)["a"].turns, stops(events)["a"].usage.total) == (1, 15)


def test_fan_out_model_makes_one_request_each(source: str, events: list[Event]) -> None:
    """Each counts once, with its own tokens."""
    enable(observers=[events.append])
    models = [
        ScriptedModel([says("x", usage=tokens(100 * n))], model_id=f"m{n}") for n in (1, 2, 3)
    ]
    Agent(model=Around(*models, together=True), callback_handler=None, name="a")("go")
    assert sorted((each.model, each.usage.total) for each in calls(events)) == [
        ("m1", 100),
        ("m2", 200),
        ("m3", 300),
    ]
    assert (stops(events)["a"].turns, stops(events)["a"].usage.total) == (1, 600)


# --- attribution ----------------------------------------------------------------------------------


def test_plain_thread_counts_for_its_starter(events: list[Event]) -> None:
    """The thread inherits nothing but the span of the tool."""
    enable(observers=[events.append])
    helper = ScriptedModel([says("hint")], model_id="helper")

    async def ask() -> Any:
        thread = threading.Thread(target=lambda: asyncio.run(read(helper)))
        thread.start()
        await asyncio.to_thread(thread.join)

    asking(ask)("go")
    assert [each.side for each in calls(events) if each.model == "helper"] == [True]
    assert stops(events)["thinker"].model_calls == 3


def test_calls_of_the_loop_are_not_side_calls(
    source: str, make_agent: MakeAgent, events: list[Event]
) -> None:
    """Nor are its retries."""
    enable(observers=[events.append])
    make_agent(ScriptedModel([uses("search"), says("x")]))("go")
    assert [each.side for each in calls(events)] == [False, False]


# --- after the end --------------------------------------------------------------------------------


def test_call_after_end_of_invocation_is_recorded(source: str, events: list[Event]) -> None:
    """A task left behind by a tool counts for its invocation, even after that has ended."""
    enable(Limits(max_token_budget=2000), observers=[events.append])
    helper = ScriptedModel([says("hint", usage=tokens(1000))] * 3, model_id="helper")

    async def main() -> None:
        ended, tasks = asyncio.Event(), []

        async def later() -> None:
            await ended.wait()
            for _ in range(3):
                await read(helper)

        async def ask() -> str:
            tasks.append(asyncio.create_task(later()))
            return "begun"

        await asking(ask).invoke_async("go")
        ended.set()
        await tasks[0]

    asyncio.run(main())
    late = [each for each in calls(events) if each.model == "helper"]
    stop = stops(events)["thinker"]
    assert [(each.side, each.usage.total, each.number) for each in late] == [
        (True, 1000, 3),
        (True, 1000, 4),
        (True, 1000, 5),
    ]
    assert {each.invocation.id for each in late} == {stop.invocation_id}
    assert stop.model_calls == 2


def test_call_outliving_its_invocation_is_counted_once(source: str, events: list[Event]) -> None:
    """It is in flight at the end, and later counts with the usage reported."""
    enable(observers=[events.append])

    async def main() -> None:
        ended, tasks = asyncio.Event(), []

        class Slow(ScriptedModel):
            async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
                await ended.wait()
                async for event in super().stream(*args, **kwargs):
                    yield event

        helper = Slow([says("hint", usage=tokens(1000))], model_id="helper")

        async def ask() -> str:
            tasks.append(asyncio.create_task(read(helper)))
            await asyncio.sleep(0)
            return "begun"

        await asking(ask).invoke_async("go")
        assert not [each for each in calls(events) if each.model == "helper"]
        ended.set()
        await tasks[0]

    asyncio.run(main())
    late = [each for each in calls(events) if each.model == "helper"]
    assert [(each.kind, each.usage.total) for each in late] == [("measured", 1000)]
