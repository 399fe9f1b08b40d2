"""One live invocation: its tally, and how it is going to end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core import events
from otel_limits.core.events import ActionTaken, Invocation, Stop
from otel_limits.core.halts import halt_sentence
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.limits import (
    LOOP_DETECTED_STOP_REASON,
    LOOP_LIMITS,
    NO_LIMITS,
    Breach,
    Level,
    Limits,
)
from otel_limits.core.loops import Call, LoopState
from otel_limits.core.origins import EXTENSION
from otel_limits.core.policy import KILLED, Policy, Verdict, verdict_of
from otel_limits.runs.budget import Budget, Budgets
from otel_limits.runs.calls import CallTracker
from otel_limits.runs.deadlines import TimeLimit
from otel_limits.runs.tools import ToolCalls
from otel_limits.runs.tree import Group, current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_limits.runs.registry import RunRegistry

FIRST_REPETITION: Final = {**dict.fromkeys(LOOP_LIMITS, 2), "max_no_progress_turns": 1}
"""The count from which on something has been repeated: one call is not."""


class Run:
    """One live invocation: its tally, and how it is going to end.

    Its methods, and those of its `calls` and `tools`, are the only way in which anything is
    counted.
    """

    # The defaults stand on the class: most of these are never set in the life of an invocation.
    state: Any = None
    """What the framework's binding keeps of it."""
    cancel: Callable[[Verdict], None] | None = None
    """Ends the invocation from any thread, where the framework can."""
    reason: str | None = None
    """Stop reason of the last leg that came to an end."""
    action: ActionTaken = "none"
    verdict: Verdict | None = None
    """Why it was halted, or would have been."""
    sentence = ""
    """The sentence of that."""
    killed = False
    outcome_frozen = False
    """True when it is settled how it ends, although its framework is not done with it yet."""
    finished = False
    released = False
    """True when it is not followed any more, as nothing is."""
    _nudged = False

    def __init__(
        self,
        runs: RunRegistry,
        invocation: Invocation,
        policy: Policy,
        trees: tuple[Budget, ...],
        *,
        unsampled: bool,
    ) -> None:
        """Begin with an empty tally; `Runs.start` is the way to make one."""
        self.services = runs
        self.invocation = invocation
        self.parent: Run | Group | None = current()
        """What started it: a live invocation, or a group of agents."""
        self.unsampled = unsampled
        """True when its span did not reach the span processor."""
        self.started = runs.now()
        self.budget = Budget(policy, self.started)
        self.tally = self.budget.tally
        self.trees = trees
        """The budget trees that it stands in: the innermost is the first."""
        self.budgets = Budgets(self.budget, trees)
        """What everything that it uses is counted in, and each of which binds it."""
        self.calls = CallTracker(self)
        self.tools = ToolCalls(self)
        self.loops = LoopState() if has_loop_limit(policy.limits) else None
        self.started_wall = time.time()
        self.time_limit = TimeLimit(self)
        self._warned: set[tuple[str, float]] = set()

    @property
    def policy(self) -> Policy:
        """What applies to it now; a human may have extended its limits."""
        return self.budget.policy

    @property
    def is_direct(self) -> bool:
        """True for a request without the loop: of what is not unsampled, it alone has no span."""
        return not self.unsampled and self.invocation.span_id is None

    # --- what happens -----------------------------------------------------------------------------

    def leg(self) -> None:
        """A pass of the agent loop begins: iterations start again."""
        self.reset_iterations()
        self.reason = None
        if self.loops is not None:
            self.loops.leg()
            self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        # What was only observed stays the answer for the whole invocation, and is told once.
        if self.action != "observed":
            self.action, self.verdict = "none", None

    def extend(self, more: Limits) -> None:
        """Let the invocation use that much more than it has used by now."""
        self.measure_time()
        # Counted from what is used by now and not from the old cap, which may have been passed by
        # far.
        more = more.extended_by(self.tally, self.tools.by_tool)
        self.budget.policy = self.policy.merged_over(more, None, NO_LIMITS, EXTENSION)
        # They would be breaches for ever, and end what was just extended.
        self.tools.refusals.clear()
        self.time_limit.start()

    def reset_iterations(self) -> None:
        """The context overflowed and was reduced: iterations start again."""
        self.tally.iterations = 0

    def cycle(self) -> None:
        """An event loop cycle begins."""
        self.tally.cycles += 1
        self.services.observers.publish(events.Cycle(invocation=self.invocation))

    def turn(self) -> None:
        """A model response was taken into the conversation."""
        # Of this agent alone, whose loop is one task; a tree is counted by many at once.
        self.tally.iterations += 1
        self.calls.on_response_accepted()
        self.services.observers.publish(
            events.Turn(invocation=self.invocation, number=self.tally.turns)
        )

    def check_loops(self, calls: Sequence[Call], text: str | None) -> None:
        """A turn is over: look whether it repeats earlier ones."""
        if self.loops is None:
            return
        self.loops.turn(calls, text)
        self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        self.tally.identical_tool_calls = self.loops.identical_tool_calls
        self.tally.repeated_tool_cycles = self.loops.repeated_tool_cycles
        self.tally.no_progress_turns = self.loops.no_progress_turns

    # --- what follows from it ---------------------------------------------------------------------

    def check_limits(self) -> Verdict | None:
        """Decide by what was used whether the agent may go on; `None` when it may."""
        self.calls.unreported.settle()
        self.measure_time()
        return self.with_subjects(self.decide())

    def decide(
        self, *, with_reserved: bool = False, forces_output: bool = False, side: bool = False
    ) -> Verdict | None:
        """Look at every budget as it is; the time is what was measured last.

        Args:
            with_reserved: What model calls under way have reserved counts as used.
            forces_output: Leave out limits that yield to a call that only forces the output.
            side: Leave out what a call beside the agent's loop cannot pass. It may come after
                the end, which only binds it to the trees that live on.
        """
        # Before any limit, and whatever the action: somebody pressed a button.
        if self.killed and not (side and self.finished):
            return KILLED
        reached = [] if side else self.tools.reached()
        for budget in self.budgets:
            reached += budget.reached(
                with_reserved=with_reserved, forces_output=forces_output, side=side
            )
        return verdict_of(reached)

    def levels(self) -> tuple[Level, ...]:
        """How much of each limit has been used."""
        self.measure_time()
        return self.budgets.levels()

    def warn(self) -> tuple[events.LimitWarning, ...]:
        """Tell each soft threshold that was passed since the last time."""
        if not self.policy.warn_at:
            return ()
        passed = [
            events.LimitWarning(invocation=self.invocation, threshold=threshold, level=level)
            for level in self.levels()
            for threshold in self.policy.warn_at
            if level.ratio >= threshold and (level.limit, threshold) not in self._warned
        ]
        for warning in passed:
            self._warned.add((warning.level.limit, warning.threshold))
            self.services.observers.publish(warning)
        return tuple(passed)

    def nudge(self) -> int | None:
        """Say which call of the turn repeats earlier ones, when the model is to be told, once.

        It is its position among the calls that `repeat` was told of.
        """
        if self._nudged or self.loops is None or self.policy.nudge_disabled:
            return None
        for kind, cap in self.policy.limits.active:
            if kind.name not in LOOP_LIMITS or cap - 1 < FIRST_REPETITION[kind.name]:
                continue
            # One before the cap, so that there is one turn left in which to do better.
            if kind.observed(self.tally) == cap - 1:
                self._nudged = True
                return self.loops.position(kind.name)
        return None

    def halt(self, verdict: Verdict, action: ActionTaken) -> None:
        """The agent is stopped because of `verdict`; an observed one is told once."""
        if self.action == "observed" and action == "observed":
            return
        self.action = action
        self.verdict = verdict
        # Once, and not by each who tells it: they are called deeper down in the stack.
        self.sentence = halt_sentence(self.invocation.agent, verdict.reason, action, verdict.breach)
        self.services.observers.publish(halt_of(self, verdict))

    def stop(self, reason: str) -> Stop:
        """How the invocation ends, or would end now."""
        self.measure_time()
        return Stop(
            reason=reason,
            action=self.action,
            breach=self.verdict.breach if self.verdict else None,
            breaches=self.verdict.breaches if self.verdict else (),
            turns=self.tally.turns,
            usage=self.tally.usage,
            agent=self.invocation.agent,
            trace_id=self.invocation.trace_id,
            invocation_id=self.invocation.id,
            cycles=self.tally.cycles,
            model_calls=self.tally.model_calls,
            started=self.started_wall,
            seconds=self.services.now() - self.started,
            tool_calls=self.tally.tool_calls,
            levels=self.budgets.levels(),
            cost=self.tally.cost,
            unpriced_calls=self.tally.unpriced_calls,
            invocation=self.invocation,
        )

    def finish(self, reason: str) -> None:
        """The invocation is over: settle what is open, tell it once, and forget it."""
        if not self.services.forget(self):
            return
        # Before the stop is made, which sums up what the calls still open turn out to have used.
        self._close()
        self.services.observers.publish_stop(self.stop(reason))

    # --- how --------------------------------------------------------------------------------------

    @suppress_errors("runs")
    def _close(self) -> None:
        """Settle what is open; a fault here must not keep the stop from being told."""
        INTERNAL_ERRORS.report_deferred()
        self.time_limit.cancel()
        self.calls.settle_all()

    def measure_time(self) -> None:
        """Note how late it is, before anybody decides."""
        self.budgets.measure_time(self.services.now())

    def with_subjects(self, verdict: Verdict | None) -> Verdict | None:
        """Name the tools that breaches are about, which takes longer than a decision may."""
        if verdict is None or verdict.reason != LOOP_DETECTED_STOP_REASON:
            return verdict
        breaches = tuple(self._with_subject(breach) for breach in verdict.breaches)
        return replace(verdict, breaches=breaches)

    def _with_subject(self, breach: Breach) -> Breach:
        if breach.reason == LOOP_DETECTED_STOP_REASON and self.loops is not None:
            return replace(breach, subject=self.loops.culprit_tool(breach.limit))
        return breach


def halt_of(run: Run, verdict: Verdict) -> events.Halt:
    """Make the event of what was just done to a run."""
    return events.Halt(
        invocation=run.invocation,
        reason=verdict.reason,
        breaches=verdict.breaches,
        action=run.action,
        sentence=run.sentence,
    )


def has_loop_limit(limits: Limits) -> bool:
    """Tell whether repetitions have to be followed at all."""
    return any(kind.name in LOOP_LIMITS for kind, _ in limits.active)
