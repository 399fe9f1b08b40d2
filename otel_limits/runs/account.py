"""The usage of an invocation, and the decision whether it may go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.core.halt_texts import FAILURE_LIMITS
from otel_limits.core.limits import LOOP_DETECTED_STOP_REASON, REPEATED_FAILURES, Breach, Level
from otel_limits.core.policy import KILLED, Reached, Verdict, verdict_of
from otel_limits.runs.budget import Budgets

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation
    from otel_limits.core.loops import LoopState
    from otel_limits.core.policy import Policy, Unpriced
    from otel_limits.core.usage import Tally
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.services import Services
    from otel_limits.runs.tasks import Task


class Account:
    """The usage of an invocation, and the decision whether it may go on.

    `reached_limits` compares its model calls, tool calls and time with its limits, and with those
    of the trees and the conversation around it.
    """

    killed = False
    finished = False
    """True once it has ended: only limits of trees that are still active apply to its calls."""
    last_failure = ""
    """How the last invocation with its input has failed, for the operator."""

    def __init__(
        self,
        services: Services,
        invocation: Invocation,
        task: Task,
        trees: tuple[Budget, ...],
        handoffs: Handoffs,
    ) -> None:
        """Begin with nothing used but what the task has used before."""
        self.services = services
        self.invocation = invocation
        self.task = task
        """The usage that limits look at: its own, and that before the interrupts it continues."""
        self.budget, self.loops = task.budget, task.loops
        self.tally = task.budget.tally
        """The sums of its task."""
        self._before = replace(self.tally) if task.resumes else None
        self.trees = trees
        """The enclosing budget trees, innermost first, each followed by its conversation if it
        begins within one."""
        self.budgets = Budgets(self.budget, trees)
        """Every budget that its usage counts toward and that limits it."""
        self.refusals: dict[str, tuple[Breach, Budget]] = {}
        """The last refused tool call of each limit: it halts the agent after the turn."""
        self.handoffs = handoffs

    @property
    def policy(self) -> Policy:
        """The policy that applies now; a person may have extended its limits."""
        return self.budget.policy

    @property
    def part(self) -> Tally:
        """Its own usage, as a part of its task's. Events have this part: they are added up."""
        return self.tally if self._before is None else self.tally.since(self._before)

    @property
    def has_usd_limit(self) -> bool:
        """True if a limit or a quota in USD applies to it."""
        return self.budgets.has_cost_limit or any(unit == "usd" for unit, _ in self.policy.quotas)

    @property
    def unpriced(self) -> Unpriced:
        """Behavior for calls without a price."""
        return self.policy.unpriced or self.budgets.unpriced_default

    @property
    def is_limited(self) -> bool:
        """True if a limit of the invocation or of a tree is in force, or a quota may apply."""
        gate = self.services.observers.gate
        has_limits = any(any(budget.policy.limits.items()) for budget in self.budgets)
        return has_limits or (gate is not None and gate.holds_quotas)

    def measure_time(self) -> None:
        """Update the elapsed time of every budget, and what the tree shares, before a decision."""
        self.budgets.measure_time(self.services.now())
        self.tally.consecutive_handoffs = self.handoffs.count

    def reached_limits(
        self, *, with_reserved: bool = False, forces_output: bool = False, side: bool = False
    ) -> Verdict | None:
        """Check every budget; the time is the one measured last.

        Args:
            with_reserved: Count what in-flight model calls have reserved as used.
            forces_output: Skip limits that yield to a call that only forces the output.
            side: Skip limits that a side call cannot exceed. A side call may come after the end of
                its invocation; then only active trees limit it.
        """
        # A kill precedes every limit, whatever the action.
        if self.killed and not (side and self.finished):
            return KILLED
        reached: list[Reached] = []
        if not side:
            reached += [(breach, each.policy.action) for breach, each in self.refusals.values()]
        for budget in self.budgets:
            reached += budget.reached(
                with_reserved=with_reserved,
                unpriced_default=self.budgets.unpriced_default,
                forces_output=forces_output,
                side=side,
            )
        return verdict_of(reached)

    def with_subjects(self, verdict: Verdict | None) -> Verdict | None:
        """Add the tools that caused loop breaches; too slow to do within a decision."""
        loops = self.loops
        if verdict is None or loops is None or verdict.reason != LOOP_DETECTED_STOP_REASON:
            return verdict
        breaches = tuple(
            self._with_subject(breach, loops)
            if breach.reason == LOOP_DETECTED_STOP_REASON
            else breach
            for breach in verdict.breaches
        )
        return replace(verdict, breaches=breaches)

    def _with_subject(self, breach: Breach, loops: LoopState) -> Breach:
        if breach.limit == REPEATED_FAILURES:
            return replace(breach, error=self.last_failure)
        tool = breach.subject or loops.culprit_tool(breach.limit)
        error = loops.error_of(tool) if tool and breach.limit in FAILURE_LIMITS else ""
        return replace(breach, subject=tool, error=error)

    def levels(self) -> tuple[Level, ...]:
        """Return the utilization of each limit."""
        self.measure_time()
        return self.budgets.levels()


class Handoffs:
    """Consecutive hand-offs in one tree of invocations, without another tool in between."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        """Begin with none, or with those before an interrupt."""
        self.count = count
