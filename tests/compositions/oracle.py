"""The outcome of a program whose agents run one at a time, by the documentation alone."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.compositions.program import ATTEMPTS, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits import Limits
    from tests.compositions.program import Agent, Program, Tool

COUNTS: Final = {
    "max_iterations": "turns",
    "max_turns": "turns",
    "max_model_calls": "calls",
    "max_token_budget": "tokens",
    "max_tool_calls": "",  # a call that was refused has reached it, a call that was made has not
}
"""By limit, in the order in which they decide, what it counts."""
OF_SIDE_CALLS: Final = ("max_model_calls", "max_token_budget")
FINAL: Final = ("halt", "raise")


@dataclass(frozen=True)
class Ended:
    """How an invocation has ended, and what it used."""

    agent: str
    reason: str
    action: str
    turns: int
    calls: int
    tokens: int
    tools: int


@dataclass
class Outcome:
    """The observed or expected outcome of a program."""

    ended: list[Ended] = field(default_factory=list)
    """Every invocation, in the order in which they ended."""
    requests: Counter[str] = field(default_factory=Counter)
    """Requests that each agent's model has received."""
    stops: list[tuple[str, str, str] | None] = field(default_factory=list)
    """For each call of the program `stop_of` its result: agent, reason and action."""
    errors: list[bool] = field(default_factory=list)
    """Whether each call has raised."""


@dataclass(eq=False)
class Budget:
    """The limits of an invocation or of a tree, and what was used of them."""

    limits: Limits
    action: str
    used: Counter[str] = field(default_factory=Counter)
    wrapped_up: bool = False

    def reached(self, *, side: bool = False) -> Iterator[str]:
        """Yield the limits that are reached."""
        for name, cap in self.limits.items():
            counted = COUNTS[name]
            applies = counted and (not side or name in OF_SIDE_CALLS)
            if applies and self.used[counted] >= cap:
                yield name


class LostError(Exception):
    """A call of an agent that raises."""


@dataclass(eq=False)
class Invocation:
    """One invocation on its way."""

    agent: Agent
    own: Budget
    trees: list[Budget]
    outer_trees: list[Budget]
    """Those that an enclosing invocation is in."""
    refused: list[Budget] = field(default_factory=list)
    """Budgets that have refused a tool."""
    observed: bool = False

    @property
    def budgets(self) -> list[Budget]:
        """All that it uses."""
        return [self.own, *self.trees]

    def use(self, **counts: int) -> None:
        """Count in every budget."""
        for budget in self.budgets:
            budget.used.update(counts)

    def verdict(self, *, side: bool = False) -> tuple[str, str] | None:
        """Return the reason and the action of what was reached."""
        reached = [] if side else [("max_tool_calls", each) for each in self.refused]
        reached += [(name, each) for each in self.budgets for name in each.reached(side=side)]
        names = list(COUNTS)
        ordered = sorted(
            ((each.action == "observe", names.index(name), each.action) for name, each in reached),
            key=lambda each: each[:2],
        )
        if not ordered:
            return None
        actions = [action for *_, action in ordered]
        return names[ordered[0][1]], next((a for a in actions if a in FINAL), actions[0])

    def claim_last_answer(self) -> bool:
        """Claim the only last answer of each budget that is spent."""
        spent = [self.own]
        for each in self.budgets:
            reached = list(each.reached())
            if each.action == "observe" or not (reached or each in self.refused):
                continue
            is_of_outermost = each is self.own or (
                each not in self.outer_trees and self.own.used["turns"] > 0
            )
            may = each.action == "wrap_up" and not each.wrapped_up and is_of_outermost
            if not may or "max_model_calls" in reached:
                return False
            spent.append(each)
        if self.own.wrapped_up:
            return False
        for each in spent:
            each.wrapped_up = True
        return True

    def admit_tool(self) -> bool:
        """Count a tool that was requested, or refuse it."""
        for each in self.budgets:
            cap = each.limits.max_tool_calls
            if cap is not None and each.used["tools"] >= cap:
                self.refused += [each] * (each not in self.refused)
                if each.action != "observe":
                    return False
        self.use(tools=1)
        return True


class Oracle:
    """Computes the outcome of a program."""

    def __init__(self, program: Program, *, repeats_last: bool) -> None:
        self._program = program
        self._repeats_last = repeats_last
        self._replies = {each.name: itertools.cycle(each.replies) for each in program.agents}
        self._given = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Call the first agent."""
        outcome, first = self.outcome, self._program.agents[0]
        for _ in self._program.calls:
            try:
                self._invoke(first, None)
                outcome.errors.append(False)
            except LostError:
                outcome.errors.append(True)
            last = outcome.ended[-1]
            is_halted = last.action in ("halted", "wrapped_up", "raised")
            outcome.stops.append((last.agent, last.reason, last.action) if is_halted else None)
        return outcome

    def _invoke(self, agent: Agent, around: Invocation | None) -> None:
        """Run one invocation; raise where its call raises."""
        program, outer = self._program, [] if around is None else around.trees
        limits = type(agent.limits)(
            **{**dict(program.limits.items()), **dict(agent.limits.items())}
        )
        tree = type(agent.tree)(**{**dict(program.tree.items()), **dict(agent.tree.items())})
        action = agent.action or program.action
        trees = [*([Budget(tree, action)] if any(tree.items()) else []), *outer]
        one = Invocation(agent, Budget(limits, action), trees, outer)
        reason, taken = self._loop(one)
        used = one.own.used
        self.outcome.ended.append(
            Ended(
                agent=agent.name,
                reason=reason,
                action=taken or ("observed" if one.observed else "none"),
                turns=used["turns"],
                calls=used["calls"],
                tokens=used["tokens"],
                tools=used["tools"],
            )
        )
        if taken == "raised" or reason == "error":
            raise LostError

    def _loop(self, one: Invocation) -> tuple[str, str]:  # noqa: C901  one story
        """Return the reason of its end, and the action of a halt."""
        failures = failures_before = 0
        is_last = False
        while True:
            verdict = None if is_last else one.verdict()
            if verdict is not None:
                reason, action = verdict
                if action == "observe":
                    one.observed = True
                else:
                    is_last = action == "wrap_up" and one.claim_last_answer()
                    if not is_last:
                        return reason, "raised" if action == "raise" else "halted"
            reply = self._next(one.agent)
            one.use(calls=1)
            if reply.failure:
                failures += 1
                is_over = reply.failure == "lost" or failures == ATTEMPTS
                if is_last and (is_over or not self._may_repeat(one, failures, failures_before)):
                    return reason, "halted"
                if is_over:
                    return "error", ""
                continue
            failures, failures_before = 0, failures
            one.use(turns=1, tokens=reply.tokens)
            if is_last:
                return reason, "halted" if reply.tools else "wrapped_up"
            if not reply.tools:
                return "end_turn", ""
            tools = {each.name: each for each in one.agent.tools}
            admitted = [name for name in reply.tools if one.admit_tool()]
            for name in admitted:
                self._use(tools[name], one)

    def _may_repeat(self, one: Invocation, failures: int, before: int) -> bool:
        """Return whether a last answer that has failed is requested once more."""
        budgets = [each for each in one.budgets if each.action != "observe"]
        is_full = any("max_model_calls" in each.reached() for each in budgets)
        return self._repeats_last and failures <= before and not is_full

    def _next(self, agent: Agent) -> Reply:
        self.outcome.requests[agent.name] += 1
        self._given += 1
        reply = next(self._replies[agent.name])
        return Reply(tokens=reply.tokens) if self._given > self._program.most_replies else reply

    def _use(self, tool: Tool, one: Invocation) -> None:
        """Run a tool, which answers whatever happens in it."""
        for name in tool.agents:
            with suppress(LostError):
                called = self._program[name]
                if called.is_model:
                    self._think(called, one)
                else:
                    self._invoke(called, one)

    def _think(self, model: Agent, one: Invocation) -> None:
        """Make a side call."""
        verdict = one.verdict(side=True)
        if verdict is not None and verdict[1] == "observe":
            one.observed = True
        elif verdict is not None:
            return
        reply = self._next(model)
        one.use(calls=1)
        if not reply.failure:
            one.use(tokens=reply.tokens)


def expected(program: Program, *, repeats_last: bool = False) -> Any:
    """Return the outcome of a program."""
    return Oracle(program, repeats_last=repeats_last).run()
