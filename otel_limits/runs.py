"""Live invocations: what each has used, in the one place that is mutable and shared."""

from __future__ import annotations

import contextvars
import fnmatch
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, get_args

from otel_limits import facts
from otel_limits.deadlines import Deadlines
from otel_limits.facts import ActionTaken, Fact, Invocation, ModelCall, Observer, Stop, ToolCall
from otel_limits.faults import FAULTS, note, unfelt
from otel_limits.limits import (
    EXACT,
    KILLED,
    LOOP_DETECTED_STOP_REASON,
    LOOP_LIMITS,
    MAX_TOOL_CALLS_STOP_REASON,
    NO_USAGE,
    TREE_PREFIX,
    Breach,
    Level,
    Limits,
    Policy,
    Tally,
    Usage,
    Verdict,
    verdict_of,
)
from otel_limits.loops import Call, LoopState
from otel_limits.progress import Progress, Used

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.facts import ToolStatus
    from otel_limits.gate import Gate
    from otel_limits.pricing import Prices

FIRST_REPETITION: Final = {**dict.fromkeys(LOOP_LIMITS, 2), "max_no_progress_turns": 1}
"""The count from which on something has been repeated: one call is not."""

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

KINDS: Final[tuple[type, ...]] = get_args(Fact)
"""What an observer is told that does not say what it wants."""

ABOUT_OBSERVERS: Final = (facts.Fault, facts.Dropped)
"""Facts whose loss is not told: telling it would have no end."""


class ToolLog(Protocol):
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


NO_ORIGIN: Final = (None, None)
"""Where no price comes from."""

CHARACTERS_PER_TOKEN: Final = 4
"""What an estimate assumes where the framework offers no projection."""

Told: TypeAlias = tuple[Observer, Callable[[Any], None]]
"""An observer, and which part of it takes facts of one kind."""


class OpenCall:
    """A model call whose end has not been seen yet."""

    is_open = True
    """False once it has been booked."""
    span_id: str | None = None
    """Its `chat` span, as soon as that has begun."""
    streamed = False
    """True when the provider sent something, so that it will bill the input."""
    reported = False
    """True when the provider sent usage, be it zero."""
    usage: Usage | None = None
    """What the provider sent, before anybody folded cached tokens into anything."""
    usage_total: int | None = None
    counted: Usage | None = None
    """The same as it counts, cached tokens in the input; `None` when it cannot be used."""

    def __init__(
        self,
        model: str,
        input_estimate: int = 0,
        started: float | None = None,
        provider: str = "unknown",
    ) -> None:
        """Remember what is known before the answer comes: little, where nobody saw it begin."""
        self.model = model
        self.provider = provider
        self.input_estimate = input_estimate
        self.started = started


class Tree:
    """What an invocation and everything that it started have used together."""

    __slots__ = ("limits", "started", "tally")

    def __init__(self, limits: Limits, started: float) -> None:
        """Begin with nothing used."""
        self.limits = limits
        self.started = started
        self.tally = Tally()


class Group:
    """What agents belong to that work together without one that started them, such as a graph."""

    __slots__ = ("finished", "invocation", "tree")

    def __init__(self, name: str, tree: Tree | None, parent: Run | Group | None) -> None:
        """Begin a tree, or a branch of the parent's."""
        identity = uuid.uuid4().hex
        root_id = parent.invocation.root_id if parent else identity
        self.invocation: Invocation = Invocation(agent=name, id=identity, root_id=root_id)
        self.tree = tree
        self.finished = False


class Run:
    """One live invocation: its tally, and how it is going to end.

    Its methods are the only way in which anything is counted. A model call is opened before it
    goes out and settled once, when its end is seen or else with the invocation.
    """

    __slots__ = (
        "__weakref__",
        "_caps_tools",
        "_cleared",
        "_deadline",
        "_is_timed",
        "_nudged",
        "_refusals",
        "_runs",
        "_tallies",
        "_tools_kept",
        "_tools_told",
        "_warned",
        "action",
        "beside",
        "blind",
        "call",
        "calls_by_tool",
        "cancel",
        "finished",
        "invocation",
        "killed",
        "loops",
        "parent",
        "policy",
        "progress",
        "reason",
        "span_ids",
        "started",
        "started_wall",
        "tally",
        "tree",
        "verdict",
        "wrapped_up",
    )

    def __init__(
        self, runs: Runs, invocation: Invocation, policy: Policy, tree: Tree | None, *, blind: bool
    ) -> None:
        """Begin with an empty tally; `Runs.start` is the way to make one."""
        self._runs = runs
        self.invocation = invocation
        self.policy = policy
        self.parent: Run | Group | None = current()
        """What started it: a live invocation, or a group of agents."""
        self.tree = tree
        self.blind = blind
        self.tally = Tally()
        self.progress = Progress()
        self._tallies = (self.tally,) if tree is None else (self.tally, tree.tally)
        self.calls_by_tool: dict[str, int] = {}
        self.loops = LoopState() if has_loop_limit(policy.limits) else None
        self.call: OpenCall | None = None
        """The open call of the agent's loop."""
        self.beside: set[OpenCall] = set()
        """Open calls that the loop knows nothing of: other tools may make some at once."""
        self.cancel: Callable[[Verdict], None] | None = None
        """Ends the invocation from any thread, where the framework can."""
        self.started = runs.now()
        self.started_wall = time.time()
        self.reason: str | None = None
        """Stop reason of the last leg that came to an end."""
        self.action: ActionTaken = "none"
        self.verdict: Verdict | None = None
        """Why it was halted, or would have been."""
        self.killed = False
        self.wrapped_up = False
        """True when the model was asked for its last answer."""
        self.span_ids: set[int] = set()
        self.finished = False
        self._refusals: dict[str, Breach] = {}
        self._warned: set[tuple[str, float]] = set()
        self._nudged = False
        self._tools_told = self._tools_kept = 0
        self._deadline: int | None = None
        self._look_ahead()

    # --- what happens -----------------------------------------------------------------------------

    def leg(self) -> None:
        """A pass of the agent loop begins: iterations start again."""
        self.recover()
        self.reason = None
        if self.loops is not None:
            self.loops.leg()
            self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        if self.action != "observed":
            self.action, self.verdict = "none", None

    def extend(self, more: Limits) -> None:
        """Let the invocation use that much more than it has used by now."""
        self._measure_time()
        limits = more.beyond(self.tally, self.calls_by_tool).over(self.policy.limits)
        self.policy = replace(self.policy, limits=limits)
        self._refusals.clear()
        self._look_ahead()
        self.limit_time()

    def recover(self) -> None:
        """The context overflowed and was reduced: iterations start again."""
        self.tally.iterations = 0

    def cycle(self) -> None:
        """An event loop cycle begins."""
        self.tally.cycles += 1
        self._runs.behind[self.invocation.id] = self
        if self._runs.heard[facts.Cycle]:
            self._runs.tell(facts.Cycle(invocation=self.invocation))

    def turn(self) -> None:
        """A model response was taken into the conversation."""
        self.tally.iterations += 1
        with self._runs.lock:
            for tally in self._tallies:
                tally.turns += 1
        self._cleared = False
        self._runs.behind[self.invocation.id] = self
        if self._runs.heard[facts.Turn]:
            self._runs.tell(facts.Turn(invocation=self.invocation, number=self.tally.turns))

    def open_call(self, model: str, input_estimate: int, provider: str = "unknown") -> OpenCall:
        """A request is about to go out."""
        if self.call is not None:  # a middleware has several under way
            self.beside.add(self.call)
        self.call = OpenCall(model, input_estimate, self._runs.now(), provider)
        return self.call

    def open_beside(self, model: str, input_estimate: int, provider: str) -> OpenCall:
        """A request that is none of the loop's is about to go out."""
        call = OpenCall(model, input_estimate, self._runs.now(), provider)
        self.beside.add(call)
        return call

    def settle(
        self,
        call: OpenCall,
        usage: Usage | None = None,
        *,
        failed: bool = False,
        aborted: bool = False,
        output_estimate: int = 0,
    ) -> None:
        """The end of a model call was seen: count it.

        Args:
            call: The call; one that nobody saw begin was never opened.
            usage: What the provider reported; `None` for what was noted of the call, if anything.
            failed: The call ended without a response.
            aborted: Nobody waited for the response, so that it is billed all the same.
            output_estimate: Tokens that the response is estimated to have, if any.
        """
        if usage is None:
            usage = call.counted
        kind = call_kind(usage, call, failed=failed)
        estimated = False
        if kind != "measured":
            billed = usage is None and (aborted or call.streamed)
            estimated = kind == "unmeasured" or (kind == "failed" and billed)
            if estimated and self.policy.unmeasured != "ignore":
                usage = Usage(input=call.input_estimate, output=output_estimate)
        counted = usage or NO_USAGE
        price = self._runs.price_of(call.model, counted)
        with self._runs.lock:
            # first what goes deepest: a runaway may have no frame left, and nothing is counted then
            self.progress.called(call.model, kind, counted, price, call.span_id)
            for tally in self._tallies:
                add_call(tally, counted, price, estimated=estimated)
        self._cleared = False
        self._shut(call)  # until here a fault leaves it open, to be settled with the invocation
        self._runs.behind[self.invocation.id] = self
        if self._runs.heard[ModelCall]:
            self._tell_call(call, kind, counted, price, estimated=estimated)

    def _tell_call(
        self,
        call: OpenCall,
        kind: facts.CallKind,
        counted: Usage,
        price: Decimal | None,
        *,
        estimated: bool,
    ) -> None:
        source, version = NO_ORIGIN if price is None else self._runs.price_origin()
        self._runs.tell(
            ModelCall(
                invocation=self.invocation,
                number=self.tally.model_calls,
                model=call.model,
                kind=kind,
                usage=counted,
                estimated=estimated,
                span_id=call.span_id,
                seconds=None if call.started is None else self._runs.now() - call.started,
                price=price,
                price_source=source,
                price_version=version,
                provider=call.provider,
                reported=call.usage,
                reported_total=call.usage_total,
                turn=self.tally.turns + 1,
                iteration=self.tally.iterations + 1,
            )
        )

    def admit_tool(self, tool: str) -> Breach | None:
        """The model asks for a call of `tool`: count it, or say which limit refuses it."""
        with self._runs.lock:
            breach = self._refusal(tool) if self._caps_tools else None
            if breach is not None:
                self._refusals[breach.limit] = breach
                self._cleared = False
                if self.policy.action != "observe":
                    self.tally.refused_tool_calls += 1
                    return breach
            self._count_tool(tool, 1)
        return None

    def return_tool(self, tool: str) -> None:
        """A tool call that was admitted did not run after all."""
        with self._runs.lock:
            self._count_tool(tool, -1)

    def tool_called(
        self,
        tool: str,
        status: ToolStatus,
        seconds: float | None,
        fingerprint: str | None,
    ) -> None:
        """A tool call is over, in its final attempt."""
        self._tools_told += 1
        tools = self.progress.tools
        tools[tool, status] = tools.get((tool, status), 0) + 1
        self._runs.behind[self.invocation.id] = self
        if not self._runs.heard[ToolCall]:
            return
        self._runs.tell(
            ToolCall(
                invocation=self.invocation,
                number=self._tools_told,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
            )
        )

    @property
    def is_direct(self) -> bool:
        """True for a request without the loop: alone those that are not blind have no span."""
        return not self.blind and self.invocation.span_id is None

    def keep_tool(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Keep a call that was answered with its contents."""
        if self._runs.tool_log is not None:
            self._tools_kept += 1
            self._runs.tool_log.write(
                self.invocation, self._tools_kept, tool, arguments, result, trigger=trigger
            )

    def repeat(self, calls: Sequence[Call], text: str | None) -> None:
        """A turn is over: look whether it repeats earlier ones."""
        if self.loops is None:
            return
        self._cleared = False
        self.loops.turn(calls, text)
        self.tally.consecutive_same_tool = self.loops.consecutive_same_tool
        self.tally.identical_tool_calls = self.loops.identical_tool_calls
        self.tally.repeated_tool_cycles = self.loops.repeated_tool_cycles
        self.tally.no_progress_turns = self.loops.no_progress_turns

    # --- what follows from it ---------------------------------------------------------------------

    def judge(self) -> Verdict | None:
        """Decide whether the agent may go on; `None` when it may."""
        if self.killed:
            return KILLED
        if self._cleared:
            return None
        # Before anything is read, so that what is counted meanwhile takes it back; and not where
        # others count as well, or time does.
        self._cleared = self.tree is None and not self._is_timed
        try:
            breaches = self._breaches()
        except BaseException:
            self._cleared = False
            raise
        if not breaches:
            return None
        self._cleared = False
        return verdict_of(tuple(self._with_subject(breach) for breach in breaches))

    def _breaches(self) -> tuple[Breach, ...]:
        """Every limit that was reached, of the invocation and of its budget tree."""
        if self._is_timed:
            self._measure_time()
        breaches = self.policy.breaches(self.tally)
        if self._refusals:
            breaches += tuple(self._refusals.values())
        if self.tree is not None:
            breaches += self.tree.limits.breaches(self.tree.tally, TREE_PREFIX)
        return breaches

    def levels(self) -> tuple[Level, ...]:
        """How much of each limit has been used."""
        self._measure_time()
        levels = self.policy.limits.levels(self.tally)
        if self.tree is not None:
            levels += self.tree.limits.levels(self.tree.tally, TREE_PREFIX)
        return levels

    def warn(self) -> tuple[facts.Warned, ...]:
        """Tell each soft threshold that was passed since the last time."""
        if not self.policy.warn_at:
            return ()
        passed = [
            facts.Warned(invocation=self.invocation, threshold=threshold, level=level)
            for level in self.levels()
            for threshold in self.policy.warn_at
            if level.ratio >= threshold and (level.limit, threshold) not in self._warned
        ]
        for warning in passed:
            self._warned.add((warning.level.limit, warning.threshold))
            self._runs.tell(warning)
        return tuple(passed)

    def nudge(self) -> bool:
        """Tell whether the model is to be told, this once, that it repeats itself."""
        if self._nudged or self.loops is None or not self.policy.nudge:
            return False
        self._nudged = any(
            kind.observed(self.tally) == cap - 1 and cap - 1 >= FIRST_REPETITION[kind.name]
            for kind, cap in self.policy.limits.active
            if kind.name in LOOP_LIMITS
        )
        return self._nudged

    def halt(self, verdict: Verdict, action: ActionTaken) -> None:
        """The agent is stopped because of `verdict`; an observed one is told once."""
        if self.action == "observed" and action == "observed":
            return
        self.action = action
        self.verdict = verdict
        self._runs.tell(
            facts.Halt(
                invocation=self.invocation,
                reason=verdict.reason,
                breaches=verdict.breaches,
                action=action,
            )
        )

    @unfelt("deadlines")
    def limit_time(self) -> None:
        """Have the invocation cancelled when its time is up."""
        self._forget_deadline()
        caps = [
            cap - (self._runs.now() - since)
            for cap, since in (
                (self.policy.limits.max_duration_seconds, self.started),
                (self.tree.limits.max_duration_seconds, self.tree.started) if self.tree else NEVER,
            )
            if cap is not None
        ]
        if caps and self.policy.action != "observe" and self.cancel is not None:
            self._deadline = self._runs.deadlines.after(max(0.0, min(caps)), self._time_is_up)

    def stop(self, reason: str) -> Stop:
        """How the invocation ends, or would end now."""
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
            seconds=self._runs.now() - self.started,
            tool_calls=self.tally.tool_calls,
            levels=self.levels(),
            cost=self.tally.cost,
            unpriced_calls=self.tally.unpriced_calls,
            invocation=self.invocation,
        )

    def finish(self, reason: str) -> None:
        """The invocation is over: settle what is open, tell it once, and forget it."""
        if not self._runs.forget(self):
            self.report()  # it was evicted, and went on
            return
        self._close()
        self.report()
        self._runs.tell_stop(self.stop(reason))

    @unfelt("runs")
    def report(self) -> None:
        """Tell what was used since the last time to those who want it summed up.

        Whoever comes meanwhile waits until it is told, as somebody may read the numbers then.
        """
        with self._runs.reporting:
            self._runs.behind.pop(self.invocation.id, None)  # first, as it may use more meanwhile
            used = self.progress.take(self.invocation, self.tally.turns, self.tally.cycles)
            if used is not None:
                self._runs.tell(used)

    def disown(self) -> None:
        """Leave it to the parent process to tell what was used until now."""
        self.progress.skip(self.invocation, self.tally.turns, self.tally.cycles)

    # --- how --------------------------------------------------------------------------------------

    @unfelt("runs")
    def _close(self) -> None:
        """Settle what is open; a fault here must not keep the stop from being told."""
        FAULTS.catch_up()
        self._forget_deadline()
        if self.call is not None:
            self.settle(self.call, failed=True, aborted=True)
        for call in tuple(self.beside):
            self.settle(call, failed=True, aborted=True)

    def _forget_deadline(self) -> None:
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            self._runs.deadlines.cancel(deadline)

    def _look_ahead(self) -> None:
        """Note what no limit asks for, so that it is left out at every turn."""
        self._cleared = False  # true while nothing was counted since the agent was let go on
        own = self.policy.limits
        scopes = (own,) if self.tree is None else (own, self.tree.limits)
        self._is_timed = any(each.max_duration_seconds for each in scopes)
        self._caps_tools = any(each.max_tool_calls or each.max_calls_per_tool for each in scopes)

    def _shut(self, call: OpenCall) -> None:
        call.is_open = False
        if call is self.call:
            self.call = None
        else:
            self.beside.discard(call)

    def _measure_time(self) -> None:
        now = self._runs.now()
        self.tally.seconds = now - self.started
        if self.tree is not None:
            self.tree.tally.seconds = now - self.tree.started

    def _refusal(self, tool: str) -> Breach | None:
        """Which limit has no call of `tool` left."""
        per_tool = (self.policy.limits.max_calls_per_tool or {}).get(tool)
        scopes = [
            ("max_calls_per_tool", per_tool, self.calls_by_tool.get(tool, 0), tool),
            ("max_tool_calls", self.policy.limits.max_tool_calls, self.tally.tool_calls, None),
        ]
        if self.tree is not None:
            used = self.tree.tally.tool_calls
            scopes.append(
                (TREE_PREFIX + "max_tool_calls", self.tree.limits.max_tool_calls, used, None)
            )
        for limit, cap, used, subject in scopes:
            if cap is not None and used >= cap:
                return Breach(limit, cap, used + 1, MAX_TOOL_CALLS_STOP_REASON, "calls", subject)
        return None

    def _count_tool(self, tool: str, change: int) -> None:
        self.calls_by_tool[tool] = self.calls_by_tool.get(tool, 0) + change
        for tally in self._tallies:
            tally.tool_calls += change

    def _with_subject(self, breach: Breach) -> Breach:
        if breach.reason == LOOP_DETECTED_STOP_REASON and self.loops is not None:
            return replace(breach, subject=self.loops.blame(breach.limit))
        return breach

    @unfelt("deadlines")
    def _time_is_up(self) -> None:
        verdict = self.judge()
        if verdict is not None and self.cancel is not None:
            self.cancel(verdict)


NEVER: Final[tuple[None, float]] = (None, 0.0)


def has_loop_limit(limits: Limits) -> bool:
    """Tell whether repetitions have to be followed at all."""
    return any(kind.name in LOOP_LIMITS for kind, _ in limits.active)


def add_call(tally: Tally, usage: Usage, price: Decimal | None, *, estimated: bool) -> None:
    """Add one model call to a tally."""
    tally.input += usage.input
    tally.output += usage.output
    if usage.cache_read or usage.cache_write:
        tally.cache_read += usage.cache_read
        tally.cache_write += usage.cache_write
    tally.model_calls += 1
    tally.unmeasured_calls += estimated
    if price is not None:
        tally.cost = EXACT.add(tally.cost, price)
    elif usage.input or usage.output:
        tally.unpriced_calls += 1


def call_kind(usage: Usage | None, call: OpenCall, *, failed: bool) -> facts.CallKind:
    """Tell a failed, a measured, a real zero-token and an unmeasured call apart."""
    if failed:
        return "failed"
    if usage is not None and (usage.input or usage.output):
        return "measured"
    return "zero_token" if call.reported else "unmeasured"


CURRENT: Final[contextvars.ContextVar[Run | Group | None]] = contextvars.ContextVar(
    "otel_limits_run", default=None
)
"""The invocation that the present task works for: what it starts belongs to it."""

FOLLOWED: Final[contextvars.ContextVar[OpenCall | None]] = contextvars.ContextVar(
    "otel_limits_followed", default=None
)
"""The call beside the loop that we are within: what it asks in turn, or traces, is the same."""


def is_followed(run: Run) -> bool:
    """Tell whether we are within a call of `run` beside its loop that is still open."""
    return FOLLOWED.get() in run.beside


def current() -> Run | Group | None:
    """Whatever live thing the present task works for."""
    scope = CURRENT.get()
    return None if scope is None or scope.finished else scope


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
        self.reporting = threading.RLock()
        """Held while something is reported, so that it is reported once."""
        self.behind: dict[str, Run] = {}
        """Those that have used what was not reported yet, by the id of the invocation."""
        self._gate: Gate | None = None
        self.observers = ()
        self.prices: Prices | None = None
        self.tool_log: ToolLog | None = None
        self.audit_keys: tuple[str, ...] = ()
        """Names in the baggage or on the agent whose values an auditor wants to group by."""
        self.deadlines = Deadlines()
        self.clock = clock
        self._last_time = 0.0
        self._max_live = max_live
        self._max_age = max_age_seconds
        self._live: OrderedDict[str, Run] = OrderedDict()
        self._by_span: dict[int, tuple[Run, bool]] = {}
        self._sighted: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Live invocations."""
        return len(self._live)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those who are told facts, in this order."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Observer, ...]) -> None:
        self.report()  # it is for those who have been there until now
        self._observers = observers
        self._listen()

    @property
    def gate(self) -> Gate | None:
        """Asked before every model call, where quotas are set, and told every fact."""
        return self._gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        self._gate = gate
        self._listen()

    def _listen(self) -> None:
        """Note who wants what, so that nothing is made that nobody wants."""
        kinds = (*KINDS, Used)
        self._audiences = {kind: audience_of(kind, self._observers) for kind in kinds}
        self.heard = {
            kind: bool(told) or self._gate is not None for kind, told in self._audiences.items()
        }

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

    def report(self) -> None:
        """Tell how far all invocations have come to those who want it summed up."""
        for run in list(self.behind.values()):
            run.report()

    def tell(self, fact: Fact | Used) -> None:
        """Hand `fact` to whoever wants it; one that fails does not keep it from the others."""
        if self._gate is not None and not isinstance(fact, Used):
            fact = self._gate(fact) or fact
        for observer, take in self._audiences[type(fact)]:
            try:
                take(fact)
            except Exception as error:  # noqa: BLE001, PERF203  foreign code
                self._lost(observer, fact, error)

    def tell_stop(self, stop: Stop) -> None:
        """Hand `stop` to every observer, and tell how long each took for it."""
        if self.gate is not None:
            self.gate(stop)
        lags = []
        for observer in self.observers:
            begin = time.perf_counter()
            try:
                observer(stop)
            except Exception as error:  # noqa: BLE001  foreign code
                self._lost(observer, stop, error)
            lags.append(
                facts.Lag(observer=component_name(observer), seconds=time.perf_counter() - begin)
            )
        for lag in lags:
            self.tell(lag)

    def replace(self, former: Observer, observer: Observer) -> None:
        """Tell `observer` from now on what `former` was told."""
        self.observers = tuple(observer if each is former else each for each in self.observers)

    def _lost(self, observer: Observer, fact: Fact | Used, error: Exception) -> None:
        if not isinstance(fact, ABOUT_OBSERVERS):
            FAULTS.report(component_name(observer), error)
            self.tell(facts.Dropped(observer=component_name(observer)))

    def tell_fault(self, component: str) -> None:
        """Tell every observer that `component` failed."""
        self.tell(facts.Fault(component=component))

    def kill(
        self,
        *,
        agent: str | None = None,
        trace_id: str | None = None,
        all: bool = False,  # noqa: A002  the word that says it
    ) -> int:
        """End live invocations at once; returns how many.

        A request without the loop is none of them: nothing breaks it off.

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

    def sight(self, span_id: int) -> None:
        """The `invoke_agent` span `span_id` reached the span processor."""
        with self.lock:
            self._sighted[span_id] = None
            if len(self._sighted) > self._max_live:
                self._sighted.popitem(last=False)

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

        A direct one is never blind: it has no span that could be missed.
        """
        with self.lock:
            blind = not direct and span_id not in self._sighted
            self._sighted.pop(span_id, None)
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
        run = Run(self, invocation, policy, self._tree(parent, policy), blind=blind)
        with self.lock:
            if not blind and span_id:
                self._by_span[span_id] = (run, False)
                run.span_ids.add(span_id)
            self._live[identity] = run
        self._began(run, model, session_id, attributes or {})
        return run

    def group(self, name: str, policy: Policy) -> Group:
        """Several agents begin to work together."""
        parent = current()
        return Group(name, self._tree(parent, policy), parent)

    def begin_span(self, span_id: int, parent_id: int, *, is_chat: bool) -> Run | None:
        """A span began under `parent_id`; returns the run that both belong to, if one does."""
        owner = self._by_span.get(parent_id)
        if owner is None:
            return None
        run, in_chat = owner
        with self.lock:
            self._by_span[span_id] = (run, in_chat or is_chat)
            run.span_ids.add(span_id)
        return run

    def end_span(self, span_id: int) -> None:
        """A span of a run ended: nothing will hang under it any more."""
        with self.lock:
            owner = self._by_span.pop(span_id, None)
            if owner is not None:
                owner[0].span_ids.discard(span_id)

    def of_span(self, span_id: int) -> tuple[Run | None, bool]:
        """The live run that owns a span, and whether the span is within a model call."""
        return self._by_span.get(span_id, (None, False))

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
        self.deadlines.reset_after_fork()
        self.reporting = threading.RLock()
        for run in (*self._live.values(), *self.behind.values()):
            run.disown()
        self.behind.clear()
        if self.gate is not None:
            self.gate.reset_after_fork()
        self._live.clear()
        self._by_span.clear()
        self._sighted.clear()

    def _tree(self, parent: Run | Group | None, policy: Policy) -> Tree | None:
        if parent is not None and parent.tree is not None:
            return parent.tree
        return Tree(policy.tree, self.now()) if any(policy.tree.items()) else None

    @unfelt("runs")
    def _began(
        self,
        run: Run,
        model: str | None,
        session_id: str | None,
        attributes: Mapping[str, str],
    ) -> None:
        """Tell it, and make room; a fault here must not lose a run that is live already."""
        self._evict()
        self.tell(
            facts.Started(
                invocation=run.invocation,
                limits=run.policy.limits,
                action=TAKEN[run.policy.action],
                blind=run.blind,
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


def audience_of(kind: type, observers: tuple[Observer, ...]) -> tuple[Told, ...]:
    """Return those who want facts of a kind: of most of them, nobody but the metrics."""
    wanted = ((each, wants_of(each)) for each in observers)
    return tuple((each, wants[kind]) for each, wants in wanted if kind in wants)


def wants_of(observer: Observer) -> Mapping[type, Callable[[Any], None]]:
    """Return what takes the facts that an observer names, or all: a mock has any attribute."""
    wants = getattr(observer, "wants", None)
    if isinstance(wants, dict):
        return wants
    return dict.fromkeys(wants if isinstance(wants, tuple) else KINDS, observer)


def component_name(observer: Observer) -> str:
    """What a failing observer is called in logs and metrics."""
    return getattr(observer, "component", None) or "observer"


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


FAULTS.tell = LIVE.tell_fault
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE.reset_after_fork)
