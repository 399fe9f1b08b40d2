"""The registry of active invocations, the only mutable shared state."""

from __future__ import annotations

import fnmatch
import math
import os
import threading
from collections import OrderedDict
from decimal import Decimal
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from otel_limits.core import events
from otel_limits.core.events import ActionTaken, Invocation
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.policy import KILLED, Policy
from otel_limits.core.terms import billable_call
from otel_limits.runs.budget import Budget, new_tree
from otel_limits.runs.conversations import Conversation, conversation_hash
from otel_limits.runs.current import current, current_scope, leave_all
from otel_limits.runs.run import Group, Run
from otel_limits.runs.services import Services
from otel_limits.runs.spans import Spans
from otel_limits.runs.tasks import UNKNOWN_INPUT, Task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from otel_limits.core.policy import Overrides
    from otel_limits.core.price import Quote
    from otel_limits.core.usage import Number, Usage
    from otel_limits.runs.quota_gate import AdmissionRequest

MAX_LIVE: Final = 10_000
"""Maximum number of active invocations; starting another one evicts the oldest."""

MAX_AGE_SECONDS: Final = 24 * 60 * 60.0
"""Age at which an invocation that never ended is evicted."""

ACTION_TAKEN: Final[dict[str, ActionTaken]] = {
    "observe": "observed",
    "halt": "halted",
    "wrap_up": "wrapped_up",
    "raise": "raised",
    "ask": "halted",
}
"""The name of each action once it was taken."""


class RunRegistry(Services):
    """The registry of active invocations, bounded in number and age."""

    def __init__(self, max_live: int = MAX_LIVE, max_age_seconds: float = MAX_AGE_SECONDS) -> None:
        """Create an empty registry without observers."""
        super().__init__()
        self.has_started = False
        """True once any invocation has started in this process."""
        self.audit_keys: tuple[str, ...] = ()
        """Baggage and trace attributes to record with each invocation."""
        self._max_live = max_live
        self._max_age = max_age_seconds
        self._live: OrderedDict[str, Run] = OrderedDict()
        self.spans: Spans[Run] = Spans(max_live)

    def __len__(self) -> int:
        """Return the number of active invocations."""
        return len(self._live)

    def __contains__(self, invocation_id: object) -> bool:
        """Return whether an invocation is active."""
        return invocation_id in self._live

    def price_of_request(self, request: AdmissionRequest, usage: Usage) -> Quote:
        """Return the price that a model call would have with this usage."""
        call = billable_call(request.model, request.provider, usage, None, request.terms)
        return self.quote(call)

    def kill(
        self,
        *,
        agent: str | None = None,
        trace_id: str | None = None,
        all: bool = False,  # noqa: A002  the clearest word
        before: float = math.inf,
    ) -> int:
        """End active invocations immediately; return how many.

        Requests without an agent loop, which cannot be interrupted, and invocations whose outcome
        is final are left alone.

        Args:
            agent: Name of the agents, with the wildcards `*` and `?`.
            trace_id: Trace whose invocations to end.
            all: End all of them.
            before: End only those that started before this time, in monotonic seconds.
        """
        # Copying the values is one step under the GIL, so other threads can start invocations.
        matching = [
            run
            for run in list(self._live.values())
            if not run.is_direct
            and run.started < before
            and (
                all
                or (agent is not None and fnmatch.fnmatchcase(run.invocation.agent, agent))
                or (trace_id is not None and run.invocation.trace_id == trace_id)
            )
        ]
        killed = []
        with self.lock:
            for run in matching:
                if not run.outcome_frozen:
                    # Kept, so that the next check ends it if the framework cannot interrupt it.
                    run.killed = True
                    killed.append(run)
        for run in killed:
            if run.cancel is not None:
                run.cancel(KILLED)
        return len(killed)

    def start(  # noqa: PLR0913  what is known when an invocation starts
        self,
        agent: str,
        policy: Policy,
        trace_id: int = 0,
        span_id: int = 0,
        *,
        sampled: bool = False,
        model: str | None = None,
        direct: bool = False,
        session_id: str | None = None,
        conversation: str = "",
        attributes: Mapping[str, str] | None = None,
        note: str = "",
        answers: Collection[str] = (),
        more: Overrides | None = None,
        given: object = UNKNOWN_INPUT,
        task: Task | None = None,
    ) -> Run:
        """Register an invocation. IDs are 0 if it has no span.

        A direct one is never unsampled: it has no span that could be missing. One that answers
        interrupts continues the task of the invocation that has ended with them.

        Args:
            agent: The name of the agent.
            policy: Its policy.
            trace_id: The trace of its span.
            span_id: Its span.
            sampled: That span will be exported.
            model: The ID of its model.
            direct: It is a request without an agent loop.
            session_id: Its session.
            conversation: The ID of its conversation, of any length; empty if it has none.
                Ignored within an invocation that has one.
            attributes: Values of the audit keys.
            note: A remark for the log.
            answers: The keys of interrupts that it answers: see `Run.await_answer`.
            more: By how much a person has extended the limits.
            given: The user's input, if that is known.
            task: The task of the group for which it makes model calls.
        """
        # The processor has seen the span start, or never will: it is called before this.
        self.has_started = True
        unsampled = not direct and not self.spans.claim(span_id)
        answers = tuple(answers)
        parent, before = current(), self._interrupted(policy, answers)
        # Imported by name: tests of applications replace `uuid.uuid4` to get IDs in sequence.
        identity = uuid4().hex
        task = task or Task(identity, policy, self.now(), before)
        if not answers:  # an answer is not the input of its task
            task.begin_with(given)
        if more is not None:
            task.extend(more.limits)
        invocation = Invocation(
            agent=agent,
            id=identity,
            root_id=parent.invocation.root_id if parent else identity,
            parent_id=parent.invocation.id if parent else None,
            trace_id=f"{trace_id:032x}" if trace_id else None,
            span_id=f"{span_id:016x}" if span_id else None,
            sampled=sampled,
            task_id=task.id,
            conversation=_conversation(parent, agent, conversation),
        )
        trees = self._trees(parent, agent, policy, task, before, conversation)
        run = Run(
            self,
            invocation,
            task,
            trees,
            parent,
            spans=self.spans,
            forget=self.forget,
            unsampled=unsampled,
            direct=direct,
        )
        if more is not None:
            run.extend_conversation(more.conversation)
        # Only now: after an error above, nothing would end an active invocation.
        self._register(run, 0 if unsampled else span_id)
        self._publish_start(run, model, session_id, attributes or {}, note)
        if answers and before is None:
            self._report_unknown(run, policy)
        return run

    def _register(self, run: Run, span_id: int) -> None:
        """Add an invocation to the active ones."""
        _, run.task_scope = current_scope()
        if span_id:
            self.spans.begin(span_id, run)
        with self.lock:
            for budget in run.budgets.all:
                budget.members += 1
            self._live[run.invocation.id] = run

    def group(
        self, name: str, policy: Policy, answers: Iterable[str] = (), conversation: str = ""
    ) -> Group:
        """Start a group of agents that run together, possibly with answers to its interrupts."""
        answers = tuple(answers)
        parent, before = current(), self._interrupted(policy, answers)
        identity = uuid4().hex
        task = Task(identity, policy, self.now(), before)
        trees = self._trees(parent, name, policy, task, before, conversation)
        group = Group(
            name, identity, task, trees, parent, _conversation(parent, name, conversation)
        )
        with self.lock:
            for tree in group.trees:
                tree.members += 1
        if answers and before is None:
            self._report_unknown(group, policy)
        return group

    def run_of(self, group: Group, model: str) -> Run:
        """Return the invocation for a group's model calls without an agent.

        It has no loop, and ends with the group.

        Args:
            group: The group for whose member the current task works.
            model: The model that is called.
        """
        with group.lock:
            if group.run is None:
                agent, task = group.invocation.agent, group.task
                group.run = self.start(agent, group.policy, model=model, direct=True, task=task)
            if group.finished:
                group.run.finish("end_turn")
            return group.run

    def end_group(self, group: Group, interrupts: Iterable[str] = ()) -> None:
        """End a group of agents, possibly with interrupts."""
        with self.lock:  # first, because an error below would keep its trees open forever
            self._leave(group.trees)
        with group.lock:
            group.finished = True
            if (run := group.run) is not None:
                run.finish(run.verdict.reason if run.verdict is not None else "end_turn")
        group.task.handoffs = group.handoffs.count
        self.interrupted.keep(interrupts, group.task)

    def after_fork(self) -> None:
        """Reset in a child process: the parent's invocations continue in the parent."""
        self.lock = threading.RLock()
        self.clock.after_fork()
        self.interrupted.after_fork()
        self.failures.after_fork()
        self.conversations.after_fork()
        if self.observers.gate is not None:
            self.observers.gate.after_fork()
        self._live.clear()
        self.spans.after_fork()
        leave_all()

    def forget(self, run: Run) -> bool:
        """Remove a run; False if it was removed before."""
        # The first caller ends it: the framework, an eviction or `disable()`.
        with self.lock:
            if run.finished:
                return False
            run.finished = True
            self._live.pop(run.invocation.id, None)
            self._leave(run.budgets.all)
        self.spans.forget(run)
        return True

    def _leave(self, budgets: tuple[Budget, ...]) -> None:
        for budget in budgets:
            budget.members -= 1
            if isinstance(budget, Conversation):
                self.conversations.leave(budget)

    def _interrupted(self, policy: Policy, answers: Iterable[str]) -> Task | None:
        """Return the task that an answer to interrupts continues, if it does."""
        found = self.interrupted.find(answers) if policy.on_resume == "continue" else None
        if found is not None:
            found.is_answered = True
        return found

    @suppress_errors("runs")
    def _report_unknown(self, started: Run | Group, policy: Policy) -> None:
        """Report an answer that begins a new task although it should continue one.

        Within another invocation, that one has answered, and this one may have nothing to answer.
        """
        is_limited = any(policy.limits.items()) or any(policy.tree.items())
        if is_limited and policy.on_resume == "continue" and started.parent is None:
            invocation = started.invocation
            self.observers.publish(events.TaskLost(cause="unknown", invocation=invocation))

    def _trees(
        self,
        parent: Run | Group | None,
        agent: str,
        policy: Policy,
        task: Task,
        before: Task | None,
        conversation: str,
    ) -> tuple[Budget, ...]:
        """Return the enclosing trees, with a new one if the policy has one that can bind.

        After an interrupt it continues the task's earlier one, or has used what the task has.
        """
        above = parent.trees if parent is not None else ()
        if policy.conversation.active:
            above = self._with_conversation(above, parent, agent, policy, conversation)
        # A conversation with lower caps replaces no tree: an answer may raise them.
        enclosing = (each for each in above if not each.is_of_conversation)
        is_covered = any(each.covers(policy, policy.tree) for each in enclosing)
        if is_covered or not any(policy.tree.items()):
            return above
        used = (before.tree or before.budget) if before is not None else None
        task.tree = new_tree(policy, self.now(), used)
        task.tree.resumes = task.resumes
        return (task.tree, *above)

    def _with_conversation(
        self,
        above: tuple[Budget, ...],
        parent: Run | Group | None,
        agent: str,
        policy: Policy,
        identity: str,
    ) -> tuple[Budget, ...]:
        """Add the budget of an agent's conversation, if it has one and that can bind."""
        if any(
            each.is_of_conversation and each.covers(policy, policy.conversation) for each in above
        ):
            return above
        around = parent.invocation.conversation if parent is not None else ""
        if not (around or identity):
            self.conversations.report_missing(agent)
            return above
        # Within the conversation of another agent, each agent has its own limits.
        key = conversation_hash(agent, around or identity)
        with self.lock:
            return (self.conversations.of(key, agent, policy), *above)

    @suppress_errors("runs")
    def _publish_start(
        self,
        run: Run,
        model: str | None,
        session_id: str | None,
        attributes: Mapping[str, str],
        note: str,
    ) -> None:
        """Evict old runs and publish the start; an error here must not lose the active run."""
        self._evict()
        caps: dict[str, Number] = {}  # the tightest of each name, over all enclosing trees
        origins = run.policy.sources()
        for tree in run.trees:
            sources = tree.policy.sources(tree.prefix)
            for limit, cap in tree.policy.limits.items():
                name = tree.prefix + limit
                if isinstance(cap, int | float | Decimal) and cap < caps.get(name, math.inf):
                    caps[name], origins[name] = cap, sources[name]
        self.observers.publish(
            events.Started(
                invocation=run.invocation,
                limits=run.policy.limits,
                action=ACTION_TAKEN[run.policy.action],
                unsampled=run.unsampled,
                model=model,
                session_id=session_id,
                attributes=attributes,
                tree=caps,
                has_quotas=self.observers.gate is not None and self.observers.gate.holds_quotas,
                configured_action=run.policy.action,
                origins=origins,
                unpriced=run.unpriced if run.has_usd_limit else None,
                tools=run.policy.named_tools,
                note=note,
            )
        )

    def _evict(self) -> None:
        while self._live:
            # Released before `finish`, which acquires it again and then calls observers.
            with self.lock:  # other threads start and end invocations
                oldest = next(iter(self._live.values()), None)
            if oldest is None or not self._over_capacity(oldest):
                return
            oldest.evicted = True
            oldest.finish("evicted")

    def _over_capacity(self, oldest: Run) -> bool:
        return len(self._live) > self._max_live or self.now() - oldest.started > self._max_age


def _conversation(parent: Run | Group | None, agent: str, identity: str) -> str:
    """Return the hash of a conversation: of that around an invocation, or else its own."""
    if parent is not None and parent.invocation.conversation:
        return parent.invocation.conversation
    return conversation_hash(agent, identity) if identity else ""


LIVE: Final = RunRegistry()
"""The registry of this process."""


def kill(
    *,
    agent: str | None = None,
    trace_id: str | None = None,
    all: bool = False,  # noqa: A002  the clearest word
) -> int:
    """End active invocations of this process immediately; later ones are unaffected.

    Streaming responses are interrupted; running tools finish, with agents that they have called
    unless those match, too. The stop reason is `killed`, whatever the action.

    Args:
        agent: Name of the agents, with the wildcards `*` and `?`.
        trace_id: Trace whose invocations to end, as 32 hexadecimal digits.
        all: End all of them.

    Returns:
        The number of invocations that were ended.

    Raises:
        ValueError: No argument selects invocations.
    """
    if agent is None and trace_id is None and not all:
        raise ValueError("kill() needs agent=…, trace_id=… or all=True.")
    return LIVE.kill(agent=agent, trace_id=trace_id, all=all)


INTERNAL_ERRORS.publish = LIVE.observers.publish_internal_error
# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE.after_fork)
