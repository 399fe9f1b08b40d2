"""One active invocation, from its start to its `Stop`; and groups of agents that run together."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from otel_limits.core import events
from otel_limits.core.events import Invocation, Stop
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.limits import LOOP_LIMITS, Level, Limits
from otel_limits.core.origins import EXTENSION
from otel_limits.core.policy import Overrides
from otel_limits.runs.call_tracker import CallTracker
from otel_limits.runs.scope import Scope
from otel_limits.runs.time_limit import TimeLimit
from otel_limits.runs.tools import ToolCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_limits.core.loops import Call
    from otel_limits.core.policy import Policy, Verdict
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.scope import Services
    from otel_limits.runs.spans import Spans

FIRST_REPETITION: Final = {**dict.fromkeys(LOOP_LIMITS, 2), "max_no_progress_turns": 1}
"""The lowest count of each loop limit that means a repetition: one call is none."""


class Group:
    """Agents that run together without a parent agent, such as a graph."""

    __slots__ = ("finished", "invocation", "lock", "parent", "policy", "run", "trees")

    def __init__(
        self, name: str, policy: Policy, trees: tuple[Budget, ...], parent: Run | Group | None
    ) -> None:
        """Create a group within these budget trees, innermost first."""
        identity = uuid4().hex
        # The root is passed on, so that all rows of a tree have one ID.
        root_id = parent.invocation.root_id if parent else identity
        self.invocation: Invocation = Invocation(agent=name, id=identity, root_id=root_id)
        self.policy = policy
        self.trees = trees
        self.parent = parent
        self.run: Run | None = None
        """The invocation of its members' model calls without an agent, once there is one."""
        self.lock = threading.RLock()
        """Held while that one starts, so that concurrent threads start only one."""
        self.finished = False


class Run(Scope):
    """One active invocation. Everything is counted through it, its `calls` and its `tools`."""

    state: Any = None
    """State that the framework's binding stores with the run."""
    task_scope: Any = None
    """The tool call or the node that started it, if any: a `tree.TaskScope`."""
    reason: str | None = None
    """Stop reason of the last leg that ended."""
    released = False
    """True once it is no longer followed, because otel-limits was disabled."""
    _nudged = False

    def __init__(  # noqa: PLR0913  what the registry knows when an invocation starts
        self,
        services: Services,
        invocation: Invocation,
        policy: Policy,
        trees: tuple[Budget, ...],
        parent: Run | Group | None,
        *,
        spans: Spans[Run],
        forget: Callable[[Run], bool],
        unsampled: bool,
        direct: bool = False,
    ) -> None:
        """Create an invocation with nothing used; use `RunRegistry.start`."""
        super().__init__(services, invocation, policy, trees)
        self.parent = parent
        """The invocation or the group that started it."""
        self.spans = spans
        self.unsampled = unsampled
        """True if its span did not reach the span processor."""
        self.is_direct = direct
        """True for a request without an agent loop, which has no span."""
        self.tools = ToolCalls(self)
        self.calls = CallTracker(self, self.tools, spans)
        self.started_wall = time.time()
        self.time_limit = TimeLimit(self, self.check_limits)
        self._forget = forget
        self._warned: set[tuple[str, float]] = set()
        self.halted: dict[str, tuple[Run, Verdict]] = {}
        """The halts of agents that it called, directly or not, by the operator's sentence."""
        self.has_handed_off = False
        """True while another agent continues its conversation, and so gives its last answer."""

    # --- events -----------------------------------------------------------------------------------

    def leg(self) -> None:
        """Start a leg: iterations start again."""
        self.reset_iterations()
        self.reason = None
        if self.loops is not None:
            self.loops.leg()
            self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        # A would-be halt remains the outcome of the whole invocation, and is published once.
        if self.action != "observed":
            self.action, self.verdict, self.sentence = "none", None, ""
            self.raised = False

    @property
    def is_outermost_loop(self) -> bool:
        """True unless code of another invocation started it, such as a node of a graph.

        An agent that a tool calls answers the tool, so nothing takes its answer for another's.
        """
        around, scope = self.parent, self.task_scope
        return around is None or (scope is not None and scope.owner is around)

    def outermost_in(self) -> tuple[Budget, ...]:
        """Return the enclosing trees in which no other running invocation encloses this one."""
        enclosed: set[int] = set()
        around = self.parent
        while around is not None:
            if isinstance(around, Run) and not (around.finished or around.has_handed_off):
                enclosed.update(map(id, around.trees))
            around = around.parent
        return tuple(tree for tree in self.trees if id(tree) not in enclosed)

    def note_halt(self, sentence: str, verdict: Verdict) -> None:
        """Note a sentence that a tool of an enclosing invocation may return to its model."""
        around = self.parent
        while around is not None:
            if isinstance(around, Run):
                around.halted[sentence] = (self, verdict)
            around = around.parent

    def extend(self, more: Limits) -> None:
        """Raise the limits to what is used now plus `more`."""
        self.measure_time()
        # Relative to the usage rather than the old cap, which may be exceeded by far.
        more = more.extended_by(self.tally, self.tools.by_tool)
        self.budget.policy = self.policy.overridden_by(Overrides(limits=more, origin=EXTENSION))
        # Earlier refusals would remain breaches forever, and end the extended invocation.
        self.refusals.clear()
        self.time_limit.start()

    def reset_iterations(self) -> None:
        """Restart iterations: a leg began, or the context overflowed and was reduced."""
        self.tally.iterations = 0

    def cycle(self) -> None:
        """Count an event loop cycle that begins."""
        self.tally.cycles += 1
        self.services.observers.publish(events.Cycle(invocation=self.invocation))

    def turn(self, call: InFlightCall | None = None) -> None:
        """Count a model response that was accepted into the conversation.

        Args:
            call: Its call, if the loop may have several in flight.
        """
        number = self.calls.on_response_accepted(call)
        self.services.observers.publish(events.Turn(invocation=self.invocation, number=number))

    def check_loops(self, calls: Sequence[Call], text: str | None) -> None:
        """Compare a finished turn to earlier ones."""
        if self.loops is None:
            return
        self.loops.turn(calls, text)
        self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        self.tally.identical_tool_calls = self.loops.identical_tool_calls
        self.tally.repeated_tool_cycles = self.loops.repeated_tool_cycles
        self.tally.no_progress_turns = self.loops.no_progress_turns

    # --- decisions --------------------------------------------------------------------------------

    def check_limits(self) -> Verdict | None:
        """Return why the agent must end, by what it has used; `None` if it may continue."""
        self.calls.unreported.settle()
        self.measure_time()
        return self.with_subjects(self.decide())

    def levels(self) -> tuple[Level, ...]:
        """Return the utilization of each limit."""
        self.measure_time()
        return self.budgets.levels()

    def warn(self) -> tuple[events.LimitWarning, ...]:
        """Publish a warning for each soft threshold that was newly crossed."""
        if not self.policy.warn_at:
            return ()
        crossed = [
            events.LimitWarning(invocation=self.invocation, threshold=threshold, level=level)
            for level in self.levels()
            for threshold in self.policy.warn_at
            if level.ratio >= threshold and (level.limit, threshold) not in self._warned
        ]
        for warning in crossed:
            self._warned.add((warning.level.limit, warning.threshold))
            self.services.observers.publish(warning)
        return tuple(crossed)

    def nudge(self) -> int | None:
        """Return which call of the turn to warn the model about, one short of a loop limit; once.

        It is the position among the calls last given to `check_loops`.
        """
        if self._nudged or self.loops is None or self.policy.nudge_disabled:
            return None
        for kind, cap in self.policy.limits.active:
            if kind.name not in LOOP_LIMITS or cap - 1 < FIRST_REPETITION[kind.name]:
                continue
            # One short of the cap, so that one turn is left to change course.
            if kind.observed(self.tally) == cap - 1:
                self._nudged = True
                return self.loops.position(kind.name)
        return None

    def stop(self, reason: str) -> Stop:
        """Return how the invocation ends, or would end now."""
        self.measure_time()
        return Stop(
            reason=reason,
            action=self.action,
            breach=self.verdict.breach if self.verdict else None,
            breaches=self.verdict.breaches if self.verdict else (),
            sentence=self.sentence,
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
            raised=self.raised,
            invocation=self.invocation,
        )

    def finish(self, reason: str) -> None:
        """End the invocation: settle open calls and publish its `Stop`, once."""
        if not self._forget(self):
            return
        # Before the `Stop` is made, which includes the usage of calls that are still open.
        self._close()
        self.services.observers.publish_stop(self.stop(reason))

    @suppress_errors("runs")
    def _close(self) -> None:
        """Settle open calls; an error here must not prevent the `Stop`."""
        INTERNAL_ERRORS.report_deferred()
        self.time_limit.cancel()
        self.calls.settle_all()
