"""A task lasts as long as its interrupts are answered, and each invocation reports its own part."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from otel_limits import Limits, ModelCall, Stop, TaskLost, Turn
from otel_limits.core.loops import Call
from otel_limits.core.policy import Overrides, Policy
from otel_limits.core.usage import Usage, measured
from otel_limits.observers.log import LogObserver
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.registry import RunRegistry
from otel_limits.runs.tasks import MAX_DAYS, InterruptedTasks, InvalidRecordError, Task, record_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
    run.count_turn()
    run.tools.admit_tool("search")
    run.check_loops([Call(tool="search", request="a", result="b")], "")


def interrupt(run: Run, key: str) -> None:
    """End an invocation with an interrupt."""
    run.await_answer([key])
    run.finish("interrupt")


def resume(runs: RunRegistry, answers: Collection[str], policy: Policy = POLICY) -> Run:
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


@pytest.mark.usefixtures("interrupted")
def test_extension_lowers_no_cap_that_was_raised_meanwhile(runs: RunRegistry) -> None:
    """One more turn than the two used would be less than the policy now allows."""
    raised = replace(POLICY, limits=Limits(max_turns=30))
    run = runs.start("boss", raised, answers=["a"], more=Overrides(limits=Limits(max_turns=1)))
    assert run.policy.limits.max_turns == 30


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
    run = runs.start("boss", POLICY, answers=["a"], more=Overrides(limits=Limits(max_turns=5)))
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
    forgotten: list[int] = []
    tasks = InterruptedTasks(CLOCK.now, most=2, report=forgotten.append)
    task = Task("1", POLICY, 0)
    for key in "abc":
        tasks.keep([key], task)
    assert [key for key in "abc" if tasks.find([key])] == ["b", "c"]
    fake_time.advance(MAX_DAYS * 24 * 60 * 60 + 1)
    assert tasks.find(["c"]) is None
    tasks.keep(["d"], task)
    assert (len(tasks), sum(forgotten)) == (1, 3)


def test_answered_task_is_not_forgotten(runs: RunRegistry, interrupted: Run) -> None:
    """It was continued, and is kept for a second answer only."""
    forgotten: list[int] = []
    tasks = InterruptedTasks(CLOCK.now, most=1, report=forgotten.append)
    resume(runs, ["a"])
    tasks.keep(["a", "b"], interrupted.task)
    assert (len(tasks), forgotten) == (1, [])


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("policy", "answers", "causes"),
    [
        (POLICY, ["b"], ["unknown"]),
        (POLICY, ["a", "b"], []),
        (POLICY, [], []),
        (replace(POLICY, on_resume="fresh"), ["b"], []),
        (Policy(), ["b"], []),
    ],
    ids=["unknown", "known", "no answer", "fresh", "no limits"],
)
def test_answer_of_unknown_task_is_reported(
    policy: Policy,
    answers: list[str],
    causes: list[str],
    runs: RunRegistry,
    published: list[Event],
) -> None:
    """Its limits start from zero, and an operator should know."""
    run = resume(runs, answers, policy)
    lost = [each for each in published if isinstance(each, TaskLost)]
    assert [each.cause for each in lost] == causes
    assert all(each.invocation == run.invocation for each in lost)
    published.clear()
    runs.end_group(runs.group("team", policy, answers))
    assert [each.cause for each in published if isinstance(each, TaskLost)] == causes


def test_lost_task_is_logged_once_per_agent(caplog: pytest.LogCaptureFixture) -> None:
    """A server whose store is lost would flood its log."""
    runs = RunRegistry()
    runs.observers.set_observers((LogObserver(),))
    for agent in ("boss", "boss", "helper"):
        runs.start(agent, POLICY, answers=["unknown"])
    assert [line.partition(" continues")[0] for line in caplog.messages] == [
        "Agent 'boss'",
        "Agent 'helper'",
    ]
    assert "its usage before it is not known, so its limits start from zero" in caplog.messages[0]


def recalled(record: object, policy: Policy = POLICY) -> Run:
    """Answer an interrupt in another process, to which only the record came."""
    runs = RunRegistry()
    runs.interrupted.recall([("a", record)])
    return resume(runs, ["a"], policy)


def test_record_continues_sums_in_another_process(interrupted: Run) -> None:
    """A restart does not give the agent its budget again."""
    interrupted.task.extend(Limits(max_cost_usd=2, max_calls_per_tool={"search": 1}))
    run, before = recalled(interrupted.task.record()), interrupted
    assert (run.tally.turns, run.tally.tokens, run.tools.by_tool) == (2, 30, {"search": 2})
    assert (run.trees[0].tally.model_calls, run.trees[0].leader) == (2, "boss")
    assert (run.invocation.task_id, run.task.resumes) == (before.invocation.id, 1)
    assert run.policy.limits.max_cost_usd == 2
    assert run.policy.limits.max_calls_per_tool == {"search": 3}
    assert run.task.record() != before.task.record()
    assert recalled(run.task.record()).task.resumes == 2


def fields(task: Task) -> dict[str, Any]:
    """The fields of a task's record."""
    written: dict[str, Any] = json.loads(json.loads(task.record())["task"])
    return written


INVALID: Final[Mapping[str, tuple[str, dict[str, Any], str]]] = {
    "version": ("", {"version": 9}, "its version is 9, and this release of otel-limits reads 1"),
    "missing": ("used", {"turns": ...}, "turns is missing"),
    "negative": ("used", {"turns": -1}, "turns is not valid"),
    "not a number": ("used", {"seconds": float("nan")}, "it is not valid JSON"),
    "infinite": ("used", {"cost": "Infinity"}, "cost is not valid"),
    "boolean": ("used", {"turns": True}, "turns is not valid"),
    "text": ("used", {"turns": "2"}, "turns is not valid"),
    "fraction": ("used", {"input": 2.5}, "input is not valid"),
    "absurd": ("used", {"input": 2**61}, "input is not valid"),
    "endless": ("used", {"input": 10**30}, "it is not valid JSON"),
    "no amount": ("used", {"cost": "much"}, "cost is not valid"),
    "no object": ("", {"used": []}, "it is not a JSON object"),
    "no tree": ("", {"tree": 3}, "it is not a JSON object"),
    "no counts": ("", {"calls_by_tool": ["search"]}, "calls_by_tool is not valid"),
    "no ID": ("", {"id": None}, "id is not valid"),
    "no flag": ("", {"has_nudged": 1}, "has_nudged is not valid"),
    "unknown limit": ("", {"extension": {"max_jokes": 3}}, "extension is not valid"),
    "bad limit": ("", {"extension": {"max_turns": -3}}, "extension is not valid"),
}
"""By name: the part of a record, what is written there, and the problem."""


@pytest.mark.parametrize("name", INVALID)
def test_invalid_record_is_refused(name: str, interrupted: Run) -> None:
    """A count is never lowered silently, by no contents of a store."""
    part, changed, problem = INVALID[name]
    written = fields(interrupted.task)
    place = written[part] if part else written
    place.update(changed)
    for key in [key for key, value in place.items() if value is ...]:
        del place[key]
    with pytest.raises(InvalidRecordError, match=f"task cannot be used: {problem}"):
        Task.from_record(record_of(written))


@pytest.mark.parametrize("name", ["nothing", "bytes", "no JSON", "deep", "long", "edited", "other"])
def test_record_that_is_none_is_refused(name: str, interrupted: Run) -> None:
    """It may come from an older release, another program or an editor."""
    record = interrupted.task.record()
    given = {
        "nothing": None,
        "bytes": b"{}",
        "no JSON": "turns: 3",
        "deep": "[" * 100_000,
        "long": " " * 1_000_001,
        "edited": record.replace("turns", "tvrns"),
        "other": "{}",
    }
    with pytest.raises(InvalidRecordError):
        Task.from_record(given[name])


@pytest.mark.usefixtures("faulty")
def test_unusable_record_begins_new_task_and_logs_error(caplog: pytest.LogCaptureFixture) -> None:
    """The resume works, and the log says that nothing is used."""
    run = recalled("broken")
    assert (run.tally.turns, run.task.resumes) == (0, 0)
    (line,) = caplog.messages
    assert "cannot be used: it is not valid JSON. The answer to its interrupt begins" in line


def test_known_task_takes_precedence_over_its_record(runs: RunRegistry, interrupted: Run) -> None:
    """The record is the same or older, or was changed, unless another process has continued it."""
    written = fields(interrupted.task)
    for changed in ({"resumes": 0}, {"resumes": 5, "used": {**written["used"], "turns": 1}}):
        runs.interrupted.recall([("a", record_of({**written, **changed}))])
        assert (resume(runs, ["a"]).tally.turns, resume(runs, ["a"]).task.resumes) == (2, 1)
    runs.interrupted.recall([("a", "broken")])
    assert resume(runs, ["a"]).tally.turns == 2
    elsewhere = recalled(interrupted.task.record())
    run_turn(elsewhere)
    runs.interrupted.recall([("a", elsewhere.task.record())])
    assert resume(runs, ["a"]).tally.turns == 3
