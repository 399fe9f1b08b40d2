"""The action `raise`: its exception, and the state that it leaves behind."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.trace import StatusCode
from pydantic import BaseModel
from strands.hooks import AfterInvocationEvent

import otel_limits
from otel_limits import (
    Breach,
    ConfigurationError,
    LimitReachedError,
    Limits,
    LimitsPlugin,
    MaxIterationsReachedException,
    MaxTokenBudgetReachedException,
    MaxTurnsReachedException,
    Stop,
    enable,
)
from otel_limits.core.errors import limit_reached
from otel_limits.core.limits import LIMITS
from otel_limits.core.policy import Verdict
from otel_limits.testing import ScriptedModel, endless, fails, only, says, uses
from tests.rules import over

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands import Agent

    from tests.conftest import Call, MakeAgent, Metric

pytestmark = pytest.mark.usefixtures("source")

CASES = [
    ("max_turns", 2, MaxTurnsReachedException),
    ("max_iterations", 2, MaxIterationsReachedException),
    ("max_token_budget", 30, MaxTokenBudgetReachedException),
]


class Report(BaseModel):
    """A structured output."""

    verdict: str = "fine"


def runaway() -> ScriptedModel:
    """A model that requests searches forever."""
    return ScriptedModel(endless(uses("search")))


@pytest.mark.parametrize(("limit", "cap", "error"), CASES)
def test_exception_is_raised_unwrapped(
    limit: str, cap: int, error: type[Exception], call: Call, make_agent: MakeAgent
) -> None:
    """The call raises the limit's own exception, not an `EventLoopException` around it."""
    enable(only(limit, cap), action="raise")
    model = runaway()
    with pytest.raises(LimitReachedError) as caught:
        call(make_agent(model))
    assert (type(caught.value), model.calls) == (error, 2)


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_raise_halts_at_the_same_call(cap: int, make_agent: MakeAgent) -> None:
    """`raise` permits as many model calls as `halt`."""
    enable(Limits(max_turns=cap), action="raise")
    model = runaway()
    with pytest.raises(MaxTurnsReachedException):
        make_agent(model)("go")
    assert model.calls == cap


def test_raise_leaves_the_history_that_halt_leaves(make_agent: MakeAgent) -> None:
    """The tools of the last turn ran, and the synthetic message ends the conversation."""
    enable(Limits(max_turns=2), action="raise")
    agent = make_agent(runaway())
    with pytest.raises(MaxTurnsReachedException):
        agent("go")
    assert [m["role"] for m in agent.messages] == ["user", "assistant"] * 3
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_an_agent_that_raised_can_be_called_again(call: Call, make_agent: MakeAgent) -> None:
    """The next invocation works and has the whole budget."""
    enable(Limits(max_turns=2), action="raise")
    model = ScriptedModel([uses("search"), uses("search"), uses("search"), says("done")])
    agent = make_agent(model)
    with pytest.raises(MaxTurnsReachedException):
        call(agent)
    assert call(agent, "x").stop_reason == "end_turn"


def test_the_exception_has_the_stop(make_agent: MakeAgent, call: Call) -> None:
    """`.stop` equals `stop_of` of a result."""
    enable(Limits(max_turns=2), action="raise")
    with pytest.raises(MaxTurnsReachedException) as caught:
        call(make_agent(runaway()))
    stop = caught.value.stop
    assert stop is not None
    assert (stop.reason, stop.action, stop.turns) == ("max_turns", "raised", 2)
    assert stop.breach == Breach("max_turns", 2, 2, "max_turns", "turns")
    assert (caught.value.turns, caught.value.max_turns) == (2, 2)


def test_a_refused_leg_raises(make_agent: MakeAgent, call: Call) -> None:
    """A leg that is refused before its first call raises like a halt after tools."""
    enable(Limits(max_turns=1), action="raise")
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)

    def resume(event: AfterInvocationEvent) -> None:
        event.resume = "once more"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    with pytest.raises(MaxTurnsReachedException):
        call(agent)
    assert model.calls == 1
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_refused_structured_output_raises(make_agent: MakeAgent, call: Call) -> None:
    """The exception is ours, not Strands' `StructuredOutputException`."""
    enable(Limits(max_turns=1), action="raise")
    with pytest.raises(MaxTurnsReachedException):
        call(make_agent(ScriptedModel([says("done")])), structured_output_model=Report)


def test_a_natural_end_raises_nothing(make_agent: MakeAgent, call: Call) -> None:
    """An answer on the last permitted turn is an answer."""
    enable(Limits(max_turns=2), action="raise")
    result = call(make_agent(ScriptedModel([uses("search"), says("done")])))
    assert str(result) == "done\n"


def test_output_of_the_tripping_turn_raises_nothing(make_agent: MakeAgent, call: Call) -> None:
    """A turn that reached the cap and produced the output has done its job."""
    enable(Limits(max_turns=1), action="raise")
    result = call(make_agent(ScriptedModel([uses("Report")])), structured_output_model=Report)
    assert result.structured_output == Report()


def test_other_hooks_of_the_end_run(make_agent: MakeAgent, call: Call) -> None:
    """`AfterInvocationEvent` reaches hooks of the application before the call raises."""
    enable(Limits(max_turns=2), action="raise")
    agent = make_agent(runaway())
    ended: list[str] = []
    for name in ("first", "second"):
        agent.hooks.add_callback(AfterInvocationEvent, lambda _, name=name: ended.append(name))
    with pytest.raises(MaxTurnsReachedException):
        call(agent)
    assert sorted(ended) == ["first", "second"]


def test_all_spans_end(
    make_agent: MakeAgent, call: Call, open_spans: Callable[[], list[str]]
) -> None:
    """Raising leaves no span open."""
    enable(Limits(max_turns=3), action="raise")
    with pytest.raises(MaxTurnsReachedException):
        call(make_agent(runaway()))
    assert open_spans() == []


def test_raising_logs_nothing_but_the_warning(
    make_agent: MakeAgent, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """No "Failed to detach context", no "event loop cycle failed"."""
    enable(Limits(max_turns=2), action="raise")
    with pytest.raises(MaxTurnsReachedException):
        call(make_agent(runaway()))
    logged = [(r.name, r.levelname) for r in caplog.records if r.levelname != "DEBUG"]
    assert logged == [("otel_limits", "WARNING")]


def test_raise_is_counted_and_published_as_raised(make_agent: MakeAgent, metric: Metric) -> None:
    """The invocation counts as raised, with the reason of its limit."""
    events: list[otel_limits.Event] = []
    enable(Limits(max_turns=2), action="raise", observers=[events.append])
    with pytest.raises(MaxTurnsReachedException):
        make_agent(runaway())("go")
    (stop,) = [fact for fact in events if isinstance(fact, Stop)]
    assert (stop.reason, stop.action) == ("max_turns", "raised")
    labels = {"agent": "tester", "reason": "max_turns", "action": "raised"}
    assert metric("otel_limits_stops_total", **labels) == 1


def test_only_raise_is_an_error_on_the_span(
    make_agent: MakeAgent, spans: InMemorySpanExporter, source: str
) -> None:
    """The `invoke_agent` span has status ERROR and `error.type`; cycles and tools are fine."""
    enable(Limits(max_turns=2), action="raise")
    with pytest.raises(MaxTurnsReachedException):
        make_agent(runaway())("go")
    failed = {
        span.name: (span.attributes or {}).get("error.type")
        for span in spans.get_finished_spans()
        if span.status.status_code is StatusCode.ERROR
    }
    expected = {"invoke_agent tester": "MaxTurnsReachedException"} if source == "spans" else {}
    assert failed == expected


def test_a_failure_of_the_model_does_not_become_ours(make_agent: MakeAgent, call: Call) -> None:
    """A provider that fails below the cap is what the caller sees."""
    enable(Limits(max_turns=9), action="raise")
    agent = make_agent(ScriptedModel([uses("search"), fails(ConnectionError("provider gone"))]))
    with pytest.raises(Exception, match="provider gone") as caught:
        call(agent)
    assert not isinstance(caught.value, LimitReachedError)


def a_stop() -> Stop:
    """A stop as an invocation leaves it."""
    breach = Breach("max_turns", 3, 3, "max_turns", "turns")
    return Stop(reason="max_turns", action="raised", breach=breach, turns=3, agent="tester")


@over(
    {
        f"{limit} by protocol {protocol}": (limit, protocol)
        for limit in LIMITS
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    *("limit", "protocol"),
)
def test_exceptions_survive_pickling(limit: str, protocol: int) -> None:
    """A worker process can hand them to its parent, with the stop and the words."""
    error = limit_reached(Verdict(limit, (Breach(limit, 3, 4, limit),)), a_stop())
    copied = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  our own bytes
    assert (type(copied), str(copied), copied.stop) == (type(error), str(error), error.stop)
    assert vars(copy.copy(error)) == vars(error)


def test_a_raised_exception_survives_pickling(make_agent: MakeAgent) -> None:
    """So does one that an agent really raised."""
    enable(Limits(max_turns=2), action="raise")
    with pytest.raises(MaxTurnsReachedException) as caught:
        make_agent(runaway())("go")
    copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert (str(copied), copied.stop) == (str(caught.value), caught.value.stop)


def test_the_exception_is_a_sentence() -> None:
    """It names the limit, the agent, what was used and what is permitted."""
    error = limit_reached(
        Verdict("max_turns", (Breach("max_turns", 3, 3, "max_turns", "turns"),)), a_stop()
    )
    assert str(error) == (
        "Agent 'tester' was halted by max_turns: 3 of 3 turns used. "
        "Run the agent again to continue, or raise the limit."
    )
    assert str(MaxTurnsReachedException(3, 3)) == "max_turns reached: 3 of 3 turns used."


def test_the_arguments_that_users_know() -> None:
    """`MaxIterationsReachedException(iterations, max_iterations)` and its kin, by name."""
    iterations = MaxIterationsReachedException(iterations=4, max_iterations=3)
    assert (iterations.iterations, iterations.max_iterations) == (4, 3)
    turns = MaxTurnsReachedException(turns=4, max_turns=3)
    assert (turns.turns, turns.max_turns) == (4, 3)
    tokens = MaxTokenBudgetReachedException(tokens=4, max_token_budget=3)
    assert (tokens.tokens, tokens.max_token_budget) == (4, 3)


def test_configuration_errors_survive_pickling() -> None:
    """A `ConfigurationError` keeps its sentences, and is a `ValueError`."""
    error = pickle.loads(pickle.dumps(ConfigurationError(["a.", "b."])))  # noqa: S301  our own
    assert issubclass(ConfigurationError, ValueError)
    assert (error.mistakes, str(error)) == (("a.", "b."), "a.\nb.")


def test_a_task_group_of_agents_sees_each_exception(make_agent: MakeAgent) -> None:
    """Agents gathered in one loop each raise their own exception."""
    enable(Limits(max_turns=2), action="raise")
    agents: list[Agent] = [make_agent(runaway(), name=name) for name in ("a", "b")]

    async def run() -> list[Any]:
        calls = (agent.invoke_async("go") for agent in agents)
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(run())
    assert [error.stop.agent for error in errors] == ["a", "b"]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: otel_limits.enable({"max_turns": 3}),  # type: ignore[arg-type]
        lambda: otel_limits.enable(30),  # type: ignore[arg-type]
        lambda: LimitsPlugin({"max_turns": 3}),  # type: ignore[arg-type]
    ],
)
def test_invalid_limits_argument_is_rejected(mistake: Callable[[], object]) -> None:
    """A dictionary is what Strands' own `limits=` takes."""
    with pytest.raises(ValueError, match=r"limits must be Limits, such as .*, got (\{|30)"):
        mistake()


@pytest.mark.parametrize("observers", [print, [3], "report"])
def test_invalid_observers_argument_is_rejected(observers: Any) -> None:
    """One that is not in a list, and one that cannot be called: no fact would ever reach it."""
    with pytest.raises(ConfigurationError, match=r"observers must be .*callable.*, got "):
        otel_limits.enable(observers=observers)
