"""An invocation from its start to its `Stop`, and the groups of agents that run together."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core import events
from otel_limits.core.events import CUT_SHORT, Invocation, Stop
from otel_limits.core.halt_texts import for_operator, nudge_note
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    KILLED_STOP_REASON,
    LOOP_LIMITS,
    REPEATED_FAILURES,
    Level,
    Limits,
    without_prefix,
)
from otel_limits.runs.account import Account, Handoffs
from otel_limits.runs.call_tracker import CallTracker
from otel_limits.runs.conversations import Conversation
from otel_limits.runs.failure_rows import OWN_CAPS, UNDECIDED, failure_of_error, failure_of_reason
from otel_limits.runs.tool_calls import ADMITTED, ToolCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from otel_limits.core.events import ActionTaken
    from otel_limits.core.loops import Call
    from otel_limits.core.policy import Overrides, Verdict
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.failure_rows import Failure
    from otel_limits.runs.services import Services
    from otel_limits.runs.spans import Spans
    from otel_limits.runs.tasks import Task

FIRST_REPETITION: Final = {
    **dict.fromkeys(LOOP_LIMITS, 2),
    "max_no_progress_turns": 1,
    "max_consecutive_handoffs": math.inf,  # the model that would be warned is another agent's
    REPEATED_FAILURES: math.inf,  # its model repeats nothing
}
"""The lowest count of each loop limit that means a repetition: one call is none."""


REPORTED_FAILURES: Final = 10
"""Failures in a row that are reported if no limit is set."""


class Run(Account):
    """One active invocation, from its start to its `Stop`.

    Everything is counted through it, its `calls` and its `tools`.
    """

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
    synthetic = False
    """True if the halt has added a message that no model wrote."""
    outcome_frozen = False
    """True when its outcome is final, although the framework has not returned yet."""
    state: Any = None
    """State that the framework's binding stores with the run."""
    task_scope: TaskScope | None = None
    """The tool call or the node that started it, if any."""
    reason: str | None = None
    """Stop reason of the last leg that ended."""
    released = False
    """True once it is no longer followed, because otel-limits was disabled."""
    evicted = False
    """True if it was removed from the active invocations, although it has not ended."""
    repeated_failures = 0
    """Its number among the failures in a row, once it has failed."""
    _is_judged = False

    def __init__(  # noqa: PLR0913  what the registry knows when an invocation starts
        self,
        services: Services,
        invocation: Invocation,
        task: Task,
        trees: tuple[Budget, ...],
        parent: Run | Group | None,
        *,
        spans: Spans[Run],
        forget: Callable[[Run], bool],
        unsampled: bool,
        direct: bool = False,
    ) -> None:
        """Create an invocation with nothing used; use `RunRegistry.start`."""
        handoffs = parent.handoffs if parent else Handoffs(task.handoffs)
        super().__init__(services, invocation, task, trees, handoffs)
        self.started = services.now()
        self.parent = parent
        """The invocation or the group that started it."""
        self.spans = spans
        self.unsampled = unsampled
        """True if its span did not reach the span processor."""
        self.is_direct = direct
        """True for a request without an agent loop, which has no span."""
        self.tools = ToolCalls(self)
        self.calls = CallTracker(self, self.tools, spans, self.trees_to_answer)
        self.started_wall = time.time()
        self.time_limit = TimeLimit(self)
        self._forget = forget
        self._find_failures()
        self.halted: dict[str, tuple[Run, Verdict]] = {}
        """The halts of agents that it called, directly or not, by the operator's sentence."""
        self.has_handed_off = False
        """True while another agent continues its conversation, and so gives its last answer."""

    # --- cycles, legs and turns -------------------------------------------------------------------

    def cycle(self) -> None:
        """Count an event loop cycle that begins."""
        self.tally.cycles += 1
        self.services.observers.publish(events.Cycle(invocation=self.invocation))

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
            self.synthetic = False

    def reset_iterations(self) -> None:
        """Restart iterations: a leg began, or the context overflowed and was reduced."""
        self.tally.iterations = 0

    def count_turn(self, call: InFlightCall | None = None) -> None:
        """Count a model response that was accepted into the conversation.

        Args:
            call: Its call, if the loop may have several in flight.
        """
        number = self.calls.count_turn(call)
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
        self.tally.consecutive_tool_failures = self.loops.consecutive_tool_failures
        self.tally.consecutive_failures_per_tool = self.loops.failures_by_tool

    # --- decisions --------------------------------------------------------------------------------

    def check_limits(self) -> Verdict | None:
        """Return why the agent must end, by what it has used; `None` if it may continue.

        A model call has its own check, with what it would use: `CallTracker.admit_by_limits`.
        """
        self.calls.unreported.settle()
        self.measure_time()
        return self.with_subjects(self.reached_limits())

    def warn(self) -> tuple[events.LimitWarning, ...]:
        """Publish a warning for each soft threshold that was newly crossed."""
        if not self.policy.warn_at:
            return ()
        crossed = [
            events.LimitWarning(invocation=self.invocation, threshold=threshold, level=level)
            for level in self.levels()
            for threshold in self.policy.warn_at
            if level.ratio >= threshold and (level.limit, threshold) not in self._warned_of(level)
        ]
        for warning in crossed:
            self._warned_of(warning.level).add((warning.level.limit, warning.threshold))
            self.services.observers.publish(warning)
        return tuple(crossed)

    def _warned_of(self, level: Level) -> set[tuple[str, float]]:
        """Return the thresholds that were reported: of a conversation once, not per message."""
        if level.limit.startswith(CONVERSATION_PREFIX):
            for each in self._conversations():
                return each.warned
        return self.task.warned

    def nudge(self) -> tuple[int, str] | None:
        """Return which call of the turn to warn the model about, one short of a loop limit; once.

        Returns:
            The position among the calls last given to `check_loops`, and the note for the model.
        """
        if self.task.has_nudged or self.loops is None or self.policy.nudge_disabled:
            return None
        for kind, cap in self.policy.limits.active:
            if kind.name not in LOOP_LIMITS or cap - 1 < FIRST_REPETITION[kind.name]:
                continue
            # One short of the cap, so that one turn is left to change course.
            if kind.observed(self.tally) == cap - 1:
                self.task.has_nudged = True
                return self.loops.position(kind.name, kind.subject), nudge_note(kind.name)
        return None

    # --- halts ------------------------------------------------------------------------------------

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

    @property
    def ending_halt(self) -> Verdict | None:
        """The halt that ends it, if one does."""
        return self.verdict if self.action in CUT_SHORT else None

    def freeze_outcome(self) -> bool:
        """Make the outcome final, so that no later kill changes it; True if killed before."""
        with self.services.lock:
            self.outcome_frozen = True
            return self.killed

    def note_halt(self, sentence: str, verdict: Verdict) -> None:
        """Note a sentence that a tool of an enclosing invocation may return to its model."""
        around = self.parent
        while around is not None:
            if isinstance(around, Run):
                around.halted[sentence] = (self, verdict)
            around = around.parent

    # --- the last answer of a tree ----------------------------------------------------------------

    @property
    def is_outermost_loop(self) -> bool:
        """True unless code of another invocation started it, such as a node of a graph.

        An agent that a tool calls answers the tool, so nothing takes its answer for another's.
        """
        around, scope = self.parent, self.task_scope
        return around is None or (scope is not None and scope.owner is around)

    @property
    def answers_for_tree(self) -> bool:
        """True if it would write the last answer of a tree that is exhausted."""
        default = self.budgets.unpriced_default
        return any(
            any(tree.reached(with_reserved=True, unpriced_default=default))
            for tree in self.trees_to_answer()
        )

    def trees_to_answer(self) -> tuple[Budget, ...]:
        """Return the enclosing trees whose last answer this invocation would write.

        It has made a turn, and no other running invocation encloses it. Or it is the agent with
        which the tree began, such as a supervisor, and what encloses it only calls agents, as a
        graph does.
        """
        enclosed: set[int] = set()
        called: set[int] = set()
        around = self.parent
        while around is not None:
            if isinstance(around, Run) and not (around.finished or around.has_handed_off):
                trees = enclosed if around.tally.turns else called
                trees.update(map(id, around.trees))
            around = around.parent
        name = self.invocation.agent
        return tuple(
            tree
            for tree in self.trees
            if id(tree) not in enclosed
            and (
                tree.leader == name
                if id(tree) in called
                else self.tally.turns or tree.is_of_conversation  # it has turns of earlier ones
            )
        )

    # --- questions to a person --------------------------------------------------------------------

    def may_ask(self, verdict: Verdict) -> bool:
        """Claim the question about a limit. A conversation has one, not one per message."""
        breach = verdict.breach
        if breach is None or not breach.limit.startswith(CONVERSATION_PREFIX):
            return True
        with self.services.lock:
            for each in self._conversations():
                cap = dict(each.policy.limits.items()).get(without_prefix(breach.limit))
                if cap == breach.cap and each.asked_by in ("", self.invocation.id):
                    each.asked_by = self.invocation.id
                    return True
        return False

    def extend(self, more: Overrides) -> None:
        """Raise the limits to what is used now plus `more`."""
        self.measure_time()
        self.task.extend(more.limits)
        self.extend_conversation(more.conversation)
        # Earlier refusals would remain breaches forever, and end the extended invocation.
        self.refusals.clear()
        self.tools.end_turn([ADMITTED])
        self.time_limit.start()

    def extend_conversation(self, more: Limits) -> None:
        """Raise the limits of the conversation about which a person was asked."""
        if more.active:
            with self.services.lock:
                for each in self._conversations():
                    if each.asked_by:
                        each.extend(more)

    def _conversations(self) -> Iterator[Conversation]:
        return (each for each in self.trees if isinstance(each, Conversation))

    def await_answer(self, interrupts: Iterable[str]) -> None:
        """Keep its task until an interrupt, with which it ends, is answered.

        Args:
            interrupts: A key of each interrupt, which is also known when the answer comes.
        """
        self.task.handoffs = self.handoffs.count
        self.task.input_hash()  # only the hash is kept
        self.services.interrupted.keep(interrupts, self.task)

    # --- failures in a row ------------------------------------------------------------------------

    @property
    def _failure_owner(self) -> str:
        # A conversation includes the agents that another one calls in it.
        return f"{self.invocation.conversation} {self.invocation.agent}"

    @suppress_errors("runs")
    def _find_failures(self) -> None:
        """Note the failures in a row before it that began with its input."""
        self.tally.repeated_failures = 0
        row = self.services.failures.find(self._failure_owner)
        if row is not None and row.given == self.task.input_hash():
            self.tally.repeated_failures, self.last_failure = row.count, row.failure.text

    @suppress_errors("runs")
    def judge(self, reason: str, error: BaseException | None, by: Run | None = None) -> None:
        """Add its failure to those in a row, or end these by its success, once.

        Args:
            reason: The framework's stop reason.
            error: The exception that it ends with.
            by: The invocation of the agent that has ended its conversation; by default its own.
        """
        by = by or self
        if self._is_judged or self.released or by.is_refused:
            return
        self._is_judged = True
        failure = by.failure(reason, error)
        if failure is not None and (given := self.task.input_hash()):
            self._add_failure(given, failure)
        elif failure is None and reason not in UNDECIDED:
            self.services.failures.end(self._failure_owner)

    @property
    def is_refused(self) -> bool:
        """True if failures in a row refused it, or its conversation, before its first call."""
        breaches = self.ending_halt.breaches if self.ending_halt else ()
        return any(breach.limit == REPEATED_FAILURES for breach in breaches) or any(
            breach.limit.startswith(CONVERSATION_PREFIX) and not self.part.model_calls
            for breach in breaches
        )

    def failure(self, reason: str, error: BaseException | None) -> Failure | None:
        """Return how it has failed: by its halt, an exception, or a cap of the framework."""
        if (halt := self.ending_halt) is not None:
            return failure_of_reason(halt.reason)
        if error is not None:
            return failure_of_error(error)
        is_failure = reason == "error" or reason.startswith(OWN_CAPS)
        return failure_of_reason(reason) if is_failure else None

    def _add_failure(self, given: str, failure: Failure) -> None:
        count = self.services.failures.add(self._failure_owner, given, failure)
        self.repeated_failures = count
        if count == REPORTED_FAILURES and self.policy.limits.max_repeated_failures is None:
            self.services.observers.publish(
                events.RepeatedFailures(
                    invocation=self.invocation, failures=count, error=failure.text
                )
            )

    # --- the end ----------------------------------------------------------------------------------

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

    def stop(self, reason: str) -> Stop:
        """Return how the invocation ends, or would end now."""
        self.measure_time()
        part = self.part
        return Stop(
            reason=reason,
            action=self.action,
            breach=self.verdict.breach if self.verdict else None,
            breaches=self.verdict.breaches if self.verdict else (),
            sentence=self.sentence,
            turns=part.turns,
            usage=part.usage,
            agent=self.invocation.agent,
            trace_id=self.invocation.trace_id,
            invocation_id=self.invocation.id,
            cycles=part.cycles,
            model_calls=part.model_calls,
            started=self.started_wall,
            seconds=self.services.now() - self.started,
            tool_calls=part.tool_calls,
            levels=self.budgets.levels(),
            cost=part.cost,
            unpriced_calls=part.unpriced_calls,
            raised=self.raised,
            synthetic=self.synthetic,
            invocation=self.invocation,
            task=self.task.usage,
            repeated_failures=self.repeated_failures,
        )


# --- groups of agents -----------------------------------------------------------------------------


class Group:
    """Agents that run together without a parent agent, such as a graph."""

    __slots__ = (
        "finished",
        "handoffs",
        "invocation",
        "lock",
        "parent",
        "policy",
        "run",
        "task",
        "trees",
    )

    def __init__(
        self,
        name: str,
        identity: str,
        task: Task,
        trees: tuple[Budget, ...],
        parent: Run | Group | None,
        conversation: str = "",
    ) -> None:
        """Create a group within these budget trees, innermost first."""
        # The root is passed on, so that all rows of a tree have one ID.
        root_id = parent.invocation.root_id if parent else identity
        self.invocation: Invocation = Invocation(
            agent=name,
            id=identity,
            root_id=root_id,
            task_id=task.id,
            conversation=conversation,
        )
        self.task = task
        """Has the tree that begins with the group, if one does, and its hand-offs."""
        self.policy = task.budget.policy
        self.trees = trees
        self.parent = parent
        self.handoffs: Handoffs = parent.handoffs if parent else Handoffs(task.handoffs)
        self.run: Run | None = None
        """The invocation of its members' model calls without an agent, once there is one."""
        self.lock = threading.RLock()
        """Held while that one starts, so that concurrent threads start only one."""
        self.finished = False


# --- tool calls and nodes -------------------------------------------------------------------------


class TaskScope:
    """A running tool call or node, as seen by the tasks and threads that it starts."""

    __slots__ = ("has_ended", "outer", "owner")

    def __init__(self, owner: Run | Group, outer: TaskScope | None) -> None:
        """Create the scope of a tool call or node, within that of another agent, if any."""
        self.owner = owner
        self.outer = outer
        self.has_ended = False
        """Stays false if it is aborted: the end of an abandoned thread is not seen."""


# --- time -----------------------------------------------------------------------------------------


class TimeLimit:
    """The next deadline of one invocation."""

    def __init__(self, run: Run) -> None:
        """Create a time limit that is not running yet."""
        self._run = run
        self._number: int | None = None
        self._observed_until = -math.inf
        """Deadlines until this moment have been published as would-be halts."""

    @suppress_errors("deadlines")
    def start(self) -> None:
        """Schedule the deadline; call again after a limit was extended."""
        self.cancel()
        run, services = self._run, self._run.services
        # Without those already published as would-be halts, which would be published forever.
        ends = [
            end
            for budget in run.budgets
            if (seconds := budget.policy.limits.max_duration_seconds) is not None
            and (end := _end(budget.started, seconds)) > self._observed_until
        ]
        if ends and run.cancel is not None:
            self._number = services.clock.schedule(min(ends), self._time_is_up)

    def cancel(self) -> None:
        """Cancel the deadline."""
        # Reset first, because the deadline's own callback gets here as well.
        number, self._number = self._number, None
        if number is not None:
            self._run.services.clock.cancel(number)

    @suppress_errors("deadlines")
    def _time_is_up(self) -> None:
        # Checked again: a person may have extended the limit since the callback was due.
        run, verdict = self._run, self._run.check_limits()
        if verdict is None or run.cancel is None:
            return
        if verdict.action != "observe":
            run.cancel(verdict)
            return
        run.halt(verdict, "observed")  # halted now in enforcement, whatever it waits for
        self._observed_until = run.services.now()
        self.start()  # an enclosing tree may have a deadline that acts


def _end(started: float, seconds: float) -> float:
    """Return the first moment at which the elapsed time is `seconds`, despite rounding."""
    end = started + seconds
    return end if end - started >= seconds else math.nextafter(end, math.inf)
