"""Whom limits reach: one agent's own, all agents of the process, and nobody once switched off."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from prometheus_client import REGISTRY
from strands import Agent
from strands.hooks import AfterModelCallEvent, BeforeInvocationEvent
from strands.middleware import InvokeModelContext, InvokeModelStage
from strands.multiagent.graph import Graph
from strands.multiagent.swarm import Swarm
from strands.telemetry import StrandsTelemetry
from strands.telemetry import tracer as strands_tracer

import otel_limits
from otel_limits import Event, Limits, LimitsPlugin, ModelCall, Started, Stop, disable, enable
from otel_limits.bindings.strands import attach
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import ScriptedModel, endless, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.conftest import MakeAgent, Metric


def runaway() -> ScriptedModel:
    """A model that asks for one more search forever."""
    return ScriptedModel(endless(uses("search")))


def calls(agent: Agent) -> int:
    """Invoke `agent` and return how many model calls that took."""
    assert isinstance(agent.model, ScriptedModel)
    before = agent.model.calls
    agent("go")
    return agent.model.calls - before


def processors(provider: trace.TracerProvider) -> list[SpanProcessor]:
    """Our span processors in a provider."""
    assert isinstance(provider, TracerProvider)
    every = provider._active_span_processor._span_processors
    return [each for each in every if isinstance(each, LimitsSpanProcessor)]


def test_a_plugin_alone_limits_its_agent(make_agent: MakeAgent, source: str) -> None:
    """Without `enable()` the agent with the plugin is limited, and no other one."""
    plugin = LimitsPlugin(Limits(max_turns=2))
    assert calls(make_agent(runaway(), plugins=[plugin])) == 2
    assert calls(make_agent(ScriptedModel([*[uses("search")] * 4, says("done")]))) == 5


def test_a_plugin_wins_over_enable(make_agent: MakeAgent, source: str) -> None:
    """The agent's own cap counts, be it lower or higher."""
    enable(Limits(max_turns=3))
    assert calls(make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])) == 2
    assert calls(make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=5))])) == 5
    assert calls(make_agent(runaway())) == 3


def test_a_plugin_takes_the_caps_that_it_does_not_set(make_agent: MakeAgent) -> None:
    """A cap that is `None` in the plugin is that of `enable()`."""
    enable(Limits(max_turns=4, max_token_budget=30))
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=9))])
    assert str(agent("go").stop_reason) == "max_token_budget"


def test_a_plugins_action_is_its_own(make_agent: MakeAgent) -> None:
    """One agent raises while the others are halted."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway(), plugins=[LimitsPlugin(action="raise")])
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        agent("go")
    assert str(make_agent(runaway())("go").stop_reason) == "max_turns"


def test_enable_after_the_plugin_changes_nothing_of_it(make_agent: MakeAgent) -> None:
    """The order of `enable()` and the plugin does not matter."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    assert calls(agent) == 2
    enable(Limits(max_turns=3))
    assert calls(agent) == 2


@pytest.mark.parametrize("first", ["plugin", "enable", "invocation"])
def test_a_plugin_never_doubles(
    first: str,
    make_agent: MakeAgent,
    events: list[Event],
    warnings_logged: Callable[[], list[str]],
    metric: Metric,
) -> None:
    """With both, an agent is counted once, warned of once and halted once."""
    plugin = LimitsPlugin(Limits(max_turns=2))
    if first == "plugin":
        agent = make_agent(runaway(), plugins=[plugin])
        enable(Limits(max_turns=2), observers=[events.append])
    elif first == "enable":
        enable(Limits(max_turns=2), observers=[events.append])
        agent = make_agent(runaway(), plugins=[plugin])
    else:
        enable(observers=[events.append])
        agent = make_agent(ScriptedModel([says("done")]))
        agent("go")
        plugin.init_agent(agent)
        agent.model = runaway()
        events.clear()
    assert calls(agent) == 2
    assert len([event for event in events if isinstance(event, Started)]) == 1
    assert [event.turns for event in events if isinstance(event, Stop)] == [2]
    assert sum("halted by" in each for each in warnings_logged()) == 1
    registered = list(agent.hooks._registered_callbacks.values())
    own = [
        each for entries in registered for each in entries if each.order in (-math.inf, math.inf)
    ]
    assert len({each.callback for each in own}) == len(own)


class BreaksOff(ScriptedModel):
    """Fails twice, when all that is billed has been sent."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Answer, then break off."""
        async for event in super().stream(*args, **kwargs):
            yield event
        if self.calls < 3:
            raise ConnectionError("broken off")


async def again(context: InvokeModelContext, next_fn: Any) -> Any:
    """Ask until the model has answered: a middleware such as an application has."""
    while True:
        try:
            events = [event async for event in next_fn(context)]
        except ConnectionError:
            continue
        for event in events:
            yield event
        return


@pytest.mark.parametrize("plugins", [[LimitsPlugin(Limits(max_turns=5))], []])
def test_each_request_of_a_middleware_counts_with_its_tokens(
    plugins: list[LimitsPlugin], make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """One that asks the model three times makes three calls, whoever was added first."""
    enable(observers=[events.append])
    agent = make_agent(BreaksOff(endless(says("hello"))), plugins=plugins)
    agent.add_middleware(InvokeModelStage, again)
    agent("go")
    counted = [(event.kind, event.usage.total) for event in events if isinstance(event, ModelCall)]
    assert counted == [("failed", 15), ("failed", 15), ("measured", 15)]


def test_a_middleware_that_an_invocation_begins_with_is_seen_through(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Each of its requests counts in that very invocation."""
    enable(observers=[events.append])
    agent = make_agent(BreaksOff(endless(says("hello"))))

    def add(event: BeforeInvocationEvent) -> None:
        agent.add_middleware(InvokeModelStage, again)

    agent.hooks.add_callback(BeforeInvocationEvent, add)
    agent("go")
    counted = [event.usage.total for event in events if isinstance(event, ModelCall)]
    assert counted == [15, 15, 15]


class AsManyAsAsked(ScriptedModel):
    """Answers nobody before it was asked twice."""

    def __init__(self) -> None:
        super().__init__([says("first"), says("second", usage=tokens(1000))])
        self.all_asked = asyncio.Event()

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the other request."""
        events = [event async for event in super().stream(*args, **kwargs)]
        if self.calls == 2:
            self.all_asked.set()
        await self.all_asked.wait()
        for event in events:
            yield event


async def twice_at_once(context: InvokeModelContext, next_fn: Any) -> Any:
    """Ask twice and take the first answer."""

    async def ask() -> list[Any]:
        return [event async for event in next_fn(context)]

    answers: Sequence[list[Any]] = await asyncio.gather(ask(), ask())
    for event in answers[0]:
        yield event


def test_requests_that_a_middleware_makes_at_once_each_count(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The one that is not taken was asked for anyway."""
    enable(observers=[events.append])
    agent = make_agent(AsManyAsAsked())
    agent.add_middleware(InvokeModelStage, twice_at_once)
    agent("go")
    counted = [event.usage.total for event in events if isinstance(event, ModelCall)]
    assert sorted(counted) == [15, 1000]


async def leave(context: InvokeModelContext, next_fn: Any) -> Any:
    """Read the beginning of an answer, and have enough of it."""
    events = next_fn(context)
    yield await anext(events)
    await events.aclose()
    raise ConnectionError("enough")


def test_a_response_that_a_middleware_leaves_is_booked_there_and_then(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Whoever is told that the call is over finds it counted."""
    enable(observers=[events.append])
    agent = make_agent(ScriptedModel([says("hello")]))
    agent.add_middleware(InvokeModelStage, leave)
    booked: list[int] = []

    def count(event: AfterModelCallEvent) -> None:
        booked.append(len([event for event in events if isinstance(event, ModelCall)]))

    agent.hooks.add_callback(AfterModelCallEvent, count)
    with pytest.raises(ConnectionError):
        agent("go")
    assert booked == [1]


def test_enabling_twice_is_enabling_once(
    make_agent: MakeAgent, warnings_logged: Callable[[], list[str]], metric: Metric
) -> None:
    """`enable()` is idempotent: one processor, one count, one warning."""
    for _ in range(3):
        enable(Limits(max_turns=2))
    assert calls(make_agent(runaway())) == 2
    assert len(processors(trace.get_tracer_provider())) == 1
    assert sum("halted by" in each for each in warnings_logged()) == 1
    assert metric("otel_limits_turns_total", agent="tester") == 2


def test_enabling_again_replaces_what_applies(make_agent: MakeAgent) -> None:
    """Invocations that begin afterwards have the new limits, also of agents that exist."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    assert calls(agent) == 2
    enable(Limits(max_turns=3))
    assert calls(agent) == 3
    enable(Limits(max_token_budget=15))
    assert calls(agent) == 1


def test_agents_that_exist_already_are_reached(make_agent: MakeAgent, source: str) -> None:
    """An agent made, and even called, before `enable()` is limited when it runs afterwards."""
    agent = make_agent(ScriptedModel([says("done"), *[uses("search")] * 9]))
    agent("go")
    enable(Limits(max_turns=2))
    assert calls(agent) == 2


def test_a_provider_that_is_made_later_is_followed(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StrandsTelemetry()` after `enable()` makes a provider that has our processor, once."""
    enable(Limits(max_turns=2))
    provider = StrandsTelemetry().tracer_provider
    assert len(processors(provider)) == 1
    tracer = strands_tracer.Tracer()
    tracer.tracer = provider.get_tracer("strands.telemetry.tracer")
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracer)
    assert calls(make_agent(runaway())) == 2
    assert metric("otel_limits_unsampled_invocations_total", agent="tester") == 0


def test_a_provider_of_a_vendor_keeps_its_own_processors() -> None:
    """A subclass whose `add_span_processor` does more than add is not asked to do it for us."""

    class Vendor(TracerProvider):
        """Throws away its default exporter as soon as another one is added, as Phoenix does."""

        def add_span_processor(self, span_processor: SpanProcessor) -> None:  # noqa: ARG002
            """Replace the default."""
            raise AssertionError("called for a processor that is no exporter")

    enable()
    assert len(processors(Vendor())) == 1


def seen_from_outside(agent: Agent) -> dict[str, Any]:
    """Everything that switching on changes."""
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    return {
        "registries": (agent.hooks, agent._middleware_registry),
        "processors": provider._active_span_processor._span_processors,
        "classes": [dict(vars(owner)) for owner in (Agent, Graph, Swarm, ScriptedModel)],
        "provider": TracerProvider.__init__,
        "metrics": metrics_there(),
        "observers": LIVE.observers.all,
        "agent": sorted(vars(agent)),
    }


def test_disable_undoes_completely(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries, processors, classes and metrics are what they were before; handlers stay."""
    # An agent with a plugin that something of another test keeps alive: its classes stay patched.
    monkeypatch.setattr(attach, "ALL_WITH_OWN", set())
    disable()
    agent = make_agent(runaway())
    before = seen_from_outside(agent)
    enable(Limits(max_turns=2), observers=[lambda _: None])
    calls(agent)
    during = seen_from_outside(agent)
    assert [name for name in before if before[name] == during[name]] == [
        "registries",
        "agent",
    ]
    disable()
    assert seen_from_outside(agent) == before


def metrics_there() -> list[str]:
    """Names of the metrics that the process publishes."""
    return sorted(family.name for family in REGISTRY.collect())


def test_disabling_twice_and_without_enabling_is_harmless() -> None:
    """`disable()` where nothing is on does nothing."""
    disable()
    disable()


def test_enabling_after_disabling_works(make_agent: MakeAgent, metric: Metric) -> None:
    """On, off and on again limits as the first time, and counts from zero."""
    agent = make_agent(runaway())
    for _ in range(3):
        enable(Limits(max_turns=2))
        assert calls(agent) == 2
        assert metric("otel_limits_turns_total", agent="tester") == 2
        disable()


def test_a_disabled_process_is_left_alone(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `OTEL_LIMITS_DISABLED=true` neither `enable()` nor a plugin does anything."""
    monkeypatch.setenv("OTEL_LIMITS_DISABLED", "true")
    before = dict(vars(Agent))
    enable(Limits(max_turns=1))
    agent = make_agent(
        ScriptedModel([uses("search"), says("done")]),
        plugins=[LimitsPlugin(Limits(max_turns=1))],
    )
    assert calls(agent) == 2
    assert dict(vars(Agent)) == before


def test_a_plugin_survives_disable(make_agent: MakeAgent, events: list[Event]) -> None:
    """`disable()` undoes `enable()`: an agent keeps what it was given itself, and that alone."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    enable(Limits(max_token_budget=15), observers=[events.append])
    assert calls(agent) == 1
    events.clear()
    disable()
    assert calls(agent) == 2
    assert events == []


def test_an_agent_with_a_plugin_keeps_nothing_on(
    make_agent: MakeAgent, metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `disable()` nothing is published until it is called again, whatever keeps it alive.

    Strands' loop for tools in the background is such a thing: it keeps the context of whoever asked
    for the first of them in the process.
    """
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    before = LIVE.observers.all, RUNTIME.enforcement(), metrics_there()
    enable(Limits(max_turns=9))
    agent = make_agent(
        ScriptedModel([uses("search"), *[says("done")] * 9]),
        plugins=[LimitsPlugin(Limits(max_turns=2))],
        background_tasks={"always": ["search"]},
    )
    agent("go")
    assert metric("otel_limits_turns_total", agent="tester") > 0
    disable()
    assert (LIVE.observers.all, RUNTIME.enforcement(), metrics_there()) == before
    assert processors(trace.get_tracer_provider()) == []
    make_agent(ScriptedModel([says("done")]), name="other")("go")
    assert metrics_there() == before[2]


def test_an_agent_with_a_plugin_is_followed_again_when_it_is_called(
    make_agent: MakeAgent, source: str, metric: Metric
) -> None:
    """It is held, counted from zero, and not blind; agents without a plugin are not followed."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    assert calls(agent) == 2
    enable(Limits(max_turns=9))
    disable()
    assert metric("otel_limits_turns_total", agent="tester") == 0
    assert (calls(agent), calls(agent)) == (2, 2)
    assert metric("otel_limits_turns_total", agent="tester") == 4
    blind = metric("otel_limits_unsampled_invocations_total", agent="tester")
    assert blind == (2 if source == "hooks" else 0)
    assert (
        calls(make_agent(ScriptedModel([*[uses("search")] * 4, says("done")]), name="other")) == 5
    )
    assert metric("otel_limits_turns_total", agent="other") == 0


def test_an_invocation_with_a_plugin_is_told_although_it_was_disabled(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """`disable()` in the middle of it: what it used is counted to its end."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=3))])
    enable(Limits(max_turns=9))

    async def read() -> None:
        events = agent.stream_async("go")
        await anext(events)
        disable()
        async for _ in events:
            pass

    asyncio.run(read())
    assert metric("otel_limits_turns_total", agent="tester") == 3
    ended = {"agent": "tester", "reason": "max_turns", "action": "halted"}
    assert metric("otel_limits_stops_total", **ended) == 1


def test_an_agent_can_be_forgotten(make_agent: MakeAgent) -> None:
    """Nothing of ours keeps an agent alive that its application has dropped."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    agent("go")
    alive = weakref.ref(agent)
    del agent
    gc.collect()
    assert alive() is None


def test_an_agent_with_a_plugin_can_be_forgotten(make_agent: MakeAgent) -> None:
    """Nor one that has limits of its own."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    agent("go")
    alive = weakref.ref(agent)
    del agent
    gc.collect()
    assert alive() is None


def test_one_plugin_can_serve_several_agents(make_agent: MakeAgent) -> None:
    """A plugin keeps nothing of the agent that it was given to."""
    plugin = LimitsPlugin(Limits(max_turns=2))
    agents = [make_agent(runaway(), plugins=[plugin]) for _ in range(2)]
    assert [calls(agent) for agent in agents] == [2, 2]


def test_a_plugin_refuses_an_unknown_action() -> None:
    """The sentence names what it may be."""
    with pytest.raises(ValueError, match=r"action must be one of observe, halt, .* got 'explode'"):
        LimitsPlugin(Limits(max_turns=1), action="explode")  # type: ignore[arg-type]


def test_the_plugin_is_imported_when_it_is_asked_for() -> None:
    """`otel_limits.LimitsPlugin` is the class; any other unknown name is no attribute."""
    assert otel_limits.LimitsPlugin is LimitsPlugin
    with pytest.raises(AttributeError, match="has no attribute 'Plugin'"):
        _ = otel_limits.Plugin


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [None, Limits(max_turns=9)])
def test_a_copy_of_an_agent_keeps_its_own_limits(
    everywhere: Limits | None, make_agent: MakeAgent
) -> None:
    """Over those of all agents, and also when the original is gone."""
    if everywhere is not None:
        enable(everywhere)
    original = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=3))])
    copied = copy.copy(original)
    assert [calls(original), calls(copied)] == [3, 3]
    del original
    gc.collect()
    assert calls(copy.copy(copied)) == 3
