"""The registry of live invocations is bounded, and what it drops is settled and counted."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from strands import tool

from otel_limits import Cycle, Limits, ModelCall, Started, Stop, ToolCall, Turn, enable
from otel_limits.core.policy import Policy
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.call_tracker import add_call
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.registry import MAX_AGE_SECONDS, RunRegistry
from otel_limits.runs.spans import MAX_ENDED
from otel_limits.testing import FakeTime, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from otel_limits.runs.run import Run
    from tests.conftest import MakeAgent, Metric


@pytest.fixture
def told() -> list[Event]:
    """The events that the registry under test published."""
    return []


@pytest.fixture
def runs(told: list[Event]) -> RunRegistry:
    """A registry of three invocations, for a minute each."""
    runs = RunRegistry(max_live=3, max_age_seconds=60)
    runs.observers.set_observers((told.append,))
    return runs


def start(runs: RunRegistry, agent: str) -> Run:
    """Start an invocation."""
    return runs.start(agent, Policy())


def stopped(told: list[Event]) -> list[tuple[str, str]]:
    """Agents and reasons of what ended."""
    return [(event.agent, event.reason) for event in told if isinstance(event, Stop)]


def test_an_observer_names_the_facts_that_it_wants(runs: RunRegistry) -> None:
    """It receives those and how each invocation ended."""

    class Selective:
        subscribes_to = (Turn,)

        def __init__(self) -> None:
            self.told: list[Event] = []

        def __call__(self, event: Event) -> None:
            self.told.append(event)

    runs.observers.set_observers((selective := Selective(),))
    run = start(runs, "a")
    run.cycle()
    run.count_turn()
    run.finish("end_turn")
    assert [type(event) for event in selective.told] == [Turn, Stop]


def test_mock_observer_receives_every_event(runs: RunRegistry) -> None:
    """A mock in a user's test names nothing."""
    runs.observers.set_observers((mock := MagicMock(),))
    start(runs, "a").cycle()
    assert [type(call.args[0]) for call in mock.call_args_list] == [Started, Cycle]


def test_the_oldest_makes_room(runs: RunRegistry, told: list[Event]) -> None:
    """One more than the bound evicts the oldest, and says so."""
    for agent in "abcd":
        start(runs, agent)
    assert (stopped(told), len(runs)) == ([("a", "evicted")], 3)


def test_another_thread_may_begin_while_the_oldest_is_looked_for(
    runs: RunRegistry, told: list[Event]
) -> None:
    """Otherwise new invocations would be missed when the registry changes during the scan."""
    others: list[threading.Thread] = []

    def begin_another(_: Any, event: str, called: Any) -> None:
        # After the scan has begun, and before it takes the oldest
        if event == "c_call" and called is next and not others:
            others.append(threading.Thread(target=start, args=(runs, "another")))
            others[0].start()
            others[0].join(0.02)

    start(runs, "a")
    sys.setprofile(begin_another)
    start(runs, "b")
    sys.setprofile(None)
    others[0].join()
    begun = [event.invocation.agent for event in told if isinstance(event, Started)]
    assert sorted(begun) == ["a", "another", "b"]


def test_abandoned_invocation_is_evicted_by_age(
    runs: RunRegistry, told: list[Event], fake_time: FakeTime
) -> None:
    """An invocation that is older than the bound goes when the next one begins."""
    start(runs, "a")
    fake_time.advance(61)
    start(runs, "b")
    assert (stopped(told), len(runs)) == ([("a", "evicted")], 1)


def test_late_observer_receives_correct_numbers(runs: RunRegistry, told: list[Event]) -> None:
    """Events without a subscriber are still numbered."""
    runs.observers.set_observers(())
    run = start(runs, "a")
    call_once(run)
    runs.observers.set_observers((told.append,))
    call_once(run)
    assert [event.number for event in told if isinstance(event, ModelCall | ToolCall | Turn)] == [
        2
    ] * 3


def test_a_call_that_could_not_be_counted_is_counted_once(
    runs: RunRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault within leaves nothing counted, and the call open until the invocation ends."""
    failures = iter([RecursionError()])

    def fail_once(*what: Any, **more: Any) -> None:
        for failure in failures:
            raise failure
        add_call(*what, **more)

    monkeypatch.setattr("otel_limits.runs.call_tracker.add_call", fail_once)
    run = start(runs, "a")
    with pytest.raises(RecursionError):
        run.calls.settle(run.calls.open(InFlightCall("m", 7)), measured(Usage(input=7)))
    run.finish("end_turn")
    assert (run.tally.model_calls, run.tally.input) == (1, 7)


def call_once(run: Run) -> None:
    """Go through one turn with one tool."""
    run.calls.settle(run.calls.open(InFlightCall("m", 1)), measured(Usage(input=1)))
    run.count_turn()
    run.tools.record("search", "success", None, None)


def test_an_evicted_call_is_settled(runs: RunRegistry, told: list[Event]) -> None:
    """An in-flight call is charged its input, once, whatever arrives later."""
    run, call = start(runs, "a"), InFlightCall("m", 100)
    run.calls.admit_by_limits(call, turn=True)
    run.calls.open(call)
    for agent in "bcd":
        start(runs, agent)
    run.finish("end_turn")
    assert [(c.kind, c.usage.input) for c in told if isinstance(c, ModelCall)] == [("failed", 100)]
    assert stopped(told) == [("a", "evicted")]


def known(runs: RunRegistry, end: int) -> list[int]:
    """Return the IDs below `end` of the spans that are remembered."""
    return [each for each in range(end) if runs.spans.node(each) is not None]


def test_spans_of_what_is_gone_are_forgotten(runs: RunRegistry) -> None:
    """Nothing stays behind for a span that never ends."""
    runs.spans.register_span(1)
    run = runs.start("a", Policy(), trace_id=7, span_id=1)
    runs.spans.begin(2, run, parent=1)
    runs.spans.begin(3, run, parent=2, in_call=True, is_third_party=True)
    run.finish("end_turn")
    assert known(runs, 4) == []


def test_spans_of_others_that_outlive_their_invocation_are_bounded(runs: RunRegistry) -> None:
    """Those that end are forgotten, and of those that never end the oldest make room."""
    for span_id in range(1, 9):
        run = runs.start("a", Policy())
        runs.spans.begin(span_id, run, is_third_party=True)
        run.finish("end_turn")
    runs.spans.begin(9, run, parent=8, is_third_party=True)
    assert known(runs, 10) == [7, 8, 9]
    runs.spans.end(8)
    assert known(runs, 10) == [7, 9]


def test_spans_that_have_ended_are_bounded(runs: RunRegistry) -> None:
    """Each begins within the one before, which ends then: only the latest are remembered."""
    run = runs.start("a", Policy())
    for span_id in range(1, MAX_ENDED + 100):
        runs.spans.begin(span_id, run, parent=span_id - 1, is_third_party=True)
        runs.spans.end(span_id - 1)
    assert len(known(runs, MAX_ENDED + 100)) == MAX_ENDED + 1
    last = runs.spans.node(MAX_ENDED + 99)
    assert last is not None
    assert len(list(last.enclosing_spans())) == MAX_ENDED + 1


def test_model_calls_of_what_is_over_are_bounded(runs: RunRegistry) -> None:
    """Their spans stay known for as long as a client may report usage for them."""
    for span_id in range(1, 9):
        run = runs.start("a", Policy())
        runs.spans.begin(span_id, run, in_call=True)
        runs.spans.end(span_id)
        run.finish("end_turn")
    assert [each for each in range(10) if runs.spans.was_model_call(each)] == [6, 7, 8]


def test_sightings_are_bounded(runs: RunRegistry) -> None:
    """Agent spans that no invocation claims don't add up."""
    for span_id in range(1, 100):
        runs.spans.register_span(span_id)
    assert [each for each in range(100) if runs.spans.claim(each)] == [97, 98, 99]


def test_an_evicted_invocation_is_still_limited(
    make_agent: MakeAgent, source: str, fake_time: FakeTime, metric: Metric
) -> None:
    """The cap holds for an evicted invocation, and the halt is published once."""
    enable(Limits(max_turns=3))

    @tool
    def look() -> str:
        """Look once for more than a day, until another invocation begins."""
        fake_time.advance(MAX_AGE_SECONDS + 1)
        make_agent(ScriptedModel([says("done")]), name="other")("go")
        return "nothing"

    model = ScriptedModel(endless(uses("look")))
    result = make_agent(model, tools=[look])("go")
    assert (result.stop_reason, model.calls) == ("max_turns", 3)
    assert metric("otel_limits_stops_total", agent="tester", reason="evicted", action="none") == 1
    assert metric("otel_limits_tokens_total", agent="tester", model="scripted", type="input") == 30
