"""The rows of the page on frameworks, each observed in a scripted agent of each framework."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from otel_limits import (
    LimitReachedError,
    Limits,
    LimitsPlugin,
    disable,
    enable,
    kill,
    stop_of,
    stops_of,
)
from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.limits import LIMITS, REPEATED_FAILURES
from otel_limits.testing import Answer, endless, fails, only, says, uses
from tests.features.subject import Ending, Subject

Observe = Callable[[Subject], bool | str]
"""Returns whether a framework has a feature, or a word about it."""

TURNS: Final = Limits(max_turns=2)

SEARCH: Final = uses("search")
CALL_OTHER: Final = uses("ask", arguments={"input": "go"})


class Opinion(BaseModel):
    """The output of a typed agent."""

    good: bool


@contextlib.contextmanager
def enabled(policy: str = "", **options: Any) -> Iterator[None]:
    """Enable otel-limits, possibly with a policy file."""
    with contextlib.ExitStack() as stack:
        if policy:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "limits.yaml")
            path.write_text(policy, encoding="utf-8")
            stack.enter_context(patch.dict(os.environ, OTEL_LIMITS_POLICY=str(path)))
        enable(**options)
        try:
            yield
        finally:
            disable()


def is_halted(ending: Ending, reason: str) -> bool:
    """Return whether a call was halted for a reason."""
    return ending.stop is not None and ending.stop.reason == reason


async def forever() -> None:
    """Wait until the call is interrupted."""
    await asyncio.Event().wait()


# --- limits ---------------------------------------------------------------------------------------

CAPS: Final[Mapping[str, tuple[object, int]]] = {
    "max_iterations": (2, 2),
    "max_turns": (2, 2),
    "max_model_calls": (2, 2),
    "max_token_budget": (45, 3),
    "max_input_tokens": (30, 3),
    "max_output_tokens": (15, 3),
    "max_tool_calls": (2, 3),
    "max_calls_per_tool": ({"search": 2}, 3),
    "max_cost_usd": (Decimal("0.06"), 2),
    "max_duration_seconds": (0.05, 0),
    "max_consecutive_same_tool": (3, 3),
    "max_identical_tool_calls": (3, 3),
    "max_repeated_tool_cycles": (3, 6),
    "max_no_progress_turns": (2, 3),
    "max_consecutive_tool_failures": (2, 2),
    "max_consecutive_failures_per_tool": ({"ask": 2}, 2),
    "max_consecutive_handoffs": (3, 3),
    "max_repeated_failures": (2, 2),
}
"""A cap for each limit, and the number of model calls that it allows a runaway agent."""

PRICES: Final = """
defaults: {tool_action: halt}
models: {'*': {price: {input: 2000, output: 2000}}}
"""
"""USD per million tokens, so that each call costs 0.03; and a halt at each limit."""


def runaway(limit: str) -> Iterable[Answer]:
    """Script an agent that reaches a limit."""
    if limit == "max_repeated_tool_cycles":
        return itertools.cycle([SEARCH, uses("search", arguments={"query": "x"})])
    return endless(CALL_OTHER if "failures" in limit else SEARCH)


def failing(subject: Subject) -> Any:
    """Return a tool named `ask` that fails."""
    return subject.doing(lambda: "error: no network")


def limit(name: str) -> Observe:
    """Return a function that observes a limit."""

    def observe(subject: Subject) -> bool:
        cap, calls = CAPS[name]
        if name == "max_consecutive_handoffs":
            with enabled(limits=only(name, cap)):
                made, ending = handed_over(subject)
            each = len(subject.hand_off_to("a"))  # an agent may answer after its hand-off
            return made == calls * each - (each - 1) and is_halted(ending, LIMITS[name].reason)
        if name == REPEATED_FAILURES:
            return repeated_failures(subject, cap, calls)
        pause = forever if name == "max_duration_seconds" else None
        with enabled(PRICES, limits=only(name, cap)):
            model = subject.model(runaway(name), pause)
            ending = asyncio.run(subject.call_later(subject.agent(model, failing(subject))))
        return model.calls == calls and is_halted(ending, LIMITS[name].reason)

    return observe


def repeated_failures(subject: Subject, cap: object, calls: int) -> bool:
    """Call an agent again after each failure, as a loop of an application does."""
    with enabled(limits=only(REPEATED_FAILURES, cap)):
        model = subject.model(endless(fails(ZeroDivisionError("down"))))
        agent = subject.agent(model)
        for _ in range(calls):
            with contextlib.suppress(ZeroDivisionError):
                subject.call(agent)
        ending = subject.call(agent)
    return model.calls == calls and is_halted(ending, "loop_detected")


def tree_over_tools(subject: Subject) -> bool:
    """An agent and the one that its tool calls share a budget."""
    with enabled(tree=Limits(max_turns=4)):
        boss, helper = subject.model(endless(CALL_OTHER)), subject.model(endless(SEARCH))
        tool = subject.calling(subject.agent(helper, name="helper"))
        ending = subject.call(subject.agent(boss, tool))
    return (boss.calls, helper.calls) == (1, 3) and is_halted(ending, "max_turns")


def tree_over_hand_offs(subject: Subject) -> bool:
    """Agents that hand over to each other share a budget."""
    with enabled(tree=Limits(max_turns=4)):
        calls, ending = handed_over(subject)
    return calls == 4 and is_halted(ending, "max_turns")


def limit_over_hand_offs(subject: Subject) -> bool:
    """An agent that becomes active again continues its own count."""
    with enabled(limits=Limits(max_turns=3)):
        calls, ending = handed_over(subject)
    return calls == 6 and is_halted(ending, "max_turns")


def handed_over(subject: Subject) -> tuple[int, Ending]:
    """Let two agents hand over to each other four times; return the number of model calls."""
    one = subject.model([*subject.hand_off_to("b") * 4, says("done")])
    other = subject.model([*subject.hand_off_to("a") * 4, says("done")])
    ending = subject.call(subject.handing_off((one, other)))
    return one.calls + other.calls, ending


def limit_by_name(subject: Subject) -> bool:
    """The policy file sets the limits of an agent by its name."""
    with enabled("agents: {boss: {limits: {max_turns: 2}}}", limits=Limits(max_turns=9)):
        model = subject.model(endless(SEARCH))
        subject.call(subject.agent(model))
    return bool(model.calls == TURNS.max_turns)


def limit_in_code(subject: Subject) -> bool:
    """The code of an agent sets its limits."""
    model = subject.model([*[SEARCH] * 4, says("done")])
    try:
        subject.call(subject.agent_with_plugin(model, LimitsPlugin(TURNS)))
    except (AttributeError, TypeError):  # it is not what the framework attaches to agents
        return False
    return bool(model.calls == TURNS.max_turns)


def side_call(subject: Subject) -> bool:
    """A model call of a tool that would exceed a limit is refused."""
    with enabled(limits=Limits(max_model_calls=1)):
        boss, other = subject.model(endless(CALL_OTHER)), subject.model([says("an answer")])
        ending = subject.call(subject.agent(boss, subject.asking(other)))
    return (boss.calls, other.calls) == (1, 0) and is_halted(ending, "max_model_calls")


# --- actions --------------------------------------------------------------------------------------


def observed_only(subject: Subject) -> bool:
    """The agent continues to its own end."""
    with enabled(limits=TURNS, action="observe"):
        model = subject.model([*[SEARCH] * 3, says("done")])
        ending = subject.call(subject.agent(model))
    return (model.calls, ending.text.strip(), ending.stop) == (4, "done", None)


def halted(subject: Subject) -> bool:
    """The call returns with a text for the end user."""
    with enabled(limits=TURNS, halt_message="too long"):
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    return model.calls == TURNS.max_turns and ending.text.strip() == "too long"


def wrapped_up(subject: Subject) -> bool:
    """The model answers without tools."""
    with enabled(limits=TURNS, action="wrap_up"):
        model = subject.model([SEARCH, SEARCH, says("what I know")])
        ending = subject.call(subject.agent(model))
    return not model.tool_specs[-1] and ending.text.startswith("what I know")


def raised(subject: Subject) -> bool:
    """The call raises the exception of the limit."""
    with enabled(limits=TURNS, action="raise"):
        try:
            subject.call(subject.agent(subject.model(endless(SEARCH))))
        except LimitReachedError as error:
            return error.stop is not None and error.stop.reason == "max_turns"
    return False


def asked(subject: Subject, more_turns: int | None, calls: int) -> bool:
    """A human lets the agent continue, until it asks again."""
    with enabled(limits=TURNS, action="ask"):
        model = subject.model(endless(SEARCH))
        agent = subject.agent(model)
        first = subject.call(agent)
        second = subject.approve(agent, first, more_turns)
    return model.calls == calls and bool(first.question and second.question)


def halted_with_type(subject: Subject) -> bool:
    """An agent whose output is typed returns from a halt, without an output."""
    with enabled(limits=TURNS):
        try:
            ending = subject.call(subject.agent(subject.model(endless(SEARCH)), output=Opinion))
        except LimitReachedError:
            return False
    return ending.output is None and is_halted(ending, "max_turns")


def wrapped_up_with_type(subject: Subject) -> bool:
    """The last answer of an agent whose output is typed has that type."""
    with enabled(limits=TURNS, action="wrap_up"):
        model = subject.model([SEARCH, SEARCH, says('{"good": true}')])
        ending = subject.call(subject.agent(model, output=Opinion))
    return isinstance(ending.output, Opinion)


# --- streams, deadlines and kills -----------------------------------------------------------------


def streamed(subject: Subject) -> bool:
    """A stream shows the text of a halt."""
    with enabled(limits=TURNS, halt_message="too long"):
        model = subject.model(endless(SEARCH))
        ending = asyncio.run(subject.stream(subject.agent(model)))
    return model.calls == TURNS.max_turns and "too long" in ending.text


async def kill_and_answer_late(answered: list[bool]) -> None:
    """Kill the agent as an operator would during its model call. A deadline ends it likewise."""
    kill(agent="boss")
    # Its callback in the event loop runs now, so that the timer that interrupts this is the earlier
    # one, however busy the machine is.
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    answered.append(True)


def interrupted(subject: Subject, call: Callable[[Any], Ending]) -> bool:
    """A call ends before the model has answered."""
    answered: list[bool] = []
    with enabled(limits=TURNS):
        model = subject.model([SEARCH], lambda: kill_and_answer_late(answered))
        ending = call(subject.agent(model))
    return not answered and is_halted(ending, "killed")


def interrupted_call(subject: Subject) -> bool:
    """A call in an event loop is interrupted."""
    return interrupted(subject, lambda agent: asyncio.run(subject.call_later(agent)))


def interrupted_stream(subject: Subject) -> bool:
    """A stream is interrupted before its first part."""
    return interrupted(subject, lambda agent: asyncio.run(subject.stream(agent)))


def interrupted_blocking_call(subject: Subject) -> bool:
    """A call without an event loop is interrupted."""
    return interrupted(subject, subject.call)


# --- quotas ---------------------------------------------------------------------------------------


def refused_by_quota(subject: Subject) -> bool:
    """A quota halts an agent."""
    with enabled("quotas: {calls: {model_calls: 2, window: P1D}}"):
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    return model.calls == TURNS.max_turns and is_halted(ending, "quota_exceeded")


def waiting_for_quota(subject: Subject) -> bool:
    """Calls wait until the quota admits them."""
    in_flight: list[int] = [0]
    most: list[int] = []

    async def count() -> None:
        in_flight[0] += 1
        most.append(in_flight[0])
        await asyncio.sleep(0.01)
        in_flight[0] -= 1

    async def call_all() -> list[Ending]:
        agents = [subject.agent(subject.model([says("done")], count)) for _ in range(3)]
        return list(await asyncio.gather(*map(subject.call_later, agents)))

    with enabled("quotas: {slots: {concurrency: 1, on_exceeded: wait}}"):
        endings = asyncio.run(call_all())
    return most == [1, 1, 1] and not any(ending.stop for ending in endings)


# --- results --------------------------------------------------------------------------------------


def continued(subject: Subject) -> bool:
    """The next call continues the conversation of a halted one."""
    with enabled(limits=TURNS):
        model = subject.model([SEARCH, SEARCH, says("done")])
        agent = subject.agent(model)
        first, second = subject.call(agent), subject.call(agent, "go on")
    is_longer = len(model.requests[2]) > len(model.requests[1]) > len(model.requests[0])
    return is_longer and first.stop is not None and second.text.strip() == "done"


def stored(subject: Subject) -> bool:
    """The conversation that is stored contains the stop."""
    with enabled(limits=TURNS):
        agent = subject.agent(subject.model(endless(SEARCH)))
        subject.call(agent)
    return stop_of(subject.stored(agent)) is not None


def stops_within(subject: Subject) -> bool:
    """The result of an agent contains the stops of agents that its tools have called."""
    with enabled(limits=TURNS):
        helper = subject.agent(subject.model(endless(SEARCH)), name="helper")
        boss = subject.model([CALL_OTHER, says("done")])
        ending = subject.call(subject.agent(boss, subject.calling(helper)))
    return [stop.agent for stop in stops_of(ending.result)] == ["helper"]


# --- spans, names, releases -----------------------------------------------------------------------


@functools.cache
def exporter() -> InMemorySpanExporter:
    """Return an exporter of this process's tracer provider, which is set if there is none."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def operations(subject: Subject) -> set[object]:
    """Return the operations of the spans that an agent makes."""
    exporter().clear()
    subject.call(subject.agent(subject.model([says("done")])))
    spans = exporter().get_finished_spans()
    return {(span.attributes or {}).get("gen_ai.operation.name") for span in spans}


def own_spans(subject: Subject) -> bool:
    """The framework makes spans without otel-limits."""
    return "invoke_agent" in operations(subject)


def spans(subject: Subject) -> bool:
    """With otel-limits, invocations and model calls have spans."""
    with enabled(limits=TURNS):
        return operations(subject) >= {"invoke_agent", "chat"}


def private_names(subject: Subject) -> str:
    """Count the private names."""
    return str(subject.private_names)


def releases(subject: Subject) -> str:
    """Return the supported releases."""
    (framework,) = [each for each in FRAMEWORKS if each.name == subject.name]
    return framework.requirement


# --- the tables -----------------------------------------------------------------------------------

LIMIT_ROWS: Final = {f"`{name}`": limit(name) for name in LIMITS}

FEATURES: Final[Mapping[str, Mapping[str, Observe]]] = {
    "limits": {
        **LIMIT_ROWS,
        "one budget with agents as tools": tree_over_tools,
        "one budget over hand-offs": tree_over_hand_offs,
        "an agent's own limits over hand-offs": limit_over_hand_offs,
        "limits by agent name": limit_by_name,
        "limits in an agent's code": limit_in_code,
        "a model called by a tool is refused": side_call,
    },
    "actions": {
        "`observe`": observed_only,
        "`halt`": halted,
        "`wrap_up`": wrapped_up,
        "`raise`": raised,
        "`ask`": lambda subject: asked(subject, 2, 4),
        "`ask`, with an amount": lambda subject: asked(subject, 1, 3),
        "`halt` returns from typed agents": halted_with_type,
        "`wrap_up` answers with the agent's type": wrapped_up_with_type,
    },
    "streams, deadlines and kills": {
        "text of a halt in streams": streamed,
        "asynchronous call is interrupted": interrupted_call,
        "asynchronous stream is interrupted": interrupted_stream,
        "synchronous call is interrupted": interrupted_blocking_call,
    },
    "quotas": {
        "quota refuses calls": refused_by_quota,
        "calls wait for quota": waiting_for_quota,
    },
    "results": {
        "next call continues the conversation": continued,
        "`stop_of()` of a stored conversation": stored,
        "`stops_of()` with agents as tools": stops_within,
    },
    "telemetry and releases": {
        "the framework emits OpenTelemetry spans": own_spans,
        "spans with otel-limits": spans,
        "private names used": private_names,
        "supported releases": releases,
    },
}
"""By table, each row with the function that observes it."""


def cell(feature: str, subject: Subject) -> str:
    """Observe a feature of a framework."""
    (observe,) = [rows[feature] for rows in FEATURES.values() if feature in rows]
    found = observe(subject)
    return found if isinstance(found, str) else "yes" if found else "no"


def features() -> Sequence[str]:
    """Return the titles of all rows."""
    return [feature for rows in FEATURES.values() for feature in rows]
