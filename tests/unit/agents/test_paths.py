"""Every path by which an agent spends: trees, aborts, other instrumentations, gateways."""

from __future__ import annotations

import asyncio
import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.multiagent import GraphBuilder, Swarm
from strands.types.exceptions import ContextWindowOverflowException

import otel_limits
from otel_limits import Limits, ModelCall, Stop, enable
from otel_limits.runs.registry import LIVE
from otel_limits.testing import Answer, ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent, Metric


def stops(events: list[Event]) -> dict[str, Stop]:
    """Stops by agent."""
    return {fact.agent: fact for fact in events if isinstance(fact, Stop)}


def calls(events: list[Event]) -> list[ModelCall]:
    """Settled model calls."""
    return [fact for fact in events if isinstance(fact, ModelCall)]


# --- budget trees ---------------------------------------------------------------------------------


def family(child_model: ScriptedModel, parent_model: ScriptedModel) -> Agent:
    """Make a parent that uses a child as its tool."""

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    child = Agent(model=child_model, tools=[look], name="child", callback_handler=None)
    return Agent(
        model=parent_model,
        tools=[child.as_tool(name="child", description="Query the child.")],
        name="parent",
        callback_handler=None,
    )


ASK_CHILD = uses("child", arguments={"input": "go"})


def test_a_tree_shares_one_budget(
    source: str, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """A breach of the tree halts the child, then the parent; both return."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "4")
    enable(observers=[events.append])
    child, parent = ScriptedModel(endless(uses("look"))), ScriptedModel(endless(ASK_CHILD))
    result = family(child, parent)("go")
    assert (result.stop_reason, parent.calls, child.calls) == ("max_turns", 1, 3)
    assert {name: stop.reason for name, stop in stops(events).items()} == {
        "child": "max_turns",
        "parent": "max_turns",
    }
    breach = stops(events)["child"].breach
    assert breach is not None
    assert (breach.limit, breach.observed) == ("tree_max_turns", 4)


def test_a_tree_can_be_capped_in_code(source: str) -> None:
    """`enable(tree=…)` and a plugin's `tree` cap it; what makes no sense for a tree is refused."""
    enable(tree=Limits(max_turns=4))
    child, parent = ScriptedModel(endless(uses("look"))), ScriptedModel(endless(ASK_CHILD))
    family(child, parent)("go")
    assert child.calls + parent.calls == 4
    plugin = otel_limits.LimitsPlugin(tree=Limits(max_turns=1))
    alone = ScriptedModel(endless(uses("nothing")))
    agent = Agent(model=alone, plugins=[plugin], callback_handler=None)
    assert (agent("go").stop_reason, alone.calls) == ("max_turns", 1)
    with pytest.raises(ValueError, match="max_iterations is not a limit of a budget tree"):
        enable(tree=Limits(max_iterations=1))


def test_a_tree_counts_each_call_once(
    source: str, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Each invocation is debited with its own calls, the tree with all of them."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TOKEN_BUDGET", "1000000")
    enable(observers=[events.append])
    child = ScriptedModel([uses("look"), says("done")])
    parent = ScriptedModel([ASK_CHILD, says("done")])
    family(child, parent)("go")
    own = {name: stop.usage.total for name, stop in stops(events).items()}
    tree = [level for level in stops(events)["parent"].levels if level.limit.startswith("tree_")]
    assert (own, [level.observed for level in tree]) == ({"child": 30, "parent": 30}, [60])


def test_tree_events_name_parent_and_root(source: str, events: list[Event]) -> None:
    """Every event of a child names its parent and the root."""
    enable(observers=[events.append])
    family(ScriptedModel([says("x")]), ScriptedModel([ASK_CHILD, says("y")]))("go")
    parent, child = (
        next(
            fact.invocation
            for fact in events
            if isinstance(fact, otel_limits.Started) and fact.invocation.agent == name
        )
        for name in ("parent", "child")
    )
    assert (child.parent_id, child.root_id) == (parent.id, parent.id)
    assert (parent.parent_id, parent.root_id) == (None, parent.id)


def test_the_next_invocation_has_a_tree_of_its_own(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees don't outlive the invocation that they began with."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "2")
    enable()
    agent = Agent(model=ScriptedModel(endless(says("hello"))), callback_handler=None)
    assert [agent("go").stop_reason for _ in range(4)] == ["end_turn"] * 4


def node(name: str, model: ScriptedModel) -> Agent:
    """Make an agent with a tool."""

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    return Agent(model=model, tools=[look], name=name, callback_handler=None)


def test_a_graph_is_one_tree(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a graph share its budget, and each node has its own readable stop reason."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "3")
    enable()
    first, second = ScriptedModel([uses("look"), says("x")]), ScriptedModel(endless(uses("look")))
    builder = GraphBuilder()
    builder.add_node(node("first", first), "first")
    builder.add_node(node("second", second), "second")
    builder.add_edge("first", "second")
    builder.set_max_node_executions(10)
    result = builder.build()("go")
    reasons = {name: each.result.stop_reason for name, each in result.results.items()}  # type: ignore[union-attr]
    assert reasons == {"first": "end_turn", "second": "max_turns"}
    assert (first.calls, second.calls) == (2, 1)


def test_a_swarm_is_one_tree(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of a swarm share its budget across a handoff."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "3")
    enable()
    handoff = uses(
        "handoff_to_agent", arguments={"agent_name": "second", "message": "go", "context": {}}
    )
    first, second = ScriptedModel([handoff, says("x")]), ScriptedModel(endless(uses("look")))
    result = Swarm([node("first", first), node("second", second)])("go")
    assert result.results["second"].result.stop_reason == "max_turns"  # type: ignore[union-attr]
    assert first.calls + second.calls == 3


class Report(BaseModel):
    """A structured output."""

    text: str = ""


class Summarised(ScriptedModel):
    """Answers direct requests for structured output through its own stream, as providers do."""

    async def structured_output(self, output_model: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """Call the model, then answer."""
        async for _event in self.stream(prompt):
            pass
        yield {"output": output_model()}


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_direct_structured_output_is_an_invocation(
    source: str, events: list[Event], metric: Metric
) -> None:
    """`agent.structured_output()` calls the model without the agent loop, and is counted once."""
    enable(observers=[events.append])
    agent = Agent(model=Summarised([says("x")]), name="direct", callback_handler=None)
    agent.structured_output(Report, "go")
    assert [call.usage.total for call in calls(events)] == [15]
    assert stops(events)["direct"].usage.total == 15
    assert metric("otel_limits_unsampled_invocations_total", agent="direct") == 0


def test_a_summary_is_debited(source: str, events: list[Event]) -> None:
    """Calls of a summarizing conversation manager count in the invocation that needed them."""
    enable(observers=[events.append])
    script = [
        fails(ContextWindowOverflowException("too long")),
        says("a summary"),
        says("the answer"),
    ]
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    agent = Agent(
        model=ScriptedModel(script),
        conversation_manager=manager,
        callback_handler=None,
        name="long",
        messages=[
            {"role": role, "content": [{"text": f"{number}"}]}  # type: ignore[typeddict-item]
            for number, role in enumerate(["user", "assistant"] * 4)
        ],
    )
    assert agent("go").stop_reason == "end_turn"
    assert [call.kind for call in calls(events)] == ["failed", "measured", "measured"]
    assert stops(events)["long"].usage.total == 30


def test_an_auxiliary_model_of_a_tool_is_debited(source: str, events: list[Event]) -> None:
    """A model that a tool asks by itself counts in the invocation that the tool works for."""
    enable(observers=[events.append])
    helper = ScriptedModel([says("hint")], model_id="helper")

    @tool
    async def think() -> str:
        """Ask another model."""
        async for _event in helper.stream([{"role": "user", "content": [{"text": "?"}]}]):
            pass
        return "thought"

    agent = Agent(
        model=ScriptedModel([uses("think"), says("x")]),
        tools=[think],
        callback_handler=None,
        name="thinker",
    )
    agent("go")
    assert sorted(call.model for call in calls(events)) == ["helper", "scripted", "scripted"]
    assert stops(events)["thinker"].usage.total == 45


class Together(ScriptedModel):
    """Answers no request before the third has arrived."""

    def __init__(self) -> None:
        super().__init__([says("hint")] * 3, model_id="helper")
        self.all_asked = asyncio.Event()

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the others."""
        answer = super().stream(*args, **kwargs)
        events = [event async for event in answer]
        if self.calls == 3:
            self.all_asked.set()
        await self.all_asked.wait()
        for event in events:
            yield event


def thinker(helper: ScriptedModel, model: ScriptedModel) -> Agent:
    """Make an agent whose tool asks `helper`."""

    @tool
    async def think() -> str:
        """Ask another model."""
        async for _event in helper.stream([{"role": "user", "content": [{"text": "?"}]}]):
            pass
        return "thought"

    return Agent(model=model, tools=[think], callback_handler=None, name="thinker")


def test_a_request_of_a_tool_that_fails_counts_once(source: str, events: list[Event]) -> None:
    """Its failure is its end: it is not booked again when its stream is closed."""
    enable(observers=[events.append])
    helper = ScriptedModel([fails(ConnectionError("gone"))], model_id="helper")
    thinker(helper, ScriptedModel([uses("think"), says("x")]))("go")
    assert [call.kind for call in calls(events) if call.model == "helper"] == ["failed"]


def test_concurrent_model_calls_of_tools_are_debited(source: str, events: list[Event]) -> None:
    """Three tools of one turn, each with a request in flight, are three requests."""
    enable(observers=[events.append])
    thinker(Together(), ScriptedModel([uses("think", "think", "think"), says("x")]))("go")
    assert [call.model for call in calls(events)].count("helper") == 3
    assert stops(events)["thinker"].usage.total == 75


def test_a_model_that_no_agent_has_is_debited(source: str, events: list[Event]) -> None:
    """A tool may call a model of a class that no agent has."""

    class Foreign(ScriptedModel):
        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            async for event in super().stream(*args, **kwargs):
                yield event

    enable(observers=[events.append])
    helper = Foreign([says("hint")], model_id="helper")
    thinker(helper, ScriptedModel([uses("think"), says("x")]))("go")
    assert [call.model for call in calls(events)] == ["scripted", "helper", "scripted"]


class Delegating(ScriptedModel):
    """Hands its stream on without looking at it, as a router does."""

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return what another one streams."""
        return super().stream(*args, **kwargs)


class Arranged(ScriptedModel):
    """Has for its method what is no function."""

    async def _stream(self, cap: int, *args: Any, **kwargs: Any) -> Any:
        assert cap == 5
        async for event in super().stream(*args, **kwargs):
            yield event

    stream = functools.partialmethod(_stream, 5)


@pytest.mark.parametrize("kind", [Delegating, Arranged])
def test_a_direct_request_is_one_however_it_is_passed_on(
    kind: type[ScriptedModel], source: str, events: list[Event]
) -> None:
    """It works as it does without us, and counts once."""
    enable(observers=[events.append])
    helper = kind([says("hint")], model_id="helper")
    thinker(helper, ScriptedModel([uses("think"), says("x")]))("go")
    assert [call.model for call in calls(events)] == ["scripted", "helper", "scripted"]


class Around(ScriptedModel):
    """Hands on what another model answers, as one that caches or logs does."""

    inner: ScriptedModel

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Call the other one."""
        async for event in self.inner.stream(*args, **kwargs):
            yield event


class Claude(ScriptedModel):
    """Answers as Strands' class for Anthropic does: cached tokens are not part of the input."""

    __module__ = "strands.models.anthropic"


@pytest.mark.parametrize("name", ["mine", "unknown"])
def test_a_model_around_another_is_that_one_to_the_vendor(
    name: str, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Its usage, its seller and its terms decide; a name that the outer one has stays."""
    enable(observers=[events.append])
    usage: Any = {
        "inputTokens": 5_000,
        "outputTokens": 30,
        "totalTokens": 5_030,
        "cacheReadInputTokens": 4_000,
    }
    model = Around([], model_id=name)
    model.inner = Claude([replace(says("x"), usage=usage)], model_id="claude-sonnet-4-5")
    model.inner.update_config(params={"inference_geo": "us"})
    make_agent(model)("go")
    (call,) = calls(events)
    assert call.model == (name if name == "mine" else "claude-sonnet-4-5")
    assert (call.provider, call.usage.input, call.usage.cache_read) == ("anthropic", 9_000, 4_000)
    assert '"region": "us"' in str(call.price_basis)


def test_agent_within_a_model_counts_separately(source: str, events: list[Event]) -> None:
    """Calls by its tools are not part of the request that started it."""
    enable(observers=[events.append])
    helper = ScriptedModel([says("hint")], model_id="helper")

    class Staffed(ScriptedModel):
        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            inner = thinker(helper, ScriptedModel([uses("think"), says("x")]))
            inner.name = "inner"
            await inner.invoke_async("go")
            async for event in super().stream(*args, **kwargs):
                yield event

    outer = ScriptedModel([uses("think"), says("x")])
    thinker(Staffed([says("hint")]), outer)("go")
    counted = {name: stop.model_calls for name, stop in stops(events).items()}
    assert counted == {"inner": 3, "thinker": 3}


def test_a_direct_stream_that_is_closed_is_closed(source: str) -> None:
    """Closing ends the provider's stream, so waiting for that end does not hang."""
    enable()
    order: list[str] = []

    class Connected(ScriptedModel):
        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            try:
                async for event in super().stream(*args, **kwargs):
                    yield event
            finally:
                order.append("disconnected")

    @tool
    async def glance() -> str:
        """Read the beginning of an answer."""
        stream = Connected([says("hint")]).stream([])
        await anext(stream)
        await stream.aclose()
        order.append("closed")
        return "seen"

    model = ScriptedModel([uses("glance"), says("x")])
    Agent(model=model, tools=[glance], callback_handler=None)("go")
    assert order == ["disconnected", "closed"]


class ByItself(ScriptedModel):
    """Implements structured output without a stream, as providers with an own API for it do."""

    async def structured_output(self, output_model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Answer without a stream."""
        yield {"output": output_model(text="ten tokens or so of text")}


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_structured_output_by_a_way_of_its_own_is_unmeasured(
    source: str, events: list[Event]
) -> None:
    """A request without a stream is estimated from its texts, and marked as estimated."""
    enable(observers=[events.append])
    agent = Agent(model=ByItself([]), name="direct", callback_handler=None)
    agent.structured_output(Report, "a question of about ten tokens, as it seems")
    (call,) = calls(events)
    assert (call.kind, call.estimated, call.model) == ("estimated", True, "scripted")
    assert (call.usage.input >= 9, call.usage.output > 5) == (True, True)


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_structured_output_that_fails_is_a_failed_call(source: str, events: list[Event]) -> None:
    """Its progress is unknown, so it counts as a call without tokens."""
    enable(observers=[events.append])
    agent = Agent(model=ByItself([]), name="direct", callback_handler=None)
    with pytest.raises(TypeError):
        agent.structured_output(int, "go")  # type: ignore[type-var]
    assert [(call.kind, call.usage.total) for call in calls(events)] == [("failed", 0)]
    assert stops(events)["direct"].reason == "error"


class ByItselfInstrumented(ScriptedModel):
    """The same, through a client that makes a span."""

    async def structured_output(self, output_model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Answer without a stream."""
        tracer = trace.get_tracer("opentelemetry.instrumentation.openai_v2")
        usage = {"gen_ai.usage.input_tokens": 900, "gen_ai.usage.output_tokens": 100}
        with tracer.start_as_current_span("chat gpt-4o", attributes=usage):
            yield {"output": output_model()}


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_structured_output_by_an_instrumented_client_is_the_direct_agents(
    events: list[Event],
) -> None:
    """Its span counts where the request was made, with its tokens, and nowhere else."""
    enable(observers=[events.append])

    @tool
    async def report() -> str:
        """Ask another agent."""
        inner = Agent(model=ByItselfInstrumented([]), name="inner", callback_handler=None)
        return str(await inner.structured_output_async(Report, "go"))

    model = ScriptedModel([uses("report"), says("x")])
    Agent(model=model, tools=[report], name="outer", callback_handler=None)("go")
    spent = {name: stop.usage.total for name, stop in stops(events).items()}
    assert spent == {"inner": 1000, "outer": 30}


# --- aborts ---------------------------------------------------------------------------------------


async def abandon(agent: Agent, events: int) -> None:
    """Read `events` events of a stream and close it."""
    stream = agent.stream_async("go")
    async for _event in itertools_async(stream, events):
        pass
    await stream.aclose()  # type: ignore[attr-defined]


async def itertools_async(stream: Any, number: int) -> Any:
    """Yield the first `number` events."""
    for _ in range(number):
        yield await anext(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_abandoned_call_is_booked_once(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """A stream that is closed within a response costs at least its input, and says so."""
    enable(observers=[events.append])
    asyncio.run(abandon(make_agent(ScriptedModel([says("hello")])), 6))
    (call,) = calls(events)
    assert (call.kind, call.estimated) == ("failed", True)
    assert call.usage.input == pytest.approx(66, rel=0.2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_aborting_does_not_dodge_a_budget(
    make_agent: MakeAgent, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that opens and abandons responses 100 times exhausts the budget of its tree."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TOKEN_BUDGET", "400")
    enable()
    child = ScriptedModel(endless(says("hello")))

    @tool
    async def dodge() -> str:
        """Open and abandon the same question again and again."""
        for _ in range(100):
            await abandon(make_agent(child, name="child"), 6)
        return "done"

    model = ScriptedModel(endless(uses("dodge")))
    result = make_agent(model, tools=[dodge])("go")
    assert (result.stop_reason, model.calls) == ("max_token_budget", 1)
    assert child.calls < 100


def test_a_response_that_breaks_off_is_booked(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """A model that fails in mid-stream had read its input."""
    enable(observers=[events.append])
    model = ScriptedModel([Answer(text="half an ans", error=OSError("gone"), usage=None)])
    with pytest.raises(Exception, match="gone"):
        make_agent(model)("go")
    (call,) = calls(events)
    assert (call.kind, call.estimated, call.usage.input > 0) == ("failed", True, True)


def test_a_request_that_was_turned_away_costs_nothing(
    make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Before anything came back nothing is billed."""
    enable(observers=[events.append])
    with pytest.raises(Exception, match="no route"):
        make_agent(ScriptedModel([fails(OSError("no route"))]))("go")
    (call,) = calls(events)
    assert (call.kind, call.estimated, call.usage.total) == ("failed", False, 0)


# --- other instrumentations -----------------------------------------------------------------------


class Instrumented(ScriptedModel):
    """A provider whose HTTP client is instrumented, too."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Emit a second span for the same call."""
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": 10,
            "gen_ai.usage.output_tokens": 5,
        }
        tracer = trace.get_tracer("opentelemetry.instrumentation.openai_v2")
        span = tracer.start_span("chat gpt-4o", attributes=attributes)
        async for event in super().stream(*args, **kwargs):
            yield event
        span.end()


def test_a_chat_span_under_a_chat_span_is_one_call(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """Two instrumentations of one call count it once."""
    enable(observers=[events.append])
    make_agent(Instrumented([says("x")]))("go")
    assert [call.usage.total for call in calls(events)] == [15]


def test_a_chat_span_within_what_a_tool_asks_is_one_call(events: list[Event]) -> None:
    """A model that a tool asks is followed by its stream, not once more by a client's span."""
    enable(observers=[events.append])
    helper = Instrumented([says("hint")], model_id="helper")
    thinker(helper, ScriptedModel([uses("think"), says("x")]))("go")
    assert [call.model for call in calls(events)] == ["scripted", "helper", "scripted"]


@pytest.mark.parametrize(
    "names",
    [
        ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
        ("llm.token_count.prompt", "llm.token_count.completion"),
    ],
)
def test_a_chat_span_of_a_tool_is_a_call(
    make_agent: MakeAgent, events: list[Event], names: tuple[str, str]
) -> None:
    """A client that a tool uses is followed by its span, under every name of the attributes."""
    enable(observers=[events.append])

    @tool
    def think() -> str:
        """Call a model unknown to Strands."""
        tracer = trace.get_tracer("opentelemetry.instrumentation.openai_v2")
        usage = {names[0]: 100, names[1]: 20, "gen_ai.usage.cache_read.input_tokens": 60}
        attributes: dict[str, Any] = {"gen_ai.request.model": "gpt-4o", **usage}
        with tracer.start_as_current_span("chat gpt-4o", attributes=attributes):
            pass
        return "thought"

    make_agent(ScriptedModel([uses("think"), says("x")]), tools=[think])("go")
    (foreign,) = [call for call in calls(events) if call.model == "gpt-4o"]
    assert (foreign.usage.total, foreign.usage.cache_read) == (120, 60)
    assert stops(events)["tester"].usage.total == 150


# --- native limits --------------------------------------------------------------------------------


def test_native_limits_keep_working(make_agent: MakeAgent, source: str, metric: Metric) -> None:
    """Strands' own limits stop as they do, and are counted under their own name."""
    enable(Limits(max_turns=10))
    result = make_agent(ScriptedModel(endless(uses("search"))))("go", limits={"turns": 2})
    assert (result.stop_reason, otel_limits.stop_of(result)) == ("limit_turns", None)
    assert metric("otel_limits_stops_total", agent="tester", reason="limit_turns", action="none")


def test_ours_wins_when_it_is_lower(make_agent: MakeAgent, source: str) -> None:
    """Both caps are in force, and the first one reached decides."""
    enable(Limits(max_turns=1))
    result = make_agent(ScriptedModel(endless(uses("search"))))("go", limits={"turns": 2})
    assert result.stop_reason == "max_turns"


# --- what is left over ----------------------------------------------------------------------------


def test_concurrent_children_share_a_budget_exactly(
    source: str, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Children that run concurrently debit one tree: no call is lost or counted twice."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TOKEN_BUDGET", "100000")
    enable(observers=[events.append])

    def children() -> Iterator[Agent]:
        for number in range(4):
            script = [*[uses("look")] * 5, says("x")]
            yield node(f"child{number}", ScriptedModel(script))

    tools = [
        child.as_tool(name=f"ask{number}", description="Ask.")
        for number, child in enumerate(children())
    ]
    asks = Answer(tools=tuple((f"ask{number}", {"input": "go"}) for number in range(4)))
    parent = Agent(
        model=ScriptedModel([asks, says("x")]), tools=list(tools), name="p", callback_handler=None
    )
    parent("go")
    (level,) = stops(events)["p"].levels
    assert level.observed == 15 * (2 + 4 * 6)
    assert len(LIVE) == 0


def test_nothing_is_repeated(events: list[Event]) -> None:
    """The order in which children end is theirs; every one ends once."""
    enable(observers=[events.append])
    family(ScriptedModel(itertools.repeat(says("x"))), ScriptedModel([ASK_CHILD, says("y")]))("go")
    assert [fact.agent for fact in events if isinstance(fact, Stop)] == ["child", "parent"]
