"""Tools at their caps, and tools that fail: the same in every framework."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from otel_limits import LimitReachedError, Limits, ToolCall
from otel_limits.testing import says, uses
from tests.features.observed import SEARCH
from tests.features.seen import (
    STEPS,
    Row,
    Way,
    error_of,
    expect,
    facts,
    in_every_way,
    published,
    recording,
    ways_of_row,
)

if TYPE_CHECKING:
    from otel_limits.core.policy import Action
    from tests.features.subject import Subject

# --- a cap of one tool ----------------------------------------------------------------------------

CALLED_OUT: Final = (
    "search was used 1 of 1 times in this task. Use other tools, or answer with what you have."
)

ONE_SEARCH: Final = Limits(max_calls_per_tool={"search": 1})


def refused_tool(subject: Subject) -> None:
    """A tool beyond its cap does not run, unlike another one of the same turn; the agent continues.

    In every way to call it, and with every action but `observe`: each way with the next action.
    """

    def check(action: Action, call: Way) -> None:
        with recording(limits=ONE_SEARCH, action=action) as events:
            model = subject.model([uses("search", "search", "ask"), says("done")])
            ending = call(subject.agent(model, subject.doing(lambda: "found")))
        tools = [each for each in events if isinstance(each, ToolCall)]
        seen = {
            **facts(subject, model, ending, events),
            "tools": sorted((each.tool, each.status, each.limit) for each in tools),
            "results": CALLED_OUT in subject.results(model.requests[-1]),
            "declared": [len(each or ()) for each in model.tool_specs],
        }
        expect(
            seen,
            tools=[
                ("ask", "success", None),
                ("search", "refused", "max_calls_per_tool"),
                ("search", "success", None),
            ],
            results=True,
            declared=[2, 2],
            calls=2,
            text="done",
            reason=None,
            valid=True,
            halts=[],
            ends=[("boss", "end_turn", "none")],
        )

    actions: tuple[Action, ...] = ("halt", "wrap_up", "raise", "ask")
    ways = list(ways_of_row(subject.ways).items())
    for turn in range(max(len(actions), len(ways))):
        action, (way, call) = actions[turn % len(actions)], ways[turn % len(ways)]
        in_every_way({way: call}, functools.partial(check, action))


def halted_by_tool(subject: Subject) -> None:
    """With `tool_action: halt` the cap of one tool ends the agent after the turn."""
    policy = "tools: {'sea*': {action: halt}}"
    with recording(policy, limits=ONE_SEARCH) as events:
        model = subject.model([uses("search", "search", "ask"), says("done")])
        ending = subject.call(subject.agent(model, subject.doing(lambda: "found")))
    expect(facts(subject, model, ending, events), calls=1, reason="max_tool_calls", synthetic=True)


def refused_for_ever(subject: Subject) -> None:
    """Three turns of nothing but refused requests halt; one that runs resets the count."""
    with recording(limits=Limits(max_calls_per_tool={"search": 1})) as events:
        script = [SEARCH, SEARCH, SEARCH, uses("search", "ask"), *[SEARCH] * 6]
        model = subject.model(script)
        ending = subject.call(subject.agent(model, subject.doing(lambda: "found")))
    stop = ending.stop
    breach = None if stop is None else stop.breach
    seen = {
        **facts(subject, model, ending, events),
        "breach": breach and (breach.limit, breach.subject),
        "sentence": str(stop and stop.sentence).split(": ")[1].split(".")[0],
    }
    expect(
        seen,
        calls=7,
        sentence="1 of 1 tool calls used, and 3 turns in a row had only refused calls",
        reason="max_tool_calls",
        breach=("max_calls_per_tool", "search"),
        synthetic=True,
        valid=True,
        halts=[("max_tool_calls", "halted")],
    )


def refused_requests_are_loops(subject: Subject) -> None:
    """A request that a cap refuses counts for the limits on loops."""
    limits = Limits(max_calls_per_tool={"search": 1}, max_consecutive_same_tool=3)
    with recording(limits=limits) as events:
        model = subject.model([SEARCH, SEARCH, SEARCH, SEARCH])
        ending = subject.call(subject.agent(model))
    expect(facts(subject, model, ending, events), calls=3, reason="loop_detected")


def observed_tool_cap(subject: Subject) -> None:
    """A trial refuses no tool, and each call says which cap would have refused it."""
    with recording(limits=ONE_SEARCH, action="observe") as events:
        model = subject.model([SEARCH, SEARCH, SEARCH, SEARCH, says("done")])
        ending = subject.call(subject.agent(model))
    tools = [each for each in events if isinstance(each, ToolCall)]
    seen = {
        **facts(subject, model, ending, events),
        "tools": [(each.status, each.limit) for each in tools],
    }
    expect(
        seen,
        calls=5,
        text="done",
        halts=[],
        tools=[("success", None), *[("success", "max_calls_per_tool")] * 3],
    )


def refused_answer(subject: Subject) -> None:
    """A refusal is for the model: where a tool's result is the answer, the user reads our text."""

    def check(call: Way) -> None:
        with recording(limits=Limits(max_tool_calls=1)) as events:
            model = subject.model([SEARCH, uses("ask"), says("never")])
            helper = subject.agent(subject.model([]), name="helper")
            ending = call(subject.delegating(model, helper))
        seen = facts(subject, model, ending, events)
        # The reader of a stream of the SDK gets the result after the last part.
        seen["text"] = seen["text"] or getattr(ending.result, "final_output", "")
        expect(
            seen,
            calls=2,
            reason="max_tool_calls",
            text=STEPS,
            synthetic=True,
            valid=True,
            tools=[("search", "success"), ("ask", "refused")],
            halts=[("max_tool_calls", "halted")],
            ends=[("boss", "max_tool_calls", "halted")],
        )

    in_every_way(subject.ways, check)


def refused_answer_raises(subject: Subject) -> None:
    """With `raise`, the call raises the error of the limit instead."""
    with recording(limits=Limits(max_tool_calls=1), action="raise") as events:
        model = subject.model([SEARCH, uses("ask"), says("never")])
        helper = subject.agent(subject.model([]), name="helper")
        error = error_of(lambda: subject.call(subject.delegating(model, helper)))
    seen = {"limit": isinstance(error, LimitReachedError), **published(events)}
    expect(seen, limit=True, halts=[("max_tool_calls", "raised")])


def refused_answer_of_one_tool(subject: Subject) -> None:
    """The same for the cap of one tool, unless another result of the turn is the answer."""
    with recording(limits=Limits(max_calls_per_tool={"ask": 1})) as events:
        model = subject.model([uses("ask", "ask"), says("after")])
        helper = subject.agent(subject.model([says("helped")] * 2), name="helper")
        ending = subject.call(subject.delegating(model, helper))
    seen = facts(subject, model, ending, events)
    is_for_model = "in this task" in str(seen["text"])
    expect({**seen, "for model": is_for_model}, valid=True, **{"for model": False})


# --- tools that fail ------------------------------------------------------------------------------

FAILURES: Final[Mapping[str, Callable[[int], str]]] = {
    "the same": lambda _: "error: Permission denied (publickey)",
    "with a time stamp": lambda n: f"[2026-11-28T10:{n:02d}:07Z] attempt {n}: error: no route",
    "in other words": lambda n: f"Traceback (most recent call last): line {n}",
    "as a status": lambda n: f"HTTP {500 + n}",
    "as a block of MCP": lambda n: f'[{{"type": "text", "text": "Error executing tool {n}"}}]',
    "as a field": lambda n: f'{{"attempt": {n}, "success": false}}',
}
"""Results of a tool that fails, by what changes."""


def counted(result: Callable[[int], str]) -> Callable[[], str]:
    """Return a function that returns the result of its first call, its second, and so on."""
    counter = itertools.count(1)
    return lambda: result(next(counter))


def failing_tool(subject: Subject) -> None:
    """A tool that fails is a loop, whatever its arguments, its text, and the words of the model."""
    for name, result in FAILURES.items():
        for limits in (
            Limits(max_consecutive_tool_failures=4),
            Limits(max_consecutive_failures_per_tool={"ask": 4}),
        ):
            ask = subject.doing(counted(result))
            with recording(limits=limits) as events:
                model = subject.model(uses("ask", text=f"Let me try {n}.") for n in range(50))
                ending = subject.call(subject.agent(model, ask))
            expect(
                {"case": name, **facts(subject, model, ending, events)},
                case=name,
                calls=4,
                reason="loop_detected",
                synthetic=True,
                valid=True,
            )


def raising_tool(subject: Subject) -> None:
    """An exception that the model reads is a failure."""
    with recording(limits=Limits(max_consecutive_tool_failures=3)) as events:
        model = subject.model(uses("ask") for _ in range(50))
        ending = subject.call(subject.agent(model, subject.raising()))
    expect(
        facts(subject, model, ending, events),
        calls=3,
        reason="loop_detected",
        tools=[("ask", "error")] * 3,
    )


def failing_among_others(subject: Subject) -> None:
    """The failures of one tool count whatever others do in between; a success resets the count."""
    results = iter(["error: down"] * 2 + ["fine"] + ["error: down"] * 50)
    ask = subject.doing(lambda: next(results))
    with recording(limits=Limits(max_consecutive_failures_per_tool={"ask": 3})) as events:
        model = subject.model(itertools.cycle([uses("ask"), SEARCH]))
        ending = subject.call(subject.agent(model, ask))
    expect(facts(subject, model, ending, events), calls=11, reason="loop_detected")


HEALTHY: Final[Mapping[str, Callable[[int], str]]] = {
    "a poll that moves": lambda n: f"{n} of 12 done",
    "a poll with a clock": lambda n: f"[2026-11-28T10:{n:02d}:07Z] copied {n * 8} of 96 files",
    "pages": lambda n: f"page {n} of 12: " + ", ".join(f"item {n * 10 + k}" for k in range(3)),
    "a cursor": lambda n: f'{{"next": "{n * 7919:08x}", "names": ["{chr(96 + n) * 4}"]}}',
    "fewer failing tests": lambda n: f"{13 - n} tests failed",
    "a measure": lambda n: f"accuracy {0.5 + n / 100:.2f}",
    "a log that grows": lambda n: "\n".join(f"line {k}" for k in range(n)),
    "errors are the answer": lambda n: f"found {n} errors in the report",
    "a count of failures": lambda n: f"Failed tests: {13 - n}",
    "a status that moves": lambda n: f"status: {440 + n} of 900",
}
"""Results of a tool that gets somewhere."""


def healthy_tools(subject: Subject) -> None:
    """A tool that gets somewhere is no loop, with the preset and with any single loop limit."""
    for name, result in HEALTHY.items():
        ask = subject.doing(counted(result))
        with recording(
            limits=Limits(
                max_identical_tool_calls=2,
                max_repeated_tool_cycles=2,
                max_no_progress_turns=2,
                max_consecutive_tool_failures=2,
                max_consecutive_failures_per_tool={"ask": 2},
            )
        ) as events:
            model = subject.model([*(uses("ask") for _ in range(6)), says("done")])
            ending = subject.call(subject.agent(model, ask))
        expect(
            {"case": name, **facts(subject, model, ending, events)},
            case=name,
            calls=7,
            text="done",
            halts=[],
        )


TOOL_ROWS: Final[Mapping[str, Row]] = {
    "refused tool": refused_tool,
    "refused tool under tool_action halt": halted_by_tool,
    "refused tool without end": refused_for_ever,
    "refused tool whose result is the answer": refused_answer,
    "refused tool whose result is the answer under raise": refused_answer_raises,
    "one refused tool whose result is the answer": refused_answer_of_one_tool,
    "refused tool that is requested again and again": refused_requests_are_loops,
    "refused tool under observe": observed_tool_cap,
    "failing tool": failing_tool,
    "tool that raises": raising_tool,
    "failing tool among others": failing_among_others,
    "tool that gets somewhere": healthy_tools,
}
"""Rows that every framework has."""
