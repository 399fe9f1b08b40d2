"""One active invocation from its start to its `Stop`: its decisions, model calls, tools and time.

Also the groups of agents that run together, and what all invocations share.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from otel_limits.core import events
from otel_limits.core.events import CUT_SHORT, CallKind, Invocation, ModelCall, Stop, ToolCall
from otel_limits.core.internal_errors import INTERNAL_ERRORS, report_suppressed, suppress_errors
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    KILLED_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    LOOP_LIMITS,
    MAX_TOOL_CALLS_STOP_REASON,
    REPEATED_FAILURES,
    Breach,
    Level,
    Limits,
    without_prefix,
)
from otel_limits.core.policy import KILLED, Reached, Verdict, verdict_of
from otel_limits.core.price import NO_QUOTE, Quote
from otel_limits.core.texts import FAILURE_LIMITS, for_operator, nudge_note
from otel_limits.core.usage import EXACT, NO_COST, Usage, UsageRecord
from otel_limits.runs.budget import ASSUMED_OUTPUT, Budgets, Reservation
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.conversations import Conversation, Conversations
from otel_limits.runs.dispatcher import EventDispatcher
from otel_limits.runs.failure_rows import (
    OWN_CAPS,
    UNDECIDED,
    FailureRows,
    failure_of_error,
    failure_of_reason,
)
from otel_limits.runs.tasks import InterruptedTasks
from otel_limits.usage.normaliser import combined, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from otel_limits.core.events import ActionTaken, ToolStatus
    from otel_limits.core.loops import Call, LoopState
    from otel_limits.core.policy import Overrides, Policy, Unpriced
    from otel_limits.core.price_lookup import Prices
    from otel_limits.core.terms import BillableCall
    from otel_limits.core.usage import Tally
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.failure_rows import Failure
    from otel_limits.runs.spans import Spans, UnreportedCall
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

NOTHING: Final = Reservation()
ONE_TURN: Final = Reservation(turns=1)
ONE_OF_SEVERAL: Final = Reservation(turns=1, iterations=1)
"""The turn of a call whose loop may have several in flight."""

MOST_UNREPORTED: Final = 1_000
"""Calls of one invocation that wait for other spans; beyond that the oldest is counted."""


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
        self.interrupted = InterruptedTasks(self.now, report=self._report_forgotten)
        self.failures = FailureRows(self.now)
        self.conversations = Conversations(self.now)

    def _report_forgotten(self, interrupts: int) -> None:
        self.observers.publish(events.TaskLost(cause="forgotten", interrupts=interrupts))

    def quote(self, call: BillableCall) -> Quote:
        """Return the price of a model call and its source; none for a call without tokens."""
        if self.prices is None or not call.usage.total:
            return NO_QUOTE
        try:
            return self.prices.quote(call)
        except Exception as error:  # noqa: BLE001  errors must not reach the agent
            report_suppressed("prices", error)
            return NO_QUOTE


class Handoffs:
    """Consecutive hand-offs in one tree of invocations, without another tool in between."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        """Begin with none, or with those before an interrupt."""
        self.count = count


class Account:
    """What an invocation has used, and whether it may go on, by its own limits and those around it.

    Its model calls, its tool calls and its time are counted in it, and decided on by it.
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
    outcome_frozen = False
    """True when its outcome is final, although the framework has not returned yet."""
    state: Any = None
    """State that the framework's binding stores with the run."""
    task_scope: Any = None
    """The tool call or the node that started it, if any: a `current.TaskScope`."""
    reason: str | None = None
    """Stop reason of the last leg that ended."""
    released = False
    """True once it is no longer followed, because otel-limits was disabled."""
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
        self.time_limit = TimeLimit(self, self.check_limits)
        self._forget = forget
        self._find_failures()
        self.halted: dict[str, tuple[Run, Verdict]] = {}
        """The halts of agents that it called, directly or not, by the operator's sentence."""
        self.has_handed_off = False
        """True while another agent continues its conversation, and so gives its last answer."""

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

    def note_halt(self, sentence: str, verdict: Verdict) -> None:
        """Note a sentence that a tool of an enclosing invocation may return to its model."""
        around = self.parent
        while around is not None:
            if isinstance(around, Run):
                around.halted[sentence] = (self, verdict)
            around = around.parent

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

    def extend_conversation(self, more: Limits) -> None:
        """Raise the limits of the conversation about which a person was asked."""
        if more.active:
            with self.services.lock:
                for each in self._conversations():
                    if each.asked_by:
                        each.extend(more)

    def _conversations(self) -> Iterator[Conversation]:
        return (each for each in self.trees if isinstance(each, Conversation))

    def extend(self, more: Overrides) -> None:
        """Raise the limits to what is used now plus `more`."""
        self.measure_time()
        self.task.extend(more.limits)
        self.extend_conversation(more.conversation)
        # Earlier refusals would remain breaches forever, and end the extended invocation.
        self.refusals.clear()
        self.tools.end_turn([ADMITTED])
        self.time_limit.start()

    def await_answer(self, interrupts: Iterable[str]) -> None:
        """Keep its task until an interrupt, with which it ends, is answered.

        Args:
            interrupts: A key of each interrupt, which is also known when the answer comes.
        """
        self.task.handoffs = self.handoffs.count
        self.task.input_hash()  # only the hash is kept
        self.services.interrupted.keep(interrupts, self.task)

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
        self.tally.consecutive_tool_failures = self.loops.consecutive_tool_failures
        self.tally.consecutive_failures_per_tool = self.loops.failures_by_tool

    # --- decisions --------------------------------------------------------------------------------

    def check_limits(self) -> Verdict | None:
        """Return why the agent must end, by what it has used; `None` if it may continue."""
        self.calls.unreported.settle()
        self.measure_time()
        return self.with_subjects(self.decide())

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
            invocation=self.invocation,
            task=self.task.usage,
            repeated_failures=self.repeated_failures,
        )

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
        breaches = self.verdict.breaches if self.verdict and self.action in CUT_SHORT else ()
        return any(breach.limit == REPEATED_FAILURES for breach in breaches) or any(
            breach.limit.startswith(CONVERSATION_PREFIX) and not self.part.model_calls
            for breach in breaches
        )

    def failure(self, reason: str, error: BaseException | None) -> Failure | None:
        """Return how it has failed: by its halt, an exception, or a cap of the framework."""
        if self.verdict is not None and self.action in CUT_SHORT:
            return failure_of_reason(self.verdict.reason)
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


# --- model calls ----------------------------------------------------------------------------------


class CallTracker:
    """Admits and counts the model calls of one invocation.

    A call is admitted, opened when it is sent, and settled when it ends; a call that is not sent
    after all is released. In between, its possible usage is reserved in the budget of the
    invocation and in every enclosing tree, so that no other call gets the same share.
    """

    def __init__(
        self,
        account: Account,
        tools: ToolCalls,
        spans: Spans[Any],
        trees_to_answer: Callable[[], Collection[Budget]],
    ) -> None:
        """Create a tracker without calls.

        Args:
            account: The invocation.
            tools: Its tool calls.
            spans: Spans of all invocations.
            trees_to_answer: Returns the trees whose last answer the invocation would write.
        """
        self._account = account
        self._tools = tools
        self._trees_to_answer = trees_to_answer
        self.in_flight: set[InFlightCall] = set()
        """The loop of most frameworks has one at most; tools and middleware may add others."""
        self._answered: set[InFlightCall] = set()
        """Concurrent calls whose responses are not accepted yet."""
        self._turn = NOTHING
        """The loop's reserved turn, until its response is accepted or it makes no more calls."""
        self._kept = NOTHING
        """The tokens of the loop's failed call, until it is retried."""
        self.unreported = UnreportedCalls(account, spans, self.settle)
        """Calls that only spans show, without their tokens."""

    def admit(
        self,
        call: InFlightCall,
        *,
        turn: bool = False,
        last: bool = False,
    ) -> Verdict | None:
        """Decide whether a call may be sent, and reserve its possible usage, in one step.

        It may be sent if it has a `reservation` afterwards: no limit is reached, the limit is only
        observed, or the call is the one final answer that may exceed a cap, in which case the
        verdict has the action `wrap_up`.

        Args:
            call: The call.
            turn: It is a call of the agent loop, so its response becomes a turn. Only limits that
                it could exceed apply to a side call.
            last: It can be turned into a final answer without tools.
        """
        account = self._account
        self.unreported.settle()
        reservation = estimate_reservation(call, account)
        account.measure_time()
        with account.services.lock:
            had_turn = self._turn is not NOTHING
            # Under the lock, so a retry cannot lose its reservation to another call.
            if turn and not call.id:
                self._release_kept()
            verdict = account.decide(
                with_reserved=True, forces_output=call.forces_output, side=not turn
            )
            if verdict is None or verdict.action == "observe" or (last and self._claim_wrap_up()):
                call.is_of_loop = turn
                self._reserve(call, reservation)
                if turn and call.id:
                    call.turn = account.budgets.reserve(ONE_OF_SEVERAL)
            elif not (had_turn and self.in_flight):  # a concurrent call may need the turn
                turn = False
            if turn and not call.id:
                self._turn = account.budgets.reserve(ONE_TURN)
        return account.with_subjects(verdict)

    def admit_again(self, call: InFlightCall) -> bool:
        """Reserve for one more attempt at the final answer; False if a limit leaves no room."""
        account = self._account
        reservation = estimate_reservation(call, account)
        account.measure_time()
        with account.services.lock:
            may = not account.killed and account.budgets.leave_room()
            if may:
                self._reserve(call, reservation)
        return may

    def reserve(self, call: InFlightCall) -> None:
        """Reserve for a call that can no longer be refused."""
        reservation = estimate_reservation(call, self._account)
        with self._account.services.lock:
            self._reserve(call, reservation)

    def open(self, call: InFlightCall) -> InFlightCall:
        """Mark a call as sent; a call that was not admitted is reserved for now."""
        if call.reservation is None:
            self.reserve(call)
        call.started = self._account.services.now()
        return call

    def resume(self, call: InFlightCall) -> None:
        """Resume counting when a paused answer is read again."""
        call.is_paused = False
        if call.is_open and call.reservation is None:
            self.reserve(call)

    def release(self, call: InFlightCall) -> None:
        """Release an admitted call that is not sent after all."""
        with self._account.services.lock:
            self._release(call)
            call.is_open = False

    def on_response_accepted(self, call: InFlightCall | None = None) -> int:
        """Count a turn: the loop's response was accepted into the conversation.

        Args:
            call: The call, if the loop may have several in flight.

        Returns:
            The number of the turn.
        """
        with self._account.services.lock:
            if call is None:
                self._release_kept()
            else:
                self._release_turn(call)
            self._account.tally.iterations += 1
            for budget in self._account.budgets:
                budget.tally.turns += 1
                budget.leader = budget.leader or self._account.invocation.agent
            return self._account.part.turns

    def on_response_rejected(self, call: InFlightCall) -> None:
        """Release the turn of a concurrent call: its response is not part of the conversation."""
        with self._account.services.lock:
            self._release_turn(call)

    def release_unused(self) -> None:
        """Release what the loop has reserved: it makes no more calls."""
        with self._account.services.lock:
            self._release_kept()
            for call in tuple(self._answered):
                self._release_turn(call)

    def add_part(self, call: InFlightCall, part: UsageRecord) -> None:
        """Count usage that is reported before the call ends, as realtime models do."""
        call.record = combined(call.record, part)
        usage = call.record.usage
        quote = self._account.services.quote(call.billable(usage))
        with self._account.services.lock:
            if call.is_open:
                for budget in self._account.budgets:
                    add_usage(budget.tally, call, usage, quote)
                call.counted, call.counted_quote = usage, quote

    def settle(
        self,
        call: InFlightCall,
        record: UsageRecord | None = None,
        *,
        failed: bool = False,
        aborted: bool = False,
    ) -> None:
        """Count a model call that has ended.

        Args:
            call: The call; one whose start was not seen was never opened.
            record: The usage that was reported; `None` for what the call has recorded, if any.
            failed: The call ended without a response.
            aborted: The response was not awaited, so the call is billed anyway.
        """
        account, call.has_ended = self._account, True
        if record is not None:
            call.record = record
        told = call.record
        kind, usage, estimated = counted(
            told,
            call.input_estimate,
            lambda: call.output_estimate,
            failed=failed,
            billed=not failed or aborted or call.answered,
        )
        if account.policy.unmeasured == "ignore":
            usage = told.usage
            kind = "unmeasured" if kind == "estimated" else kind
        billable = call.billable(usage)
        quote = account.services.quote(billable)
        retried = failed and not aborted
        number = self._count(call, usage, quote, estimated=estimated, retried=retried)
        if number is not None:
            self._publish(call, number, kind, billable, quote, estimated=estimated)

    def settle_all(self) -> None:
        """Settle the in-flight calls of a finished invocation.

        A background task may still await a side call. That one is settled when it ends; while it
        is paused, it reserves nothing in the trees.
        """
        # A copy, because settling a call removes it from the set.
        for call in tuple(self.in_flight):
            if call.started is None:
                self.release(call)
            elif call.has_ended:  # an internal error kept it from being counted
                self.settle(call)
            elif call.is_of_loop:
                self.settle(call, failed=True, aborted=True)
            elif call.is_paused:
                with self._account.services.lock:
                    reservation, call.reservation = call.reservation, None
                    if reservation is not None:
                        self._account.budgets.release(reservation)
        self.unreported.settle()
        self.release_unused()

    # --- reservations, under the lock -------------------------------------------------------------

    def _reserve(self, call: InFlightCall, reservation: Reservation) -> None:
        call.reservation = self._account.budgets.reserve(reservation)
        self.in_flight.add(call)

    def _release(self, call: InFlightCall, *, failed: bool = False) -> None:
        """Release a call's reservation; keep the tokens of a failed loop call for its retry."""
        reservation, call.reservation = call.reservation, None
        self.in_flight.discard(call)
        if reservation is None:
            return
        self._account.budgets.release(reservation)
        if call.id:
            # Until the response is accepted: another call could take the turn in between.
            if call.has_ended and not failed:
                self._answered.add(call)
            else:
                self._release_turn(call)
        elif failed and call.is_of_loop and self._kept is NOTHING:
            self._kept = self._account.budgets.reserve(replace(reservation, model_calls=0))

    def _release_turn(self, call: InFlightCall) -> None:
        self._answered.discard(call)
        if call.turn is not None:
            self._account.budgets.release(call.turn)
            call.turn = None

    def _claim_wrap_up(self) -> bool:
        """Claim the final answer that may exceed a cap, if it is available."""
        account = self._account
        refusing = [budget for _, budget in account.refusals.values()]
        return not account.killed and account.budgets.claim_wrap_up(
            refusing, self._trees_to_answer()
        )

    def _release_kept(self) -> None:
        """Release what the loop has reserved apart from its calls."""
        for kept in (self._turn, self._kept):
            if kept is not NOTHING:
                self._account.budgets.release(kept)
        self._turn = self._kept = NOTHING

    def _count(
        self,
        call: InFlightCall,
        usage: Usage,
        quote: Quote,
        *,
        estimated: bool,
        retried: bool,
    ) -> int | None:
        """Replace a call's reservation by its usage in every budget; `None` if counted before."""
        account = self._account
        # One step for the invocation and its trees, because other agents check those concurrently.
        with account.services.lock:
            if not call.is_open:  # another thread has finished the invocation
                return None
            for budget in account.budgets:
                add_call(budget.tally, call, usage, quote, estimated=estimated)
            if usage.output > account.budgets.outputs.get(call.model, 0):
                account.budgets.outputs[call.model] = usage.output
            self._release(call, failed=retried)
            # An error before this line leaves the call open; it is settled with the invocation.
            call.is_open = False
            # Read under the lock: calls that end concurrently need different numbers.
            return account.part.model_calls

    def _publish(
        self,
        call: InFlightCall,
        number: int,
        kind: CallKind,
        billable: BillableCall,
        quote: Quote,
        *,
        estimated: bool,
    ) -> None:
        account = self._account
        account.services.observers.publish(
            ModelCall(
                invocation=account.invocation,
                number=number,
                model=call.model,
                kind=kind,
                usage=billable.usage,
                estimated=estimated,
                span_id=call.span_id,
                seconds=None if call.started is None else account.services.now() - call.started,
                price=quote.price,
                price_source=quote.source,
                price_version=quote.version,
                price_basis=billable.basis,
                price_at_most=quote.at_most,
                unpriced=quote.unknown,
                cache_saved=quote.cache_saved,
                stated_cost=quote.stated,
                stated_by=quote.stated_by,
                stated_refused=quote.stated_refused,
                listed_price=quote.listed,
                cost_is_limited=account.budgets.ignores_unpriced,
                tier=billable.tier,
                provider=call.provider,
                reported=call.record.reported,
                reported_total=call.record.total,
                unknown_usage=billable.unplaced.names if billable.unplaced else (),
                # The turn counts once its response is accepted, which comes after this.
                turn=account.part.turns + 1,
                iteration=account.tally.iterations + 1,
                after_tools={} if call.is_side else self._tools.of_turn,
                call_id=call.id,
                side=call.is_side,
            )
        )


def estimate_reservation(call: InFlightCall, account: Account) -> Reservation:
    """Return a call's possible usage: estimated input, and the model's largest output so far."""
    output = account.budgets.outputs.get(call.model)
    if output is None:
        output = min(call.output_cap or ASSUMED_OUTPUT, ASSUMED_OUTPUT)
    cost = None
    if account.budgets.has_cost_limit:
        expected = Usage(input=call.input_estimate, output=output)
        cost = account.services.quote(call.billable(expected)).charge
    return Reservation(
        model_calls=1, input=call.input_estimate, output=output, cost=cost or NO_COST
    )


def add_call(
    tally: Tally, call: InFlightCall, usage: Usage, quote: Quote, *, estimated: bool
) -> None:
    """Add one model call to a tally."""
    add_usage(tally, call, usage, quote)
    tally.model_calls += 1
    if estimated:
        tally.unmeasured_calls += 1
        tally.unmeasured_model = call.model
    if quote.price is None and usage.total:
        tally.unpriced_calls += 1
        if quote.at_most is None:
            tally.unbounded_calls += 1
            tally.unbounded_model = call.model


def add_usage(tally: Tally, call: InFlightCall, usage: Usage, quote: Quote) -> None:
    """Add the current usage of a call to a tally, without the part that was counted before."""
    tally.input += usage.input - call.counted.input
    tally.output += usage.output - call.counted.output
    tally.cache_read += usage.cache_read - call.counted.cache_read
    tally.cache_write += usage.cache_write - call.counted.cache_write
    before = call.counted_quote
    cost = EXACT.subtract(quote.price or NO_COST, before.price or NO_COST)
    at_most = EXACT.subtract(quote.charge or NO_COST, before.charge or NO_COST)
    tally.cost = EXACT.add(tally.cost, cost)
    tally.cost_at_most = EXACT.add(tally.cost_at_most, at_most)


# --- model calls that only spans show -------------------------------------------------------------


class UnreportedCalls:
    """The calls of one invocation that wait for other spans.

    If two instrumentations trace one call, only one may report its tokens, and its span may end
    later. So the calls wait until the invocation is checked or ends,
    and as long as a span around or within theirs is open.
    """

    def __init__(self, account: Account, spans: Spans[Any], settle: Callable[..., None]) -> None:
        """Create an empty list."""
        self._account = account
        self._spans = spans
        self._settle_call = settle
        self._waiting: list[UnreportedCall] = []

    @suppress_errors("runs")
    def add(self, unreported: UnreportedCall) -> None:
        """Add the call of a span that has just ended."""
        with self._account.services.lock:
            self._waiting.append(unreported)
            oldest = self._waiting.pop(0) if len(self._waiting) > MOST_UNREPORTED else None
        if oldest is not None:
            ready, still_waiting = self._spans.split_unreported([oldest])
            self._count(ready + still_waiting)

    @suppress_errors("runs")
    def settle(self) -> None:
        """Count the calls whose tokens no other span has reported or can still report."""
        if not self._waiting:  # nearly always
            return
        with self._account.services.lock:
            waiting, self._waiting = self._waiting, []
        ready, still_waiting = self._spans.split_unreported(waiting)
        with self._account.services.lock:
            self._waiting[:0] = still_waiting
        self._count(ready)

    def _count(self, ready: list[UnreportedCall]) -> None:
        for each in ready:
            self._settle_call(each.call, each.record, failed=each.failed)


# --- tool calls -----------------------------------------------------------------------------------

REFUSED_TURNS: Final = 3
"""Consecutive turns with nothing but refused requests that halt the agent."""


class ToolAdmission(NamedTuple):
    """The decision about a requested tool call."""

    refusal: Breach | None = None
    """The limit that refuses it."""
    limit: str | None = None
    """The name of the limit that refuses it, or would refuse it if it were not only observed."""


ADMITTED: Final = ToolAdmission()


class ToolCalls:
    """The tool calls of one invocation."""

    def __init__(self, account: Account) -> None:
        """Create an empty record."""
        self._account = account
        self.by_tool = account.task.calls_by_tool
        self._of_turn: tuple[int, dict[str, int]] = (0, {})
        """The last turn with tool calls, and its calls by tool."""
        self._published = self._logged = 0

    @property
    def of_turn(self) -> dict[str, int]:
        """Calls by tool in the last turn, whose results are in the next request."""
        turn, called = self._of_turn
        # Only of this very turn: after a response without tools there are no results.
        return called if turn == self._account.tally.turns else {}

    def admit(self, tool: str) -> ToolAdmission:
        """Count a requested call of `tool`, unless a limit refuses it."""
        account, observed = self._account, None
        with account.services.lock:
            # Checked and counted in one step: parallel agents of a tree share the rest.
            for breach, budget in self._spent(tool):
                # Also when only observed: the check after the turn reports it.
                if breach.subject is None or not account.policy.refuses_only(tool):
                    account.refusals[breach.limit] = breach, budget
                if budget.policy.action != "observe":
                    account.tally.refused_tool_calls += 1
                    return ToolAdmission(breach, breach.limit)
                observed = observed or breach.limit
            self._count(tool, 1)
        return ToolAdmission(None, observed) if observed else ADMITTED

    def end_turn(self, admitted: Sequence[ToolAdmission]) -> None:
        """Halt the agent after turns in which every request was refused by the cap of a tool.

        Args:
            admitted: The decisions about the requests of a turn.
        """
        if not admitted:  # a turn that requests no tool is neither
            return
        refusals = [each.refusal for each in admitted if each.refusal is not None]
        task, is_refused = self._account.task, len(refusals) == len(admitted)
        task.refused_turns = task.refused_turns + 1 if is_refused else 0
        if task.refused_turns >= REFUSED_TURNS:
            self.halt_by(refusals[-1])

    def halt_by(self, breach: Breach) -> None:
        """Halt the agent by a limit that has refused a tool call."""
        with self._account.services.lock:
            self._account.refusals[breach.limit] = breach, self._account.budget

    def release(self, tool: str) -> None:
        """Uncount an admitted call that did not run."""
        with self._account.services.lock:
            self._count(tool, -1)

    def record(
        self,
        tool: str,
        status: ToolStatus,
        seconds: float | None,
        fingerprint: str | None,
        limit: str | None = None,
        *,
        is_handoff: bool = False,
    ) -> None:
        """Publish the final attempt of a call."""
        self._published += 1
        self._account.handoffs.count = self._account.handoffs.count + 1 if is_handoff else 0
        called = self.of_turn
        called[tool] = called.get(tool, 0) + 1
        self._of_turn = (self._account.tally.turns, called)
        self._account.services.observers.publish(
            ToolCall(
                invocation=self._account.invocation,
                number=self._published,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
                turn=self._account.part.turns,
                limit=limit,
            )
        )

    def log(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Write an answered call with its contents to the tool log, if there is one."""
        log = self._account.services.tool_log
        if log is not None:
            # Numbered separately: refused calls are published but not logged.
            self._logged += 1
            log.write(
                self._account.invocation, self._logged, tool, arguments, result, trigger=trigger
            )

    def _spent(self, tool: str) -> Iterator[tuple[Breach, Budget]]:
        """Yield every limit that allows no further call of `tool`, with its budget."""
        account = self._account
        per_tool = (account.policy.limits.max_calls_per_tool or {}).get(tool)
        caps: list[tuple[str, int | None, int, str | None, Budget]] = [
            ("max_calls_per_tool", per_tool, self.by_tool.get(tool, 0), tool, account.budget)
        ]
        for budget in account.budgets:
            limit = budget.prefix + "max_tool_calls"
            cap = budget.policy.limits.max_tool_calls
            caps.append((limit, cap, budget.tally.tool_calls, None, budget))
        for limit, cap, used, subject, budget in caps:
            if cap is not None and used >= cap:
                reason = MAX_TOOL_CALLS_STOP_REASON
                origin = budget.policy.origin_of(limit, subject)
                # One more than used, because the refused call would have exceeded the cap.
                breach = Breach(limit, cap, used + 1, reason, "tool calls", subject, origin=origin)
                yield budget.over_resumes(breach), budget

    def _count(self, tool: str, change: int) -> None:
        self.by_tool[tool] = self.by_tool.get(tool, 0) + change
        for budget in self._account.budgets:
            budget.tally.tool_calls += change


# --- time -----------------------------------------------------------------------------------------


class TimeLimit:
    """The next deadline of one invocation."""

    def __init__(self, run: Run, check_limits: Callable[[], Verdict | None]) -> None:
        """Create a time limit that is not running yet."""
        self._run = run
        self._check_limits = check_limits
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
        run, verdict = self._run, self._check_limits()
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
