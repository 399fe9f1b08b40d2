"""Faults inside otel-limits: never felt by the agent, counted once, and nothing lost to them."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import wrapt
from strands import tool
from strands.hooks import AfterToolsEvent
from strands.types.exceptions import EventLoopException

import otel_limits
from otel_limits import Event, InternalError, Limits, ModelCall, ObserverDropped, Stop, enable
from otel_limits.core.internal_errors import (
    INTERNAL_ERRORS,
    LOG_INTERVAL_SECONDS,
    ErrorReporter,
    suppress_errors,
)
from otel_limits.core.policy import Policy
from otel_limits.core.price_lookup import Prices
from otel_limits.observers.prometheus import PrometheusObserver
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from strands import Agent

    from otel_limits.core.limits import Breach
    from otel_limits.observers.metrics import MetricSpec, Series
    from tests.conftest import MakeAgent, Metric

pytestmark = pytest.mark.usefixtures("faulty")


@tool
async def search(query: str = "") -> str:
    """Search for a query."""
    return "nothing found"


def halted(agent: Agent, cap: int = 3) -> bool:
    """Return whether `agent` is halted after exactly `cap` model calls."""
    reason = str(agent("go").stop_reason)
    assert isinstance(agent.model, ScriptedModel)
    return (reason, agent.model.calls) == ("max_turns", cap)


def runaway() -> ScriptedModel:
    """A model that requests searches forever."""
    return ScriptedModel(endless(uses("search")))


def internal_errors(metric: Metric, component: str) -> float:
    """Faults of a component that the metrics know."""
    return metric("otel_limits_internal_errors_total", component=component)


@pytest.fixture
def errors_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Errors that otel-limits has logged in this test so far."""

    def read() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == "otel_limits" and record.levelno == logging.ERROR
        ]

    return read


def failing(*_: Any) -> Any:
    """A collaborator that always fails."""
    raise OSError("out of order")


def break_metric(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let one metric exist, and fail whenever it changes."""
    make, full = PrometheusObserver.make_series, f"otel_limits_{name}"

    def make_broken(observer: PrometheusObserver, spec: MetricSpec, labels: Any) -> Series:
        series = make(observer, spec, labels)
        return failing if spec.name.removesuffix("_total") == full else series

    monkeypatch.setattr(PrometheusObserver, "make_series", make_broken)


@pytest.mark.usefixtures("source")
def test_a_users_callback_that_always_fails(
    make_agent: MakeAgent, metric: Metric, errors_logged: Callable[[], list[str]]
) -> None:
    """Each failure is counted, logged once, and no other observer misses an event."""
    events: list[Event] = []
    enable(Limits(max_turns=3), observers=[failing, events.append])
    assert halted(make_agent(runaway()))
    told = [fact for fact in events if not isinstance(fact, (InternalError, ObserverDropped))]
    faults = [fact.component for fact in events if isinstance(fact, InternalError)]
    assert faults == ["observer"] * len(told)
    assert internal_errors(metric, "observer") == len(told)
    assert len(errors_logged()) == 1
    assert [fact.usage.total for fact in events if isinstance(fact, Stop)] == [45]


@pytest.mark.usefixtures("source")
def test_a_users_callback_that_recurses_for_ever(make_agent: MakeAgent, metric: Metric) -> None:
    """Its RecursionError stays its own."""

    def recurse(fact: Event) -> None:
        recurse(fact)

    events: list[Event] = []
    enable(Limits(max_turns=3), observers=[recurse, events.append])
    assert halted(make_agent(runaway()))
    told = [fact for fact in events if not isinstance(fact, (InternalError, ObserverDropped))]
    assert internal_errors(metric, "observer") == len(told)
    assert [fact.usage.total for fact in events if isinstance(fact, Stop)] == [45]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("name", "failures"),
    [("limit", 1), ("turns", 3), ("model_calls", 3), ("synthetic_messages", 1), ("stops", 1)],
)
def test_metrics_that_fail(
    name: str,
    failures: int,
    make_agent: MakeAgent,
    metric: Metric,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent whose metrics are out of order is halted, and that they are is counted."""
    break_metric(monkeypatch, name)
    events: list[Event] = []
    enable(Limits(max_turns=3), observers=[events.append])
    assert halted(make_agent(runaway()))
    assert internal_errors(metric, "prometheus") == failures
    assert [fact.usage.total for fact in events if isinstance(fact, Stop)] == [45]


def test_metrics_that_cannot_count_faults(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, errors_logged: Callable[[], list[str]]
) -> None:
    """A fault in the counting of faults is the end of it, not the beginning of a loop."""
    break_metric(monkeypatch, "internal_errors")
    enable(Limits(max_turns=3), observers=[failing])
    assert halted(make_agent(runaway()))
    assert len(errors_logged()) == 1


class Hostile(wrapt.ObjectProxy[Any]):
    """A live span that refuses whatever we write to it."""

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        """Take what others write."""
        if any(name.startswith("otel_limits.") for name in attributes):
            failing()
        self.__wrapped__.set_attributes(attributes)


def test_a_span_that_cannot_be_written_to(
    make_agent: MakeAgent, metric: Metric, errors_logged: Callable[[], list[str]]
) -> None:
    """The halt reaches every other observer, and the message is marked."""
    enable(Limits(max_turns=3))
    agent = make_agent(runaway())
    agent.hooks.add_callback(
        AfterToolsEvent,
        lambda event: setattr(event.agent, "trace_span", Hostile(event.agent.trace_span)),
    )

    result = agent("go")
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_turns", True)
    assert internal_errors(metric, "span") == 1
    assert len(errors_logged()) == 1


@pytest.mark.usefixtures("source")
def test_a_judgement_that_fails_is_made_again(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails after the tools of the last turn, and is right before the next model call."""
    judge, numbers = Policy.breaches, count(1)

    def fail_once(policy: Policy, *tallies: Any) -> tuple[Breach, ...]:
        if next(numbers) == 2:
            raise RuntimeError("out of order")
        return judge(policy, *tallies)

    monkeypatch.setattr(Policy, "breaches", fail_once)
    enable(Limits(max_turns=1))
    assert halted(make_agent(runaway()), cap=1)


def test_prices_that_always_fail(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without a price is unpriced: it counts with its tokens, and is not free."""
    events: list[Event] = []
    enable(Limits(max_turns=3), observers=[events.append])
    monkeypatch.setattr(Prices, "quote", failing)
    assert halted(make_agent(runaway()))
    assert internal_errors(metric, "prices") == 3
    calls = [fact for fact in events if isinstance(fact, ModelCall)]
    assert [(call.price, call.usage.total) for call in calls] == [(None, 15)] * 3


def test_fault_under_observe_does_not_halt(make_agent: MakeAgent) -> None:
    """Faults do not turn `observe` into a halt."""
    enable(Limits(max_turns=1), action="observe", observers=[failing])
    agent = make_agent(ScriptedModel([uses("search")] * 3 + [says("done")]))
    assert str(agent("go")) == "done\n"


def test_fault_under_raise_still_raises(make_agent: MakeAgent) -> None:
    """Faults do not keep `raise` from raising."""
    enable(Limits(max_turns=2), action="raise", observers=[failing])
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        make_agent(runaway())("go")


def test_content_that_cannot_be_written_down(make_agent: MakeAgent, metric: Metric) -> None:
    """An estimate of something that is no JSON costs a fault, and the call still counts."""
    from otel_limits.usage.text import as_json

    circle: list[Any] = []
    circle.append(circle)
    enable()
    assert as_json(circle) == ""
    assert internal_errors(metric, "usage") == 1


def test_a_fault_is_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Each component has its own minute; all faults are counted."""
    time, told = [0.0], list[str]()
    faults = ErrorReporter(clock=lambda: time[0])
    faults.publish = told.append
    for time[0] in (0.0, 1.0, LOG_INTERVAL_SECONDS - 0.1, LOG_INTERVAL_SECONDS + 0.1):
        faults.report("clock", OSError("secret"))
        faults.report("prices", OSError("secret"))
    assert told == ["clock", "prices"] * 4
    logged = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in logged] == ["clock", "prices"] * 2


def test_the_log_of_a_fault_names_the_error_and_not_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exception's text may contain a prompt: it is shown at DEBUG only."""
    try:
        int("secret")
    except ValueError as error:
        ErrorReporter().report("observer", error)
    place = r"in test_the_log_of_a_fault_\w+ \(test_internal_errors\.py:\d+\)"
    assert re.search(rf"observer failed with ValueError {place} and was skipped; ", caplog.text)
    assert "secret" not in caplog.text
    caplog.set_level(logging.DEBUG, logger="otel_limits")
    ErrorReporter().report("observer", OSError("secret"))
    assert "secret" in caplog.text


def test_unreportable_fault_is_reported_later() -> None:
    """In the depth of a runaway there is no frame left to count; it is made up for."""
    told: list[str] = []

    def too_deep(component: str) -> None:
        raise RecursionError

    faults = ErrorReporter()
    faults.publish = too_deep
    faults.report("processor", RecursionError())
    assert faults.unreported == ["processor"]
    faults.publish = told.append
    faults.report_deferred()
    assert (told, faults.unreported) == (["processor"], [])


def test_deferred_faults_are_counted_at_invocation_end(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """No further fault is needed to report deferred ones."""
    enable()
    INTERNAL_ERRORS.unreported.append("processor")
    make_agent(ScriptedModel([says("done")]))("go")
    assert internal_errors(metric, "processor") == 1


@contextlib.contextmanager
def frames(limit: int) -> Iterator[None]:
    """Set how deep Python may go."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    yield
    sys.setrecursionlimit(before)


SHALLOW = 140
"""Enough for a runaway of some twenty turns."""


def depth_of_a_runaway(make_agent: MakeAgent) -> tuple[int, int]:
    """Let a runaway run into Python's recursion limit: its model calls and finished turns."""
    # Its price is looked up.
    model = ScriptedModel(endless(uses("search")), "gpt-4o", base_url="https://api.openai.com")
    agent = make_agent(model, tools=[search])
    turns: list[Any] = []
    agent.hooks.add_callback(AfterToolsEvent, lambda event: turns.append(event.message))
    with frames(SHALLOW), pytest.raises(EventLoopException, match="recursion"):
        agent("go")
    assert isinstance(agent.model, ScriptedModel)
    return agent.model.calls, len(turns)


@pytest.mark.usefixtures("source")
def test_a_runaway_without_limits_dies_of_recursion_and_is_booked(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """Every call is counted, and no callback of otel-limits was the one that went too deep.

    The last one may break off before the provider reports anything, or receives it.
    """
    bare, _ = depth_of_a_runaway(make_agent)
    events: list[Event] = []
    enable(Limits(max_no_progress_turns=10**6), observers=[events.append])
    calls, _ = depth_of_a_runaway(make_agent)
    assert bare - 4 <= calls <= bare
    assert [fact for fact in events if isinstance(fact, InternalError)] == []
    booked = [(fact.kind, fact.usage.total) for fact in events if isinstance(fact, ModelCall)]
    measured, failed = ("measured", 15), ("failed", 0)
    assert booked in (
        [measured] * calls,
        [*[measured] * calls, failed],
        [*[measured] * (calls - 1), failed],
    )
    (stop,) = [fact for fact in events if isinstance(fact, Stop)]
    assert (stop.reason, stop.usage.total) == ("error", sum(tokens for _, tokens in booked))


@pytest.mark.usefixtures("source")
def test_a_cap_holds_down_to_the_last_frames(make_agent: MakeAgent) -> None:
    """A runaway that is about to die of recursion can still be halted, at exactly its cap."""
    enable()
    _, deepest = depth_of_a_runaway(make_agent)
    for cap in range(deepest - 2, deepest + 1):
        enable(Limits(max_turns=cap))
        with frames(SHALLOW):
            assert halted(make_agent(runaway(), tools=[search]), cap)


@pytest.mark.usefixtures("source")
def test_a_cap_holds_beyond_the_recursion_limit_that_was_raised(make_agent: MakeAgent) -> None:
    """Where an application raised the limit, a deeper cap holds as exactly."""
    enable(Limits(max_turns=50))
    with frames(SHALLOW * 3):
        assert halted(make_agent(runaway(), tools=[search]), 50)


def test_a_guarded_function_returns_none_for_its_caller() -> None:
    """A failure yields `None`; a success passes through."""
    assert suppress_errors("binding")(failing)() is None
    assert suppress_errors("binding")(lambda number: number + 1)(1) == 2
