"""Live invocations: what each has used, in the one place that is mutable and shared."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from otel_limits import facts
from otel_limits.facts import ActionTaken, Fact, Invocation, ModelCall, Observer, Stop
from otel_limits.faults import FAULTS
from otel_limits.limits import NO_USAGE, Breach, Policy, Tally, Usage

MAX_LIVE: Final = 10_000
"""Live invocations that are remembered; the oldest is settled when one more begins."""

MAX_AGE_SECONDS: Final = 24 * 60 * 60.0
"""After this, an invocation that never ended is settled."""

TAKEN: Final[dict[str, ActionTaken]] = {"observe": "observed", "halt": "halted", "raise": "raised"}

CHARACTERS_PER_TOKEN: Final = 4
"""What an estimate assumes where the framework offers no projection."""


class OpenCall:
    """A model call whose end has not been seen yet."""

    __slots__ = (
        "input_estimate",
        "model",
        "provider",
        "reported",
        "span_id",
        "started",
        "streamed",
        "usage",
        "usage_total",
    )

    def __init__(
        self, model: str, input_estimate: int, started: float, provider: str = "unknown"
    ) -> None:
        """Remember what is known before the answer comes."""
        self.model = model
        self.provider = provider
        self.input_estimate = input_estimate
        self.started = started
        self.span_id: str | None = None
        """Its `chat` span, as soon as that has begun."""
        self.streamed = False
        """True when the provider sent something, so that it will bill the input."""
        self.reported = False
        """True when the provider sent usage, be it zero."""
        self.usage: Usage | None = None
        """What the provider sent, before anybody folded cached tokens into anything."""
        self.usage_total: int | None = None


class Run:
    """One live invocation: its tally, and how it is going to end.

    Its methods are the only way in which anything is counted. A model call is opened before it
    goes out and is settled by whoever sees its end first, its span or its hook, so that it counts
    once whatever reaches us.
    """

    __slots__ = (
        "__weakref__",
        "_runs",
        "action",
        "blind",
        "breach",
        "breaches",
        "call",
        "finished",
        "invocation",
        "policy",
        "reason",
        "span_ids",
        "started",
        "started_wall",
        "tally",
    )

    def __init__(self, runs: Runs, invocation: Invocation, policy: Policy, *, blind: bool) -> None:
        """Begin with an empty tally; `Runs.start` is the way to make one."""
        self._runs = runs
        self.invocation = invocation
        self.policy = policy
        self.blind = blind
        self.tally = Tally()
        self.call: OpenCall | None = None
        self.started = runs.now()
        self.started_wall = time.time()
        self.reason: str | None = None
        """Stop reason of the last leg that came to an end."""
        self.action: ActionTaken = "none"
        self.breach: Breach | None = None
        self.breaches: tuple[Breach, ...] = ()
        self.span_ids: set[int] = set()
        self.finished = False

    def leg(self) -> None:
        """A pass of the agent loop begins: iterations start again."""
        self.tally.iterations = 0
        self.reason = None
        if self.action != "observed":
            self.action, self.breach, self.breaches = "none", None, ()

    def recover(self) -> None:
        """The context overflowed and was reduced: iterations start again."""
        self.tally.iterations = 0

    def cycle(self) -> None:
        """An event loop cycle begins."""
        self.tally.cycles += 1
        self._runs.tell(facts.Cycle(invocation=self.invocation))

    def turn(self) -> None:
        """A model response was taken into the conversation."""
        self.tally.iterations += 1
        self.tally.turns += 1
        self._runs.tell(facts.Turn(invocation=self.invocation, number=self.tally.turns))

    def open_call(self, model: str, input_estimate: int, provider: str = "unknown") -> None:
        """A request is about to go out."""
        if self.call is not None:  # a middleware called the model again and dropped the answer
            self.settle(None, failed=True)
        self.call = OpenCall(model, input_estimate, self._runs.now(), provider)

    def settle(
        self,
        usage: Usage | None,
        *,
        failed: bool = False,
        output_estimate: int = 0,
        model: str | None = None,
        span_id: str | None = None,
    ) -> None:
        """The end of a model call was seen: count it.

        Args:
            usage: What the provider reported; `None` when it reported nothing that can be used.
            failed: The call ended without a response.
            output_estimate: Tokens that the response is estimated to have, if any.
            model: Model id, where the opened call does not know it.
            span_id: Id of its `chat` span.
        """
        call, self.call = self.call, None
        kind = call_kind(usage, call, failed=failed)
        estimated = kind == "unmeasured" or (
            kind == "failed" and call is not None and call.streamed
        )
        if estimated and self.policy.unmeasured != "ignore":
            usage = Usage(input=call.input_estimate if call else 0, output=output_estimate)
        with self._runs.lock:
            self.tally.model_calls += 1
            self.tally.unmeasured_calls += estimated
            self.tally.usage += usage or NO_USAGE
        self._runs.tell(
            ModelCall(
                invocation=self.invocation,
                number=self.tally.model_calls,
                model=model or (call.model if call else "unknown"),
                kind=kind,
                usage=usage or NO_USAGE,
                estimated=estimated,
                span_id=span_id or (call.span_id if call else None),
                seconds=self._runs.now() - call.started if call else None,
                provider=call.provider if call else "unknown",
                reported=call.usage if call else None,
                reported_total=call.usage_total if call else None,
                turn=self.tally.turns + 1,
                iteration=self.tally.iterations + 1,
            )
        )

    def breached(self) -> tuple[Breach, ...]:
        """Every limit that has been reached by now."""
        return self.policy.breaches(self.tally)

    def halt(self, breaches: tuple[Breach, ...]) -> None:
        """The agent is stopped because of `breaches`; an observed breach is told once."""
        if self.action == "observed":
            return
        self.action = TAKEN[self.policy.action]
        self.breaches = breaches
        self.breach = breaches[0]
        self._runs.tell(
            facts.Halt(
                invocation=self.invocation,
                breach=self.breach,
                breaches=breaches,
                action=self.action,
            )
        )

    def stop(self, reason: str) -> Stop:
        """How the invocation ends, or would end now."""
        return Stop(
            reason=reason,
            action=self.action,
            breach=self.breach,
            breaches=self.breaches,
            turns=self.tally.turns,
            usage=self.tally.usage,
            agent=self.invocation.agent,
            trace_id=self.invocation.trace_id,
            invocation_id=self.invocation.id,
            cycles=self.tally.cycles,
            model_calls=self.tally.model_calls,
            started=self.started_wall,
            seconds=self._runs.now() - self.started,
            levels=self.policy.limits.levels(self.tally),
        )

    def finish(self, reason: str) -> None:
        """The invocation is over: settle what is open, tell it once, and forget it."""
        if not self._runs.forget(self):
            return
        if self.call is not None:
            self.settle(None, failed=True)
        self._runs.tell(self.stop(reason))


def call_kind(usage: Usage | None, call: OpenCall | None, *, failed: bool) -> facts.CallKind:
    """Tell a failed, a measured, a real zero-token and an unmeasured call apart."""
    if failed:
        return "failed"
    if usage is not None and usage.total:
        return "measured"
    return "zero_token" if call is not None and call.reported else "unmeasured"


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
        self.observers: tuple[Observer, ...] = ()
        self.audit_keys: tuple[str, ...] = ()
        """Names in the baggage or on the agent whose values an auditor wants to group by."""
        self.clock = clock
        self._last_time = 0.0
        self._max_live = max_live
        self._max_age = max_age_seconds
        self._live: OrderedDict[str, Run] = OrderedDict()
        self._by_span: dict[int, Run] = {}
        self._sighted: OrderedDict[int, None] = OrderedDict()

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

    def tell(self, fact: Fact) -> None:
        """Hand `fact` to every observer; one that fails does not keep it from the others."""
        for observer in self.observers:
            try:
                observer(fact)
            except Exception as error:  # noqa: BLE001, PERF203  each is foreign code
                if not isinstance(fact, facts.Fault):
                    FAULTS.report(component_name(observer), error)

    def tell_fault(self, component: str) -> None:
        """Tell every observer that `component` failed."""
        self.tell(facts.Fault(component=component))

    def sight(self, span_id: int) -> None:
        """The `invoke_agent` span `span_id` reached the span processor."""
        with self.lock:
            self._sighted[span_id] = None
            if len(self._sighted) > self._max_live:
                self._sighted.popitem(last=False)

    def start(
        self,
        agent: str,
        policy: Policy,
        trace_id: int,
        span_id: int,
        *,
        session_id: str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Run:
        """An agent begins an invocation whose span has these ids, 0 for none."""
        with self.lock:
            blind = span_id not in self._sighted
            self._sighted.pop(span_id, None)
        invocation = Invocation(
            agent=agent,
            id=uuid.uuid4().hex,
            trace_id=f"{trace_id:032x}" if trace_id else None,
            span_id=f"{span_id:016x}" if span_id else None,
        )
        run = Run(self, invocation, policy, blind=blind)
        with self.lock:
            self._live[invocation.id] = run
            if not blind:
                self._by_span[span_id] = run
                run.span_ids.add(span_id)
        self._evict()
        self.tell(
            facts.Started(
                invocation=invocation,
                limits=policy.limits,
                action=TAKEN[policy.action],
                blind=blind,
                session_id=session_id,
                attributes=attributes or {},
            )
        )
        return run

    def cycle(self, span_id: int, parent_id: int) -> None:
        """A cycle span of the run that owns `parent_id` began."""
        with self.lock:
            run = self._by_span.get(parent_id)
            if run is None:
                return
            self._by_span[span_id] = run
            run.span_ids.add(span_id)
        run.cycle()

    def chat(self, span_id: int, parent_id: int) -> None:
        """The span of the model call that is open began under the cycle `parent_id`."""
        run = self._by_span.get(parent_id)
        if run is not None and run.call is not None:
            run.call.span_id = f"{span_id:016x}"

    def end_span(self, span_id: int) -> None:
        """A span of a run ended: nothing will hang under it any more."""
        with self.lock:
            run = self._by_span.pop(span_id, None)
            if run is not None:
                run.span_ids.discard(span_id)

    def of_span(self, span_id: int) -> Run | None:
        """The run that owns a span, if it is live."""
        return self._by_span.get(span_id)

    def forget(self, run: Run) -> bool:
        """Drop a run; False when that had been done before."""
        with self.lock:
            if run.finished:
                return False
            run.finished = True
            self._live.pop(run.invocation.id, None)
            for span_id in run.span_ids:
                self._by_span.pop(span_id, None)
            run.span_ids.clear()
            return True

    def reset_after_fork(self) -> None:
        """Start afresh in a child: its parent's invocations go on in the parent."""
        self.lock = threading.Lock()
        self._live.clear()
        self._by_span.clear()
        self._sighted.clear()

    def _evict(self) -> None:
        while self._live:
            oldest = next(iter(self._live.values()), None)
            if oldest is None or not self._is_too_much(oldest):
                return
            oldest.finish("evicted")

    def _is_too_much(self, oldest: Run) -> bool:
        return len(self._live) > self._max_live or self.now() - oldest.started > self._max_age


def component_name(observer: Observer) -> str:
    """What a failing observer is called in logs and metrics."""
    return getattr(observer, "component", None) or "observer"


LIVE: Final = Runs()
"""The runs of this process."""

FAULTS.tell = LIVE.tell_fault
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE.reset_after_fork)
