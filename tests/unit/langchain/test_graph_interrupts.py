"""Interrupts of the application, hand-offs and middleware keep working, and count once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from otel_limits import Event, Limits, QuotaDecision, Stop, ToolCall, enable, stops_of
from otel_limits.testing import Answer, ScriptedChatModel, endless, fails, says, uses
from tests.langchain.graphs import (
    ASK,
    CALLS,
    STEPS,
    agent,
    config,
    halt_of,
    looping,
    search,
    unanswered,
)
from tests.langchain.retries import ModelRetries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


def test_approved_tools_count_once(events: list[Event]) -> None:
    """The invocation that brings the approval has the call, and nothing else."""
    enable(max_turns=3, observers=[events.append])
    asking: Any = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    graph = agent(looping(), checkpointer=InMemorySaver(), middleware=[asking])
    graph.invoke(ASK, config("1"))
    graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config("1"))
    stops = [each for each in events if isinstance(each, Stop)]
    assert [(each.reason, each.turns, each.tool_calls) for each in stops] == [
        ("interrupt", 1, 0),
        ("interrupt", 1, 1),
    ]
    assert len([each for each in events if isinstance(each, ToolCall)]) == 1


def test_refused_tool_that_waits_for_a_human_counts_once(events: list[Event]) -> None:
    """In the invocation that answers its request, not in the one that was interrupted before."""
    enable(max_calls_per_tool={"search": 1}, observers=[events.append])
    asking: Any = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    model = ScriptedChatModel([uses("search", "search"), says("done")])
    graph = agent(model, checkpointer=InMemorySaver(), middleware=[asking])
    graph.invoke(ASK, config("1"))
    assert not [each for each in events if isinstance(each, ToolCall)]
    state = graph.invoke(Command(resume={"decisions": [{"type": "approve"}] * 2}), config("1"))
    assert state["messages"][-1].text == "done"
    used = [(each.tool, each.status) for each in events if isinstance(each, ToolCall)]
    assert used == [("search", "success"), ("search", "refused")]


def test_halt_after_a_resume_leaves_a_valid_thread() -> None:
    """A tool that has waited for a human, and a limit after it."""
    enable(max_turns=3)

    @tool
    def confirm() -> str:
        """Wait for a human."""
        return str(interrupt("sure?"))

    model = ScriptedChatModel([uses("confirm"), *[uses("search")] * 9])
    graph = create_agent(model, [confirm, search], name="boss", checkpointer=InMemorySaver())
    graph.invoke(ASK, config("1"))
    state = graph.invoke(Command(resume="yes"), config("1"))
    assert (model.calls, halt_of(state).reason) == (3, "max_turns")
    stored = graph.get_state(config("1"))
    assert stored.next == ()
    assert unanswered(stored.values["messages"]) == []


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize(
    "middleware",
    [
        ModelFallbackMiddleware(looping(), looping()),
        ModelRetries(max_retries=3, initial_delay=0.01),
        ToolRetryMiddleware(max_retries=3, initial_delay=0.01),
    ],
    ids=lambda each: type(each).__name__,
)
def test_middleware_does_not_retry_a_halt(middleware: Any, how: str) -> None:
    """Other models would be called instead."""
    enable(max_turns=3)
    model = looping()
    state = CALLS[how](agent(model, middleware=[middleware]))
    assert (model.calls, halt_of(state).model_calls) == (3, 3)


def unavailable() -> Any:
    """A model whose vendor does not answer."""
    return ScriptedChatModel([fails(ConnectionError("gone"))] * 99)


TEXT: Final = "This request could not be completed because it took too many steps."

FALLBACKS: Final[Mapping[str, tuple[Sequence[Any], str, str]]] = {
    "answers": (["what I know"], "what I know", ""),
    "fails": ([fails(ConnectionError("gone too"))] * 9, TEXT, "ConnectionError"),
}
"""The fallback's last answers, the text that the agent ends with, and the remark on it."""


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("name", FALLBACKS)
def test_last_answer_falls_back_as_the_answers_before(name: str, how: str) -> None:
    """The first model fails at each turn, and so at the last one."""
    last, text, remark = FALLBACKS[name]
    enable(max_turns=3, action="wrap_up")
    script = [uses("search")] * 3 + [says(each) if isinstance(each, str) else each for each in last]
    first, second = unavailable(), ScriptedChatModel(script)
    state = CALLS[how](agent(first, middleware=[ModelFallbackMiddleware(second)]))
    assert (first.calls, second.calls) == (4, 4)
    assert state["messages"][-1].text == text
    assert remark in halt_of(state).sentence
    assert halt_of(state).action == ("halted" if remark else "wrapped_up")


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("cap", [7, 8])
def test_fallback_for_the_last_answer_keeps_to_the_model_calls(
    cap: int,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """The seventh call fails, and the quota is not asked about an eighth beyond the cap."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 99, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(max_turns=3, max_model_calls=cap, action="wrap_up", observers=[events.append])
    first, second = unavailable(), ScriptedChatModel(endless(uses("search")))
    state = CALLS[how](agent(first, middleware=[ModelFallbackMiddleware(second)]))
    assert (first.calls, second.calls) == (4, cap - 4)
    assert (halt_of(state).reason, halt_of(state).action) == ("max_turns", "halted")
    assert len([each for each in events if isinstance(each, QuotaDecision)]) == cap


class FallsBackAtFirst(AgentMiddleware):
    """Asks another model after an error, but not at the last turn."""

    def __init__(self, other: Any) -> None:
        self.other, self.errors = other, 0

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        """Call the model, or the other one."""
        try:
            return handler(request)
        except ConnectionError:
            self.errors += 1
            if self.errors > 3:
                raise
            return handler(request.override(model=self.other))


def test_last_answer_whose_error_leaves_the_graph_is_a_halt() -> None:
    """Its fallback gives up."""
    enable(max_turns=3, action="wrap_up")
    first, second = unavailable(), ScriptedChatModel(endless(uses("search")))
    state = CALLS["invoke"](agent(first, middleware=[FallsBackAtFirst(second)]))
    assert (first.calls, second.calls) == (4, 3)
    assert (state["messages"][-1].text, halt_of(state).action) == (TEXT, "halted")


def test_last_answer_that_fails_without_a_fallback_halts() -> None:
    """Although a middleware would repeat it: no answer before was repeated."""
    enable(max_turns=3, action="wrap_up")
    model = ScriptedChatModel([uses("search")] * 3 + [fails(ConnectionError("gone"))] * 9)
    retries = ModelRetries(max_retries=3, initial_delay=0.01)
    state = CALLS["invoke"](agent(model, middleware=[retries]))
    assert (model.calls, halt_of(state).action) == (4, "halted")


def test_tree_cap_holds_over_hand_offs_of_a_swarm() -> None:
    """Two agents that hand over to each other forever."""
    from langgraph_swarm import create_handoff_tool, create_swarm

    enable(tree=Limits(max_turns=5))
    models = {name: ScriptedChatModel(endless(uses(f"transfer_to_{name}"))) for name in "ab"}
    agents: Any = [
        create_agent(models["b"], [create_handoff_tool(agent_name="b")], name="a"),
        create_agent(models["a"], [create_handoff_tool(agent_name="a")], name="b"),
    ]
    swarm = create_swarm(agents, default_active_agent="a").compile(
        checkpointer=InMemorySaver(), name="swarm"
    )
    state = swarm.invoke(ASK, config("1"))
    assert sum(each.calls for each in models.values()) == 5
    assert halt_of(state).reason == "max_turns"
    assert unanswered(state["messages"]) == []


def supervised(boss: Iterable[Answer], helper: Iterable[Answer], output_mode: str) -> Any:
    """A supervisor with one helper."""
    from langgraph_supervisor import create_supervisor

    options: Any = {"supervisor_name": "boss", "output_mode": output_mode}
    agents: Any = [agent(ScriptedChatModel(helper), name="helper")]
    return create_supervisor(agents, model=ScriptedChatModel(boss), **options).compile(name="team")


MODES = ("full_history", "last_message")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("output_mode", MODES)
def test_state_that_ends_with_a_halt_has_that_stop(output_mode: str) -> None:
    """Not that of a helper before it, which shared the budget of the tree."""
    enable(tree=Limits(max_turns=5))
    boss, helper = endless(uses("transfer_to_helper")), endless(uses("search"))
    state = supervised(boss, helper, output_mode).invoke(ASK, STEPS)
    assert halt_of(state).agent == "boss"
    assert [each.agent for each in stops_of(state)] == ["helper", "boss"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("output_mode", MODES)
def test_state_shows_a_halted_node_before_the_last_answer(output_mode: str) -> None:
    """The result of a graph does not hide that a part of it is unfinished."""
    enable(max_turns=2)
    boss = [uses("transfer_to_helper"), says("done")]
    state = supervised(boss, endless(uses("search")), output_mode).invoke(ASK, STEPS)
    assert state["messages"][-1].text == "done"
    assert (halt_of(state).agent, halt_of(state).turns) == ("helper", 2)
