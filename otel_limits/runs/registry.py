"""The registry of live invocations, in the one place that is mutable and shared."""

from __future__ import annotations

import fnmatch
import math
import os
import threading
import time
import uuid
from collections import OrderedDict
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Protocol

from otel_limits.core import events
from otel_limits.core.events import ActionTaken, Invocation
from otel_limits.core.internal_errors import INTERNAL_ERRORS, report_suppressed, suppress_errors
from otel_limits.core.policy import KILLED, Policy
from otel_limits.core.price import OF_NO_CALL, Quote
from otel_limits.core.terms import billable_call
from otel_limits.runs.budget import Budget, new_tree
from otel_limits.runs.deadlines import Deadlines
from otel_limits.runs.dispatcher import EventDispatcher
from otel_limits.runs.run import Run
from otel_limits.runs.spans import Spans
from otel_limits.runs.tree import Group, current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.core.pricing import Prices
    from otel_limits.core.terms import BillableCall
    from otel_limits.core.usage import Number, Usage
    from otel_limits.runs.gate import Request

MAX_LIVE: Final = 10_000
"""Live invocations that are remembered; the oldest is settled when one more begins."""

MAX_AGE_SECONDS: Final = 24 * 60 * 60.0
"""After this, an invocation that never ended is settled."""

ACTION_TAKEN: Final[dict[str, ActionTaken]] = {
    "observe": "observed",
    "halt": "halted",
    "wrap_up": "wrapped_up",
    "raise": "raised",
    "ask": "halted",
}
"""What an action is called once it was taken."""


class ToolLogWriter(Protocol):
    """Keeps tool calls with their contents, where a user asked for it."""

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
        """Keep one finished call; `trigger` is the one that caused the halt."""


class RunRegistry:
    """The registry of live invocations, bounded in number and age.

    Its lock guards state only: observers are called outside it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_live: int = MAX_LIVE,
        max_age_seconds: float = MAX_AGE_SECONDS,
    ) -> None:
        """Begin with no invocation and no observer."""
        # Guards every budget, too, as several invocations add to those of trees; it is held for
        # additions and comparisons only. Its own thread may take it again: what ends an invocation
        # can run at any moment, where the garbage collector closes a forgotten coroutine.
        self.lock = threading.RLock()
        self.observers = EventDispatcher()
        self.prices: Prices | None = None
        self.tool_log: ToolLogWriter | None = None
        self.has_started = False
        """True when any invocation has begun in this process."""
        self.audit_keys: tuple[str, ...] = ()
        """Names in the baggage or on the agent whose values an auditor wants to group by."""
        self.keeps_fingerprints = False
        """True while somebody keeps the hashes of tool calls, whatever is limited."""
        self.deadlines = Deadlines()
        self.clock = clock
        self._last_time = 0.0
        self._max_live = max_live
        self._max_age = max_age_seconds
        self._live: OrderedDict[str, Run] = OrderedDict()
        self.spans = Spans(max_live)

    def __len__(self) -> int:
        """Live invocations."""
        return len(self._live)

    def now(self) -> float:
        """Monotonic seconds; a clock that fails repeats its last answer."""
        try:
            self._last_time = self.clock()
        except Exception as error:  # noqa: BLE001  the agent must not feel a broken clock
            INTERNAL_ERRORS.report("clock", error)
        return self._last_time

    def quote(self, sale: BillableCall) -> Quote:
        """What a model call costs, and who says so; nothing for one without tokens."""
        if self.prices is None or not sale.usage.total:
            return OF_NO_CALL
        try:
            return self.prices.quote(sale)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("prices", error)
            return OF_NO_CALL

    def price_of_request(self, request: Request, usage: Usage) -> Decimal | None:
        """USD of a model call that wants to go out, if it uses so much; `None` for unknown."""
        sale = billable_call(request.model, request.provider, usage, None, request.terms)
        return self.quote(sale).price

    def kill(
        self,
        *,
        agent: str | None = None,
        trace_id: str | None = None,
        all: bool = False,  # noqa: A002  the word that says it
        before: float = math.inf,
    ) -> int:
        """End live invocations at once; returns how many.

        A request without the loop is left alone, as nothing can break it off, and so is what has
        come to its end.

        Args:
            agent: Name of the agents, `*` and `?` stand for any characters.
            trace_id: Trace whose invocations are ended.
            all: End every one.
            before: Only what began before this time, in monotonic seconds.
        """
        # A list of the values is made in one step under the GIL, so that other threads may begin
        # invocations.
        matching = [
            run
            for run in list(self._live.values())
            if not run.is_direct
            and run.started < before
            and (all or is_named(run.invocation, agent, trace_id))
        ]
        killed = []
        with self.lock:
            for run in matching:
                if not run.outcome_frozen:
                    # Kept, as the next judgement ends it where the framework cannot break it off.
                    run.killed = True
                    killed.append(run)
        for run in killed:
            if run.cancel is not None:
                run.cancel(KILLED)
        return len(killed)

    def freeze_outcome(self, run: Run) -> bool:
        """Let no kill change any more how a run ends; True when it was killed before."""
        with self.lock:
            run.outcome_frozen = True
            return run.killed

    def start(  # noqa: PLR0913  what is known when an invocation begins
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
        attributes: Mapping[str, str] | None = None,
    ) -> Run:
        """An agent begins an invocation whose span has these ids, 0 for none.

        A direct one is never unsampled: it has no span that could be missed.
        """
        # The processor has seen the span begin, or never will: it is told before we are.
        self.has_started = True
        unsampled = not direct and not self.spans.claim(span_id)
        parent = current()
        invocation = _identify(agent, parent, trace_id, span_id, sampled=sampled)
        run = Run(self, invocation, policy, self._trees(parent, policy), unsampled=unsampled)
        if span_id and not unsampled:
            self.spans.begin(span_id, run)
        # Written out here and in three places below, as a call may fail. Then the invocation is
        # begun once more, and a first one that is live or counted by then would never be ended.
        with self.lock:
            for budget in run.budgets.all:
                budget.members += 1
            self._live[invocation.id] = run
        # Outside the lock, as it tells observers.
        self._began(run, model, session_id, attributes or {})
        return run

    def group(self, name: str, policy: Policy) -> Group:
        """Several agents begin to work together."""
        parent = current()
        group = Group(name, policy, self._trees(parent, policy), parent)
        with self.lock:
            for tree in group.trees:
                tree.members += 1
        return group

    def run_of(self, group: Group, model: str) -> Run:
        """Return the invocation of what a group asks of models without an agent.

        It has no loop, and ends with the group.

        Args:
            group: The group, of which the present task works for a member.
            model: The model that is asked.
        """
        with group.lock:
            if group.run is None:
                agent = group.invocation.agent
                group.run = self.start(agent, group.policy, model=model, direct=True)
            if group.finished:
                group.run.finish("end_turn")
            return group.run

    def end_group(self, group: Group) -> None:
        """The agents that worked together are done."""
        with self.lock:  # first, as a fault in what follows would keep its trees open for ever
            for tree in group.trees:
                tree.members -= 1
        with group.lock:
            group.finished = True
            if (run := group.run) is not None:
                run.finish(run.verdict.reason if run.verdict is not None else "end_turn")

    def forget(self, run: Run) -> bool:
        """Drop a run; False when that had been done before."""
        # Whoever comes first ends it: the framework, an eviction or `disable()`.
        with self.lock:
            if run.finished:
                return False
            run.finished = True
            self._live.pop(run.invocation.id, None)
            for budget in run.budgets.all:
                budget.members -= 1
        self.spans.forget(run)
        return True

    def after_fork(self) -> None:
        """Start afresh in a child: its parent's invocations go on in the parent."""
        self.lock = threading.RLock()
        self.deadlines.after_fork()
        if self.observers.gate is not None:
            self.observers.gate.after_fork()
        self._live.clear()
        self.spans.after_fork()

    def _trees(self, parent: Run | Group | None, policy: Policy) -> tuple[Budget, ...]:
        """Return the trees that something stands in, with one of its own where that can bind."""
        above = parent.trees if parent is not None else ()
        if not any(policy.tree.items()) or any(each.covers(policy) for each in above):
            return above
        return (new_tree(policy, self.now()), *above)

    @suppress_errors("runs")
    def _began(
        self,
        run: Run,
        model: str | None,
        session_id: str | None,
        attributes: Mapping[str, str],
    ) -> None:
        """Tell it, and make room; a fault here must not lose a run that is live already."""
        self._evict()
        self.observers.publish(
            events.Started(
                invocation=run.invocation,
                limits=run.policy.limits,
                action=ACTION_TAKEN[run.policy.action],
                unsampled=run.unsampled,
                model=model,
                session_id=session_id,
                attributes=attributes,
                tree=_caps_of_trees(run),
                has_quotas=self.observers.gate is not None and self.observers.gate.holds_quotas,
                configured_action=run.policy.action,
            )
        )

    def _evict(self) -> None:
        while self._live:
            # Released before `finish`, which takes it again and then tells observers.
            with self.lock:  # other threads begin invocations, and end them
                oldest = next(iter(self._live.values()), None)
            if oldest is None or not self._over_capacity(oldest):
                return
            oldest.finish("evicted")

    def _over_capacity(self, oldest: Run) -> bool:
        return len(self._live) > self._max_live or self.now() - oldest.started > self._max_age


def _identify(
    agent: str, parent: Run | Group | None, trace_id: int, span_id: int, *, sampled: bool
) -> Invocation:
    """Name an invocation that begins, and what it belongs to."""
    identity = uuid.uuid4().hex
    return Invocation(
        agent=agent,
        id=identity,
        root_id=parent.invocation.root_id if parent else identity,
        parent_id=parent.invocation.id if parent else None,
        trace_id=f"{trace_id:032x}" if trace_id else None,
        span_id=f"{span_id:016x}" if span_id else None,
        sampled=sampled,
    )


def _caps_of_trees(run: Run) -> dict[str, Number]:
    """Every cap of the trees that a run stands in, the tightest of each name."""
    caps: dict[str, Number] = {}
    for tree in run.trees:
        for name, cap in tree.policy.limits.items():
            if isinstance(cap, int | float | Decimal):
                caps[tree.prefix + name] = min(cap, caps.get(tree.prefix + name, cap))
    return caps


LIVE: Final = RunRegistry()
"""The runs of this process."""


def is_named(invocation: Invocation, agent: str | None, trace_id: str | None) -> bool:
    """Tell whether an invocation is of an agent or of a trace, each where one is given."""
    return (agent is not None and fnmatch.fnmatchcase(invocation.agent, agent)) or (
        trace_id is not None and invocation.trace_id == trace_id
    )


def kill(
    *,
    agent: str | None = None,
    trace_id: str | None = None,
    all: bool = False,  # noqa: A002  the word that says it
) -> int:
    """End live invocations of this process at once; the next ones are untouched.

    A response that is being streamed is broken off, tools that run are waited for. The stop
    reason is `killed`, whatever the action.

    Args:
        agent: Name of the agents; `*` and `?` stand for any characters.
        trace_id: Trace whose invocations are ended, as 32 hexadecimal digits.
        all: End every one.

    Returns:
        How many invocations were ended.

    Raises:
        ValueError: Nothing says which.
    """
    if agent is None and trace_id is None and not all:
        raise ValueError("kill() needs agent=…, trace_id=… or all=True to know what to end.")
    return LIVE.kill(agent=agent, trace_id=trace_id, all=all)


INTERNAL_ERRORS.publish = LIVE.observers.publish_internal_error
# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE.after_fork)
