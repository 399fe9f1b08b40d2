"""Events, results and metrics show the usage of a task, and of each of its invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from otel_limits import Event, Limits, Started, Stop, enable
from otel_limits.testing import says, uses
from tests.resumed import NAMES, SUBJECTS, run_allowed

if TYPE_CHECKING:
    from otel_limits.testing import FakeTime
    from tests.conftest import Metric
    from tests.features.subject import Subject

pytestmark = pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)


def test_stop_has_the_sums_of_task_and_invocation(subject: Subject, events: list[Event]) -> None:
    """The last invocation made no turn: the limit counts those before it."""
    enable(Limits(max_turns=3), observers=[events.append])
    _, endings = run_allowed(subject)
    first = next(each.invocation for each in events if isinstance(each, Started))
    stop = endings[-1].stop
    assert stop is not None
    assert (stop.turns, stop.model_calls, stop.usage.total, stop.tool_calls) == (0, 0, 0, 1)
    task = stop.task
    assert (task.id, task.resumes) == (first.id, 3)
    assert (task.turns, task.model_calls, task.usage.total, task.tool_calls) == (3, 3, 45, 3)


def test_stops_of_events_add_up_to_their_task(subject: Subject, events: list[Event]) -> None:
    """A sum over events counts each call once."""
    enable(observers=[events.append])
    run_allowed(subject, 2)
    stops = [each for each in events if isinstance(each, Stop)]
    assert [each.task.turns for each in stops] == [1, 2, 3]
    assert [each.task.resumes for each in stops] == [0, 1, 2]
    last = stops[-1].task
    for name in ("turns", "model_calls", "tool_calls", "cost", "unpriced_calls"):
        assert getattr(last, name) == sum(getattr(each, name) for each in stops)
    assert last.usage.total == sum(each.usage.total for each in stops)


def test_metrics_have_the_use_of_the_task_and_the_turns_of_the_invocation(
    subject: Subject, metric: Metric
) -> None:
    """Turns and tokens are added up; the utilization says how near a halt is."""
    enable(Limits(max_turns=4, max_token_budget=100))
    run_allowed(subject, 2)
    used = "otel_limits_budget_used_ratio_sum"
    assert metric(used, agent="boss", limit="max_turns") == (1 + 2 + 3) / 4
    assert metric(used, agent="boss", limit="max_token_budget") == pytest.approx(0.9)
    assert metric("otel_limits_invocation_turns_sum", agent="boss") == 3
    assert metric("otel_limits_invocation_tokens_sum", agent="boss") == 45


def test_time_of_a_task_is_that_of_its_invocations(
    subject: Subject, events: list[Event], fake_time: FakeTime
) -> None:
    """A person who answers the next day has not used the agent's time."""
    enable(observers=[events.append])

    async def think() -> None:
        fake_time.advance(10)

    agent = subject.asking_first(subject.model([uses("search"), says("done")], think))
    ending = subject.call(agent)
    fake_time.advance(24 * 60 * 60)
    subject.accept(agent, ending)
    stops = [each for each in events if isinstance(each, Stop)]
    assert [each.seconds for each in stops] == [10, 10]
    assert [each.task.seconds for each in stops] == [10, 20]
