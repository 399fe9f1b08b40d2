"""One live invocation: its tally, and how it is going to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.core import facts
from otel_limits.core.facts import ActionTaken, Invocation, ModelCall, Stop, ToolCall
from otel_limits.core.faults import FAULTS, never_raises
from otel_limits.core.limits import (
    LOOP_DETECTED_STOP_REASON,
    LOOP_LIMITS,
    MAX_TOOL_CALLS_STOP_REASON,
    TREE_PREFIX,
    Breach,
    Level,
    Limits,
)
from otel_limits.core.loops import Call, LoopState
from otel_limits.core.policy import KILLED, Policy, Verdict, verdict_of
from otel_limits.core.usage import NO_USAGE, Tally, Usage
from otel_limits.runs.calls import FOLLOWED, OpenCall, add_call, call_kind
from otel_limits.runs.tree import Group, Tree, current

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.core.facts import ToolStatus
    from otel_limits.runs.registry import Runs

FIRST_REPETITION: Final = {**dict.fromkeys(LOOP_LIMITS, 2), "max_no_progress_turns": 1}
"""The count from which on something has been repeated: one call is not."""

NO_ORIGIN: Final = (None, None)
"""Where no price comes from."""


class Run:
    """One live invocation: its tally, and how it is going to end.

    Its methods are the only way in which anything is counted. A model call is opened before it
    goes out and settled once, when its end is seen or else with the invocation.
    """

    __slots__ = (
        "__weakref__",
        "_caps_tools",
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
        "reason",
        "side_calls",
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
        self._tallies = (self.tally,) if tree is None else (self.tally, tree.tally)
        self.calls_by_tool: dict[str, int] = {}
        self.loops = LoopState() if has_loop_limit(policy.limits) else None
        self.call: OpenCall | None = None
        """The open call of the agent's loop."""
        self.side_calls: set[OpenCall] = set()
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
        self._runs.observers.publish(facts.Cycle(invocation=self.invocation))

    def turn(self) -> None:
        """A model response was taken into the conversation."""
        self.tally.iterations += 1
        with self._runs.lock:
            for tally in self._tallies:
                tally.turns += 1
        self._runs.observers.publish(
            facts.Turn(invocation=self.invocation, number=self.tally.turns)
        )

    def open_call(self, model: str, input_estimate: int, provider: str = "unknown") -> OpenCall:
        """A request is about to go out."""
        if self.call is not None:  # a middleware has several under way
            self.side_calls.add(self.call)
        self.call = OpenCall(model, input_estimate, self._runs.now(), provider)
        return self.call

    def open_side_call(self, model: str, input_estimate: int, provider: str) -> OpenCall:
        """A request that is none of the loop's is about to go out."""
        call = OpenCall(model, input_estimate, self._runs.now(), provider)
        self.side_calls.add(call)
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
            for tally in self._tallies:
                add_call(tally, counted, price, estimated=estimated)
        self._shut(call)  # until here a fault leaves it open, to be settled with the invocation
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
        self._runs.observers.publish(
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
        self._runs.observers.publish(
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
        return verdict_of(tuple(self._with_subject(breach) for breach in self._breaches()))

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
            self._runs.observers.publish(warning)
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
        self._runs.observers.publish(
            facts.Halt(
                invocation=self.invocation,
                reason=verdict.reason,
                breaches=verdict.breaches,
                action=action,
            )
        )

    @never_raises("deadlines")
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
            return
        self._close()
        self._runs.observers.publish_stop(self.stop(reason))

    # --- how --------------------------------------------------------------------------------------

    @never_raises("runs")
    def _close(self) -> None:
        """Settle what is open; a fault here must not keep the stop from being told."""
        FAULTS.catch_up()
        self._forget_deadline()
        if self.call is not None:
            self.settle(self.call, failed=True, aborted=True)
        for call in tuple(self.side_calls):
            self.settle(call, failed=True, aborted=True)

    def _forget_deadline(self) -> None:
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            self._runs.deadlines.cancel(deadline)

    def _look_ahead(self) -> None:
        """Note what no limit asks for, so that it is left out at every turn."""
        own = self.policy.limits
        scopes = (own,) if self.tree is None else (own, self.tree.limits)
        self._is_timed = any(each.max_duration_seconds for each in scopes)
        self._caps_tools = any(each.max_tool_calls or each.max_calls_per_tool for each in scopes)

    def _shut(self, call: OpenCall) -> None:
        call.is_open = False
        if call is self.call:
            self.call = None
        else:
            self.side_calls.discard(call)

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

    @never_raises("deadlines")
    def _time_is_up(self) -> None:
        verdict = self.judge()
        if verdict is not None and self.cancel is not None:
            self.cancel(verdict)


NEVER: Final[tuple[None, float]] = (None, 0.0)


def has_loop_limit(limits: Limits) -> bool:
    """Tell whether repetitions have to be followed at all."""
    return any(kind.name in LOOP_LIMITS for kind, _ in limits.active)


def is_followed(run: Run) -> bool:
    """Tell whether we are within a side call of `run` that is still open."""
    return FOLLOWED.get() in run.side_calls
