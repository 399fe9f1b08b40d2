"""The behavior of agents with otel-limits, the same in every framework.

Each row is a function that builds agents of a framework, calls them, and compares what is seen: the
requests at the model, the events, the text for the end user, the marker of the last message, and
the validity of the conversation. `tests/unit/agents/test_behaviours.py` runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider, StatusCode
from strands.telemetry import tracer as strands_tracer

from otel_limits import (
    Halt,
    LimitReachedError,
    Limits,
    MaxTurnsReachedException,
    ModelCall,
    Started,
    Stop,
    kill,
    stop_of,
    stops_of,
)
from otel_limits.core.limits import LIMITS, REPEATED_FAILURES
from otel_limits.runs.tasks import MAX_DAYS
from otel_limits.testing import Answer, FakeTime, endless, fails, only, says, tokens, uses
from tests.features.observed import (
    CALL_OTHER,
    CAPS,
    PRICES,
    SEARCH,
    TURNS,
    exporter,
    failing,
    handed_over,
    runaway,
)
from tests.features.rows_of_failures import FAILURE_ROWS
from tests.features.rows_of_quotas import QUOTA_ROWS, last_use
from tests.features.rows_of_tools import TOOL_ROWS
from tests.features.seen import (
    FOR_MODEL,
    KILLED,
    MANY,
    STEPS,
    TIME,
    Row,
    Way,
    causes_of,
    error_of,
    expect,
    facts,
    in_every_way,
    logged,
    published,
    recording,
    tool_entries,
)

if TYPE_CHECKING:
    from tests.features.subject import Subject

# --- limits ---------------------------------------------------------------------------------------


def every_limit(subject: Subject) -> None:
    """Each limit counts the same. The ways to call an agent take turns."""
    ways = itertools.cycle(subject.ways.items())
    for (name, (cap, calls)), (way, call) in zip(CAPS.items(), ways):  # noqa: B905  endless
        if name not in ("max_duration_seconds", "max_consecutive_handoffs", REPEATED_FAILURES):
            check = functools.partial(check_limit, subject, only(name, cap), calls)
            in_every_way({way: call}, check)


def check_limit(subject: Subject, limits: Limits, calls: int, call: Way) -> None:
    """Compare a runaway agent under one limit."""
    ((name, _),) = limits.items()
    with recording(PRICES, limits=limits) as events:
        model = subject.model(runaway(name))
        ending = call(subject.agent(model, failing(subject)))
    reason, tool = LIMITS[name].reason, "ask" if "failures" in name else "search"
    is_refusal = reason == "max_tool_calls"
    expect(
        {"limit": name, **facts(subject, model, ending, events)},
        limit=name,
        calls=calls,
        reason=reason,
        action="halted",
        valid=True,
        synthetic=True,
        kinds=["measured"] * calls,
        tools=[
            *[(tool, "success")] * (calls - is_refusal),
            *[(tool, "refused")] * is_refusal,
        ],
        halts=[(reason, "halted")],
        ends=[("boss", reason, "halted")],
    )


def halted(subject: Subject) -> None:
    """A halt is the same in every way to call an agent: calls, events, text and marker."""

    def check(call: Way) -> None:
        with recording(limits=Limits(max_turns=3)) as events:
            model = subject.model(endless(SEARCH))
            ending = call(subject.agent(model))
        expect(
            facts(subject, model, ending, events),
            calls=3,
            reason="max_turns",
            action="halted",
            agent="boss",
            text=STEPS,
            synthetic=True,
            valid=True,
            started=["boss"],
            models=["scripted"] * 3,
            kinds=["measured"] * 3,
            tokens=[15] * 3,
            side=[False] * 3,
            turns=[1, 2, 3],
            tools=[("search", "success")] * 3,
            tool_turns=[1, 2, 3],
            halts=[("max_turns", "halted")],
            ends=[("boss", "max_turns", "halted")],
        )
        stop = ending.stop
        assert stop is not None
        counted = {
            "stop": (stop.turns, stop.model_calls, stop.tool_calls),
            "usage": (stop.usage.input, stop.usage.output),
            "stops": len(stops_of(ending.result)),
        }
        expect(counted, stop=(3, 3, 3), usage=(30, 15), stops=1)

    in_every_way(subject.ways, check)


def own_halt_message(subject: Subject) -> None:
    """The text for the end user is that of the setting."""
    with recording(limits=TURNS, halt_message="Sorry, {agent} stopped.") as events:
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    expect(facts(subject, model, ending, events), text="Sorry, boss stopped.", synthetic=True)


def natural_end(subject: Subject) -> None:
    """An agent that is done with its last permitted turn is a success."""

    def check(call: Way) -> None:
        with recording(limits=TURNS) as events:
            model = subject.model([SEARCH, says("done")])
            ending = call(subject.agent(model))
        expect(
            facts(subject, model, ending, events),
            calls=2,
            reason=None,
            text="done",
            synthetic=False,
            turns=[1, 2],
            tokens=[15, 15],
            halts=[],
            ends=[("boss", "end_turn", "none")],
        )

    in_every_way(subject.ways, check)


def failed_call(subject: Subject) -> None:
    """The application gets the error of the vendor; the call counts, and is no turn."""
    with recording(limits=TURNS) as events:
        model = subject.model([SEARCH, fails(ZeroDivisionError("down"))])
        error = error_of(lambda: subject.call(subject.agent(model)))
    seen = {
        "calls": model.calls,
        "error": any(isinstance(each, ZeroDivisionError) for each in causes_of(error)),
        "stop": stop_of(error),
        **published(events),
    }
    expect(
        seen,
        calls=2,
        error=True,
        stop=None,
        kinds=["measured", "failed"],
        turns=[1],
        halts=[],
        ends=[("boss", "error", "none")],
    )


def unmeasured_stream(subject: Subject) -> None:
    """A stream without usage is never counted as zero tokens."""
    with recording(limits=TURNS) as events:
        model = subject.model([says("word " * 50, usage=None)])
        asyncio.run(subject.stream(subject.agent(model)))
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    seen = {"kind": (call.kind, call.estimated), "many": call.usage.output > 20}
    expect(seen, kind=("estimated", True), many=True)


def empty_answer(subject: Subject) -> None:
    """Zero tokens that a provider reports are not a missing usage, which is estimated."""
    reported = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}

    def check(call: Way) -> None:
        for usage, kind in ((reported, "zero_token"), (None, "estimated")):
            with recording(limits=TURNS) as events:
                call(subject.agent(subject.model([says("", usage=usage)])))
            expect(published(events), kinds=[kind])

    in_every_way(subject.ways, check)


def tokens_once(subject: Subject) -> None:
    """However an agent is called, each request counts once, with its own usage."""

    def check(call: Way) -> None:
        with recording(limits=Limits(max_turns=9)) as events:
            script = [uses("search", usage=tokens(40)), says("done", usage=tokens(50))]
            model = subject.model(script)
            call(subject.agent(model))
        expect(published(events), tokens=[40, 50], kinds=["measured"] * 2)

    in_every_way(subject.ways, check)


# --- actions --------------------------------------------------------------------------------------


def observed(subject: Subject) -> None:
    """A trial in production halts no agent, and records once what would have been halted."""

    def check(call: Way) -> None:
        with recording(limits=Limits(max_turns=1), action="observe") as events:
            model = subject.model([SEARCH, SEARCH, says("done")])
            ending = call(subject.agent(model))
        expect(
            facts(subject, model, ending, events),
            calls=3,
            reason=None,
            text="done",
            synthetic=False,
            valid=True,
            tools=[("search", "success")] * 2,
            halts=[("max_turns", "observed")],
            ends=[("boss", "end_turn", "observed")],
        )

    in_every_way(subject.ways, check)


def raised(subject: Subject) -> None:
    """The application handles the error of the limit."""

    def check(call: Way) -> None:
        with recording(limits=TURNS, action="raise") as events:
            model = subject.model(endless(SEARCH))
            error = error_of(lambda: call(subject.agent(model)))
        stop = stop_of(error)
        seen = {
            "error": isinstance(error, MaxTurnsReachedException),
            "stop": stop and (stop.reason, stop.turns, stop.action, stop.raised),
            "calls": model.calls,
            **published(events),
        }
        expect(
            seen,
            error=True,
            calls=2,
            stop=("max_turns", 2, "raised", True),
            tools=[("search", "success")] * 2,
            halts=[("max_turns", "raised")],
            ends=[("boss", "max_turns", "raised")],
        )

    in_every_way(subject.ways, check)


def wrapped_up(subject: Subject) -> None:
    """One last call without tools writes the answer, and the model reads why."""

    def check(call: Way) -> None:
        with recording(limits=TURNS, action="wrap_up") as events:
            model = subject.model([SEARCH, SEARCH, says("what I know")])
            ending = call(subject.agent(model))
        last = model.requests[-1]
        seen = {
            **facts(subject, model, ending, events),
            "answer": ending.text.partition("\n")[0],
            "last_tools": bool(model.tool_specs[-1]),
            "last_tool_calls": tool_entries(subject, last),
            "note": "This task must end now" in str(last),
        }
        expect(
            seen,
            calls=3,
            reason="max_turns",
            action="wrapped_up",
            answer="what I know",
            synthetic=False,
            note=True,
            valid=True,
            kinds=["measured"] * 3,
            tools=[("search", "success")] * 2,
            halts=[("max_turns", "wrapped_up")],
            ends=[("boss", "max_turns", "wrapped_up")],
            last_tools=False,
            last_tool_calls=[],
        )

    in_every_way(subject.ways, check)


NO_ANSWER: Final = "Instead of a final answer, the model requested tools."

LAST_ANSWERS: Final[Mapping[str, tuple[Answer, str]]] = {
    "fails": (
        fails(RuntimeError("overloaded")),
        "Its final answer failed (RuntimeError: overloaded).",
    ),
    "is empty": (says(""), "Its final answer was empty."),
    "requests tools": (SEARCH, NO_ANSWER),
    "requests tools with a text": (uses("search", text="Let me see."), NO_ANSWER),
}
"""Last answers that are none, and what the operator reads about them."""


def without_last_answer(last: Answer, remark: str) -> Row:
    """Return a row about a last answer that is none."""

    def row(subject: Subject) -> None:
        """It becomes a plain halt without another call or tool, and the operator reads why."""

        def check(call: Way) -> None:
            with recording(limits=Limits(max_turns=1), action="wrap_up") as events:
                model = subject.model([SEARCH, last])
                ending = call(subject.agent(model))
            stop = ending.stop
            seen = facts(subject, model, ending, events)
            seen["text"] = ending.text.removeprefix(last.text).strip()  # which a stream shows
            seen["remark"] = stop is not None and f" {remark} " in stop.sentence
            expect(
                seen,
                calls=2,
                text=STEPS,
                reason="max_turns",
                action="halted",
                synthetic=True,
                remark=True,
                kinds=["measured", "measured" if last.error is None else "failed"],
                tools=[("search", "success")],
                halts=[("max_turns", "halted")],
                ends=[("boss", "max_turns", "halted")],
            )

        in_every_way(subject.ways, check)

    return row


def asked(subject: Subject) -> None:
    """A human is asked instead of a halt, and again at the next limit; the log has both."""
    with recording(limits=TURNS, action="ask") as events, logged("It waits for an answer") as lines:
        model = subject.model(endless(SEARCH))
        agent = subject.agent(model)
        first = subject.call(agent)
        second = subject.approve(agent, first, 2)
    seen = {
        **facts(subject, model, second, events),
        "questions": [bool(each.question) for each in (first, second)],
        "first": stop_of(first.result),
        "logged": ["reached max_turns: " in line for line in lines],
    }
    expect(
        seen,
        calls=4,
        logged=[True, True],
        questions=[True, True],
        reason=None,
        first=None,
        valid=True,
        halts=[],
        tools=[("search", "success")] * 4,
        ends=[("boss", "interrupt", "none")] * 2,
    )


def refused_by_human(subject: Subject) -> None:
    """A human who is asked and does not agree ends the agent, without another model call."""
    with recording(limits=TURNS, action="ask") as events:
        model = subject.model(endless(SEARCH))
        agent = subject.agent(model)
        ending = subject.reject(agent, subject.call(agent))
    expect(
        facts(subject, model, ending, events),
        calls=2,
        reason="max_turns",
        text=STEPS,
        synthetic=True,
        valid=True,
        tools=[("search", "success")] * 2,
        halts=[("max_turns", "halted")],
        ends=[("boss", "interrupt", "none"), ("boss", "max_turns", "halted")],
    )


TAKEN: Final = {"halt": "halted", "raise": "raised", "wrap_up": "wrapped_up"}


def next_call(action: str, taken: str) -> Row:
    """Return a row about the call after a limit.

    Args:
        action: The setting.
        taken: What was done at the limit.
    """

    def row(subject: Subject) -> None:
        """The conversation is kept and valid, and the next call is a new invocation."""
        last = [says("until now")] if action == "wrap_up" else []

        def check(call: Way) -> None:
            with recording(limits=TURNS, action=action) as events:
                model = subject.model([SEARCH, SEARCH, *last, SEARCH, says("done")])
                agent = subject.agent(model)
                with contextlib.suppress(LimitReachedError):
                    call(agent)
                first = model.calls
                ending = subject.call(agent, "go on")
            requests = model.requests[first:]
            seen = {
                **facts(subject, model, ending, events),
                "kept": [len(tool_entries(subject, each)) for each in requests],
                "note": "This task must end now" in str(requests),
                "stored": action != "halt" or STEPS in str(requests[0]),
            }
            expect(
                seen,
                calls=4 + len(last),
                kept=[4, 6],  # each tool call, and each result
                note=False,
                stored=True,
                reason=None,
                text="done",
                synthetic=False,
                valid=True,
                turns=[1, 2, *[3] * len(last), 1, 2],
                ends=[("boss", "max_turns", taken), ("boss", "end_turn", "none")],
            )

        in_every_way(subject.ways, check)

    return row


# --- notes for the model --------------------------------------------------------------------------


def nudged(subject: Subject) -> None:
    """The model is warned one repetition before a loop limit, and not earlier."""
    with recording(limits=Limits(max_identical_tool_calls=3)) as events:
        model = subject.model(endless(SEARCH))
        ending = subject.call(subject.agent(model))
    warned = ["repeating yourself" in str(request) for request in model.requests]
    seen = {**facts(subject, model, ending, events), "warned": warned}
    expect(seen, calls=3, reason="loop_detected", warned=[False, False, True])


# --- streams, deadlines and kills -----------------------------------------------------------------


def streamed(subject: Subject) -> None:
    """The reader of a stream gets the text of a halt once, and nothing of one that would be."""
    for action, script, text in (
        ("halt", endless(SEARCH), "too long"),
        ("halt", [SEARCH, says("done")], "done"),
        ("observe", [SEARCH, SEARCH, says("done")], "done"),
    ):
        with recording(limits=TURNS, action=action, halt_message="too long"):
            model = subject.model(script)
            ending = asyncio.run(subject.stream(subject.agent(model)))
        expect({"text": ending.text}, text=text)


def left_stream(subject: Subject) -> None:
    """A chat page that is closed is not a success."""
    with recording(limits=Limits(max_turns=9)) as events:
        model = subject.model(endless(SEARCH))
        asyncio.run(subject.leave(subject.agent(model)))
    expect(published(events), halts=[], ends=[("boss", "aborted", "none")])


def reader_of_a_stream(subject: Subject) -> None:
    """Agents that the reader of a stream calls have their own budget."""
    with recording(tree=Limits(max_turns=3)):
        outer, inner = subject.model(endless(SEARCH)), subject.model(endless(SEARCH))
        other = subject.agent(inner, name="other")

        async def read() -> None:
            if inner.calls == 0:
                await subject.call_later(other)

        asyncio.run(subject.stream(subject.agent(outer), read))
    expect({"calls": (outer.calls, inner.calls)}, calls=(3, 3))


class Ended(NamedTuple):
    """How an agent is ended from outside."""

    reason: str
    action: str
    text: str
    apply: Callable[[FakeTime], object]


ENDED: Final[Mapping[str, Ended]] = {
    "kill": Ended("killed", "killed", KILLED, lambda _: kill(agent="boss")),
    "deadline": Ended("max_duration", "halted", TIME, lambda time: time.advance(30)),
}


def interrupted(by: Ended) -> Row:
    """Return a row about a model call that does not return."""

    def row(subject: Subject) -> None:
        """A call ends although its model never answers, in an event loop and in a stream.

        The vendor bills its input, which is estimated.
        """
        policy = "quotas: {all: {tokens: 100000, window: P1D}}"

        def check(call: Way) -> None:
            limits = Limits(max_duration_seconds=30)
            with FakeTime() as time, recording(policy, limits=limits) as events:

                async def hang() -> None:
                    by.apply(time)
                    await asyncio.Event().wait()

                model = subject.model([], hang)
                ending = call(subject.agent(model))
            (sent,) = [each for each in events if isinstance(each, ModelCall)]
            seen = facts(subject, model, ending, events)
            seen |= {"is_estimated": sent.estimated and sent.usage.input > 0}
            expect(
                seen | {"quota": last_use(events)},
                calls=0,  # nothing was taken from the script
                is_estimated=True,
                quota=sent.usage.input,
                reason=by.reason,
                action=by.action,
                text=by.text,
                synthetic=True,
                kinds=["failed"],
                turns=[],
                halts=[(by.reason, by.action)],
                ends=[("boss", by.reason, by.action)],
            )

        in_every_way(in_a_loop(subject), check)

    return row


def in_a_loop(subject: Subject) -> Mapping[str, Way]:
    """Return the ways to call an agent in an event loop."""
    return {
        "call": lambda agent: asyncio.run(subject.call_later(agent)),
        "stream": lambda agent: asyncio.run(subject.stream(agent)),
    }


def ended_in_a_tool(by: Ended) -> Row:
    """Return a row about the end of an agent during one of its tools."""

    def row(subject: Subject) -> None:
        """A running tool is waited for and has its result; no model call follows it."""

        def check(call: Way) -> None:
            with FakeTime() as time, recording(limits=Limits(max_duration_seconds=30)) as events:

                def work() -> str:
                    by.apply(time)
                    return "finished"

                model = subject.model([uses("ask"), says("done")])
                agent = subject.agent(model, subject.doing(work))
                seen = facts(subject, model, call(agent), events)
                subject.call(agent)
            expect(
                {**seen, "results": subject.results(model.requests[-1])},
                calls=1,
                reason=by.reason,
                action=by.action,
                text=by.text,
                synthetic=True,
                results=["finished"],
                tools=[("ask", "success")],
                halts=[(by.reason, by.action)],
                ends=[("boss", by.reason, by.action)],
            )

        in_every_way(subject.ways, check)

    return row


# --- trees ----------------------------------------------------------------------------------------


def tree(subject: Subject) -> None:
    """An agent and the one that its tool calls share a budget, and each is halted once."""
    with recording(tree=Limits(max_turns=4)) as events:
        boss, helper = subject.model(endless(CALL_OTHER)), subject.model(endless(SEARCH))
        tool = subject.calling(subject.agent(helper, name="helper"))
        ending = subject.call(subject.agent(boss, tool))
    roots = {each.invocation.root_id for each in events if isinstance(each, ModelCall)}
    seen = {**facts(subject, boss, ending, events), "helper": helper.calls}
    expect(
        {**seen, "roots": len(roots)},
        calls=1,
        helper=3,
        roots=1,
        reason="max_turns",
        text=STEPS,
        synthetic=True,
        turns=[1, 1, 2, 3],
        started=["boss", "helper"],
        ends=[("helper", "max_turns", "halted"), ("boss", "max_turns", "halted")],
    )


def last_answer_of_a_tree(subject: Subject) -> None:
    """It belongs to the root; a member is halted without one."""
    with recording(tree=Limits(max_turns=4), action="wrap_up") as events:
        helper = subject.model(endless(SEARCH))
        boss = subject.model([CALL_OTHER, says("in short")])
        tool = subject.calling(subject.agent(helper, name="helper"))
        ending = subject.call(subject.agent(boss, tool))
    seen = {
        **facts(subject, boss, ending, events),
        "helper": helper.calls,
        "answer": ending.text.partition("\n")[0],
    }
    expect(
        seen,
        calls=2,
        helper=3,
        answer="in short",
        action="wrapped_up",
        ends=[("helper", "max_turns", "halted"), ("boss", "max_turns", "wrapped_up")],
    )


def halted_helper(subject: Subject) -> None:
    """The model around it reads that the answer is unfinished, and its own answer is no halt."""
    with recording(limits=TURNS) as events:
        helper = subject.model(endless(SEARCH))
        boss = subject.model([CALL_OTHER, says("done")])
        tool = subject.calling(subject.agent(helper, name="helper"))
        ending = subject.call(subject.agent(boss, tool))
    seen = {
        **facts(subject, boss, ending, events),
        "helper": helper.calls,
        "read": [each.strip() for each in subject.results(boss.requests[-1])],
        "stops": stops_of(ending.result),
    }
    expect(
        seen,
        calls=2,
        helper=2,
        read=[FOR_MODEL],
        reason=None,
        stops=(),
        text="done",
        synthetic=False,
        ends=[("helper", "max_turns", "halted"), ("boss", "end_turn", "none")],
    )


def halted_helper_in_json(subject: Subject) -> None:
    """The model reads the same if the tool puts the text for the end user into its result."""
    with recording(limits=TURNS):
        helper = subject.model(endless(SEARCH))
        boss = subject.model([CALL_OTHER, says("done")])
        agent = subject.agent(helper, name="helper")
        tool = subject.calling(agent, lambda text: json.dumps({"answer": text.strip()}))
        subject.call(subject.agent(boss, tool))
    (read,) = subject.results(boss.requests[-1])
    expect({"read": json.loads(read)}, read={"answer": FOR_MODEL})


def delegated(subject: Subject) -> None:
    """The text of a halted helper whose answer is that of its caller is for the end user."""
    with recording(limits=TURNS) as events:
        helper = subject.model(endless(SEARCH))
        boss = subject.model([CALL_OTHER, says("never")])
        agent = subject.delegating(boss, subject.agent(helper, name="helper"))
        ending = subject.call(agent)
    expect(
        {**facts(subject, boss, ending, events), "helper": helper.calls},
        calls=1,
        helper=2,
        reason="max_turns",
        agent="helper",
        text=STEPS,
        synthetic=True,
        ends=[("helper", "max_turns", "halted"), ("boss", "end_turn", "none")],
    )


def hand_off(subject: Subject) -> None:
    """Agents that hand over to each other are halted together, in one tree."""
    with recording(tree=Limits(max_turns=4)) as events:
        calls, ending = handed_over(subject)
    made = [each for each in events if isinstance(each, ModelCall)]
    seen = {
        "calls": calls,
        "reason": ending.stop and ending.stop.reason,
        "roots": len({each.invocation.root_id for each in made}),
        **published(events),
    }
    expect(
        seen,
        calls=4,
        reason="max_turns",
        roots=1,
        kinds=["measured"] * 4,
        halts=[("max_turns", "halted")],
    )


def hand_offs_for_ever(subject: Subject) -> None:
    """Agents that hand over to each other endlessly are a loop; a tool in between is work."""
    parts = len(subject.hand_off_to("a"))  # an agent may answer after its hand-off
    with recording(limits=Limits(max_consecutive_handoffs=3)) as events:
        calls, ending = handed_over(subject)
    expect(
        {
            "calls": calls,
            "reason": ending.stop and ending.stop.reason,
            "halts": {each.reason for each in events if isinstance(each, Halt)},
        },
        calls=3 * parts - (parts - 1),
        reason="loop_detected",
        halts={"loop_detected"},
    )
    with recording(limits=Limits(max_consecutive_handoffs=2)) as events:
        models = (
            subject.model([SEARCH, *subject.hand_off_to("b"), SEARCH, *subject.hand_off_to("b")]),
            subject.model([SEARCH, *subject.hand_off_to("a"), says("done")]),
        )
        subject.call(subject.handing_off(models))
    expect(
        {"calls": sum(model.calls for model in models), **published(events)},
        calls=4 + 3 * parts,
        halts=[],
    )


def side_call(subject: Subject) -> None:
    """A model call of a tool counts, is no turn, and is refused beyond a limit."""
    with recording(limits=Limits(max_model_calls=3)) as events:
        boss, other = subject.model(endless(CALL_OTHER)), subject.model(endless(says("an answer")))
        ending = subject.call(subject.agent(boss, subject.asking(other)))
    expect(
        {**facts(subject, boss, ending, events), "other": other.calls},
        calls=2,
        other=1,
        reason="max_model_calls",
        text=STEPS,
        side=[False, True, False],
        turns=[1, 2],
        halts=[("max_model_calls", "halted")],
        ends=[("boss", "max_model_calls", "halted")],
    )


# --- tools that do not run ------------------------------------------------------------------------


def in_a_row(
    subject: Subject,
    request: Any,
    build: Callable[[Any], Any],
    name: str,
    *,
    is_run: bool = False,
    is_failure: bool = True,
) -> None:
    """Compare the calls of a model that requests the same tool in each turn."""
    cap = 5
    calls = cap
    reason: str | None = LIMITS[name].reason
    if name == "max_tool_calls":  # a request beyond it is refused, and needs a model call
        calls, reason = (cap + 1, reason) if is_run else (MANY + 1, None)
    if name == "max_consecutive_tool_failures" and not is_failure:
        calls, reason = MANY + 1, None
    with recording(limits=only(name, cap)) as events:
        model = subject.model([*[request] * MANY, says("gave up")])
        agent = build(model)
        ending = subject.call(agent)
        while ending.question is not None:
            ending = subject.reject(agent, ending)
    seen = facts(subject, model, ending, events)
    expect(seen, calls=calls, reason=reason, valid=True)


def unknown_tool(name: str) -> Row:
    """Return a row about an agent that requests an unknown tool forever."""
    return lambda subject: in_a_row(subject, uses("nope"), subject.agent, name)


def invalid_arguments(name: str) -> Row:
    """Return a row about an agent whose arguments are invalid forever."""
    request = uses("search", arguments={"query": {"not": "text"}})
    return lambda subject: in_a_row(subject, request, subject.agent, name, is_run=True)


def denied_tool(name: str) -> Row:
    """Return a row about an agent whose tool is denied by code of the application forever."""
    return lambda subject: in_a_row(subject, SEARCH, subject.denying, name)


def rejected_tool(name: str) -> Row:
    """Return a row about an agent whose tool is rejected by a human forever."""
    return lambda subject: in_a_row(subject, SEARCH, subject.asking_first, name, is_failure=False)


# --- tools that a human allows --------------------------------------------------------------------

ALLOWED: Final[Mapping[str, tuple[Mapping[str, Any], int, str | None]]] = {
    "max_turns": ({"limits": Limits(max_turns=3)}, 3, "max_turns"),
    "max_tool_calls": ({"limits": Limits(max_tool_calls=3)}, 4, "max_tool_calls"),
    "max_calls_per_tool": (
        {"limits": Limits(max_calls_per_tool={"search": 3})},
        6,
        "max_tool_calls",
    ),
    "max_token_budget": ({"limits": Limits(max_token_budget=45)}, 3, "max_token_budget"),
    "max_identical_tool_calls": (
        {"limits": Limits(max_identical_tool_calls=3)},
        3,
        "loop_detected",
    ),
    "max_no_progress_turns": ({"limits": Limits(max_no_progress_turns=2)}, 3, "loop_detected"),
    "a tree's max_model_calls": ({"tree": Limits(max_model_calls=3)}, 3, "max_model_calls"),
    "max_turns with on_resume fresh": (
        {"limits": Limits(max_turns=3), "policy": "defaults: {on_resume: fresh}"},
        MANY + 1,
        None,
    ),
    "max_iterations": ({"limits": Limits(max_iterations=2)}, MANY + 1, None),
    "max_turns with observe": (
        {"limits": Limits(max_turns=3), "action": "observe"},
        MANY + 1,
        None,
    ),
    "max_turns with wrap_up": (
        {"limits": Limits(max_turns=3), "action": "wrap_up"},
        4,
        "max_turns",
    ),
}
"""By limit: the settings, and the model calls and the stop reason of an agent whose tool a human
allows each time. Each answer begins a new leg, and so new iterations."""


WEEK: Final = MAX_DAYS * 24 * 60 * 60 + 1
"""Seconds after which memory has forgotten a task, as after a restart."""

LATER: Final = ("max_turns", "max_tool_calls", "max_token_budget", "a tree's max_model_calls")
"""Limits that hold then, as the framework keeps the task with the interrupt."""


def allowed_tool(name: str, seconds: float = 0) -> Row:
    """Return a row about an agent whose tool calls a human allows, forever.

    Args:
        name: The limit.
        seconds: The time until each answer.
    """
    settings, calls, reason = ALLOWED[name]

    def row(subject: Subject) -> None:
        """Answers continue the task, and with it its budget."""
        with recording(**settings) as events, FakeTime() as time:
            model = subject.model([*[SEARCH] * MANY, says("gave up")])
            agent = subject.asking_first(model)
            ending = subject.call(agent)
            while ending.question is not None:
                time.advance(seconds)
                ending = subject.accept(agent, ending)
        seen = facts(subject, model, ending, events)
        seen["parts"] = sum(each.turns for each in events if isinstance(each, Stop))
        expect(seen, calls=calls, reason=reason, valid=True, parts=calls)

    return row


NOT_RUN: Final = {
    "an unknown tool": unknown_tool,
    "invalid arguments": invalid_arguments,
    "a tool denied by code": denied_tool,
    "a tool rejected by a human": rejected_tool,
}
NOT_RUN_LIMITS: Final = (
    "max_identical_tool_calls",
    "max_consecutive_same_tool",
    "max_tool_calls",
    "max_consecutive_tool_failures",
)


# --- spans ----------------------------------------------------------------------------------------


def spans(action: str, error: str | None) -> Row:
    """Return a row about the spans of an agent that reaches a limit.

    Args:
        action: The setting.
        error: The type of the error on the span of the invocation, if any.
    """

    def row(subject: Subject) -> None:
        """A trace shows the invocation with its stop, and each call with its usage."""

        def check(call: Way) -> None:
            script = [SEARCH, SEARCH, says("what I know")]
            agent = subject.agent(subject.model(script))
            with recording(limits=TURNS, action=action) as events:
                made = spans_of(lambda: call(agent))
            (invocation,) = made["invoke_agent"]
            shown = [f"{each.context.span_id:016x}" for each in made["chat"]]
            seen = {
                "name": invocation.name,
                "reason": invocation.attributes["otel_limits.stop.reason"],
                "error": invocation.attributes.get("error.type"),
                "failed": invocation.status.status_code is StatusCode.ERROR,
                "same": shown == [each.span_id for each in events if isinstance(each, ModelCall)],
                "input": [each.attributes["gen_ai.usage.input_tokens"] for each in made["chat"]],
            }
            expect(
                seen,
                name="invoke_agent boss",
                reason="max_turns",
                error=error,
                failed=error is not None,
                same=True,
                input=[10] * (3 if action == "wrap_up" else 2),
            )

        in_every_way(subject.ways, check)

    return row


def span_of_a_side_call(subject: Subject) -> None:
    """A trace shows every request that costs money."""
    boss, other = subject.model([uses("ask"), says("done")]), subject.model([says("an answer")])
    with recording(limits=TURNS):
        agent = subject.agent(boss, subject.asking(other))
        made = spans_of(lambda: subject.call(agent))
    expect({"shown": len(made["chat"])}, shown=3)


def spans_that_are_not_recorded(subject: Subject) -> None:
    """The invocation counts as unsampled, whether the spans are dropped or never made."""
    for provider in (NoOpTracerProvider(), TracerProvider(sampler=ALWAYS_OFF)):
        with (
            mock.patch.object(trace, "_TRACER_PROVIDER", provider),
            mock.patch.object(strands_tracer, "_tracer_instance", None),
            recording(limits=TURNS) as events,
        ):
            model = subject.model([says("done")])
            subject.call(subject.agent(model))
        started = [each.unsampled for each in events if isinstance(each, Started)]
        expect({"unsampled": started}, unsampled=[True])


def spans_of(call: Callable[[], object]) -> Mapping[str, list[Any]]:
    """Return the spans of a call by their operation, also of one that raises."""
    memory = exporter()
    memory.clear()
    with contextlib.suppress(LimitReachedError):
        call()
    made: dict[str, list[Any]] = defaultdict(list)
    for each in memory.get_finished_spans():
        made[str((each.attributes or {}).get("gen_ai.operation.name"))].append(each)
    memory.clear()
    return made


# --- the table ------------------------------------------------------------------------------------

ROWS: Final[Mapping[str, Row]] = {
    "every limit": every_limit,
    "halt": halted,
    "own halt message": own_halt_message,
    "natural end on the last turn": natural_end,
    "failed model call": failed_call,
    "unmeasured stream": unmeasured_stream,
    "empty answer": empty_answer,
    "tokens count once": tokens_once,
    "observe": observed,
    "raise": raised,
    "wrap_up": wrapped_up,
    **{
        f"wrap_up whose answer {what}": without_last_answer(last, remark)
        for what, (last, remark) in LAST_ANSWERS.items()
    },
    "ask": asked,
    "ask, and a human refuses": refused_by_human,
    **{f"next call after {action}": next_call(action, taken) for action, taken in TAKEN.items()},
    "warning before a loop limit": nudged,
    **TOOL_ROWS,
    **FAILURE_ROWS,
    "stream": streamed,
    "stream that is left": left_stream,
    "reader of a stream": reader_of_a_stream,
    **{f"{name} during a model call": interrupted(by) for name, by in ENDED.items()},
    **{f"{name} during a tool": ended_in_a_tool(by) for name, by in ENDED.items()},
    **QUOTA_ROWS,
    "tree": tree,
    "wrap_up of a tree": last_answer_of_a_tree,
    "halted helper": halted_helper,
    "halted helper in JSON": halted_helper_in_json,
    "delegation to a halted helper": delegated,
    "hand-off": hand_off,
    "hand-offs without end": hand_offs_for_ever,
    "side call": side_call,
    **{
        f"{what} under {name}": build(name)
        for what, build in NOT_RUN.items()
        for name in NOT_RUN_LIMITS
    },
    **{f"a tool allowed by a human under {name}": allowed_tool(name) for name in ALLOWED},
    **{
        f"a tool allowed by a human a week later under {name}": allowed_tool(name, WEEK)
        for name in LATER
    },
    "spans after halt": spans("halt", None),
    "spans after wrap_up": spans("wrap_up", None),
    "spans after raise": spans("raise", "MaxTurnsReachedException"),
    "span of a side call": span_of_a_side_call,
    "spans that are not recorded": spans_that_are_not_recorded,
}
"""Rows that every framework has."""
