"""Admission of model calls by limits, trees and quotas, in any framework.

A binding knows where invocations and model calls begin and end, and how to stop them. This module
decides for all bindings which calls may be sent, and the action at a limit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.gateways import (
    budget_refusal,
    chain_of,
    http_status,
    is_answer,
    is_answer_cut,
    is_filtered,
    is_timeout,
    is_unsent,
)
from otel_limits.bindings.waits import InvocationEndedError, PendingWaits, wait_for
from otel_limits.core.errors import LimitReachedError, StopNote, limit_reached
from otel_limits.core.halt_texts import NOTHING_TO_SUM_UP, for_end_user, no_last_answer
from otel_limits.core.internal_errors import (
    INTERNAL_ERRORS,
    report_suppressed,
    suppress_errors,
    suppress_errors_async,
    suppress_lapses,
)
from otel_limits.core.limits import (
    EXTENDABLE,
    KILLED_STOP_REASON,
    MAX_DURATION_STOP_REASON,
    without_prefix,
)
from otel_limits.core.policy import Verdict
from otel_limits.runs.conversations import Conversation
from otel_limits.runs.current import CURRENT
from otel_limits.runs.quota_gate import AdmissionRequest
from otel_limits.runs.run import Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_limits.core.limits import Breach
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.quota_gate import QuotaGate


# --- admission ------------------------------------------------------------------------------------

IMMEDIATE: Final = (MAX_DURATION_STOP_REASON, KILLED_STOP_REASON)
"""Reasons that halt immediately, without a last answer or a question."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model call that must not be sent."""

    verdict: Verdict
    asks: bool = False
    """True if a human may still extend the limit."""


@dataclass(slots=True, eq=False)
class Admission:
    """Admission of the model calls of one invocation. A binding may add state in a subclass."""

    run: Run
    verdict: Verdict | None = field(default=None, kw_only=True)
    """The pending halt: no further model call is sent."""
    wrapping: Verdict | None = field(default=None, kw_only=True)
    """The halt that follows the model's last answer."""
    last_call: InFlightCall | None = field(default=None, kw_only=True)
    """The call for that answer."""
    failures: int = field(default=0, kw_only=True)
    """Calls of the loop that have failed since its last response."""
    failures_before: int = field(default=0, kw_only=True)
    """Those before that response, which a fallback has given."""
    side_verdict: Verdict | None = field(default=None, kw_only=True)
    """The verdict on a refused side call that the loop may have requested."""
    waits: PendingWaits = field(default_factory=PendingWaits, kw_only=True)
    """Pending waits of the invocation, which a deadline or a kill ends."""

    @property
    def enders(self) -> tuple[Admission, ...]:
        """The invocations whose limit, deadline or kill ends its model calls."""
        return (self,)

    @property
    def end(self) -> Verdict | None:
        """The halt that ends its model calls: its own, or that of another of its `enders`."""
        return self.verdict

    @property
    def is_cancelled(self) -> bool:
        """True if a call that waits for quotas will not be sent, so that it need not wait."""
        return self.verdict is not None

    @property
    def wrapped_up(self) -> bool:
        """True once the model was asked for its only last answer."""
        return self.run.budget.wrapped_up or self.wrapping is not None

    @property
    def may_wrap_up(self) -> bool:
        """True if the action at one of its limits, or of a quota, can be `wrap_up`."""
        budgets = self.run.budgets
        return self.gate is not None or any(each.policy.action == "wrap_up" for each in budgets)

    def text_of(self, verdict: Verdict) -> str:
        """Return the end user's text of a halt."""
        run = self.run
        return for_end_user(run.invocation.agent, verdict, run.policy.halt_message)

    # --- one request of the loop ------------------------------------------------------------------

    async def admit_calls(
        self,
        calls: Sequence[InFlightCall],
        attributes: Mapping[str, object],
        *,
        obstacle: str = "",
        can_ask: bool = True,
    ) -> Refusal | None:
        """Decide whether the calls of a request may be sent, by limits and quotas: all, or none.

        Limits that are reached refuse it, without asking quotas. Otherwise it waits for quotas, and
        then all limits decide: other agents may have used up a shared one while it waited. See
        `reserve_or_refuse`.
        """
        request = self.admission_request(calls, attributes, obstacle=obstacle)
        quota_verdict = None if request is None else await self.ask_quotas(request)
        refusal = self._decided_all(calls, quota_verdict, obstacle=obstacle, can_ask=can_ask)
        if refusal is not None and request is not None:
            await self.settle_all_quotas(calls)
        return refusal

    def admit_calls_blocking(
        self,
        calls: Sequence[InFlightCall],
        attributes: Mapping[str, object],
        *,
        obstacle: str = "",
        can_ask: bool = True,
    ) -> Refusal | None:
        """Do the same as `admit_calls` in a thread that may block."""
        request = self.admission_request(calls, attributes, obstacle=obstacle)
        quota_verdict = None if request is None else wait_for(self.ask_quotas(request))
        refusal = self._decided_all(calls, quota_verdict, obstacle=obstacle, can_ask=can_ask)
        if refusal is not None and request is not None:
            wait_for(self.settle_all_quotas(calls))
        return refusal

    async def settle(self, call: InFlightCall, error: BaseException | None = None) -> None:
        """Count a call that has ended, once, and settle its quotas."""
        self._count(call, error)
        await self.settle_quotas(call.id)

    def settle_blocking(self, call: InFlightCall, error: BaseException | None = None) -> None:
        """Do the same as `settle` in a thread that may block."""
        self._count(call, error)
        if self.gate is not None:
            wait_for(self.settle_quotas(call.id))

    @suppress_errors("binding")
    def _count(self, call: InFlightCall, error: BaseException | None) -> None:
        """Count a call; after an internal error it is counted with the end of the invocation."""
        call.has_ended = True
        settle_call(self.run, call, error)

    def _decided_all(
        self,
        calls: Sequence[InFlightCall],
        quota_verdict: Verdict | None,
        *,
        obstacle: str,
        can_ask: bool,
    ) -> Refusal | None:
        """Decide about each call; if one is refused, release the others."""
        for call in calls:
            # Only with the last one: the calls before it are sent with the same last answer.
            verdict = quota_verdict if call is calls[-1] else None
            refusal = self._decided(call, verdict, obstacle=obstacle, can_ask=can_ask)
            if refusal is not None:
                self.release_all(calls)
                return refusal
        return None

    @suppress_errors("binding")
    def release_all(self, calls: Sequence[InFlightCall]) -> None:
        """Release calls that the limits have admitted and that are not sent."""
        for call in calls:
            if call.is_open:
                self._release(call)

    @suppress_lapses("binding")
    def _decided(
        self, call: InFlightCall, quota_verdict: Verdict | None, *, obstacle: str, can_ask: bool
    ) -> Refusal | None:
        """Decide; an internal error never refuses a call."""
        return self.reserve_or_refuse(call, quota_verdict, obstacle=obstacle, can_ask=can_ask)

    # --- quotas -----------------------------------------------------------------------------------

    @property
    def gate(self) -> QuotaGate | None:
        """The gate of the fleet's quotas, if any may apply."""
        return self.run.services.observers.gate

    @suppress_errors_async("quotas")
    async def ask_quotas(self, request: AdmissionRequest) -> Verdict | None:
        """Wait until quotas admit or refuse a call; return the reason to refuse it."""
        # Nothing is reserved for a call that is refused in any case.
        is_refused = self.verdict is not None or self.wrapping is not None
        if self.gate is None or (is_refused and not self.may_repeat_last):
            return None
        return await self.gate.admit_by_quotas(request)

    @suppress_errors_async("quotas")
    async def settle_quotas(self, call_id: str = "") -> None:
        """Settle the reservation; the call has been counted already, or was not sent."""
        if self.gate is not None:
            await self.gate.settle(self.run.invocation.id, call_id)

    async def settle_all_quotas(self, calls: Sequence[InFlightCall]) -> None:
        """Settle the reservations of calls that are not sent."""
        for call in calls:
            await self.settle_quotas(call.id)

    @suppress_errors("binding")
    def admission_request(
        self,
        calls: Sequence[InFlightCall],
        attributes: Mapping[str, object],
        *,
        obstacle: str = "",
    ) -> AdmissionRequest | None:
        """Describe the calls of a request for the quotas; `None` if there are none."""
        if self.gate is None:
            return None

        def is_refused() -> bool:
            return any(self._is_refused(call, obstacle=obstacle) for call in calls)

        first, *others = [self._request_of(call, attributes, obstacle) for call in calls]
        return replace(first, is_refused=is_refused, others=tuple(others))

    def _request_of(
        self, call: InFlightCall, attributes: Mapping[str, object], obstacle: str
    ) -> AdmissionRequest:
        return AdmissionRequest(
            invocation=self.run.invocation,
            call_id=call.id,
            model=call.model,
            input=call.input_estimate,
            output_cap=call.output_cap,
            provider=call.provider,
            terms=call.terms,
            is_cancelled=lambda: self.is_cancelled,
            action=self.run.policy.action,
            obstacle=obstacle or self._obstacle_at_quota,
            unpriced=self.run.unpriced,
            attributes=attributes,
            conversations=tuple(each for each in self.run.trees if isinstance(each, Conversation)),
        )

    @suppress_errors("binding")
    def _is_refused(self, call: InFlightCall, *, obstacle: str) -> bool:
        """Return whether limits refuse a call whatever quotas decide, and note which ones.

        They do so even if a limit is raised in between, because no quota has admitted the call.
        """
        calls, pending = self.run.calls, self.verdict or self.wrapping
        if pending is not None:
            has_room = self.may_repeat_last and calls.has_room_again()
            call.refused_by = None if has_room else pending
        else:
            call.refused_by = calls.reached_before(
                call,
                turn=not call.formats_answer,
                last=not obstacle and not self.run.budget.wrapped_up,
            )
        return call.refused_by is not None

    @property
    def _obstacle_at_quota(self) -> str:
        """Why a call that a quota refuses cannot be the model's last answer; empty if it can.

        There is one for each invocation, if that has made a turn.
        """
        if self.wrapped_up:
            return no_last_answer("it was requested before")
        return "" if self.run.tally.turns else NOTHING_TO_SUM_UP

    # --- decisions --------------------------------------------------------------------------------

    def reserve_or_refuse(
        self,
        call: InFlightCall,
        quota_verdict: Verdict | None = None,
        *,
        obstacle: str = "",
        can_ask: bool = True,
    ) -> Refusal | None:
        """Reserve usage for a model call of the loop, or refuse it.

        Args:
            call: The call. It is the model's last answer if it is `last_call` afterwards.
            quota_verdict: The refusal of a quota.
            obstacle: Why it cannot be sent without tools, as a last answer, for the operator;
                empty if it can.
            can_ask: A human can be asked before it is sent.
        """
        run = self.run
        pending = self.verdict or self.wrapping
        if pending is not None and self._repeats_last(call, quota_verdict):
            return None
        if pending is not None:  # nothing is sent after the last answer
            return self._refused(pending, call, asks=pending.asks_again and can_ask)
        can_be_last = not obstacle and not run.budget.wrapped_up
        verdict = call.refused_by or run.calls.admit_by_limits(
            call, turn=not call.formats_answer, last=can_be_last
        )
        can_be_last = can_be_last and call.reservation is not None
        for each in (verdict, quota_verdict):
            if each is None:
                continue
            action = each.action or run.policy.action
            if action == "observe" and each.reason != KILLED_STOP_REASON:
                run.halt(each, "observed")
            # A time limit or a kill waits neither for a last answer nor for a human.
            elif each.reason in IMMEDIATE:
                return self._refused(each, call)
            elif action == "ask" and can_ask and can_be_extended(each) and run.may_ask(each):
                self._release(call)
                return Refusal(each, asks=True)
            elif action == "wrap_up" and can_be_last:
                self.wrapping, self.last_call = self.wrapping or each, call
                run.budget.wrapped_up = True
            else:
                return self._refused(self._remarked(each, obstacle), call)
        self.side_verdict = None  # the loop continued despite a refused side call
        return None

    def _remarked(self, verdict: Verdict, obstacle: str) -> Verdict:
        """Say why the model is not asked for a last answer, where that was the action."""
        if verdict.remark or (verdict.action or self.run.policy.action) != "wrap_up":
            return verdict
        full = [breach.limit for breach in verdict.breaches if not breach.leaves_room]
        if full and not obstacle:
            no_room = no_last_answer(f"{full[0]} leaves no room for it")
            obstacle = no_room if self.run.tally.turns else NOTHING_TO_SUM_UP
        return replace(verdict, remark=obstacle)

    @property
    def may_repeat_last(self) -> bool:
        """True while the last answer has failed, and a fallback may give it."""
        return self.verdict is None and self.wrapping is not None and self.last_call is None

    def _repeats_last(self, call: InFlightCall, quota_verdict: Verdict | None) -> bool:
        """Admit a call as one more attempt at the last answer, if quotas and limits leave room."""
        policy = self.run.policy
        is_spent = call.refused_by is not None or (
            quota_verdict is not None and (quota_verdict.action or policy.action) != "observe"
        )
        if is_spent or not self.may_repeat_last or not self.run.calls.admit_again(call):
            return False
        call.is_of_loop, self.last_call, self.side_verdict = True, call, None
        return True

    def falls_back(self, failed: Verdict) -> bool:
        """Let a fallback give the last answer, after no more failures than in the turn before.

        Args:
            failed: The halt if the framework has none, or if its call is not sent.
        """
        if self.failures > self.failures_before:
            return False
        self.last_call, self.side_verdict = None, failed
        return True

    def _refused(self, verdict: Verdict, call: InFlightCall, *, asks: bool = False) -> Refusal:
        """Refuse this call and all later ones."""
        self.verdict, self.wrapping = verdict, None
        self._release(call)
        return Refusal(verdict, asks=asks)

    def _release(self, call: InFlightCall) -> None:
        if call.reservation is not None:  # the limits reserved for it, and a quota refuses it
            self.run.calls.release(call)

    def ends_loop(self, verdict: Verdict) -> bool:
        """Return whether a verdict ends the loop after tools, not at the next model call."""
        action = verdict.action or self.run.policy.action
        if action == "observe" and verdict.reason != KILLED_STOP_REASON:
            self.run.halt(verdict, "observed")
            return False
        if self.wrapping is not None or verdict.reason in IMMEDIATE:
            return True
        # Both need the next model call: a question is raised there, or it is sent without tools.
        return action != "ask" and not (action == "wrap_up" and not self.wrapped_up)

    @suppress_errors("binding")
    def cancel(self, verdict: Verdict) -> None:
        """End the invocation now, from any thread: a deadline has passed, or it was killed."""
        with self.run.services.lock:
            if self.verdict is not None or self.run.outcome_frozen:
                return  # the first halt wins
            self.verdict = verdict
        self.waits.cut()


def can_be_extended(verdict: Verdict) -> bool:
    """Return whether the limit can be raised for one invocation or conversation."""
    return verdict.breach is not None and verdict.breach.limit in EXTENDABLE


# --- side calls -----------------------------------------------------------------------------------

# A refusal raises the limit's error, as every caller of a model expects exceptions. If the loop
# itself requested the call, e.g. for a summary, the error leaves the loop and becomes its halt.
# Application code gets the error, and can continue without the model.


def admit_side_call(run: Run, call: InFlightCall) -> None:
    """Reserve usage for a side call, or raise the error of the limit that it would exceed."""
    try:
        verdict = run.calls.admit_by_limits(call)
        if verdict is not None and verdict.action == "observe" and not run.finished:
            run.halt(verdict, "observed")
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        INTERNAL_ERRORS.report_lapse("binding", error)
        return
    # Raised outside of the guard above, which would suppress it as an internal error.
    if verdict is not None and call.reservation is None:
        raise _error_of(run, verdict)


def _error_of(run: Run, verdict: Verdict) -> LimitReachedError:
    if run.is_direct:  # the request is the whole invocation
        run.halt(verdict, "raised")
    error = limit_reached(verdict, run.stop(verdict.reason))
    note_refusal(run, verdict)
    # A tool that made the call may return the error to the model of `run` itself.
    run.halted[str(error)] = (run, verdict)
    run.note_halt(str(error), verdict)
    return error


def note_refusal(run: Run, verdict: Verdict) -> None:
    """Remember a refused side call that the loop of `run` may have requested."""
    if isinstance(run.state, Admission):
        run.state.side_verdict = verdict


def halt_from_error(admission: Admission, error: BaseException) -> Verdict | None:
    """Return the halt that caused an error of the loop, if any.

    The loop requested a call that was refused. The error is that of the limit, or one that a
    steering handler or a classifier raises because its own agent gave no output.
    """
    for each in chain_of(error):
        if isinstance(each, LimitReachedError) and each.stop is not None and each.stop.breaches:
            stop = each.stop
            if limits_run(stop.breaches[0], admission.run, stop.invocation_id):
                return Verdict(stop.reason, stop.breaches)
    return admission.side_verdict


def limits_run(breach: Breach, run: Run, invocation_id: str = "") -> bool:
    """Return whether a breach is one of this invocation, or of a tree or conversation around it."""
    if invocation_id == run.invocation.id:
        return True
    name = without_prefix(breach.limit)
    return any(
        breach.limit == tree.prefix + name
        and dict(tree.policy.limits.items()).get(name) == breach.cap
        for tree in run.trees
    )


def settle_call(run: Run, call: InFlightCall | None, error: BaseException | None = None) -> None:
    """Count a call that is still open; `error` is the reason for its failure."""
    if call is None or not call.is_open:
        return
    if isinstance(error, Exception) and not call.has_content:
        # Some models send chunks before the request, so chunks alone do not prove an answer.
        is_refused = http_status(error) is not None or is_unsent(error)
        is_taken_on = not is_refused and (call.answered or is_answer(error))
        call.answered = is_taken_on or is_filtered(error)
    # An answer is billed even if otel-limits, the application or the network stopped waiting.
    aborted = error is not None and (
        not isinstance(error, Exception)
        or isinstance(error, (LimitReachedError, InvocationEndedError))
        or is_timeout(error)
        or is_answer_cut(error)
    )
    run.calls.settle(call, failed=error is not None, aborted=aborted)


# --- spent budgets at a vendor --------------------------------------------------------------------
# They belong to the application first: its hooks, routers and middleware see them like any other
# error, and can repeat the call with another vendor. Only an error that leaves the agent's loop
# halts the agent, if a limit is in force.


@suppress_errors("binding")
def is_halted_by_vendor(admission: Admission, error: Exception) -> bool:
    """Return whether an error of the loop becomes its halt, instead of leaving the agent.

    With the actions `observe` and `raise` the application gets its own error.
    """
    run = admission.run
    verdict = budget_refusal(error) if run.is_limited else None
    if verdict is None:
        return False
    action = run.policy.action
    if action == "observe":
        run.halt(verdict, "observed")
    elif action == "raise":
        run.halt(verdict, "raised")
        if text := str(error):  # which a tool returns to the model around this agent
            run.note_halt(text, verdict)
        StopNote.add(error, run.stop(verdict.reason))
    else:
        admission.verdict, admission.wrapping = verdict, None
        return True
    return False


def retry_unless_spent(original: Any) -> Any:
    """Wrap the framework's decision to repeat a failed call, which may take minutes.

    A spent budget does not come back within that time. Without a limit nothing changes.
    """

    @functools.wraps(original)
    def is_retryable(strategy: Any, exception: Exception) -> bool:
        return not _is_final(exception) and original(strategy, exception)

    return is_retryable


@suppress_errors("binding")
def _is_final(error: Exception) -> bool:
    run = CURRENT.get()
    return isinstance(run, Run) and run.is_limited and budget_refusal(error) is not None
