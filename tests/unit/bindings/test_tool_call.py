"""Tool calls that are counted, published and seen by loop limits, whatever ids they have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
)
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor

from otel_limits import Event, Limits, Stop, ToolCall, enable
from otel_limits.observers import toollog
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterable
    from pathlib import Path

    from strands.types.streaming import StreamEvent

    from tests.conftest import MakeAgent, Metric


pytestmark = pytest.mark.usefixtures("source")


def published(events: list[Event]) -> list[tuple[str, str]]:
    """Name and status of each published tool call."""
    return [(fact.tool, fact.status) for fact in events if isinstance(fact, ToolCall)]


def counted(events: list[Event]) -> list[int]:
    """Tool calls that each finished invocation counted."""
    return [fact.tool_calls for fact in events if isinstance(fact, Stop)]


# --- interrupts -----------------------------------------------------------------------------------


@tool
def delete() -> str:
    """Delete everything."""
    return "deleted"


def careful(make_agent: MakeAgent, *names: str) -> Agent:
    """Make an agent that uses these tools concurrently, of which `delete` needs approval."""
    agent = make_agent(ScriptedModel([uses(*names), says("done")]))
    agent.tool_registry.register_tool(delete)

    def ask(event: BeforeToolCallEvent) -> None:
        if event.tool_use["name"] == "delete":
            event.interrupt("approval", reason="may I?")

    agent.hooks.add_callback(BeforeToolCallEvent, ask)
    return agent


def approval(result: Any) -> list[Any]:
    """Approve of everything that a human is asked."""
    return [
        {"interruptResponse": {"interruptId": each.id, "response": "yes"}}
        for each in result.interrupts
    ]


def approve(agent: Agent) -> None:
    """Let a hook answer for the human, within the same invocation."""

    def resume(event: AfterInvocationEvent) -> None:
        if event.result is not None and event.result.stop_reason == "interrupt":
            event.resume = approval(event.result)

    agent.hooks.add_callback(AfterInvocationEvent, resume)


def test_a_hook_that_resumes_has_finished_tools_counted_once(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """Two searches and an approved deletion are three calls, which a cap of three permits."""
    enable(Limits(max_tool_calls=3), observers=[events.append])
    agent = careful(make_agent, "search", "search", "delete")
    approve(agent)
    assert agent("go").stop_reason == "end_turn"
    assert published(events) == [
        ("search", "success"),
        ("search", "success"),
        ("delete", "success"),
    ]
    assert counted(events) == [3]


def test_refusal_is_published_once_across_a_hooks_resume(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The approved call runs, and then the agent is halted because of the one that was refused."""
    enable(Limits(max_tool_calls=2), observers=[events.append])
    agent = careful(make_agent, "search", "delete", "search")
    approve(agent)
    assert agent("go").stop_reason == "max_tool_calls"
    assert published(events) == [
        ("search", "success"),
        ("search", "refused"),
        ("delete", "success"),
    ]
    assert counted(events) == [2]


def test_finished_tools_are_published_once_across_a_callers_resume(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The invocation that brings the approval has the approved call, and nothing else."""
    enable(Limits(max_tool_calls=2), observers=[events.append])
    agent = careful(make_agent, "search", "delete", "search")
    asked = agent("go")
    assert published(events) == [("search", "success"), ("search", "refused")]
    events.clear()
    assert agent(approval(asked)).stop_reason == "end_turn"
    assert (published(events), counted(events)) == ([("delete", "success")], [1])


def test_a_batch_that_has_to_be_approved_is_counted_once(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """A human who is asked before any tool of a turn runs does not use up its calls."""
    enable(Limits(max_tool_calls=1), observers=[events.append])
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    agent.hooks.add_callback(BeforeToolsEvent, lambda event: event.interrupt("ok", reason="may I?"))
    approve(agent)
    assert agent("go").stop_reason == "end_turn"
    assert (published(events), counted(events)) == ([("search", "success")], [1])


def test_an_interrupt_before_any_result_is_no_turn_without_progress(
    make_agent: MakeAgent,
) -> None:
    """The turn that waits for a human is judged once, when its tools have run."""
    enable(Limits(max_no_progress_turns=3))
    model = ScriptedModel(endless(uses("delete")))
    agent = careful(make_agent)
    agent.model = model
    approve(agent)
    assert (agent("go").stop_reason, model.calls) == ("loop_detected", 4)


# --- calls that are denied ------------------------------------------------------------------------


def deny(event: BeforeToolCallEvent) -> None:
    """Let no tool run."""
    event.cancel_tool = "You may not."


def deny_all(event: BeforeToolsEvent) -> None:
    """Let no tool of a turn run."""
    event.cancel = "You may not."


DENIALS: Any = {"call": (BeforeToolCallEvent, deny), "turn": (BeforeToolsEvent, deny_all)}


@pytest.fixture(params=DENIALS)
def strict(request: pytest.FixtureRequest, make_agent: MakeAgent) -> MakeAgent:
    """Make agents with a hook that denies every tool, one by one or a whole turn."""

    def make(model: Any, **arguments: Any) -> Agent:
        agent = make_agent(model, **arguments)
        agent.hooks.add_callback(*DENIALS[request.param])
        return agent

    return make


def test_asking_for_a_denied_tool_for_ever_is_a_loop(strict: MakeAgent) -> None:
    """Loop limits look at calls that a hook denies, with what it says for their result."""
    enable(Limits(max_identical_tool_calls=4, max_turns=9))
    model = ScriptedModel(endless(uses("search")))
    assert (strict(model)("go").stop_reason, model.calls) == ("loop_detected", 4)


def test_denied_call_is_published_as_an_error(strict: MakeAgent, events: list[Event]) -> None:
    """It has the status `error` and no duration, since no tool ran."""
    enable(Limits(max_turns=9), observers=[events.append])
    strict(ScriptedModel([uses("search", "search"), says("done")]))("go")
    calls = [fact for fact in events if isinstance(fact, ToolCall)]
    assert [(call.number, call.status, call.seconds) for call in calls] == [
        (1, "error", None),
        (2, "error", None),
    ]


def test_denied_call_uses_up_no_call(strict: MakeAgent, events: list[Event]) -> None:
    """A cap of one call is not reached by two that were denied."""
    enable(Limits(max_tool_calls=1, max_calls_per_tool={"search": 1}), observers=[events.append])
    agent = strict(ScriptedModel([uses("search"), uses("search"), says("done")]))
    assert agent("go").stop_reason == "end_turn"
    assert (published(events), counted(events)) == ([("search", "error")] * 2, [0])


def test_a_denied_call_is_in_the_metrics(strict: MakeAgent, metric: Metric) -> None:
    """It is one of the tools that a model asked for, and ended as an error."""
    enable()
    strict(ScriptedModel([uses("search"), says("done")]))("go")
    labels = {"agent": "tester", "tool": "search", "status": "error"}
    assert metric("otel_limits_tool_calls_total", **labels) == 1


@pytest.mark.parametrize("name", ["search the web!", "x" * 70])
def test_invalid_tool_name_is_published_as_an_error(
    name: str, make_agent: MakeAgent, events: list[Event]
) -> None:
    """The framework answers such a call itself; it uses up no call."""
    enable(Limits(max_tool_calls=1), observers=[events.append])
    make_agent(ScriptedModel([uses(name), uses(name), says("done")]))("go")
    assert (published(events), counted(events)) == ([(name, "error")] * 2, [0])


def test_asking_for_what_can_be_no_tool_for_ever_is_a_loop(make_agent: MakeAgent) -> None:
    """Loop limits look at calls whose name no tool can have."""
    enable(Limits(max_identical_tool_calls=4, max_turns=9))
    model = ScriptedModel(endless(uses("search the web!")))
    assert (make_agent(model)("go").stop_reason, model.calls) == ("loop_detected", 4)


def test_long_tool_name_is_truncated(make_agent: MakeAgent) -> None:
    """A name that a model makes up must not flood the halt message."""
    enable(Limits(max_consecutive_same_tool=2, max_turns=3))
    result = make_agent(ScriptedModel(endless(uses("x" * 10_000))))("go")
    assert (result.stop_reason, len(str(result)) < 500) == ("loop_detected", True)


def test_the_tool_log_keeps_a_denied_call(
    strict: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A post-mortem of a loop of denied calls finds the one that halted the agent."""
    monkeypatch.setenv("OTEL_LIMITS_TOOL_LOG_DIR", str(tmp_path / "log"))
    enable(Limits(max_identical_tool_calls=2))
    strict(ScriptedModel(endless(uses("search"))))("go")
    entries = list(toollog.read(tmp_path / "log"))
    assert [(each.trigger, each.result) for each in entries] == [
        (False, "You may not."),
        (True, "You may not."),
    ]


def test_tools_of_a_canceled_agent_are_not_published(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """A canceled agent's tools are answered by the framework, not denied."""
    enable(Limits(max_turns=9), observers=[events.append])
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    agent.hooks.add_callback(BeforeToolsEvent, lambda event: event.agent.cancel())
    assert agent("go").stop_reason == "cancelled"
    assert (published(events), counted(events)) == ([], [0])


# --- tools in the background ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "refused"),
    [({"max_tool_calls": 3}, 1), ({"max_calls_per_tool": {"search": 3}}, 3)],
)
def test_a_tool_that_goes_on_in_the_background_is_a_call(
    limits: dict[str, Any], refused: int, make_agent: MakeAgent, events: list[Event]
) -> None:
    """It was let run when the model asked for it, and nothing takes that back."""
    enable(Limits(**limits), observers=[events.append])
    ran, turns = [], asyncio.Semaphore(0)

    @tool
    async def search() -> str:
        """Search until the turn is over."""
        ran.append("search")
        await turns.acquire()
        return "found"

    model = ScriptedModel([uses("search")] * 6 + [says("done")] * 6)
    agent = Agent(
        model=model, tools=[search], background_tasks={"always": [search]}, callback_handler=None
    )
    agent.hooks.add_callback(AfterToolsEvent, lambda _: turns.release())
    assert str(agent("go").stop_reason) == "max_tool_calls"
    assert len(ran) == 3
    assert published(events) == [("search", "success")] * 3 + [("search", "refused")] * refused


# --- requests that a tool makes of its own agent --------------------------------------------------


class Found(BaseModel):
    """The answer to a direct request."""


class Patient(ScriptedModel):
    """Answers a direct request when the other tool of the turn is done."""

    def __init__(self) -> None:
        super().__init__(endless(uses("classify", "search")))
        self.searched = asyncio.Event()

    async def structured_output(self, *_: Any, **__: Any) -> Any:
        """Wait, then answer."""
        await self.searched.wait()
        self.searched.clear()
        yield {"output": Found()}


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_tools_beside_a_direct_request_of_the_agent_are_counted(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """They stay those of the loop, despite calls in between."""
    enable(Limits(max_tool_calls=4), observers=[events.append])
    model = Patient()
    agent = make_agent(model)

    @tool
    async def classify() -> str:
        """Call the agent's own model."""
        await agent.structured_output_async(Found, "what is it?")
        return "classified"

    def tell(event: AfterToolCallEvent) -> None:
        if event.tool_use["name"] == "search":
            model.searched.set()

    agent.tool_registry.register_tool(classify)
    agent.hooks.add_callback(AfterToolCallEvent, tell)
    assert str(agent("go").stop_reason) == "max_tool_calls"
    assert published(events)[:4] == [("classify", "success"), ("search", "success")] * 2


# --- calls of one turn ----------------------------------------------------------------------------

EXECUTORS = pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])


class OneId(ScriptedModel):
    """Gives every tool use of every turn the same id, as some models do."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer with one id for all."""
        async for event in super().stream(*arguments, **named):
            use = event.get("contentBlockStart", {}).get("start", {}).get("toolUse")
            if use is not None:
                use["toolUseId"] = "call_0"
            yield event


@tool
async def look(query: str) -> str:
    """Look something up; the first query takes longest."""
    await asyncio.sleep(0.02 if query == "a" else 0)
    return f"about {query}"


def asks(*queries: str) -> Answer:
    """Ask for `look` with each of these."""
    return Answer(tools=tuple(("look", {"query": each}) for each in queries))


@EXECUTORS
def test_different_calls_with_one_id_are_no_loop(
    make_agent: MakeAgent, executor: Any, events: list[Event]
) -> None:
    """Each has its own arguments and its own result."""
    enable(Limits(max_identical_tool_calls=2), observers=[events.append])
    model = OneId([asks("a", "b", "c"), says("done")])
    agent = make_agent(model, tools=[look], tool_executor=executor())
    assert (agent("go").stop_reason, model.calls) == ("end_turn", 2)
    calls = [fact for fact in events if isinstance(fact, ToolCall)]
    assert len({call.fingerprint for call in calls}) == 3
    assert [call.status for call in calls] == ["success"] * 3


@EXECUTORS
def test_equal_calls_with_one_id_are_a_loop(make_agent: MakeAgent, executor: Any) -> None:
    """Repetition is still detected."""
    enable(Limits(max_identical_tool_calls=3))
    model = OneId(endless(asks("a", "b", "a")))
    agent = make_agent(model, tools=[look], tool_executor=executor())
    assert (agent("go").stop_reason, model.calls) == ("loop_detected", 2)


@EXECUTORS
@pytest.mark.parametrize("replaces", [False, True], ids=["as-asked", "replaced-by-a-hook"])
def test_only_what_has_no_call_left_is_refused(
    make_agent: MakeAgent, executor: Any, events: list[Event], *, replaces: bool
) -> None:
    """Of five calls with one id, the first two run; also where a hook rewrites each of them."""
    enable(Limits(max_tool_calls=2), observers=[events.append])
    ran: list[str] = []

    @tool
    async def look(query: str) -> str:
        """Look something up."""
        ran.append(query)
        return f"about {query}"

    agent = make_agent(
        OneId(endless(asks("a", "b", "c", "d", "e"))), tools=[look], tool_executor=executor()
    )
    if replaces:
        agent.hooks.add_callback(BeforeToolCallEvent, replace_use)
    assert agent("go").stop_reason == "max_tool_calls"
    assert ran == ["a", "b"]
    statuses = [fact.status for fact in events if isinstance(fact, ToolCall)]
    assert statuses == ["success"] * 2 + ["refused"] * 3


def replace_use(event: BeforeToolCallEvent) -> None:
    """Replace a tool use with another object."""
    event.tool_use = {**event.tool_use}


# --- the nudge ------------------------------------------------------------------------------------


def nudged(agent: Any) -> list[tuple[str, bool]]:
    """Return each result's text, and whether it contains the nudge."""
    return [
        (block["toolResult"]["content"][0]["text"], "repeating yourself" in str(block))
        for message in agent.messages
        for block in message["content"]
        if "toolResult" in block
    ]


@EXECUTORS
@pytest.mark.parametrize("model", [ScriptedModel, OneId])
@pytest.mark.parametrize("order", [("b", "a", "c"), ("a", "b", "c"), ("b", "c", "a")])
def test_the_nudge_lands_on_the_call_that_repeats(
    make_agent: MakeAgent, executor: Any, model: type[ScriptedModel], order: tuple[str, ...]
) -> None:
    """At any position in its turn, and in any order of completion."""
    enable(Limits(max_identical_tool_calls=3))
    script = [asks("a"), asks(*order), says("done")]
    agent = make_agent(model(script), tools=[look], tool_executor=executor())
    agent("go")
    expected = [("about a", False), *((f"about {each}", each == "a") for each in order)]
    assert nudged(agent) == expected


def test_an_exempt_call_is_not_nudged(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may repeat; the positions of the others still count it."""
    monkeypatch.setenv("OTEL_LIMITS_EXEMPT_TOOLS", "search")
    enable(Limits(max_identical_tool_calls=3))
    script = [
        asks("a"),
        Answer(tools=(("search", {}), ("look", {"query": "a"}), ("search", {}))),
        says("done"),
    ]

    @tool
    def search() -> str:
        """Search."""
        return "nothing"

    agent = make_agent(ScriptedModel(script), tools=[look, search])
    agent("go")
    assert [is_nudged for _, is_nudged in nudged(agent)] == [False, False, True, False]


def test_without_progress_the_last_call_is_nudged(make_agent: MakeAgent) -> None:
    """No single call repeats: the turn does."""
    enable(Limits(max_no_progress_turns=2))
    agent = make_agent(ScriptedModel([uses("search"), uses("search", "search"), says("done")]))
    agent("go")
    assert [is_nudged for _, is_nudged in nudged(agent)] == [False, False, True]
