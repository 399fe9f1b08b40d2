"""Scope of limits: one agent, all agents of the process, or none after `disable()`."""

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
from otel_limits.bindings.strands import agent_hooks
from otel_limits.otel.processor import LimitsSpanProcessor
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import ScriptedModel, endless, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.conftest import MakeAgent, Metric


def runaway() -> ScriptedModel:
    """Make a model that requests one more search forever."""
    return ScriptedModel(endless(uses("search")))


def calls(agent: Agent) -> int:
    """Invoke `agent` and return the number of its model calls."""
    assert isinstance(agent.model, ScriptedModel)
    before = agent.model.calls
    agent("go")
    return agent.model.calls - before


def processors(provider: trace.TracerProvider) -> list[SpanProcessor]:
    """Our span processors in a provider."""
    assert isinstance(provider, TracerProvider)
    every = provider._active_span_processor._span_processors
    return [each for each in every if isinstance(each, LimitsSpanProcessor)]


def test_plugin_without_enable_limits_its_agent(make_agent: MakeAgent, source: str) -> None:
    """Without `enable()`, the agent with the plugin is limited, and no other one is."""
    plugin = LimitsPlugin(Limits(max_turns=2))
    assert calls(make_agent(runaway(), plugins=[plugin])) == 2
    assert calls(make_agent(ScriptedModel([*[uses("search")] * 4, says("done")]))) == 5


def test_plugin_wins_over_enable(make_agent: MakeAgent, source: str) -> None:
    """The agent's own cap counts, whether lower or higher."""
    enable(Limits(max_turns=3))
    assert calls(make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])) == 2
    assert calls(make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=5))])) == 5
    assert calls(make_agent(runaway())) == 3


def test_plugin_inherits_unset_caps(make_agent: MakeAgent) -> None:
    """A cap that is `None` in the plugin is inherited from `enable()`."""
    enable(Limits(max_turns=4, max_token_budget=30))
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=9))])
    assert str(agent("go").stop_reason) == "max_token_budget"


def test_plugin_action_applies_to_its_agent_only(make_agent: MakeAgent) -> None:
    """One agent raises while the others are halted."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway(), plugins=[LimitsPlugin(action="raise")])
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        agent("go")
    assert str(make_agent(runaway())("go").stop_reason) == "max_turns"


def test_enable_after_plugin_keeps_plugin_limits(make_agent: MakeAgent) -> None:
    """The order of `enable()` and the plugin does not matter."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    assert calls(agent) == 2
    enable(Limits(max_turns=3))
    assert calls(agent) == 2


@pytest.mark.parametrize("first", ["plugin", "enable", "invocation"])
def test_plugin_with_enable_counts_once(
    first: str,
    make_agent: MakeAgent,
    events: list[Event],
    warnings_logged: Callable[[], list[str]],
    metric: Metric,
) -> None:
    """With both, an agent is counted, warned about and halted once."""
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
    """Fails twice after sending everything that is billed."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Answer, then disconnect."""
        async for event in super().stream(*args, **kwargs):
            yield event
        if self.calls < 3:
            raise ConnectionError("broken off")


async def again(context: InvokeModelContext, next_fn: Any) -> Any:
    """Retry until the model has answered, as a middleware of an application may."""
    while True:
        try:
            events = [event async for event in next_fn(context)]
        except ConnectionError:
            continue
        for event in events:
            yield event
        return


@pytest.mark.parametrize("plugins", [[LimitsPlugin(Limits(max_turns=5))], []])
def test_retries_by_middleware_count_with_their_tokens(
    plugins: list[LimitsPlugin], make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Three attempts are three calls, whichever middleware was added first."""
    enable(observers=[events.append])
    agent = make_agent(BreaksOff(endless(says("hello"))), plugins=plugins)
    agent.add_middleware(InvokeModelStage, again)
    agent("go")
    counted = [(event.kind, event.usage.total) for event in events if isinstance(event, ModelCall)]
    assert counted == [("failed", 15), ("failed", 15), ("measured", 15)]


def test_middleware_added_at_invocation_start_is_counted(
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


class AnswersInPairs(ScriptedModel):
    """Answers only after a second call has started."""

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


async def calls_concurrently(context: InvokeModelContext, next_fn: Any) -> Any:
    """Call the model twice and take the first answer."""

    async def ask() -> list[Any]:
        return [event async for event in next_fn(context)]

    answers: Sequence[list[Any]] = await asyncio.gather(ask(), ask())
    for event in answers[0]:
        yield event


def test_concurrent_requests_by_middleware_are_all_counted(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The discarded one was sent anyway."""
    enable(observers=[events.append])
    agent = make_agent(AnswersInPairs())
    agent.add_middleware(InvokeModelStage, calls_concurrently)
    agent("go")
    counted = [event.usage.total for event in events if isinstance(event, ModelCall)]
    assert sorted(counted) == [15, 1000]


async def leave(context: InvokeModelContext, next_fn: Any) -> Any:
    """Read the start of an answer and drop the rest."""
    events = next_fn(context)
    yield await anext(events)
    await events.aclose()
    raise ConnectionError("enough")


def test_response_dropped_by_middleware_is_counted_immediately(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """An observer of the call's event finds the call already counted."""
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


def test_enable_twice_is_idempotent(
    make_agent: MakeAgent, warnings_logged: Callable[[], list[str]], metric: Metric
) -> None:
    """`enable()` is idempotent: one processor, one count, one warning."""
    for _ in range(3):
        enable(Limits(max_turns=2))
    assert calls(make_agent(runaway())) == 2
    assert len(processors(trace.get_tracer_provider())) == 1
    assert sum("halted by" in each for each in warnings_logged()) == 1
    assert metric("otel_limits_turns_total", agent="tester") == 2


def test_enable_again_replaces_limits(make_agent: MakeAgent) -> None:
    """Invocations that start afterwards have the new limits, for existing agents too."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    assert calls(agent) == 2
    enable(Limits(max_turns=3))
    assert calls(agent) == 3
    enable(Limits(max_token_budget=15))
    assert calls(agent) == 1


def test_existing_agents_are_limited(make_agent: MakeAgent, source: str) -> None:
    """An agent made, or even called, before `enable()` is limited when it runs afterwards."""
    agent = make_agent(ScriptedModel([says("done"), *[uses("search")] * 9]))
    agent("go")
    enable(Limits(max_turns=2))
    assert calls(agent) == 2


def test_provider_made_later_gets_our_processor(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StrandsTelemetry()` after `enable()` makes a provider with our processor, added once."""
    enable(Limits(max_turns=2))
    provider = StrandsTelemetry().tracer_provider
    assert len(processors(provider)) == 1
    tracer = strands_tracer.Tracer()
    tracer.tracer = provider.get_tracer("strands.telemetry.tracer")
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracer)
    assert calls(make_agent(runaway())) == 2
    assert metric("otel_limits_unsampled_invocations_total", agent="tester") == 0


def test_vendor_provider_keeps_its_processors() -> None:
    """A subclass may do more than add in `add_span_processor`, so we don't call it."""

    class Vendor(TracerProvider):
        """Replaces its default exporter when another one is added, as Phoenix does."""

        def add_span_processor(self, span_processor: SpanProcessor) -> None:  # noqa: ARG002
            """Replace the default."""
            raise AssertionError("called for a processor that is no exporter")

    enable()
    assert len(processors(Vendor())) == 1


def seen_from_outside(agent: Agent) -> dict[str, Any]:
    """Everything that `enable()` changes."""
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


def test_disable_restores_everything(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registries, processors, classes and metrics are as before; only handlers stay."""
    # Agents with plugins that other tests keep alive would keep their classes patched.
    monkeypatch.setattr(agent_hooks, "ALL_WITH_OWN", set())
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


def test_disable_without_enable_does_nothing() -> None:
    """`disable()` does nothing while otel-limits is off."""
    disable()
    disable()


def test_enable_after_disable_works(make_agent: MakeAgent, metric: Metric) -> None:
    """After another `enable()`, limits apply and counts start from zero."""
    agent = make_agent(runaway())
    for _ in range(3):
        enable(Limits(max_turns=2))
        assert calls(agent) == 2
        assert metric("otel_limits_turns_total", agent="tester") == 2
        disable()


def test_disabled_process_is_unchanged(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `OTEL_LIMITS_DISABLED=true`, neither `enable()` nor a plugin has any effect."""
    monkeypatch.setenv("OTEL_LIMITS_DISABLED", "true")
    before = dict(vars(Agent))
    enable(Limits(max_turns=1))
    agent = make_agent(
        ScriptedModel([uses("search"), says("done")]),
        plugins=[LimitsPlugin(Limits(max_turns=1))],
    )
    assert calls(agent) == 2
    assert dict(vars(Agent)) == before


def test_plugin_survives_disable(make_agent: MakeAgent, events: list[Event]) -> None:
    """`disable()` undoes `enable()` only: an agent keeps its own limits."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    enable(Limits(max_token_budget=15), observers=[events.append])
    assert calls(agent) == 1
    events.clear()
    disable()
    assert calls(agent) == 2
    assert events == []


def test_disable_with_living_plugin_publishes_nothing(
    make_agent: MakeAgent, metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `disable()` nothing is published until its next call, even if the agent stays alive.

    Strands' loop for background tools keeps it alive: it holds the context of the invocation that
    first used one in the process.
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


def test_agent_with_plugin_is_tracked_again_after_disable(
    make_agent: MakeAgent, source: str, metric: Metric
) -> None:
    """It is limited, counted from zero and sampled; agents without a plugin are not tracked."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    assert calls(agent) == 2
    enable(Limits(max_turns=9))
    disable()
    assert metric("otel_limits_turns_total", agent="tester") == 0
    assert (calls(agent), calls(agent)) == (2, 2)
    assert metric("otel_limits_turns_total", agent="tester") == 4
    unsampled = metric("otel_limits_unsampled_invocations_total", agent="tester")
    assert unsampled == (2 if source == "hooks" else 0)
    assert (
        calls(make_agent(ScriptedModel([*[uses("search")] * 4, says("done")]), name="other")) == 5
    )
    assert metric("otel_limits_turns_total", agent="other") == 0


def test_disable_mid_run_counts_plugin_invocation_to_its_end(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """Usage is counted to the end of an invocation even if `disable()` is called during it."""
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


def test_agent_is_garbage_collected(make_agent: MakeAgent) -> None:
    """We keep no agent alive that its application has dropped."""
    enable(Limits(max_turns=2))
    agent = make_agent(runaway())
    agent("go")
    alive = weakref.ref(agent)
    del agent
    gc.collect()
    assert alive() is None


def test_agent_with_plugin_is_garbage_collected(make_agent: MakeAgent) -> None:
    """Nor an agent with its own limits."""
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=2))])
    agent("go")
    alive = weakref.ref(agent)
    del agent
    gc.collect()
    assert alive() is None


def test_plugin_can_serve_several_agents(make_agent: MakeAgent) -> None:
    """A plugin keeps no state of the agent that it was given to."""
    plugin = LimitsPlugin(Limits(max_turns=2))
    agents = [make_agent(runaway(), plugins=[plugin]) for _ in range(2)]
    assert [calls(agent) for agent in agents] == [2, 2]


def test_plugin_with_unknown_action_raises() -> None:
    """The error lists the valid actions."""
    with pytest.raises(ValueError, match=r"action must be one of observe, halt, .* got 'explode'"):
        LimitsPlugin(Limits(max_turns=1), action="explode")  # type: ignore[arg-type]


def test_plugin_is_imported_lazily() -> None:
    """`otel_limits.LimitsPlugin` is the class; any other unknown name raises `AttributeError`."""
    assert otel_limits.LimitsPlugin is LimitsPlugin
    with pytest.raises(AttributeError, match="has no attribute 'Plugin'"):
        _ = otel_limits.Plugin


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [None, Limits(max_turns=9)])
def test_copied_agent_keeps_its_own_limits(
    everywhere: Limits | None, make_agent: MakeAgent
) -> None:
    """They win over the process-wide limits, even after the original is gone."""
    if everywhere is not None:
        enable(everywhere)
    original = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=3))])
    copied = copy.copy(original)
    assert [calls(original), calls(copied)] == [3, 3]
    del original
    gc.collect()
    assert calls(copy.copy(copied)) == 3
