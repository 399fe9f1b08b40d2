"""An answer to an interrupt of the OpenAI Agents SDK continues its task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from agents import Agent, RunState, SQLiteSession, function_tool

from otel_limits import Event, Limits, ModelCall, Started, Stop, ToolCall, disable, enable, stop_of
from otel_limits.runs.tasks import MAX_DAYS
from otel_limits.testing import ScriptedAgentsModel, endless, says, uses
from tests.openai_agents.runs import CALLS, call_run, halt_of, options_of, unanswered

if TYPE_CHECKING:
    from otel_limits.testing import FakeTime

SENDING: Any = uses("send", arguments={"to": "x"})


class Post:
    """Counts the messages that were sent."""

    def __init__(self) -> None:
        self.sent = 0

        def send(to: str = "") -> str:
            """Send."""
            self.sent += 1
            return f"sent {self.sent} to {to}"

        self.send: Any = function_tool(send, needs_approval=True)


def careful(model: Any, post: Post, *tools: Any, **options: Any) -> Agent[Any]:
    """An agent whose tool waits for a person."""
    return Agent(**{"name": "boss", "model": model, "tools": [*tools, post.send], **options})


def sending(times: int = 20) -> ScriptedAgentsModel:
    """A model that requests the tool again and again."""
    return ScriptedAgentsModel([*[SENDING] * times, says("done")])


def approved(state: Any) -> Any:
    """Approve everything that a state waits for."""
    for each in state.get_interruptions():
        state.approve(each)
    return state


def approve_all(agent: Any, result: Any, call: Any = call_run, most: int = 12) -> tuple[int, Any]:
    """Approve until there is nothing to approve; return the number of approvals."""
    approvals = 0
    while result.interruptions and approvals < most:
        approvals, result = approvals + 1, call(agent, approved(result.to_state()))
    return approvals, result


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_approvals_stop_at_cap(call: Any) -> None:
    """Twelve approvals, of which one is permitted."""
    enable(Limits(max_tool_calls=1))
    post = Post()
    agent = careful(sending(), post)
    approvals, result = approve_all(agent, call(agent), call)
    assert (post.sent, approvals, halt_of(result).reason) == (1, 2, "max_tool_calls")


def test_session_continues_its_task() -> None:
    """The application keeps the conversation in a session of the SDK."""
    enable(Limits(max_turns=2))
    post, session = Post(), SQLiteSession("1")
    agent = careful(sending(), post)

    def call(agent: Any, given: Any) -> Any:
        return call_run(agent, given, session=session)

    approvals, result = approve_all(agent, call(agent, "go"), call)
    assert (post.sent, approvals, halt_of(result).reason) == (2, 2, "max_turns")
    assert unanswered(asyncio.run(session.get_items())) == []
    session.close()


def test_new_message_begins_new_task() -> None:
    """A conversation has as many tasks as messages of the user."""
    enable(Limits(max_turns=2))
    post = Post()
    agent = careful(ScriptedAgentsModel([SENDING, says("done"), SENDING, says("done")]), post)
    for sent in (1, 2):
        approvals, result = approve_all(agent, call_run(agent))
        assert (post.sent, approvals, result.final_output) == (sent, 1, "done")


def test_runs_do_not_share_a_task() -> None:
    """Two users of one agent, whose models give their tool calls the same IDs."""
    enable(Limits(max_turns=2))
    agents = [careful(ScriptedAgentsModel([SENDING, says("done")]), Post()) for _ in range(2)]
    results = [call_run(agent) for agent in agents]
    for agent, result in zip(agents, results, strict=True):
        assert call_run(agent, approved(result.to_state())).final_output == "done"


def test_two_answers_to_one_interrupt_each_continue_from_it() -> None:
    """An application may keep a state, and answer it once more."""
    enable(Limits(max_turns=2))
    post = Post()
    agent = careful(sending(), post)
    text = call_run(agent).to_state().to_string()
    for sent in (1, 2):
        state = asyncio.run(RunState.from_string(agent, text))
        result = call_run(agent, approved(state))
        assert (post.sent, len(result.interruptions)) == (sent, 1)


def test_answers_within_one_task_are_published_once(events: list[Event]) -> None:
    """Totals are sums over invocations, so each has its own part."""
    enable(Limits(max_turns=3), observers=[events.append])
    agent = careful(sending(), Post())
    approvals, result = approve_all(agent, call_run(agent))
    stops = [each for each in events if isinstance(each, Stop)]
    assert (approvals, halt_of(result).reason) == (3, "max_turns")
    assert [each.turns for each in stops] == [1, 1, 1, 0]
    assert sum(each.tool_calls for each in stops) == 3
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert {each.task_id for each in started} == {started[0].id}


def test_interrupt_in_agent_as_tool_continues_its_task_and_its_tree(events: list[Event]) -> None:
    """Its approval is asked through the agent around it."""
    enable(tree=Limits(max_model_calls=4), observers=[events.append])
    helper = careful(sending(), Post(), name="helper")
    asking = uses("ask", arguments={"input": "go"})
    tool = helper.as_tool("ask", "Ask.", **options_of({}))
    boss: Any = Agent("boss", model=ScriptedAgentsModel([asking, says("done")]), tools=[tool])
    approvals, result = approve_all(boss, call_run(boss))
    assert len([each for each in events if isinstance(each, ModelCall)]) == 4
    assert (approvals, halt_of(result).reason) == (3, "max_model_calls")
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert {(each.agent, each.task_id) for each in started} == {
        (each.agent, each.task_id) for each in started[:2]
    }


def test_agent_as_tool_that_waits_is_one_tool_call(events: list[Event]) -> None:
    """It ends when its agent does, and not with each question to a person."""
    enable(tree=Limits(max_tool_calls=4), observers=[events.append])
    helper = careful(sending(3), Post(), name="helper")
    asking = uses("ask", arguments={"input": "go"})
    tool = helper.as_tool("ask", "Ask.", **options_of({}))
    boss: Any = Agent("boss", model=ScriptedAgentsModel([asking, says("done")]), tools=[tool])
    approvals, result = approve_all(boss, call_run(boss))
    assert (approvals, result.final_output) == (3, "done")
    tools = [each.tool for each in events if isinstance(each, ToolCall)]
    assert tools == ["send", "send", "send", "ask"]


def test_interrupt_after_hand_off_continues_the_tasks_of_both_agents(events: list[Event]) -> None:
    """The first agent's invocation contains that of the second one."""
    enable(Limits(max_turns=3), observers=[events.append])
    second = careful(sending(), Post(), name="second")
    model = ScriptedAgentsModel([uses("transfer_to_second")])
    first: Any = Agent("first", model=model, handoffs=[second])
    approvals, result = approve_all(first, call_run(first))
    assert (approvals, halt_of(result).reason) == (3, "max_turns")
    started = [each.invocation for each in events if isinstance(each, Started)]
    assert {(each.agent, each.task_id) for each in started} == {
        (each.agent, each.task_id) for each in started[:2]
    }


def test_parallel_interrupts_continue_one_task() -> None:
    """One is approved and one rejected; then a limit of one call is not used up twice."""
    enable(Limits(max_tool_calls=2))
    post = Post()
    agent = careful(ScriptedAgentsModel(endless(uses("send", "send"))), post)
    result = call_run(agent)
    state = result.to_state()
    first, second = state.get_interruptions()
    state.approve(first)
    state.reject(second)
    approvals, result = approve_all(agent, call_run(agent, state))
    assert halt_of(result).reason == "max_tool_calls"
    assert (post.sent, approvals) == (2, 1)


def test_unanswered_interrupt_continues_its_task() -> None:
    """Only one of two is answered, so the run asks again."""
    enable(Limits(max_tool_calls=2))
    post = Post()
    agent = careful(ScriptedAgentsModel(endless(uses("send", "send"))), post)
    result = call_run(agent)
    for _ in range(2):
        state = result.to_state()
        state.approve(state.get_interruptions()[0])
        result = call_run(agent, state)
    approvals, result = approve_all(agent, result)
    assert (post.sent, approvals, halt_of(result).reason) == (2, 1, "max_tool_calls")


def test_extension_outlives_a_further_interrupt() -> None:
    """The next answer is about a tool, and the limit stays extended."""
    enable(Limits(max_turns=2), action="ask")
    post = Post()
    agent = careful(sending(3), post)
    result, asked = call_run(agent), []
    while result.interruptions:
        (question,) = result.interruptions
        asked.append(question.name)
        result = call_run(agent, approved(result.to_state()))
    assert (asked, result.final_output) == (
        ["send", "send", "otel_limits_continue", "send"],
        "done",
    )


def test_approval_extends_a_limit_on_time(fake_time: FakeTime) -> None:
    """The time of the task is over when the answer comes."""
    enable(Limits(max_duration_seconds=30), action="ask")
    post = Post()
    agent = careful(ScriptedAgentsModel([SENDING, says("done")]), post)
    result = call_run(agent)
    fake_time.advance(3600)
    result = call_run(agent, approved(result.to_state()))
    assert result.final_output == "done"


def test_wrap_up_at_a_resume_answers_once() -> None:
    """The last answer belongs to the task."""
    enable(Limits(max_turns=1), action="wrap_up")
    post = Post()
    model = ScriptedAgentsModel([SENDING, says("what I know")])
    agent = careful(model, post)
    result = call_run(agent, approved(call_run(agent).to_state()))
    assert (post.sent, model.calls, result.final_output) == (1, 2, "what I know")
    assert halt_of(result).reason == "max_turns"


def test_observe_continues_and_reports_once_per_leg(events: list[Event]) -> None:
    """Nothing is halted."""
    enable(Limits(max_turns=2), action="observe", observers=[events.append])
    agent = careful(sending(3), Post())
    approvals, result = approve_all(agent, call_run(agent))
    assert (approvals, result.final_output, stop_of(result)) == (3, "done", None)
    stops = [each for each in events if isinstance(each, Stop)]
    assert [each.action for each in stops] == ["none", "none", "observed", "observed"]


# --- after a restart ------------------------------------------------------------------------------


Restore = Callable[[Any, Any], Any]


@pytest.fixture
def restored(fake_time: FakeTime) -> Restore:
    """Returns a state from its text, after otel-limits has forgotten what is in memory."""

    def restore(agent: Any, state: Any) -> Any:
        fake_time.advance(MAX_DAYS * 24 * 60 * 60 + 1)
        text = state if isinstance(state, str) else state.to_string()
        return asyncio.run(RunState.from_string(agent, text))

    return restore


AFTER_RESTART: dict[str, tuple[dict[str, Any], int, str]] = {
    "turns": ({"limits": Limits(max_turns=3)}, 3, "max_turns"),
    "model calls": ({"limits": Limits(max_model_calls=3)}, 3, "max_model_calls"),
    "tool calls": ({"limits": Limits(max_tool_calls=2)}, 2, "max_tool_calls"),
    "calls of a tool": (
        {"limits": Limits(max_calls_per_tool={"send": 2})},
        2,
        "max_tool_calls",
    ),
    "tokens": ({"limits": Limits(max_token_budget=45)}, 3, "max_token_budget"),
    "tree": ({"limits": Limits(), "tree": Limits(max_model_calls=3)}, 3, "max_model_calls"),
}


@pytest.mark.parametrize(("options", "sent", "reason"), AFTER_RESTART.values(), ids=AFTER_RESTART)
def test_sums_survive_a_restart(
    options: dict[str, Any], sent: int, reason: str, restored: Restore
) -> None:
    """Each approval comes to another process, with the state as a text."""
    enable(**options)
    post = Post()
    agent = careful(sending(), post)
    result, approvals = call_run(agent), 0
    while result.interruptions and approvals < 12:
        state = restored(agent, result.to_state())
        result, approvals = call_run(agent, approved(state)), approvals + 1
    assert (post.sent, halt_of(result).reason) == (sent, reason)


def test_sums_of_agent_as_tool_survive_a_restart(restored: Restore) -> None:
    """Its state is stored within that of the agent around it."""
    enable(Limits(max_tool_calls=2))
    post = Post()
    helper = careful(sending(), post, name="helper")
    tool = helper.as_tool("ask", "Ask.", **options_of({}))
    model = ScriptedAgentsModel([uses("ask", arguments={"input": "go"}), says("done")])
    boss: Any = Agent("boss", model=model, tools=[tool])
    result, approvals = call_run(boss), 0
    while result.interruptions and approvals < 12:
        state = restored(boss, result.to_state())
        result, approvals = call_run(boss, approved(state)), approvals + 1
    assert (post.sent, approvals, result.final_output) == (2, 3, "done")


def test_extension_survives_a_restart(restored: Restore) -> None:
    """A person has approved more, and another process gets the next answer."""
    enable(Limits(max_turns=1), action="ask")
    post = Post()
    agent = careful(sending(2), post)
    result, asked = call_run(agent), []
    while result.interruptions:
        asked.append(result.interruptions[0].name)
        state = restored(agent, result.to_state())
        result = call_run(agent, approved(state))
    ours = "otel_limits_continue"
    assert (asked, result.final_output) == (["send", ours, "send", ours], "done")


def test_agents_work_with_a_state_without_otel_limits() -> None:
    """Our entries in a state do not matter to the SDK."""
    enable(Limits(max_turns=2))
    agent = careful(sending(2), Post())
    text = call_run(agent).to_state().to_string()
    disable()
    state = asyncio.run(RunState.from_string(agent, text))
    assert len(call_run(agent, approved(state)).interruptions) == 1


# --- records that cannot be used ------------------------------------------------------------------


def changed(text: str, change: str) -> str:
    """The text of a state whose record is damaged or removed."""
    state = json.loads(text)
    entries = state["tool_use_tracker"]
    (name,) = [each for each in entries if each.startswith("otel_limits:")]
    if change == "removed":
        del entries[name]
    elif change == "edited":
        entries[name][1] = entries[name][1].replace('turns\\": 1', 'turns\\": 0')
    else:
        entries[name][1] = change
    assert json.dumps(state) != text
    return json.dumps(state)


CHANGES: dict[str, str] = {"removed": "removed", "edited": "edited", "no JSON": "{", "empty": ""}


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        (Limits(max_turns=2), 2),
        (Limits(max_tool_calls=1), 1),
        (Limits(max_token_budget=30), 2),
    ],
    ids=["turns", "tool calls", "tokens"],
)
def test_lost_record_is_recounted_from_the_state(
    change: str, limits: Limits, sent: int, restored: Restore, caplog: pytest.LogCaptureFixture
) -> None:
    """A count is never lowered, and the resume works."""
    enable(limits)
    post = Post()
    agent = careful(sending(), post, name=f"{change} {limits}")
    result, approvals = call_run(agent), 0
    while result.interruptions and approvals < 12:
        state = restored(agent, changed(result.to_state().to_string(), change))
        result, approvals = call_run(agent, approved(state)), approvals + 1
    assert (post.sent, approvals) == (sent, 2)
    assert stop_of(result) is not None
    assert caplog.text.count("are those that the state shows") == 1


def test_record_in_memory_precedes_a_lost_one() -> None:
    """It knows more."""
    enable(Limits(max_turns=2))
    post = Post()
    agent = careful(sending(), post)
    text = changed(call_run(agent).to_state().to_string(), "{")
    state = asyncio.run(RunState.from_string(agent, text))
    approvals, result = approve_all(agent, call_run(agent, approved(state)))
    assert (post.sent, approvals, halt_of(result).reason) == (2, 1, "max_turns")
