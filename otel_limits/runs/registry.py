"""The registry of live invocations, in the one place that is mutable and shared."""

from __future__ import annotations

import fnmatch
import os
import threading
import time
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from otel_limits.core import facts
from otel_limits.core.facts import ActionTaken, Invocation
from otel_limits.core.faults import FAULTS, never_raises, note
from otel_limits.core.policy import KILLED, Policy
from otel_limits.core.usage import Usage
from otel_limits.runs.calls import NO_ORIGIN
from otel_limits.runs.deadlines import Deadlines
from otel_limits.runs.observers import Observers
from otel_limits.runs.run import Run
from otel_limits.runs.spans import Spans
from otel_limits.runs.tree import Group, Tree, current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from decimal import Decimal

    from otel_limits.core.pricing import Prices
    from otel_limits.core.usage import Usage

MAX_LIVE: Final = 10_000
"""Live invocations that are remembered; the oldest is settled when one more begins."""

MAX_AGE_SECONDS: Final = 24 * 60 * 60.0
"""After this, an invocation that never ended is settled."""

TAKEN: Final[dict[str, ActionTaken]] = {
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


class Runs:
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
        self.lock = threading.Lock()
        self.observers = Observers()
        self.prices: Prices | None = None
        self.tool_log: ToolLogWriter | None = None
        self.audit_keys: tuple[str, ...] = ()
        """Names in the baggage or on the agent whose values an auditor wants to group by."""
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
            FAULTS.report("clock", error)
        return self._last_time

    def price_of(self, model: str, usage: Usage) -> Decimal | None:
        """USD of a model call, or `None` when nobody knows."""
        if self.prices is None or not (usage.input or usage.output):
            return None
        try:
            return self.prices.price(model, usage)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("prices", error)
            return None

    def price_origin(self) -> tuple[str | None, str | None]:
        """Source of the prices, and its version."""
        return NO_ORIGIN if self.prices is None else (self.prices.source, self.prices.version)

    def kill(
        self,
        *,
        agent: str | None = None,
        trace_id: str | None = None,
        all: bool = False,  # noqa: A002  the word that says it
    ) -> int:
        """End live invocations at once; returns how many.

        A request without the loop is left alone, as nothing can break it off.

        Args:
            agent: Name of the agents, `*` and `?` stand for any characters.
            trace_id: Trace whose invocations are ended.
            all: End every one.
        """
        matching = [
            run
            for run in list(self._live.values())
            if not run.is_direct
            and (
                all
                or (agent is not None and fnmatch.fnmatchcase(run.invocation.agent, agent))
                or (trace_id is not None and run.invocation.trace_id == trace_id)
            )
        ]
        for run in matching:
            run.killed = True
            if run.cancel is not None:
                run.cancel(KILLED)
        return len(matching)

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
        unsampled = not direct and not self.spans.take(span_id)
        parent = current()
        identity = uuid.uuid4().hex
        invocation = Invocation(
            agent=agent,
            id=identity,
            root_id=parent.invocation.root_id if parent else identity,
            parent_id=parent.invocation.id if parent else None,
            trace_id=f"{trace_id:032x}" if trace_id else None,
            span_id=f"{span_id:016x}" if span_id else None,
            sampled=sampled,
        )
        run = Run(self, invocation, policy, self._tree(parent, policy), unsampled=unsampled)
        if span_id and not unsampled:
            self.spans.own(run, span_id)
        with self.lock:
            self._live[identity] = run
        self._began(run, model, session_id, attributes or {})
        return run

    def group(self, name: str, policy: Policy) -> Group:
        """Several agents begin to work together."""
        parent = current()
        return Group(name, self._tree(parent, policy), parent)

    def forget(self, run: Run) -> bool:
        """Drop a run; False when that had been done before."""
        # Whoever comes first ends it: the framework, an eviction or `disable()`.
        with self.lock:
            if run.finished:
                return False
            run.finished = True
            self._live.pop(run.invocation.id, None)
        self.spans.forget(run)
        return True

    def after_fork(self) -> None:
        """Start afresh in a child: its parent's invocations go on in the parent."""
        self.lock = threading.Lock()
        self.deadlines.after_fork()
        if self.observers.gate is not None:
            self.observers.gate.after_fork()
        self._live.clear()
        self.spans.after_fork()

    def _tree(self, parent: Run | Group | None, policy: Policy) -> Tree | None:
        if parent is not None and parent.tree is not None:
            return parent.tree
        return Tree(policy.tree, self.now()) if any(policy.tree.items()) else None

    @never_raises("runs")
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
            facts.Started(
                invocation=run.invocation,
                limits=run.policy.limits,
                action=TAKEN[run.policy.action],
                unsampled=run.unsampled,
                model=model,
                session_id=session_id,
                attributes=attributes,
            )
        )

    def _evict(self) -> None:
        while self._live:
            with self.lock:  # other threads begin invocations, and end them
                oldest = next(iter(self._live.values()), None)
            if oldest is None or not self._is_too_much(oldest):
                return
            oldest.finish("evicted")

    def _is_too_much(self, oldest: Run) -> bool:
        return len(self._live) > self._max_live or self.now() - oldest.started > self._max_age


LIVE: Final = Runs()
"""The runs of this process."""


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


FAULTS.publish = LIVE.observers.publish_fault
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE.after_fork)
