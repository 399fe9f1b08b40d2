"""Whether an agent may go on follows from what was counted, however often it was asked before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.limits import Limits, Policy, Usage
from otel_limits.loops import Call
from otel_limits.runs import CURRENT, OpenCall, Run, Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Step = Callable[["Invocation"], object]

USED: Final = Usage(input=3, output=2)
REPEATED: Final = Call(tool="search", request="q", result="r")

LIMITS: Final = {
    "turns": Limits(max_turns=2),
    "iterations": Limits(max_iterations=2),
    "tokens": Limits(max_token_budget=10),
    "tools": Limits(max_tool_calls=2),
    "each tool": Limits(max_calls_per_tool={"search": 1}),
    "loops": Limits(max_identical_tool_calls=3),
    "legs": Limits(max_consecutive_same_tool=3),
    "time": Limits(max_duration_seconds=5),
}


class Invocation:
    """One invocation, with a clock of its own."""

    def __init__(self, policy: Policy) -> None:
        self.now = 0.0
        runs = Runs(lambda: self.now)
        self.run: Run = runs.start("agent", policy)
        token = CURRENT.set(self.run)
        self.child: Run = runs.start("child", policy)
        """Counts for the same tree, if there is one."""
        CURRENT.reset(token)

    def wait(self) -> None:
        """Let two seconds pass."""
        self.now += 2


def come_back(each: Invocation) -> None:
    """A tool that was admitted does not run after all."""
    if each.run.admit_tool("search") is None:
        each.run.return_tool("search")


STEPS: Final[dict[str, Step]] = {
    "turn": lambda each: each.run.turn(),
    "call": lambda each: each.run.settle(OpenCall("m"), USED),
    "unmeasured call": lambda each: each.run.settle(OpenCall("m")),
    "tool": lambda each: each.run.admit_tool("search"),
    "tool that did not run": come_back,
    "repetition": lambda each: each.run.repeat([REPEATED], None),
    "leg": lambda each: each.run.leg(),
    "recovery": lambda each: each.run.recover(),
    "more": lambda each: each.run.extend(Limits(max_turns=1, max_tool_calls=1)),
    "child": lambda each: each.child.settle(OpenCall("m"), USED),
    "time": Invocation.wait,
}


def reason(steps: Sequence[str], policy: Policy, asked: Sequence[bool]) -> Any:
    """What stops an invocation after these steps, when it was asked after some of them as well."""
    invocation = Invocation(policy)
    for step, ask in zip(steps, asked, strict=True):
        STEPS[step](invocation)
        if ask:
            invocation.run.judge()
    return invocation.run.judge()


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("action", ["halt", "observe"])
@given(data=st.data())
def test_asking_along_the_way_changes_no_answer(limits: Limits, action: Any, data: Any) -> None:
    """The last answer is the same whether or not it was asked for earlier."""
    steps = data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
    asked = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    policy = Policy(limits=limits, action=action, unmeasured="halt")

    assert reason(steps, policy, asked) == reason(steps, policy, [False] * len(steps))


@given(data=st.data())
def test_asking_along_the_way_changes_no_answer_in_a_tree(data: Any) -> None:
    """Others count for it as well."""
    steps = data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
    policy = Policy(tree=Limits(max_token_budget=10))

    assert reason(steps, policy, [True] * len(steps)) == reason(steps, policy, [False] * len(steps))
