"""Agents are followed through Strands' public hooks, without side effects for other users."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookOrder,
    HookRegistry,
    MessageAddedEvent,
)
from strands.interrupt import Interrupt, InterruptException
from strands.middleware import InvokeModelContext, InvokeModelStage
from strands.middleware._agent_stream import AgentStreamStage
from strands.middleware._registry import MiddlewareRegistry
from strands.types._events import EventLoopStopEvent
from strands.types.events import ModelStopReason, TypedEvent
from strands.types.exceptions import EventLoopException

from otel_limits import (
    Event,
    Limits,
    LimitsPlugin,
    ModelCall,
    ToolCall,
    Turn,
    disable,
    enable,
    is_synthetic,
    stop_of,
)
from otel_limits.bindings.strands.halting import RefusedError
from otel_limits.testing import ScriptedModel, endless, fails, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeAgent


PLAIN_STREAM = ScriptedModel.stream
"""The original method, as it is while otel-limits is off."""


@tool
def search() -> str:
    """Search for nothing."""
    return "nothing found"


def runaway() -> ScriptedModel:
    """A model that asks for one more search forever."""
    return ScriptedModel(endless(uses("search")))


def counted(events: list[Event]) -> list[tuple[str, int]]:
    """Status and tokens of each model call."""
    return [(event.kind, event.usage.total) for event in events if isinstance(event, ModelCall)]


async def prepares_three(context: InvokeModelContext, next_fn: Any) -> Any:
    """Prepare three requests and make them one after another."""
    for prepared in [next_fn(context) for _ in range(3)]:
        async for event in prepared:
            last = event
    yield last


async def has_a_fallback(context: InvokeModelContext, next_fn: Any) -> Any:
    """Prepare a fallback request and never make it."""
    first, _fallback = next_fn(context), next_fn(context)
    async for event in first:
        yield event


async def prepares_two_concurrently(context: InvokeModelContext, next_fn: Any) -> Any:
    """Prepare two requests and make them concurrently."""

    async def read(events: Any) -> list[Any]:
        return [event async for event in events]

    answers = await asyncio.gather(
        *[read(events) for events in (next_fn(context), next_fn(context))]
    )
    for event in answers[0]:
        yield event


def test_prepared_request_is_judged_when_made(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The first one spends the budget, so the others are refused."""
    enable(Limits(max_token_budget=15), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("hello"))))
    agent.add_middleware(InvokeModelStage, prepares_three)
    assert str(agent("go").stop_reason) == "max_token_budget"
    assert counted(events) == [("measured", 15)]


async def retries_once(context: InvokeModelContext, next_fn: Any) -> Any:
    """Retry once after a failure, then raise its own error."""
    try:
        async for event in next_fn(context):
            yield event
    except Exception:  # noqa: BLE001  as a fallback does
        try:
            async for event in next_fn(context):
                yield event
        except Exception as error:
            raise RuntimeError("no model answers") from error


def goes_on(event: AfterInvocationEvent) -> None:
    """Resume every leg."""
    event.resume = "and now?"


def test_refusal_retried_by_middleware_is_still_a_halt(make_agent: MakeAgent, source: str) -> None:
    """It ends the agent like any other halt, and the prompt is answered."""
    enable(Limits(max_turns=2))
    model = ScriptedModel(endless(says("hello")))
    agent = make_agent(model)
    agent.add_middleware(InvokeModelStage, retries_once)
    agent.hooks.add_callback(AfterInvocationEvent, goes_on)
    result = agent("go")
    assert (str(result.stop_reason), model.calls) == ("max_turns", 2)
    assert is_synthetic(result.message)
    assert agent.messages[-1] == result.message


def test_middleware_error_after_refusal_is_raised(make_agent: MakeAgent, source: str) -> None:
    """It is not our error, so it passes through."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel(endless(fails(OSError("gone")))))
    agent.add_middleware(InvokeModelStage, retries_once)
    with pytest.raises(RuntimeError, match="no model answers"):
        agent("go")


async def calls_a_halted_agent(context: InvokeModelContext, next_fn: Any) -> Any:
    """Fail like an agent that is halted in its turn, without handling it."""
    async for event in next_fn(context):
        yield event
    raise RuntimeError("the other agent is halted") from RefusedError()


def test_refusal_of_another_agent_is_raised(make_agent: MakeAgent, source: str) -> None:
    """This agent has no limit that could have halted it."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel(endless(says("hello"))))
    agent.add_middleware(InvokeModelStage, calls_a_halted_agent)
    with pytest.raises(RuntimeError, match="the other agent"):
        agent("go")


def test_prepared_request_never_made_is_not_counted(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """It is not recorded as a failed call."""
    enable(observers=[events.append])
    agent = make_agent(ScriptedModel([says("hello")]))
    agent.add_middleware(InvokeModelStage, has_a_fallback)
    agent("go")
    assert counted(events) == [("measured", 15)]


def test_prepared_requests_count_their_own_tokens(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Neither call is attributed to the other."""
    enable(observers=[events.append])
    answers = [says("first"), says("second", usage=tokens(7000))]
    agent = make_agent(ScriptedModel(answers))
    agent.add_middleware(InvokeModelStage, prepares_two_concurrently)
    agent("go")
    assert sorted(counted(events)) == [("measured", 15), ("measured", 7000)]


class Own(HookRegistry):
    """A registry class of an application."""

    def __init__(self, callbacks: Any) -> None:
        super().__init__()
        self._registered_callbacks = callbacks
        self.seen: list[str] = []

    async def invoke_callbacks_async(self, event: Any) -> Any:
        """Record every event."""
        self.seen.append(type(event).__name__)
        return await super().invoke_callbacks_async(event)


def own_class(agent: Agent, _: pytest.MonkeyPatch) -> list[str]:
    """Give the agent a registry of another class."""
    agent.hooks = registry = Own(agent.hooks._registered_callbacks)
    return registry.seen


def own_method(agent: Agent, _: pytest.MonkeyPatch) -> list[str]:
    """Replace the method on the agent's registry with a function."""
    seen, original = [], agent.hooks.invoke_callbacks_async

    async def invoke(event: Any) -> Any:
        seen.append(type(event).__name__)
        return await original(event)

    agent.hooks.invoke_callbacks_async = invoke  # type: ignore[method-assign]
    return seen


def wrapped_class(_: Agent, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instrument the registry class."""
    seen, original = [], HookRegistry.invoke_callbacks_async

    async def invoke(registry: HookRegistry, event: Any) -> Any:
        seen.append(type(event).__name__)
        return await original(registry, event)

    monkeypatch.setattr(HookRegistry, "invoke_callbacks_async", invoke)
    return seen


@pytest.mark.parametrize("change", [own_class, own_method, wrapped_class])
def test_custom_hooks_stay_unchanged(
    change: Callable[[Agent, pytest.MonkeyPatch], list[str]],
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They see every event, and limits are enforced."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    seen, hooks = change(agent, monkeypatch), agent.hooks
    assert str(agent("go").stop_reason) == "max_turns"
    assert seen.count("BeforeModelCallEvent") == 2
    assert seen.count("AfterToolsEvent") == 2
    assert agent.hooks is hooks


def test_registry_class_instrumented_later_sees_every_event(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including events without awaited callbacks, as before our agent ran."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    agent("go")
    seen = wrapped_class(agent, monkeypatch)
    assert str(agent("go").stop_reason) == "max_turns"
    assert seen.count("MessageAddedEvent") == 6  # the prompt, two turns with results, the halt


@pytest.mark.parametrize("runs_before", [0, 1])
def test_instrumented_middleware_registry_sees_every_stage(
    runs_before: int, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the agent has no middleware or has run before."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    for _ in range(runs_before):
        agent("go")
    seen, original = [], MiddlewareRegistry.invoke

    def invoke(registry: MiddlewareRegistry, stage: Any, *how: Any) -> Any:
        seen.append(stage)
        return original(registry, stage, *how)

    monkeypatch.setattr(MiddlewareRegistry, "invoke", invoke)
    assert str(agent("go").stop_reason) == "max_turns"
    assert seen.count(InvokeModelStage) == 2


class Fixed(Agent):
    """An agent whose hooks cannot be reassigned."""

    @property
    def hooks(self) -> HookRegistry:
        """The one registry."""
        registry: HookRegistry = vars(self)["_fixed"]
        return registry

    @hooks.setter
    def hooks(self, registry: HookRegistry) -> None:
        if "_fixed" in vars(self):
            raise AttributeError("hooks are set")
        vars(self)["_fixed"] = registry


def test_read_only_hooks_are_limited() -> None:
    """Such an agent is limited like any other."""
    enable(Limits(max_turns=2))
    assert str(Fixed(model=runaway(), callback_handler=None)("go").stop_reason) == "max_turns"


def test_copied_agent_is_counted_separately(make_agent: MakeAgent) -> None:
    """It shares the registries of the original, hence also our hooks in them."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    agent("go")
    other = copy.copy(agent)
    assert [str(each("go").stop_reason) for each in (other, agent)] == ["max_turns"] * 2


def handlers_of(agent: Agent) -> list[Any]:
    """Every hook and every middleware, in order."""
    hooks, stages = agent.hooks._registered_callbacks, agent._middleware_registry._handlers
    entries: list[Any] = [*hooks.values(), *stages.values()]
    return [each for registered in entries for each in registered]


def test_disable_and_enable_add_no_handlers(make_agent: MakeAgent) -> None:
    """Strands cannot remove hooks, so ours stay and are reused."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    agent("go")
    attached = handlers_of(agent)
    disable()
    enable(Limits(max_turns=3))
    stop = stop_of(agent("go"))
    assert stop is not None
    assert stop.turns == 3
    assert handlers_of(agent) == attached


def test_attached_hooks_do_nothing_while_disabled(make_agent: MakeAgent) -> None:
    """No limit is enforced, and we add nothing to the conversation."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel([uses("search")] * 7 + [says("done")]))
    agent("go")
    disable()
    result = agent("go on")
    assert (str(result.stop_reason), str(result)) == ("end_turn", "done\n")
    assert not any(is_synthetic(each) for each in agent.messages[-11:])


def test_copied_agent_keeps_limits_of_its_original(make_agent: MakeAgent) -> None:
    """Holds for a shallow copy and for an agent with deep-copied hooks, without `enable()`."""
    limited = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    other = make_agent(runaway())
    other.hooks = copy.deepcopy(limited.hooks)
    assert str(copy.copy(limited)("go").stop_reason) == "max_turns"
    assert str(other("go").stop_reason) == "max_turns"


def test_hooks_with_extreme_orders_run_between_ours(make_agent: MakeAgent) -> None:
    """Even the application's first and last hooks affect what we see."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    denied = []

    def deny(event: BeforeToolsEvent) -> None:
        event.cancel = "not today"
        denied.append(event)

    agent.add_hook(deny, BeforeToolsEvent, order=HookOrder.SDK_LAST + 1000)
    stop = stop_of(agent("go"))
    assert stop is not None
    assert (stop.turns, stop.tool_calls, len(denied)) == (2, 0, 2)


async def asks_twice(context: InvokeModelContext, next_fn: Any) -> Any:
    """Call the model twice for one answer."""
    async for event in next_fn(context):
        last = event
    async for event in next_fn(context):
        last = event
    yield last


def run_one_turn(
    make_agent: MakeAgent, events: list[Event], middleware: Any, runs_before: int
) -> None:
    """Take one turn with a middleware that was registered after `runs_before` invocations."""
    enable(observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("hello"))))
    for _ in range(runs_before):
        agent("go")
    events.clear()
    agent.add_middleware(InvokeModelStage, middleware)
    agent("go")


@pytest.mark.parametrize("runs_before", [0, 1])
def test_middleware_calling_model_twice_is_counted_twice(
    runs_before: int, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Registered before or after ours, it makes two calls for each turn."""
    run_one_turn(make_agent, events, asks_twice, runs_before)
    assert counted(events) == [("measured", 15)] * 2
    assert [event.number for event in events if isinstance(event, Turn)] == [1]


def test_second_call_within_our_stage_is_judged_separately(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """A middleware registered after ours calls the model again with a spent budget."""
    enable(Limits(max_token_budget=45), observers=[events.append])
    model = ScriptedModel(endless(says("hello")))
    agent = make_agent(model)
    agent("go")
    agent.add_middleware(InvokeModelStage, prepares_three)
    enable(Limits(max_token_budget=15), observers=[events.append])
    events.clear()
    assert str(agent("go").stop_reason) == "max_token_budget"
    assert (model.calls, counted(events)) == (2, [("measured", 15)])


async def answers_itself(context: InvokeModelContext, next_fn: Any) -> Any:
    """Answer without the model."""
    message = {"role": "assistant", "content": [{"text": "from the cache"}]}
    usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    yield ModelStopReason("end_turn", message, usage, {"latencyMs": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("runs_before", [0, 1])
def test_middleware_answering_without_model_takes_a_turn_but_no_call(
    runs_before: int, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Holds for a middleware registered before or after ours."""
    run_one_turn(make_agent, events, answers_itself, runs_before)
    assert counted(events) == []
    assert [event.number for event in events if isinstance(event, Turn)] == [1]


class Awaiting(HookRegistry):
    """Awaits the result of every hook, as a future Strands may do."""

    async def invoke_callbacks_async(self, event: Any) -> Any:
        """Call every hook and await its result."""
        interrupts = []
        for callback in self.get_callbacks_for(event):
            try:
                returned = callback(event)
                if inspect.isawaitable(returned):
                    await returned
            except InterruptException as exception:  # noqa: PERF203  one hook does not stop the others
                interrupts.append(exception.interrupt)
        return event, interrupts


class Noting(MiddlewareRegistry):
    """Runs stages in its own way."""

    def invoke(self, stage: Any, context: Any, terminal: Any) -> Any:
        """Wrap one more generator around the stage."""

        async def laid_around() -> Any:
            async for event in MiddlewareRegistry.invoke(self, stage, context, terminal):
                yield event

        return laid_around()


@pytest.mark.parametrize("on", [False, True])
def test_custom_dispatch_runs_application_hooks_equally_often(
    *, on: bool, make_agent: MakeAgent
) -> None:
    """We don't depend on how Strands calls hooks: the counts are the same without otel-limits."""
    if on:
        enable(Limits(max_turns=50))
    agent = make_agent(ScriptedModel([uses("search"), uses("search"), says("done")]))
    agent.hooks, agent._middleware_registry = Awaiting(), Noting()
    seen: list[str] = []

    def plain_hook(event: BeforeModelCallEvent) -> Any:
        async def later() -> None:
            seen.append("awaited")

        seen.append("called")
        return later()

    async def stage(context: InvokeModelContext, next_fn: Any) -> Any:
        seen.append("stage")
        async for event in next_fn(context):
            yield event

    agent.add_hook(plain_hook, BeforeModelCallEvent)
    agent.add_middleware(InvokeModelStage, stage)
    assert str(agent("go")) == "done\n"
    assert seen == ["called", "awaited", "stage"] * 3


def new_hooks(agent: Agent, _: MakeAgent) -> None:
    """Give the agent new hooks, as Strands makes them."""
    agent.hooks = HookRegistry()


def copied_hooks(agent: Agent, _: MakeAgent) -> None:
    """Give the agent a copy of its hooks."""
    agent.hooks = copy.deepcopy(agent.hooks)


def hooks_of_another(agent: Agent, make_agent: MakeAgent) -> None:
    """Give the agent the hooks of another limited agent."""
    other = make_agent(runaway())
    other("go")
    agent.hooks = other.hooks


def hooks_around(agent: Agent, _: MakeAgent) -> None:
    """Wrap the agent's hooks in hooks of the application."""
    inner, agent.hooks = agent.hooks, Own(agent.hooks._registered_callbacks)
    agent.hooks.invoke_callbacks_async = inner.invoke_callbacks_async  # type: ignore[method-assign]


def own_hooks(agent: Agent, _: MakeAgent) -> None:
    """Give the agent hooks of an application class."""
    agent.hooks = Own({})


def new_middleware(agent: Agent, _: MakeAgent) -> None:
    """Give the agent new middleware, as Strands makes it."""
    agent._middleware_registry = MiddlewareRegistry()


def middleware_around(agent: Agent, _: MakeAgent) -> None:
    """Wrap the agent's middleware in middleware of the application."""
    inner, agent._middleware_registry = agent._middleware_registry, MiddlewareRegistry()
    agent._middleware_registry.invoke = inner.invoke  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        new_hooks,
        copied_hooks,
        hooks_of_another,
        hooks_around,
        own_hooks,
        new_middleware,
        middleware_around,
    ],
)
def test_agent_with_replaced_registries_stays_limited(
    change: Callable[[Agent, MakeAgent], None], make_agent: MakeAgent, events: list[Event]
) -> None:
    """From its next invocation, without counting anything twice."""
    enable(Limits(max_turns=2), observers=[events.append])
    agent = make_agent(runaway())
    agent("go")
    change(agent, make_agent)
    events.clear()
    assert str(agent("go").stop_reason) == "max_turns"
    assert counted(events) == [("measured", 15)] * 2
    assert [event.status for event in events if isinstance(event, ToolCall)] == ["success"] * 2


class Middleware(MiddlewareRegistry):
    """A registry of an application."""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("hooks", HookRegistry),
        ("_middleware_registry", MiddlewareRegistry),
        ("_middleware_registry", Middleware),
    ],
)
def test_agent_with_registry_replaced_mid_run_stays_limited(
    place: str, kind: Callable[[], object], make_agent: MakeAgent
) -> None:
    """Its model calls are judged anyway, and the agent is attached to again."""
    enable(Limits(max_turns=3))
    model = ScriptedModel([uses("search")] * 9 + [says("done")])
    agent = make_agent(model, tools=[])

    @tool(name="search")
    def replaces() -> str:
        """Replace one of the agent's registries."""
        setattr(agent, place, kind())
        return "replaced"

    agent.tool_registry.register_tool(replaces)
    agent("go")
    assert model.calls == 3


def test_restored_registries_are_reused(make_agent: MakeAgent) -> None:
    """A tool that replaces them temporarily does not switch off the agent's limits."""
    enable(Limits(max_turns=3))
    agent = make_agent(runaway(), tools=[])

    @tool(name="search")
    async def lends() -> str:
        """Call the model without the agent's hooks and middleware."""
        kept = agent.hooks, agent._middleware_registry
        agent.hooks, agent._middleware_registry = HookRegistry(), MiddlewareRegistry()
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await agent.structured_output_async(BaseModel, "what now?")
        agent.hooks, agent._middleware_registry = kept
        return "asked"

    agent.tool_registry.register_tool(lends)
    stop = stop_of(agent("go"))
    assert stop is not None
    assert (stop.reason, stop.turns) == ("max_turns", 3)


def test_registries_lent_to_another_agent_carry_no_limits(make_agent: MakeAgent) -> None:
    """Only copies keep the limits of their original."""
    limited = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    other = make_agent(ScriptedModel([uses("search")] * 3 + [says("done")]))
    other._middleware_registry = limited._middleware_registry
    assert other("go").stop_reason == "end_turn"


def refer_to(_: list[Agent], __: MessageAddedEvent) -> None:
    """Keep an agent alive, as a hook."""


def test_agent_referenced_by_its_hooks_is_garbage_collected(make_agent: MakeAgent) -> None:
    """We hold no reference to its registries."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())

    kept = [agent]
    agent.hooks.add_callback(MessageAddedEvent, functools.partial(refer_to, kept))
    agent("go")
    alive = weakref.ref(agent)
    del agent, kept
    gc.collect()
    assert alive() is None


def test_coroutine_hooks_are_awaited(make_agent: MakeAgent) -> None:
    """Their interrupts are collected from all of them, as Strands does."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    seen = []

    async def asks(event: Any) -> None:
        await asyncio.sleep(0)
        seen.append("asks")
        event.interrupt("first", "may I?")

    def also_asks(event: Any) -> None:
        seen.append("also asks")
        event.interrupt("second", "may I as well?")

    agent.hooks.add_callback(BeforeToolCallEvent, asks)
    agent.hooks.add_callback(BeforeToolCallEvent, also_asks)
    result = agent("go")
    assert seen == ["asks", "also asks"]
    assert [each.name for each in result.interrupts or ()] == ["first", "second"]


EVENTS = (
    BeforeModelCallEvent,
    AfterModelCallEvent,
    MessageAddedEvent,
    BeforeToolsEvent,
    BeforeToolCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
)
"""Event types, in and against the order of registration."""

INTERRUPTIBLE = (BeforeToolsEvent, BeforeToolCallEvent)
"""Event types that allow an interrupt."""

HOOKS = st.lists(
    st.tuples(
        st.sampled_from(EVENTS),
        st.sampled_from([-50, 0, 0, 50]),
        st.sampled_from(["notes", "waits", "asks", "asks again", "fails", "registers"]),
    ),
    max_size=6,
)
"""Hooks of an application: event type, order and behaviour."""


def hook(seen: list[str], agent: Agent, place: int, behaviour: str) -> Any:
    """Make a hook that records its call and then does something."""

    def notes(event: Any) -> None:
        seen.append(f"{place} {type(event).__name__}")
        if behaviour.startswith("asks") and isinstance(event, INTERRUPTIBLE):
            event.interrupt(behaviour if behaviour == "asks again" else f"asks {place}", "?")
        if behaviour == "fails" and len(seen) > 10:
            raise ValueError(str(place))
        # Not during reversed events: there Strands calls a new hook immediately or not until the
        # next event, depending on whether any hook of a later order follows.
        is_reversed = event.should_reverse_callbacks
        if behaviour == "registers" and len(seen) < 30 and not is_reversed:
            newcomer = hook(seen, agent, place + 100, "notes")
            agent.hooks.add_callback(type(event), newcomer, order=(place % 3 - 1) * 50)

    async def waits(event: Any) -> None:
        await asyncio.sleep(0)
        notes(event)

    return waits if behaviour == "waits" else notes


def hook_calls(hooks: list[tuple[type, int, str]]) -> tuple[list[str], str]:
    """Return the hook calls of an agent in two invocations of two turns, and its outcome."""
    seen: list[str] = []
    model = ScriptedModel([uses("search"), says("one"), uses("search"), says("two")])
    agent = Agent(model=model, tools=[search], callback_handler=None)
    for place, (event, order, behaviour) in enumerate(hooks):
        agent.hooks.add_callback(event, hook(seen, agent, place, behaviour), order=order)
    try:
        results = [agent("go") for _ in range(2)]
    except Exception as error:  # noqa: BLE001  every kind is compared
        return seen, repr(error)
    asked = [[each.name for each in result.interrupts or ()] for result in results]
    return seen, repr((asked, [str(each.stop_reason) for each in results]))


@settings(max_examples=25)
@given(HOOKS)
@example([(BeforeToolCallEvent, 0, "asks again")] * 2)
def test_hooks_are_called_as_without_otel_limits(hooks: list[tuple[type, int, str]]) -> None:
    """Same order, number, interrupts and errors as without otel-limits, for any behaviour."""
    disable()
    expected = hook_calls(hooks)
    enable()
    assert hook_calls(hooks) == expected


def test_model_with_instance_stream_is_counted_by_its_answer(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """It bypasses the patched method of the class, but limits are enforced."""
    enable(Limits(max_turns=2), observers=[events.append])
    model, another = runaway(), runaway()
    model.stream = functools.partial(PLAIN_STREAM, another)  # type: ignore[method-assign]
    stop = stop_of(make_agent(model)("go"))
    assert stop is not None
    assert (stop.reason, stop.turns, stop.model_calls, another.calls) == ("max_turns", 2, 2, 2)
    assert counted(events) == [("measured", 15)] * 2


class Elsewhere:
    """A model whose class Strands doesn't know, e.g. a gateway's client."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model, self.config = model, model.config

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the model."""
        return getattr(self.model, name)

    @functools.wraps(PLAIN_STREAM)
    def stream(self, *asked: Any, **how: Any) -> Any:
        """Stream from the model, bypassing the patch of its class."""
        return PLAIN_STREAM(self.model, *asked, **how)


def wrapped_before(model: ScriptedModel, _: Agent) -> None:
    """Wrap the model's own method, as a spy does that was installed before us."""
    model.stream = functools.partial(PLAIN_STREAM, model)  # type: ignore[method-assign]


def replaced_in_a_hook(model: ScriptedModel, agent: Agent) -> None:
    """Give the agent another model before each call."""
    agent.add_hook(
        lambda event: setattr(event.agent, "model", Elsewhere(model)), BeforeModelCallEvent
    )


def replaced_in_a_middleware(model: ScriptedModel, agent: Agent) -> None:
    """Call another model than the agent's."""
    agent.add_middleware(
        InvokeModelStage.Input,
        lambda context: context.replace(model=cast("Any", Elsewhere(model))),
    )


def replaced_in_ours(model: ScriptedModel, agent: Agent) -> None:
    """Do the same in a middleware that runs within ours."""
    agent("the first time")
    replaced_in_a_middleware(model, agent)


@pytest.mark.parametrize(
    "change", [wrapped_before, replaced_in_a_hook, replaced_in_a_middleware, replaced_in_ours]
)
def test_replaced_model_tokens_are_counted(
    change: Callable[[ScriptedModel, Agent], None], make_agent: MakeAgent, source: str
) -> None:
    """A budget of three calls allows three calls even if none passes a patched class."""
    enable(Limits(max_token_budget=45))
    first = [says("hello")] if change is replaced_in_ours else []
    model = ScriptedModel([*first, *[uses("search")] * 20])
    agent = make_agent(model)
    change(model, agent)
    before = model.calls
    stop = stop_of(agent("go"))
    assert stop is not None
    assert (stop.reason, stop.model_calls, model.calls - before) == ("max_token_budget", 3, 3)


async def asks_a_human(context: InvokeModelContext, next_fn: Any) -> Any:
    """Require human approval of the last call."""
    if not context.tool_specs:
        raise InterruptException(Interrupt(id="approve", name="approve"))
    async for event in next_fn(context):
        yield event


async def has_a_mistake(context: InvokeModelContext, next_fn: Any) -> Any:
    """Fail on the last call."""
    if not context.tool_specs:
        raise KeyError("a mistake of the application")
    async for event in next_fn(context):
        yield event


@pytest.mark.parametrize("middleware", [asks_a_human, has_a_mistake])
def test_middleware_error_in_last_call_passes_through(
    middleware: Any, make_agent: MakeAgent, source: str
) -> None:
    """A question reaches the human and a mistake its author: neither becomes a halt."""
    enable(Limits(max_turns=2), action="wrap_up")
    agent = make_agent(ScriptedModel([says("hello"), *[uses("search")] * 5]))
    agent("the first time")
    agent.add_middleware(InvokeModelStage, middleware)
    if middleware is has_a_mistake:
        with pytest.raises(EventLoopException, match="a mistake"):
            agent("go")
    else:
        assert agent("go").stop_reason == "interrupt"


def test_limits_of_a_copy_do_not_apply_to_its_original(make_agent: MakeAgent) -> None:
    """They share hooks but not limits."""
    enable(Limits(max_turns=3))
    agent = make_agent(ScriptedModel([says("hello"), *[uses("search")] * 20]))
    agent("the first time")
    other = copy.copy(agent)
    LimitsPlugin(Limits(max_turns=8)).init_agent(other)
    stop = stop_of(agent("go"))
    assert stop is not None
    assert stop.turns == 3


async def yields_first(context: InvokeModelContext, next_fn: Any) -> Any:
    """Let the reader of the stream run before the model is called."""
    yield InvocationNote({"noted": True})
    async for event in next_fn(context):
        yield event


class InvocationNote(TypedEvent):
    """An event of an application."""

    @property
    def is_callback_event(self) -> bool:
        """Pass the event to the reader of the stream."""
        return True


def test_calls_belong_to_the_agent_whose_stream_is_read(make_agent: MakeAgent, source: str) -> None:
    """One task alternates between two streams while a middleware waits before the model call."""
    enable(Limits(max_token_budget=45))
    models = [ScriptedModel([says("hello"), *[uses("search")] * 20]) for _ in range(2)]
    agents = [make_agent(model, name=str(number)) for number, model in enumerate(models)]
    for agent in agents:
        agent("the first time")
        agent.add_middleware(InvokeModelStage, yields_first)

    async def read_in_turns() -> None:
        streams = [aiter(agent.stream_async("go")) for agent in agents]
        while streams:
            for stream in tuple(streams):
                with contextlib.suppress(StopAsyncIteration):
                    await anext(stream)
                    continue
                streams.remove(stream)

    asyncio.run(read_in_turns())
    assert [model.calls for model in models] == [1 + 3] * 2


async def ends_the_first_leg(context: Any, next_fn: Any) -> Any:
    """Answer the first leg without calling the model."""
    if len(context.agent.messages) < 4:
        message: Any = {"role": "assistant", "content": [{"text": "not yet"}]}
        yield EventLoopStopEvent("end_turn", message, context.agent.event_loop_metrics, {})
        return
    async for event in next_fn(context):
        yield event


def test_leg_after_one_without_model_call_is_tracked(make_agent: MakeAgent, source: str) -> None:
    """A hook resumes after a middleware answered; the halt still has its reason."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel([says("hello"), *[uses("search")] * 20]))
    agent("the first time")
    agent.messages.clear()
    legs = iter([True, False])

    def resume_once(event: AfterInvocationEvent) -> None:
        if next(legs, False):
            event.agent.messages[:] = [{"role": "user", "content": [{"text": "go"}]}] * 4
            event.resume = "and now?"

    agent.add_hook(resume_once, AfterInvocationEvent)
    agent.add_middleware(AgentStreamStage, ends_the_first_leg)
    assert agent("go").stop_reason == "max_turns"


def test_events_can_be_dispatched_by_hand(make_agent: MakeAgent) -> None:
    """Without quotas, no hook of otel-limits needs an event loop."""
    enable(Limits(max_turns=2))
    agent = make_agent(ScriptedModel([says("done")]))
    agent("go")
    agent.hooks.invoke_callbacks(BeforeModelCallEvent(agent=agent, invocation_state={}))
