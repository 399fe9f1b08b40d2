"""The shared state of one invocation: identity, budgets and the registry's services."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from otel_limits.core import events
from otel_limits.core.internal_errors import report_suppressed
from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    LOOP_LIMITS,
    Breach,
)
from otel_limits.core.loops import LoopState
from otel_limits.core.policy import KILLED, Policy, Reached, Verdict, verdict_of
from otel_limits.core.price import NO_QUOTE, Quote
from otel_limits.core.texts import for_operator
from otel_limits.runs.budget import Budget, Budgets
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.dispatcher import EventDispatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.core.events import ActionTaken, Invocation
    from otel_limits.core.policy import Unpriced
    from otel_limits.core.pricing import Prices
    from otel_limits.core.terms import BillableCall


class ToolLogWriter(Protocol):
    """Records tool calls with their contents."""

    def write(
        self,
        invocation: Invocation,
        number: int,
        tool: str,
        arguments: object,
        result_text: str,
        *,
        trigger: bool,
    ) -> None:
        """Record one finished call; `trigger` marks the one that caused the halt."""


class Services:
    """Shared by all invocations of a registry: lock, clock, observers and prices."""

    def __init__(self) -> None:
        """Create the services, without observers or prices."""
        # Also guards every budget, because several invocations add to the same tree. Held for
        # additions and comparisons only, never while third-party code runs. Reentrant, because the
        # garbage collector can close a forgotten coroutine at any moment, which ends an invocation.
        self.lock = threading.RLock()
        self.observers = EventDispatcher()
        self.prices: Prices | None = None
        self.tool_log: ToolLogWriter | None = None
        self.keeps_fingerprints = False
        """True while an observer needs the hashes of tool calls, even without a loop limit."""
        self.clock = CLOCK
        self.now = CLOCK.now

    def quote(self, call: BillableCall) -> Quote:
        """Return the price of a model call and its source; none for a call without tokens."""
        if self.prices is None or not call.usage.total:
            return NO_QUOTE
        try:
            return self.prices.quote(call)
        except Exception as error:  # noqa: BLE001  errors must not reach the agent
            report_suppressed("prices", error)
            return NO_QUOTE


class Scope:
    """The state of one invocation that its calls, tools and deadlines share."""

    # Defaults are class attributes because most of them are never set during an invocation.
    cancel: Callable[[Verdict], None] | None = None
    """Ends the invocation from any thread, if the framework supports it."""
    action: ActionTaken = "none"
    verdict: Verdict | None = None
    """Why it was halted, or would have been."""
    sentence = ""
    """The halt sentence of `verdict`."""
    raised = False
    """True if the halt is raised as an exception."""
    killed = False
    outcome_frozen = False
    """True when its outcome is final, although the framework has not returned yet."""
    finished = False

    def __init__(
        self,
        services: Services,
        invocation: Invocation,
        policy: Policy,
        trees: tuple[Budget, ...],
    ) -> None:
        """Create the state with nothing used."""
        self.services = services
        self.invocation = invocation
        self.started = services.now()
        self.budget = Budget(policy, self.started)
        self.tally = self.budget.tally
        self.trees = trees
        """The enclosing budget trees, innermost first."""
        self.budgets = Budgets(self.budget, trees)
        """Every budget that its usage counts toward and that limits it."""
        self.refusals: dict[str, tuple[Breach, Budget]] = {}
        """The last refused tool call of each limit: it halts the agent after the turn."""
        has_loop_limit = any(kind.name in LOOP_LIMITS for kind, _ in policy.limits.active)
        self.loops = LoopState() if has_loop_limit else None

    @property
    def policy(self) -> Policy:
        """The policy that applies now; a person may have extended its limits."""
        return self.budget.policy

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
        """Update the elapsed time of every budget, before a decision."""
        self.budgets.measure_time(self.services.now())

    def decide(
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
            replace(breach, subject=loops.culprit_tool(breach.limit))
            if breach.reason == LOOP_DETECTED_STOP_REASON
            else breach
            for breach in verdict.breaches
        )
        return replace(verdict, breaches=breaches)

    def outermost_in(self) -> tuple[Budget, ...]:
        """Return the enclosing trees in which no other running invocation encloses this one."""
        return self.trees

    def halt(self, verdict: Verdict, action: ActionTaken) -> None:
        """Record and publish the halt; a would-be halt is published once."""
        if self.action == "observed" and action == "observed":
            return
        self.raised = action == "raised"
        # A kill is not a limit, and whatever counts limits must not count it.
        action = "killed" if verdict.reason == KILLED_STOP_REASON else action
        self.action = action
        self.verdict = verdict
        # Composed here once, because everything that reports it runs deeper in the stack.
        self.sentence = for_operator(self.invocation.agent, verdict, action)
        self.services.observers.publish(
            events.Halt(
                invocation=self.invocation,
                reason=verdict.reason,
                breaches=verdict.breaches,
                action=action,
                sentence=self.sentence,
            )
        )

    def freeze_outcome(self) -> bool:
        """Make the outcome final, so that no later kill changes it; True if killed before."""
        with self.services.lock:
            self.outcome_frozen = True
            return self.killed
