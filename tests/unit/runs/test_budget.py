"""Budget trees: a cap holds in every composition, regardless of concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeModelCallEvent
from strands.multiagent import GraphBuilder
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Halt, Limits, LimitsPlugin, Stop, enable
from otel_limits.core.errors import limit_reached
from otel_limits.core.policy import Verdict
from otel_limits.runs.budget import new_tree
from otel_limits.runs.current import CURRENT
from otel_limits.runs.registry import LIVE
from otel_limits.testing import Answer, FakeTime, ScriptedModel, endless, fails, only, says, uses
from tests.conftest import call_async, call_stream, call_sync
from tests.metered import PER_MESSAGE, Metered

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from otel_limits import Event, Level
    from otel_limits.runs.budget import Budget
    from tests.conftest import Call, MakeAgent

pytestmark = pytest.mark.usefixtures("source")

SIZES = (2, 10, 30)
SIZES_AND_WAYS = [(2, call_async), (10, call_stream), (30, call_sync)]
"""Numbers of concurrent agents, each with another way to call their parent."""


@tool
async def look() -> str:
    """Look."""
    await asyncio.sleep(0)
    return "nothing"


def agent_of(model: ScriptedModel, name: str, **arguments: Any) -> Agent:
    """Make a silent agent that can look."""
    return Agent(
        **{"model": model, "tools": [look], "name": name, "callback_handler": None, **arguments}
    )


def runaways(number: int, **arguments: Any) -> list[Agent]:
    """Agents that search forever."""
    return [
        agent_of(Metered(endless(uses("look"))), f"child{n}", **arguments) for n in range(number)
    ]


def asking(children: list[Agent], then: Iterable[Answer] = (), **arguments: Any) -> Agent:
    """A parent that calls all of them concurrently, and is a runaway afterwards."""
    ask = Answer(tools=tuple((child.name, {"input": "go"}) for child in children))
    tools = [child.as_tool(name=child.name, description="Ask.") for child in children]
    script = itertools.chain([ask], then or endless(ask))
    return agent_of(Metered(script), "parent", tools=tools, **arguments)


def calls_of(*agents: Agent) -> int:
    """Requests that reached the models of these agents."""
    return sum(agent.model.calls for agent in agents)  # type: ignore[attr-defined]


def stops(events: list[Event]) -> dict[str, Stop]:
    """How each agent's last invocation ended."""
    return {fact.agent: fact for fact in events if isinstance(fact, Stop)}


def tree_levels(stop: Stop) -> dict[str, Level]:
    """Usage of the tree, by limit."""
    return {each.limit: each for each in stop.levels if each.limit.startswith("tree_")}


def used(messages: list[Any]) -> int:
    """Tokens of one call with these messages, and its answer."""
    return PER_MESSAGE * (len(messages) + 1)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[Budget]:
    """Every budget tree that was begun."""
    begun: list[Budget] = []
    original = new_tree

    def note(*arguments: Any) -> Budget:
        begun.append(original(*arguments))
        return begun[-1]

    monkeypatch.setattr("otel_limits.runs.registry.new_tree", note)
    return begun


def is_empty(tree: Budget) -> bool:
    """All reservations are released."""
    held = tree.reserved
    return (held.turns, held.model_calls, held.tokens, held.cost) == (0, 0, 0, 0)


# --- concurrency ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "way"), SIZES_AND_WAYS)
@pytest.mark.parametrize("limit", ["max_turns", "max_model_calls"])
def test_concurrent_agents_as_tools_share_the_cap(
    number: int, limit: str, way: Call, events: list[Event], trees: list[Budget]
) -> None:
    """A tree's cap of 3 is 3 model calls, regardless of which agent makes them."""
    enable(tree=only(limit, 3), observers=[events.append])
    children = runaways(number)
    parent = asking(children)
    result = way(parent)
    assert calls_of(parent, *children) == 3
    assert result.stop_reason == limit
    assert {stop.reason for stop in stops(events).values()} == {limit}
    assert [is_empty(tree) for tree in trees] == [True]


@pytest.mark.parametrize(("number", "way"), SIZES_AND_WAYS)
def test_tokens_of_concurrent_agents_share_the_cap(
    number: int, way: Call, events: list[Event]
) -> None:
    """A tree's token budget is passed by one call at most."""
    enable(tree=Limits(max_token_budget=100), observers=[events.append])
    children = runaways(number)
    parent = asking(children)
    way(parent)
    spent = tree_levels(stops(events)["parent"])["tree_max_token_budget"].observed
    last = max(used(request) for agent in (parent, *children) for request in agent.model.requests)  # type: ignore[attr-defined]
    assert spent <= 100 + last
    assert spent == sum(stop.usage.total for stop in stops(events).values())


@pytest.mark.parametrize("limit", ["max_input_tokens", "max_output_tokens"])
def test_input_and_output_caps_hold_for_concurrent_agents(limit: str, events: list[Event]) -> None:
    """Input and output are each reserved."""
    enable(tree=only(limit, 40), observers=[events.append])
    children = runaways(10)
    asking(children)("go")
    spent = tree_levels(stops(events)["parent"])[f"tree_{limit}"].observed
    assert 40 <= spent <= 40 + 5 * PER_MESSAGE


def test_cost_of_concurrent_agents_shares_the_cap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, events: list[Event]
) -> None:
    """A tree's budget in USD is passed by one call at most."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {metered: {price: {input: 1000, output: 1000}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(tree=Limits(max_cost_usd=Decimal("0.10")), observers=[events.append])
    children = runaways(10)
    asking(children)("go")
    spent = tree_levels(stops(events)["parent"])["tree_max_cost_usd"].observed
    assert Decimal("0.10") <= spent <= Decimal("0.15")


@pytest.mark.parametrize("number", SIZES)
def test_entry_nodes_of_a_graph(number: int, events: list[Event], trees: list[Budget]) -> None:
    """Nodes that start concurrently share their graph's cap exactly."""
    enable(tree=Limits(max_turns=3), observers=[events.append])
    children = runaways(number)
    builder = GraphBuilder()
    for child in children:
        builder.add_node(child, child.name)
        builder.set_entry_point(child.name)
    builder.set_max_node_executions(100)
    builder.build()("go")
    assert calls_of(*children) == 3
    assert [is_empty(tree) for tree in trees] == [True]


def test_agents_in_threads_of_a_tool(trees: list[Budget]) -> None:
    """Threads that work for one invocation share its tree."""
    enable(tree=Limits(max_turns=3))
    children = runaways(8)

    @tool
    def ask_all() -> str:
        """Ask all in threads."""
        import contextvars

        with ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(contextvars.copy_context().run, child, "go") for child in children
            ]
            return str([future.result().stop_reason for future in futures])

    parent = agent_of(Metered(endless(uses("ask_all"))), "parent", tools=[ask_all])
    parent("go")
    assert calls_of(parent, *children) == 3
    assert [is_empty(tree) for tree in trees] == [True]


def test_a_breach_names_what_is_used_and_what_is_reserved(events: list[Event]) -> None:
    """Its observed value is both together, and its text and its exception say which is which."""
    enable(tree=Limits(max_turns=3), observers=[events.append])
    children = runaways(10)
    asking(children)("go")
    halts = [fact for fact in events if isinstance(fact, Halt) and fact.breaches[0].reserved]
    assert len(halts) == 8
    breach = halts[0].breaches[0]
    assert (breach.limit, breach.cap, breach.observed, breach.reserved) == (
        "tree_max_turns",
        3,
        3,
        2,
    )
    refused = next(child for child in children if not child.model.calls)  # type: ignore[attr-defined]
    stop = otel_limits.stop_of(refused.messages[-1])
    assert stop is not None
    assert "3 of 3 turns: 1 used, 2 reserved by in-flight model calls" in stop.sentence
    assert stop.breach == breach
    error = limit_reached(Verdict("max_turns", (breach,)), stop)
    assert "3 of 3 turns: 1 used, 2 reserved by in-flight model calls" in str(error)


def test_concurrent_calls_do_not_wait_for_each_other(events: list[Event]) -> None:
    """A task that reads one agent's stream and asks another in between is not locked out."""
    enable(tree=Limits(max_turns=2), observers=[events.append])

    @tool
    async def read_one_and_ask_the_other() -> str:
        """Read one stream, and ask another agent while its response is half read."""
        first, second = runaways(2)
        stream = first.stream_async("go")
        async for event in stream:
            if "event" in event:  # the first chunk: the call is in flight
                reason = str((await second.invoke_async("go")).stop_reason)
                await stream.aclose()  # type: ignore[attr-defined]
                return f"{reason} {calls_of(second)}"
        return "no event"

    parent = agent_of(
        Metered([uses("read_one_and_ask_the_other"), says("done")]),
        "parent",
        tools=[read_one_and_ask_the_other],
    )
    parent("go")
    results = [
        block["toolResult"]["content"][0]["text"]
        for message in parent.messages
        for block in message["content"]
        if "toolResult" in block
    ]
    assert results == ["max_turns 0"]


def test_failed_call_releases_its_reserved_turn(trees: list[Budget]) -> None:
    """Not the model call: a child that fails leaves its turn to the next one."""
    enable(tree=Limits(max_turns=2, max_model_calls=9))
    failing = agent_of(Metered([fails(OSError("gone"))]), "failing")
    working = agent_of(Metered([says("done")]), "working")
    tools = [each.as_tool(name=each.name, description="Ask.") for each in (failing, working)]
    ask = [uses(name, arguments={"input": "go"}) for name in ("failing", "working")]
    parent = agent_of(Metered(ask), "parent", tools=tools)
    both = Answer(tools=tuple((name, {"input": "go"}) for name in ("failing", "working")))
    parent.model = Metered([both])
    from strands.tools.executors import SequentialToolExecutor

    parent.tool_executor = SequentialToolExecutor()
    parent("go")
    assert calls_of(failing, working) == 2
    tally = trees[0].tally
    assert (tally.turns, tally.model_calls, is_empty(trees[0])) == (2, 3, True)


def test_a_retry_keeps_its_place(
    trees: list[Budget], events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits to be tried again is not overtaken, though its turn is the last one."""
    enable(tree=Limits(max_turns=2), observers=[events.append])
    waiting, asked = asyncio.Event(), asyncio.Event()

    async def wait_for_the_other(_: float) -> None:
        waiting.set()
        await asked.wait()

    sleeping = SimpleNamespace(sleep=wait_for_the_other)
    monkeypatch.setattr("strands.event_loop._retry.asyncio", sleeping)

    class Late(Metered):
        async def stream(self, *arguments: Any, **named: Any) -> Any:
            if not self.calls:
                self.calls += 1
                raise ModelThrottledException("busy")
            async for event in super().stream(*arguments, **named):
                yield event

    throttled = agent_of(
        Late([says("done")]), "throttled", retry_strategy=ModelRetryStrategy(max_attempts=3)
    )
    (other,) = runaways(1)

    @tool
    async def ask_both() -> str:
        """Ask one, and the other one while it waits to be tried again."""
        task = asyncio.ensure_future(throttled.invoke_async("go"))
        await waiting.wait()
        second = await other.invoke_async("go")
        asked.set()
        return f"{(await task).stop_reason} {second.stop_reason}"

    agent_of(Metered(endless(uses("ask_both"))), "parent", tools=[ask_both])("go")
    assert (calls_of(throttled), calls_of(other)) == (2, 0)
    assert stops(events)["throttled"].reason == "end_turn"
    assert is_empty(trees[0])


def test_a_discarded_response_keeps_its_turn(events: list[Event]) -> None:
    """A validator that has the loop ask again uses calls and tokens, and one turn in the end."""
    enable(tree=Limits(max_turns=1), observers=[events.append])
    model = Metered([says("no"), says("no"), says("yes")])
    agent = agent_of(model, "picky")

    def validate(event: AfterModelCallEvent) -> None:
        response = event.stop_response
        event.retry = response is not None and response.message["content"] == [{"text": "no"}]

    agent.hooks.add_callback(AfterModelCallEvent, validate)
    assert str(agent("go")) == "yes\n"
    assert (model.calls, stops(events)["picky"].turns) == (3, 1)


def test_abandoned_stream_releases_its_reservation(trees: list[Budget]) -> None:
    """Closing an abandoned stream releases its reservation."""
    enable(tree=Limits(max_turns=3))

    @tool
    async def abandon() -> str:
        """Ask two agents, and read neither answer to its end."""
        for child in runaways(2):
            stream = child.stream_async("go")
            async for event in stream:
                if "event" in event:
                    break
            assert trees[0].reserved.turns == 1
            await stream.aclose()  # type: ignore[attr-defined]
        assert is_empty(trees[0])
        return "done"

    model = Metered([uses("abandon"), says("done")])
    result = agent_of(model, "parent", tools=[abandon])("go")
    assert (result.stop_reason, model.calls) == ("end_turn", 2)
    assert is_empty(trees[0])


def test_an_agent_alone_is_held_to_the_token(events: list[Event]) -> None:
    """Without concurrent calls, its own reservation never blocks it."""
    enable(
        Limits(max_turns=5, max_token_budget=201, max_model_calls=5),
        tree=Limits(max_turns=5, max_token_budget=201, max_model_calls=5),
        observers=[events.append],
    )
    model = Metered(endless(uses("look")))
    assert agent_of(model, "alone")("go").stop_reason == "max_turns"
    stop = stops(events)["alone"]
    assert (model.calls, stop.usage.total, stop.breach and stop.breach.reserved) == (5, 300, 0)


# --- trees within trees ---------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [None, 3, 4, 5, 100])
def test_each_tree_binds(outer: int | None, call: Call, events: list[Event]) -> None:
    """A child with a tree is capped by it, and by every enclosing tree."""
    enable(tree=Limits(max_turns=outer) if outer else None, observers=[events.append])
    inner = LimitsPlugin(tree=Limits(max_turns=3))
    child = agent_of(Metered(endless(uses("look"))), "child", plugins=[inner])
    call(asking([child], then=[says("done")]))
    assert child.model.calls == min(3, (outer or 100) - 1)  # type: ignore[attr-defined]
    breach = stops(events)["child"].breach
    assert breach is not None
    assert (breach.limit, breach.cap) == ("tree_max_turns", 3)


def test_three_trees_deep(events: list[Event]) -> None:
    """Usage counts once in each enclosing tree; the one with the least left binds."""
    enable(tree=Limits(max_model_calls=12), observers=[events.append])

    def nested(depth: int) -> Agent:
        if not depth:
            return agent_of(Metered(endless(uses("look"))), "leaf")
        below = nested(depth - 1)
        return agent_of(
            Metered(endless(uses(below.name, arguments={"input": "go"}))),
            f"level{depth}",
            tools=[below.as_tool(name=below.name, description="Ask.")],
            plugins=[LimitsPlugin(tree=Limits(max_turns=(0, 3, 7, 100)[depth]))],
        )

    nested(3)("go")
    told = [fact for fact in events if isinstance(fact, Stop)]
    assert [(stop.agent, stop.turns, stop.reason) for stop in told] == [
        ("leaf", 2, "max_turns"),  # level1's tree of 3
        ("level1", 1, "max_turns"),
        ("leaf", 1, "max_turns"),  # level2's tree of 7
        ("level1", 1, "max_turns"),
        ("level2", 2, "max_turns"),
        ("leaf", 1, "max_model_calls"),  # the outermost
        ("level1", 1, "max_model_calls"),
        ("level2", 1, "max_model_calls"),
        ("level3", 2, "max_model_calls"),
    ]
    assert sum(stop.model_calls for stop in told) == 12


def test_redundant_inner_tree_is_omitted(trees: list[Budget]) -> None:
    """The limits of the environment are those of every agent, and make one tree."""
    enable(tree=Limits(max_turns=9))
    children = [agent_of(Metered([says("done")]), "child")]
    asking(children, then=[says("done")])("go")
    assert len(trees) == 1


@pytest.mark.parametrize("shared", ["tree", "conversation"])
@pytest.mark.parametrize(
    ("rules", "cap", "answer"),
    [
        ("researcher: {unmeasured: halt}", "max_token_budget", uses("look", usage=None)),
        (
            "'*': {limits: {max_turns: 9}}, researcher: {unpriced: halt}",
            "max_cost_usd",
            uses("look"),
        ),
        ("boss: {unpriced: warn}", "max_cost_usd", uses("look")),
    ],
    ids=["unmeasured", "unpriced", "unpriced by default"],
)
def test_agent_in_a_looser_tree_halts_at_calls_of_unknown_size(  # noqa: PLR0913
    shared: str,
    rules: str,
    cap: str,
    answer: Answer,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """Its own rule for such calls holds, although the caps around it are the same."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"defaults: {{{shared}: {{{cap}: 1000}}}}\nagents: {{{rules}}}\n"
        "models: {priced: {price: {input: 1, output: 1}}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(observers=[events.append])
    model = ScriptedModel([answer] * 3 + [says("done")], model_id="unknown")
    child = agent_of(model, "researcher")
    ask = uses("researcher", arguments={"input": "go"})
    boss = agent_of(
        ScriptedModel([ask, says("done")], model_id="priced"),
        "boss",
        tools=[child.as_tool(name="researcher", description="Ask.")],
    )
    boss("go")
    assert (model.calls, stops(events)["researcher"].action) == (1, "halted")


def test_tree_breach_takes_its_owners_action(call: Call, events: list[Event]) -> None:
    """A child that is only observed is halted by the tree of a parent that halts."""
    enable(tree=Limits(max_turns=4), observers=[events.append])
    watched = LimitsPlugin(Limits(max_turns=1), action="observe")
    child = agent_of(Metered(endless(uses("look"))), "child", plugins=[watched])
    parent = asking([child])
    result = call(parent)
    assert (calls_of(parent, child), result.stop_reason) == (4, "max_turns")
    assert stops(events)["child"].action == "halted"


def test_a_child_that_halts_in_a_tree_that_is_observed(events: list[Event]) -> None:
    """Its own limit halts it; the tree's is reported only."""
    enable(observers=[events.append])
    halts = LimitsPlugin(Limits(max_turns=5), action="halt")
    child = agent_of(Metered(endless(uses("look"))), "child", plugins=[halts])
    watches = LimitsPlugin(tree=Limits(max_turns=2), action="observe")
    parent = asking([child], then=[says("done")], plugins=[watches])
    assert (parent("go").stop_reason, calls_of(child)) == ("end_turn", 5)
    told = [(fact.invocation.agent, fact.action) for fact in events if isinstance(fact, Halt)]
    assert told == [("child", "observed"), ("child", "halted"), ("parent", "observed")]


def test_tool_cap_of_a_tree_takes_its_owners_action(events: list[Event]) -> None:
    """Also where a call is refused before it runs."""
    enable(tree=Limits(max_tool_calls=3), observers=[events.append])
    watched = LimitsPlugin(Limits(max_tool_calls=1), action="observe")
    child = agent_of(Metered(endless(uses("look"))), "child", plugins=[watched])
    asking([child])("go")
    tally = [fact for fact in events if isinstance(fact, otel_limits.ToolCall)]
    assert sum(fact.status != "refused" for fact in tally) == 3
    assert stops(events)["child"].reason == "max_tool_calls"


def test_work_after_its_parent_ended_counts_in_the_enclosing_tree() -> None:
    """Background work of a finished child counts for the nearest active ancestor."""
    enable(tree=Limits(max_turns=4))
    left: list[Any] = []
    late = agent_of(Metered(endless(uses("look"))), "late")

    @tool
    async def leave_behind() -> str:
        """Leave a task behind that asks another agent later."""
        begin = asyncio.Event()

        async def later() -> str:
            await begin.wait()
            return str((await late.invoke_async("go")).stop_reason)

        left.append((begin, asyncio.ensure_future(later())))
        return "left"

    child = agent_of(Metered([uses("leave_behind"), says("done")]), "child", tools=[leave_behind])

    @tool
    async def collect() -> str:
        """Let the task go on that the child has left behind."""
        begin, task = left[0]
        begin.set()
        return str(await task)

    ask = Answer(tools=(("child", {"input": "go"}),))
    parent = agent_of(
        Metered([ask, uses("collect")]),
        "parent",
        tools=[child.as_tool(name="child", description="Ask."), collect],
    )
    assert parent("go").stop_reason == "max_turns"
    assert calls_of(parent, child, late) == 4
    assert CURRENT.get() is None


# --- what a halt does -----------------------------------------------------------------------------


class Report(BaseModel):
    """An output that is never valid."""

    number: int


@pytest.mark.parametrize("limit", ["max_turns", "max_iterations"])
@pytest.mark.parametrize(
    ("action", "calls"), [("halt", 2), ("ask", 2), ("raise", 2), ("wrap_up", 3)]
)
def test_forced_output_that_is_never_valid(limit: str, action: Any, calls: int) -> None:
    """Whatever the action at the cap, the loop stops forcing it."""
    enable(only(limit, 2), action=action)
    never = uses("Report", arguments={"number": "none"})
    model = ScriptedModel(itertools.chain([says("text")], endless(never)))
    agent = agent_of(model, "forced")
    try:
        result = agent("go", structured_output_model=Report)
    except otel_limits.LimitReachedError:
        assert action == "raise"
    else:
        assert result.stop_reason == ("interrupt" if action == "ask" else limit)
    assert model.calls == calls
    assert is_valid(agent.messages) or action == "ask"


def test_iterations_yield_to_the_first_call_that_forces_output() -> None:
    """It is the end of a leg that has its answer; what mends an invalid output is not."""
    enable(Limits(max_iterations=1), action="ask")
    model = ScriptedModel([says("text"), uses("Report", arguments={"number": "none"})])
    result = agent_of(model, "forced")("go", structured_output_model=Report)
    assert (result.stop_reason, model.calls) == ("interrupt", 2)


def is_valid(messages: Any) -> bool:
    """Every tool use has its result in the message after it."""
    pending: list[str] = []
    for message in messages:
        results = [b["toolResult"]["toolUseId"] for b in message["content"] if "toolResult" in b]
        if sorted(results) != sorted(pending):
            return False
        pending = [b["toolUse"]["toolUseId"] for b in message["content"] if "toolUse" in b]
    return not pending


@pytest.mark.parametrize("number", [3, 30])
def test_one_last_answer_per_tree(number: int, events: list[Event]) -> None:
    """In a chain of nodes the active one writes it; nodes that start later do not."""
    enable(tree=Limits(max_turns=3), action="wrap_up", observers=[events.append])
    nodes = [
        agent_of(Metered(itertools.chain([uses("look")] * 3, endless(says("in short")))), f"n{n}")
        for n in range(number)
    ]
    builder = GraphBuilder()
    for node in nodes:
        builder.add_node(node, node.name)
    for before, after in itertools.pairwise(nodes):
        builder.add_edge(before.name, after.name)
    builder.set_entry_point("n0")
    builder.set_max_node_executions(100)
    builder.build()("go")
    assert calls_of(*nodes) == 4
    assert [stop.action for stop in stops(events).values()] == ["wrapped_up"] + ["halted"] * (
        number - 1
    )


def test_a_tree_that_was_spent_by_an_answer_has_no_last_one() -> None:
    """No node was active: the first one finished at the cap."""
    enable(tree=Limits(max_turns=2), action="wrap_up")
    first = agent_of(Metered([uses("look"), says("done")]), "first")
    second = agent_of(Metered(endless(says("more"))), "second")
    builder = GraphBuilder()
    builder.add_node(first, "first")
    builder.add_node(second, "second")
    builder.add_edge("first", "second")
    builder.set_entry_point("first")
    builder.set_max_node_executions(100)
    builder.build()("go")
    assert (calls_of(first), calls_of(second)) == (2, 0)


def test_a_last_answer_needs_a_tree_that_permits_it() -> None:
    """An agent that would wrap up is halted where the tree around it halts and is spent."""
    enable(tree=Limits(max_turns=3), action="halt")
    wraps = LimitsPlugin(Limits(max_turns=2), action="wrap_up")
    child = agent_of(Metered(endless(uses("look"))), "child", plugins=[wraps])
    parent = asking([child])
    parent("go")
    assert (calls_of(parent), calls_of(child)) == (1, 2)


def test_a_last_answer_within_a_tree_that_has_room() -> None:
    """Each child may write one at its own cap, as long as the tree admits it like any call."""
    enable(Limits(max_turns=1), tree=Limits(max_turns=6), action="wrap_up")
    children = [agent_of(Metered([uses("look"), says("short")]), f"c{n}") for n in range(2)]
    parent = asking(children, then=[says("short")])
    parent("go")
    assert [calls_of(child) for child in children] == [2, 2]


# --- model calls ----------------------------------------------------------------------------------


def test_a_validator_that_never_agrees(call: Call) -> None:
    """Its retries are no turns, and end at the cap of model calls."""
    enable(Limits(max_turns=3, max_model_calls=7))
    model = ScriptedModel(endless(says("no")))
    agent = agent_of(model, "picky")

    def never(event: AfterModelCallEvent) -> None:
        event.retry = event.stop_response is not None

    agent.hooks.add_callback(AfterModelCallEvent, never)
    assert (call(agent).stop_reason, model.calls) == ("max_model_calls", 7)
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_failures_are_model_calls() -> None:
    """Each attempt that was throttled is one."""
    enable(Limits(max_model_calls=3))
    model = ScriptedModel(endless(fails(ModelThrottledException("busy"))))
    agent = agent_of(
        model,
        "busy",
        retry_strategy=ModelRetryStrategy(max_attempts=9, initial_delay=0, max_delay=0),
    )
    assert (agent("go").stop_reason, model.calls) == ("max_model_calls", 3)


@pytest.mark.parametrize(("calls", "made"), [(2, 2), (3, 3), (4, 3)])
def test_a_last_answer_is_a_model_call(calls: int, made: int) -> None:
    """Where there is no room for one, there is none."""
    enable(Limits(max_turns=2, max_model_calls=calls), action="wrap_up")
    model = ScriptedModel([uses("look"), uses("look"), says("in short")])
    result = agent_of(model, "tester")("go")
    assert model.calls == made
    assert otel_limits.is_synthetic(result.message) is (made == 2)


def test_the_exception_of_model_calls() -> None:
    """It has a name and a sentence."""
    enable(Limits(max_model_calls=2), action="raise")
    with pytest.raises(otel_limits.MaxModelCallsReachedError, match="2 of 2 model calls used"):
        agent_of(ScriptedModel(endless(uses("look"))), "tester")("go")
    assert otel_limits.MAX_MODEL_CALLS_STOP_REASON == "max_model_calls"


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["drops", "replaces", "clears"])
def test_a_hook_that_rewrites_a_response(way: str, call: Call, events: list[Event]) -> None:
    """A turn is counted where the answer is taken, whatever is left of its metadata."""
    enable(Limits(max_turns=3), observers=[events.append])
    model = ScriptedModel(endless(uses("look")))
    agent = agent_of(model, "tester")

    def rewrite(event: AfterModelCallEvent) -> None:
        assert event.stop_response is not None
        message: Any = event.stop_response.message
        kept = dict(message)
        if way == "clears":
            message.clear()
        message.pop("metadata", None)
        if way != "drops":
            message.update(role="assistant", content=[{"text": "redacted"}, *kept["content"]])

    agent.hooks.add_callback(AfterModelCallEvent, rewrite)
    assert (call(agent).stop_reason, model.calls) == ("max_turns", 3)
    assert stops(events)["tester"].turns == 3


# --- observe --------------------------------------------------------------------------------------


def test_observe_reports_a_deadline(
    make_agent: MakeAgent, call: Call, events: list[Event], fake_time: FakeTime
) -> None:
    """A deadline ends it even if no other check would run."""

    class Slow(ScriptedModel):
        async def stream(self, *arguments: Any, **named: Any) -> Any:
            fake_time.advance(30)
            async for event in super().stream(*arguments, **named):
                yield event

    enable(Limits(max_duration_seconds=30), action="observe", observers=[events.append])
    result = call(make_agent(Slow([says("done")])))
    assert result.stop_reason == "end_turn"
    (halt,) = [fact for fact in events if isinstance(fact, Halt)]
    assert (halt.reason, halt.action) == ("max_duration", "observed")
    assert stops(events)["tester"].action == "observed"


def test_observe_reports_what_is_refused_beside_others(events: list[Event]) -> None:
    """A call that reservations would have refused is reported and goes out."""
    enable(tree=Limits(max_turns=3), action="observe", observers=[events.append])
    children = [agent_of(Metered([says("done")]), f"child{n}") for n in range(5)]
    parent = asking(children, then=[says("done")])
    assert parent("go").stop_reason == "end_turn"
    assert calls_of(*children) == 5
    halts = [fact for fact in events if isinstance(fact, Halt)]
    assert {halt.action for halt in halts} == {"observed"}
    assert sum(halt.invocation.agent != "parent" for halt in halts) == 3


def test_nothing_is_live_afterwards() -> None:
    """Neither runs nor reservations are left over."""
    enable(tree=Limits(max_turns=3))
    asking(runaways(3))("go")
    assert len(LIVE) == 0


def test_an_observed_deadline_does_not_hide_one_that_acts(
    events: list[Event], fake_time: FakeTime
) -> None:
    """The tree of the parent halts where the child's own limit is only observed."""

    class Endless(ScriptedModel):
        async def stream(self, *_: Any, **__: Any) -> Any:
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": {}}}
            while True:
                fake_time.advance(10)
                await asyncio.sleep(0.02)
                yield {"contentBlockDelta": {"delta": {"text": "."}}}

    enable(tree=Limits(max_duration_seconds=30), observers=[events.append])
    watched = LimitsPlugin(Limits(max_duration_seconds=10), action="observe")
    child = agent_of(Endless([]), "child", plugins=[watched])
    asking([child])("go")
    told = [(f.invocation.agent, f.action) for f in events if isinstance(f, Halt)]
    assert told[:2] == [("child", "observed"), ("child", "halted")]


def test_legs_have_one_last_answer(events: list[Event]) -> None:
    """A hook that resumes after a wrap-up gets no second one."""
    enable(Limits(max_turns=2), action="wrap_up", observers=[events.append])
    model = ScriptedModel([uses("look"), uses("look"), says("in short")])
    agent = agent_of(model, "tester")
    resumed = iter(["go on"])
    agent.hooks.add_callback(
        AfterInvocationEvent, lambda event: setattr(event, "resume", next(resumed, None))
    )
    agent("go")
    assert model.calls == 3


# --- what is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_a_thread_that_a_graph_has_left_behind_stays_in_its_tree(
    action: Any, events: list[Event]
) -> None:
    """A graph ends when one node fails; the thread of another one's tool lives on, and asks on."""
    enable(tree=Limits(max_turns=4), action=action, observers=[events.append])
    asked = [agent_of(Metered(endless(uses("look"))), f"asked{n}") for n in range(3)]
    is_asking, has_ended = threading.Event(), threading.Event()

    @tool
    def ask_one_after_another() -> str:
        """Ask one agent after another, in a thread."""
        is_asking.set()
        assert has_ended.wait(30)
        return str([outcome(agent) for agent in asked])

    def outcome(agent: Agent) -> str:
        with contextlib.suppress(otel_limits.LimitReachedError):
            return str(agent("go").stop_reason)
        return "raised"

    async def fail(*_: Any, **__: Any) -> None:
        await asyncio.to_thread(is_asking.wait)
        raise OSError("gone")

    failing = agent_of(ScriptedModel([says("never")]), "failing")
    failing.hooks.add_callback(BeforeModelCallEvent, fail)
    asks = agent_of(
        Metered([uses("ask_one_after_another"), says("done")]),
        "asks",
        tools=[ask_one_after_another],
    )
    builder = GraphBuilder()
    builder.set_max_node_executions(2)
    for node in (failing, asks):
        builder.add_node(node, node.name)

    async def main() -> None:
        with pytest.raises(OSError, match="gone"):
            await builder.build().invoke_async("go")
        has_ended.set()  # the thread is waited for at the end of the loop

    asyncio.run(main())
    assert calls_of(*asked, asks) == 4
    assert {stops(events)[agent.name].reason for agent in asked} == {"max_turns"}


# --- how large a tree's cap should be -------------------------------------------------------------

WORK = [*[uses("look")] * 4, says("done")]
"""The work of one child: five turns."""


def test_a_cap_of_all_turns_is_large_enough(events: list[Event]) -> None:
    """Ten children of five turns, and two of the parent: 52."""
    enable(tree=Limits(max_turns=52), observers=[events.append])
    children = [agent_of(Metered(list(WORK)), f"child{n}") for n in range(10)]
    parent = asking(children, then=[says("all done")])
    assert parent("go").stop_reason == "end_turn"
    assert {stop.reason for stop in stops(events).values()} == {"end_turn"}
    assert calls_of(parent, *children) == 52


def test_a_token_budget_needs_room_for_a_call_of_each_that_runs(events: list[Event]) -> None:
    """All the work, plus for each concurrent agent its largest input and its model's output."""
    alone = sum(PER_MESSAGE * (2 * turn + 2) for turn in range(5))
    room = 10 * (PER_MESSAGE * 9 + PER_MESSAGE)
    of_parent = PER_MESSAGE * (2 + 4)
    budget = 10 * alone + room + of_parent
    enable(tree=Limits(max_token_budget=budget), observers=[events.append])
    children = [agent_of(Metered(list(WORK)), f"child{n}") for n in range(10)]
    assert asking(children, then=[says("all done")])("go").stop_reason == "end_turn"
    assert {stop.reason for stop in stops(events).values()} == {"end_turn"}
