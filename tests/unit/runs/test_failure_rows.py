"""Invocations in a row with the same input and failure: what is the same, and what is a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from strands import Agent, tool
from strands.types.interrupt import InterruptResponseContent

from otel_limits import Limits, RepeatedFailures, Stop, disable, enable, stop_of
from otel_limits.core.policy import Policy
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.failure_rows import (
    MAX_SECONDS,
    FailureRows,
    failure_of_error,
    failure_of_reason,
)
from otel_limits.runs.registry import RunRegistry
from otel_limits.runs.tasks import UNKNOWN_INPUT
from otel_limits.testing import ScriptedChatModel, ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from langchain_core.runnables import RunnableConfig

    from otel_limits.core.events import Event
    from otel_limits.testing import Answer, FakeTime

POLICY = Policy(limits=Limits(max_repeated_failures=3))
DOWN = failure_of_reason("max_turns")


@pytest.fixture
def published() -> list[Event]:
    """The events that the registry under test published."""
    return []


@pytest.fixture
def runs(published: list[Event]) -> RunRegistry:
    """A registry with an observer."""
    runs = RunRegistry()
    runs.observers.set_observers((published.append,))
    return runs


def end(
    runs: RunRegistry,
    reason: str = "error",
    error: BaseException | None = None,
    given: object = "question",
    **options: Any,
) -> int:
    """Run an invocation; return how many failures there were in a row at its begin."""
    run = runs.start("boss", POLICY, given=given, **options)
    before = run.tally.repeated_failures
    if reason == "interrupt":
        run.await_answer(["a"])
    run.judge(reason, error)
    run.finish(reason)
    return before


class SlowError(Exception):
    """An error with an ID and a time in its text."""

    def __init__(self, request: str, minute: int) -> None:
        super().__init__(f"busy, request ID req_{request}, at 2026-01-02T10:{minute:02}:00Z")


class OtherError(Exception):
    """Another one."""


class UnreadableError(Exception):
    """An error without a readable text."""

    def __str__(self) -> str:
        """Fail."""
        raise ValueError


def test_error_is_the_same_without_moving_parts() -> None:
    """A time stamp and the ID of a request differ in every failure."""
    first = failure_of_error(SlowError("011CSHoEeqs5C35K2UUqR7Fy", 1))
    assert first.key == failure_of_error(SlowError("9f86d081884c7d659a2feaa0c55ad015", 2)).key
    assert first.text == (
        "SlowError: busy, request ID req_011CSHoEeqs5C35K2UUqR7Fy, at 2026-01-02T10:01:00Z"
    )
    others = [OtherError("busy"), OtherError("down"), OtherError("page 5"), UnreadableError()]
    assert len({failure_of_error(each).key for each in others} | {first.key}) == len(others) + 1
    assert failure_of_error(UnreadableError()).text == "UnreadableError"


def test_secrets_of_an_error_are_not_shown() -> None:
    """The text is logged."""
    assert "hunter2" not in failure_of_error(OtherError("password=hunter2 is wrong")).text


def test_failures_in_a_row_are_counted(runs: RunRegistry, published: list[Event]) -> None:
    """Another failure, a success and another input begin a new row."""
    error = OtherError("down")
    assert [end(runs, error=error) for _ in range(3)] == [0, 1, 2]
    assert [end(runs, "max_turns_exceeded"), end(runs, error=error)] == [3, 1]
    assert [end(runs, error=error, given="other"), end(runs, error=error)] == [0, 0]
    assert [end(runs, "end_turn"), end(runs, error=error)] == [1, 0]
    stops = [each.repeated_failures for each in published if isinstance(each, Stop)]
    assert stops == [1, 2, 3, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("reason", ["aborted", "cancelled", "interrupt"])
def test_end_without_outcome_leaves_row(runs: RunRegistry, reason: str) -> None:
    """A user who goes away, or is asked, is neither a failure nor a success."""
    error = OtherError("down")
    assert [end(runs, error=error), end(runs, reason), end(runs, error=error)] == [0, 1, 1]


def test_answer_to_interrupt_has_input_of_its_task(runs: RunRegistry) -> None:
    """The answer is not what the user wants."""
    error = OtherError("down")
    assert [end(runs, error=error), end(runs, "interrupt")] == [0, 1]
    assert end(runs, error=error, given="yes", answers=["a"]) == 1
    assert end(runs) == 2


def test_answer_to_unknown_interrupt_has_no_input(runs: RunRegistry) -> None:
    """It may be that of another process."""
    error = OtherError("down")
    assert [end(runs, error=error, given="yes", answers=["b"]) for _ in range(2)] == [0, 0]
    assert end(runs, error=error, given="yes") == 0


def test_invocation_without_known_input_has_no_row(runs: RunRegistry) -> None:
    """A hand-off in the OpenAI Agents SDK, or a framework whose binding does not know it."""
    assert [end(runs, error=OtherError("down"), given=UNKNOWN_INPUT) for _ in range(3)] == [0, 0, 0]


class Counted(dict[str, int]):
    """An input that counts how often it is read."""

    reads = 0

    def items(self) -> Any:
        """Return the items."""
        self.reads += 1
        return super().items()


def test_input_is_read_only_after_failures(runs: RunRegistry) -> None:
    """An input can be large, and agents that do not fail need no hash of it."""
    given = Counted(a=1)
    end(runs, "end_turn", given=given)
    assert given.reads == 0
    assert [end(runs, given=given), end(runs, given=given)] == [0, 1]
    assert given.reads == 2


def test_tenth_failure_is_reported_once_per_row(runs: RunRegistry, published: list[Event]) -> None:
    """A success in between begins a new row, which is reported again."""
    counts: list[int] = []
    for reason in [*["error"] * 12, "end_turn", *["error"] * 11]:
        run = runs.start("boss", Policy(), given="question")
        run.judge(reason, None)
        run.finish(reason)
        counts.append(sum(isinstance(each, RepeatedFailures) for each in published))
    assert counts == [*[0] * 9, *[1] * 13, 2, 2][: len(counts)]


def test_limit_replaces_the_report(runs: RunRegistry, published: list[Event]) -> None:
    """Its halts are reported, and 0 turns it off."""
    for cap in (0, 20):
        policy = Policy(limits=Limits(max_repeated_failures=cap))
        for _ in range(12):
            run = runs.start("boss", policy, given=str(cap))
            run.judge("error", None)
            run.finish("error")
    assert not any(isinstance(each, RepeatedFailures) for each in published)


# --- the table of rows ----------------------------------------------------------------------------


def test_rows_are_bounded() -> None:
    """The conversation that has not failed for longest is forgotten."""
    rows = FailureRows(CLOCK.now, most=3)
    for number in range(10):
        rows.add(str(number), "a", DOWN)
    assert len(rows) == 3
    assert [rows.add(place, "a", DOWN) for place in ("7", "6", "9", "8")] == [2, 1, 2, 1]


def test_row_is_forgotten_after_a_day(fake_time: FakeTime) -> None:
    """The cause may have gone; refused attempts do not keep it."""
    rows = FailureRows(CLOCK.now)
    assert [rows.add("a", "x", DOWN) for _ in range(2)] == [1, 2]
    fake_time.advance(MAX_SECONDS - 1)
    assert rows.find("a") is not None
    fake_time.advance(2)
    assert rows.find("a") is None
    rows.add("b", "x", DOWN)
    assert len(rows) == 1


# --- real agents ----------------------------------------------------------------------------------


def only_stops(stops: list[Stop]) -> Callable[[Event], None]:
    """Return an observer that collects the ends of invocations."""
    return lambda event: stops.append(event) if isinstance(event, Stop) else None


def make(script: Iterator[Answer] | list[Answer], name: str = "boss", *tools: Any) -> Agent:
    """Make an agent."""
    return Agent(model=ScriptedModel(script), name=name, tools=[*tools], callback_handler=None)


def test_loop_of_an_application_is_ended() -> None:
    """It calls the agent again after each failure, fifty times."""
    enable(Limits(max_repeated_failures=10))
    agent = make(endless(fails(OtherError("down"))))
    errors = 0
    for _ in range(50):
        try:
            agent("Where is my parcel?")
        except OtherError:  # noqa: PERF203  as an application does
            errors += 1
    assert (errors, agent.model.calls) == (10, 10)  # type: ignore[attr-defined]


def test_conversations_have_separate_rows(runs: RunRegistry) -> None:
    """Many users may have the same question, and the same failure once each."""
    users = [f"thread {number}" for number in range(100)]
    error = OtherError("down")
    assert {end(runs, error=error, conversation=user) for user in users} == {0}
    assert {end(runs, error=error, conversation=user) for user in users} == {1}
    assert end(runs, "end_turn", conversation=users[0]) == 2
    assert [end(runs, error=error, conversation=user) for user in users[:2]] == [0, 2]
    assert end(runs, error=error) == 0


def test_refusals_of_a_conversation_at_its_cap_do_not_count() -> None:
    """Once the cap is raised, the user may send the same message again."""
    stops: list[Stop] = []
    limits = Limits(max_repeated_failures=1)
    enable(limits, conversation=Limits(max_turns=1), observers=[only_stops(stops)])
    agent = make(endless(says("done")))
    assert [agent("continue").stop_reason for _ in range(3)] == ["end_turn", *["max_turns"] * 2]
    assert [each.repeated_failures for each in stops] == [0, 0, 0]


def test_new_agent_of_strands_is_another_conversation() -> None:
    """It has the messages of another user."""
    enable(Limits(max_repeated_failures=1))
    agents = [make([fails(OtherError("down")), says("too late")]) for _ in range(3)]
    for agent in agents:
        with pytest.raises(OtherError):
            agent("go")
    assert {agent("go").stop_reason for agent in agents} == {"loop_detected"}


def test_failure_after_an_answer_continues_the_row() -> None:
    """A person allows one more attempt, which fails in the same way."""
    stops: list[Stop] = []
    enable(Limits(max_repeated_failures=1), action="ask", observers=[only_stops(stops)])
    agent = make(endless(fails(OtherError("down"))))
    with pytest.raises(OtherError):
        agent("go")
    (question,) = agent("go").interrupts or ()
    answer: Any = {"interruptId": question.id, "response": "yes"}
    with pytest.raises(OtherError):
        agent([InterruptResponseContent(interruptResponse=answer)])
    assert [(each.reason, each.repeated_failures) for each in stops] == [
        ("error", 1),
        ("interrupt", 0),
        ("error", 2),
    ]


def test_new_thread_of_langgraph_is_another_conversation() -> None:
    """A message gets its ID from LangGraph, which does not make it another input."""
    enable(Limits(max_repeated_failures=2))
    model = ScriptedChatModel(endless(fails(OtherError("down"))))
    graph = create_agent(model, [], name="boss", checkpointer=InMemorySaver())
    message = HumanMessage("go")
    for thread in ("one", "two"):
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        for _ in range(2):
            with pytest.raises(OtherError):
                graph.invoke({"messages": [message]}, config)
        stop = stop_of(graph.invoke({"messages": [message]}, config))
        assert stop is not None
        assert stop.reason == "loop_detected"
    assert model.calls == 4


def test_failures_of_a_helper_are_its_own() -> None:
    """An agent that a tool calls is refused like any other; the one around it continues."""
    enable(Limits(max_repeated_failures=2))
    helper = make(endless(fails(OtherError("down"))), "helper")

    @tool
    def ask() -> str:
        """Call the helper."""
        return str(helper("go"))

    boss = make([*[uses("ask")] * 4, says("done")], "boss", ask)
    assert str(boss("go")).strip() == "done"
    assert helper.model.calls == 2  # type: ignore[attr-defined]


def test_disable_forgets_rows() -> None:
    """A person may have mended the cause."""
    agent = make([fails(OtherError("down")), says("done")])
    enable(Limits(max_repeated_failures=1))
    with pytest.raises(OtherError):
        agent("go")
    disable()
    enable(Limits(max_repeated_failures=1))
    assert str(agent("go")).strip() == "done"
