"""A task lasts as long as its interrupts are answered, and each invocation reports its own part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from otel_limits import Limits, ModelCall, Stop, Turn
from otel_limits.core.loops import Call
from otel_limits.core.policy import Policy
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.registry import RunRegistry
from otel_limits.runs.tasks import MAX_DAYS, InterruptedTasks, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_limits.core.events import Event
    from otel_limits.runs.run import Run
    from otel_limits.testing import FakeTime

POLICY = Policy(
    limits=Limits(max_turns=4, max_iterations=3, max_identical_tool_calls=9),
    tree=Limits(max_model_calls=6),
)


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


def run_turn(run: Run) -> None:
    """Let an agent make a turn with a tool."""
    call = run.calls.open(InFlightCall("m"))
    run.calls.settle(call, measured(Usage(input=10, output=5)))
    run.turn()
    run.tools.admit("search")
    run.check_loops([Call(tool="search", request="a", result="b")], "")


def interrupt(run: Run, key: str) -> None:
    """End an invocation with an interrupt."""
    run.await_answer([key])
    run.finish("interrupt")


def resume(runs: RunRegistry, answers: Iterable[str], policy: Policy = POLICY) -> Run:
    """Start an invocation that answers interrupts."""
    return runs.start("boss", policy, answers=answers)


@pytest.fixture
def interrupted(runs: RunRegistry) -> Run:
    """An invocation that has made two turns, and waits for the answer to the interrupt `a`."""
    run = runs.start("boss", POLICY)
    run_turn(run)
    run_turn(run)
    interrupt(run, "a")
    return run


@pytest.mark.usefixtures("interrupted")
def test_answer_continues_sums_and_begins_new_iterations(runs: RunRegistry) -> None:
    """An approval does not give the agent its budget again; iterations are those of a leg."""
    run = resume(runs, ["a"])
    tree = run.trees[0].tally
    assert (run.tally.turns, run.tally.tool_calls, run.tally.tokens) == (2, 2, 30)
    assert (run.tools.by_tool, tree.model_calls, tree.tokens) == ({"search": 2}, 2, 30)
    assert (run.tally.identical_tool_calls, run.tally.iterations) == (2, 0)
    run_turn(run)
    assert run.check_limits() is None
    run_turn(run)
    assert (verdict := run.check_limits()) is not None
    assert (verdict.reason, verdict.breaches[0].observed) == ("max_turns", 4)
    assert run.tally.identical_tool_calls == 4


def test_events_have_own_part_and_common_task(
    runs: RunRegistry, published: list[Event], interrupted: Run
) -> None:
    """Totals over all invocations are those of the models, however often a task was resumed."""
    run = resume(runs, ["a"])
    run_turn(run)
    run.finish("end_turn")
    turns = [event.number for event in published if isinstance(event, Turn)]
    calls = [(event.number, event.turn) for event in published if isinstance(event, ModelCall)]
    stops = [event for event in published if isinstance(event, Stop)]
    assert (turns, calls) == ([1, 2, 1], [(1, 1), (2, 2), (1, 1)])
    assert [(each.turns, each.tool_calls, each.usage.total) for each in stops] == [
        (2, 2, 30),
        (1, 1, 15),
    ]
    levels = {level.limit: level.observed for level in stops[1].levels}
    assert (levels["max_turns"], levels["tree_max_model_calls"]) == (3, 3)
    tasks = {each.invocation.task_id for each in stops if each.invocation is not None}
    assert tasks == {interrupted.invocation.id}


@pytest.mark.usefixtures("interrupted")
def test_second_answer_continues_from_its_interrupt(runs: RunRegistry) -> None:
    """Two answers to one interrupt, e.g. a fork, don't share their further usage."""
    first, second = resume(runs, ["a"]), resume(runs, ["a"])
    run_turn(first)
    assert (first.tally.turns, second.tally.turns) == (3, 2)
    assert (first.trees[0].tally.model_calls, second.trees[0].tally.model_calls) == (3, 2)


@pytest.mark.usefixtures("interrupted")
def test_further_interrupt_has_sums_of_its_task(runs: RunRegistry) -> None:
    """Legs add up, also if an interrupt has the ID of an earlier one."""
    run = resume(runs, ["a"])
    run_turn(run)
    interrupt(run, "a")
    again = resume(runs, ["a"])
    assert (again.tally.turns, again.task.resumes) == (3, 2)


@pytest.mark.usefixtures("interrupted")
def test_unknown_interrupt_begins_new_task(runs: RunRegistry) -> None:
    """A new message of the user answers none."""
    for answers in ([], ["b"]):
        run = resume(runs, answers)
        assert (run.tally.turns, run.trees[0].tally.turns) == (0, 0)
        assert run.invocation.task_id == run.invocation.id


@pytest.mark.usefixtures("interrupted")
def test_fresh_resume_begins_new_task(runs: RunRegistry) -> None:
    """A setting restores a budget for each answer."""
    run = resume(runs, ["a"], replace(POLICY, on_resume="fresh"))
    assert (run.tally.turns, run.trees[0].tally.turns, run.task.resumes) == (0, 0, 0)


def test_time_of_task_runs_only_with_its_agent(runs: RunRegistry, fake_time: FakeTime) -> None:
    """A person may answer on the next day."""
    policy = Policy(limits=Limits(max_duration_seconds=5), tree=Limits(max_duration_seconds=9))
    run = runs.start("boss", policy)
    fake_time.advance(3)
    interrupt(run, "a")
    fake_time.advance(60 * 60)
    run = resume(runs, ["a"], policy)
    fake_time.advance(1)
    assert run.check_limits() is None
    assert (run.tally.seconds, run.trees[0].tally.seconds, run.stop("").seconds) == (4, 4, 1)
    fake_time.advance(1)
    assert (verdict := run.check_limits()) is not None
    assert verdict.reason == "max_duration"


@pytest.mark.usefixtures("interrupted")
def test_extension_lasts_as_long_as_its_task(runs: RunRegistry) -> None:
    """A person need not allow the same again after the next interrupt."""
    run = runs.start("boss", POLICY, answers=["a"], more=Limits(max_turns=5))
    assert run.policy.limits.max_turns == 7
    interrupt(run, "b")
    again = resume(runs, ["b"])
    assert (again.policy.limits.max_turns, again.policy.limits.max_iterations) == (7, 3)
    # A limit that was raised further in the meantime, or turned off, is not lowered by it.
    for limits in (Limits(max_turns=9), Limits(max_turns=9, max_calls_per_tool={"search": 8})):
        assert resume(runs, ["b"], Policy(limits=limits)).policy.limits == limits


@pytest.mark.usefixtures("interrupted")
def test_tree_that_is_new_has_used_what_its_task_has(runs: RunRegistry) -> None:
    """A limit that was set in the meantime counts what the task has used before."""
    policy = Policy(limits=Limits(max_no_progress_turns=3), tree=Limits(max_turns=3))
    run = resume(runs, ["a"], policy)
    assert run.trees[0].tally.turns == 2


def test_interrupts_are_bounded_in_number_and_age(fake_time: FakeTime) -> None:
    """Most interrupts of a chat are never answered."""
    tasks = InterruptedTasks(CLOCK.now, most=2)
    task = Task("1", POLICY, 0)
    for key in "abc":
        tasks.keep([key], task)
    assert [key for key in "abc" if tasks.find([key])] == ["b", "c"]
    fake_time.advance(MAX_DAYS * 24 * 60 * 60 + 1)
    assert tasks.find(["c"]) is None
    tasks.keep(["d"], task)
    assert (len(tasks), tasks.forgotten) == (1, 3)
