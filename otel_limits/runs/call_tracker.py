"""Model calls of one invocation: reserved for before they are sent, counted once when they end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import CallKind, ModelCall
from otel_limits.core.usage import EXACT, NO_COST, Usage, UsageRecord
from otel_limits.runs.budget import ASSUMED_OUTPUT, Reservation
from otel_limits.runs.unreported_calls import UnreportedCalls
from otel_limits.usage.normaliser import combined, completed

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict
    from otel_limits.core.price import Quote
    from otel_limits.core.terms import BillableCall
    from otel_limits.core.usage import Tally
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.scope import Scope
    from otel_limits.runs.spans import Spans
    from otel_limits.runs.tools import ToolCalls

NOTHING: Final = Reservation()
ONE_TURN: Final = Reservation(turns=1)
ONE_OF_SEVERAL: Final = Reservation(turns=1, iterations=1)
"""The turn of a call whose loop may have several in flight."""


class CallTracker:
    """Admits and counts the model calls of one invocation.

    A call is admitted, opened when it is sent, and settled when it ends; a call that is not sent
    after all is released. In between, its possible usage is reserved in the budget of the
    invocation and in every enclosing tree, so that no other call gets the same share.
    """

    def __init__(self, scope: Scope, tools: ToolCalls, spans: Spans[Any]) -> None:
        """Create a tracker without calls."""
        self._scope = scope
        self._tools = tools
        self.in_flight: set[InFlightCall] = set()
        """The loop of most frameworks has one at most; tools and middleware may add others."""
        self._answered: set[InFlightCall] = set()
        """Concurrent calls whose responses are not accepted yet."""
        self._turn = NOTHING
        """The loop's reserved turn, until its response is accepted or it makes no more calls."""
        self._kept = NOTHING
        """The tokens of the loop's failed call, until it is retried."""
        self.unreported = UnreportedCalls(scope, spans, self.settle)
        """Calls that only spans show, without their tokens."""

    def admit(
        self,
        call: InFlightCall,
        *,
        turn: bool = False,
        forces_output: bool = False,
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
            forces_output: It only forces structured output, which some limits yield to.
            last: It can be turned into a final answer without tools.
        """
        scope = self._scope
        self.unreported.settle()
        reservation = estimate_reservation(call, scope)
        scope.measure_time()
        with scope.services.lock:
            had_turn = self._turn is not NOTHING
            # Under the lock, so a retry cannot lose its reservation to another call.
            if turn and not call.id:
                self._release_kept()
            verdict = scope.decide(with_reserved=True, forces_output=forces_output, side=not turn)
            if verdict is None or verdict.action == "observe" or (last and self._claim_wrap_up()):
                call.is_of_loop = turn
                self._reserve(call, reservation)
                if turn and call.id:
                    call.turn = scope.budgets.reserve(ONE_OF_SEVERAL)
            elif not (had_turn and self.in_flight):  # a concurrent call may need the turn
                turn = False
            if turn and not call.id:
                self._turn = scope.budgets.reserve(ONE_TURN)
        return scope.with_subjects(verdict)

    def reserve(self, call: InFlightCall) -> None:
        """Reserve for a call that can no longer be refused."""
        reservation = estimate_reservation(call, self._scope)
        with self._scope.services.lock:
            self._reserve(call, reservation)

    def open(self, call: InFlightCall) -> InFlightCall:
        """Mark a call as sent; a call that was not admitted is reserved for now."""
        if call.reservation is None:
            self.reserve(call)
        call.started = self._scope.services.now()
        return call

    def resume(self, call: InFlightCall) -> None:
        """Resume counting when a paused answer is read again."""
        call.is_paused = False
        if call.is_open and call.reservation is None:
            self.reserve(call)

    def release(self, call: InFlightCall) -> None:
        """Release an admitted call that is not sent after all."""
        with self._scope.services.lock:
            self._release(call)
            call.is_open = False

    def on_response_accepted(self, call: InFlightCall | None = None) -> int:
        """Count a turn: the loop's response was accepted into the conversation.

        Args:
            call: The call, if the loop may have several in flight.

        Returns:
            The number of the turn.
        """
        with self._scope.services.lock:
            if call is None:
                self._release_kept()
            else:
                self._release_turn(call)
            self._scope.tally.iterations += 1
            for budget in self._scope.budgets:
                budget.tally.turns += 1
            return self._scope.tally.turns

    def on_response_rejected(self, call: InFlightCall) -> None:
        """Release the turn of a concurrent call: its response is not part of the conversation."""
        with self._scope.services.lock:
            self._release_turn(call)

    def release_unused(self) -> None:
        """Release what the loop has reserved: it makes no more calls."""
        with self._scope.services.lock:
            self._release_kept()
            for call in tuple(self._answered):
                self._release_turn(call)

    def add_part(self, call: InFlightCall, part: UsageRecord) -> None:
        """Count usage that is reported before the call ends, as realtime models do."""
        call.record = combined(call.record, part)
        usage = call.record.usage
        quote = self._scope.services.quote(call.billable(usage))
        with self._scope.services.lock:
            if call.is_open:
                for budget in self._scope.budgets:
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
        scope, call.has_ended = self._scope, True
        if record is not None:
            call.record = record
        if failed:
            kind: CallKind = "failed"
        elif call.record.sure != "measured":
            kind = "unmeasured"
        else:
            kind = "measured" if call.record.usage.total else "zero_token"
        # Providers bill a failed call, too, once they have accepted it.
        is_billed = not failed or aborted or call.answered
        estimated = is_billed and call.record.sure != "measured"
        counted = call.record.usage
        if estimated and scope.policy.unmeasured != "ignore":
            counted = completed(call.record, call.input_estimate, call.output_estimate)
        billable = call.billable(counted)
        quote = scope.services.quote(billable)
        retried = failed and not aborted
        number = self._count(call, counted, quote, estimated=estimated, retried=retried)
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
                with self._scope.services.lock:
                    reservation, call.reservation = call.reservation, None
                    if reservation is not None:
                        self._scope.budgets.release(reservation)
        self.unreported.settle()
        self.release_unused()

    # --- reservations, under the lock -------------------------------------------------------------

    def _reserve(self, call: InFlightCall, reservation: Reservation) -> None:
        call.reservation = self._scope.budgets.reserve(reservation)
        self.in_flight.add(call)

    def _release(self, call: InFlightCall, *, failed: bool = False) -> None:
        """Release a call's reservation; keep the tokens of a failed loop call for its retry."""
        reservation, call.reservation = call.reservation, None
        self.in_flight.discard(call)
        if reservation is None:
            return
        self._scope.budgets.release(reservation)
        if call.id:
            # Until the response is accepted: another call could take the turn in between.
            if call.has_ended and not failed:
                self._answered.add(call)
            else:
                self._release_turn(call)
        elif failed and call.is_of_loop and self._kept is NOTHING:
            self._kept = self._scope.budgets.reserve(replace(reservation, model_calls=0))

    def _release_turn(self, call: InFlightCall) -> None:
        self._answered.discard(call)
        if call.turn is not None:
            self._scope.budgets.release(call.turn)
            call.turn = None

    def _claim_wrap_up(self) -> bool:
        """Claim the final answer that may exceed a cap, if it is available."""
        scope = self._scope
        refusing = [budget for _, budget in scope.refusals.values()]
        return not scope.killed and scope.budgets.claim_wrap_up(refusing, scope.outermost_in())

    def _release_kept(self) -> None:
        """Release what the loop has reserved apart from its calls."""
        for kept in (self._turn, self._kept):
            if kept is not NOTHING:
                self._scope.budgets.release(kept)
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
        scope = self._scope
        # One step for the invocation and its trees, because other agents check those concurrently.
        with scope.services.lock:
            if not call.is_open:  # another thread has finished the invocation
                return None
            for budget in scope.budgets:
                add_call(budget.tally, call, usage, quote, estimated=estimated)
            if usage.output > scope.budgets.outputs.get(call.model, 0):
                scope.budgets.outputs[call.model] = usage.output
            self._release(call, failed=retried)
            # An error before this line leaves the call open; it is settled with the invocation.
            call.is_open = False
            # Read under the lock: calls that end concurrently need different numbers.
            return scope.tally.model_calls

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
        scope = self._scope
        scope.services.observers.publish(
            ModelCall(
                invocation=scope.invocation,
                number=number,
                model=call.model,
                kind=kind,
                usage=billable.usage,
                estimated=estimated,
                span_id=call.span_id,
                seconds=None if call.started is None else scope.services.now() - call.started,
                price=quote.price,
                price_source=quote.source,
                price_version=quote.version,
                price_basis=billable.basis,
                price_at_most=quote.at_most,
                unpriced=quote.unknown,
                cache_saved=quote.cache_saved,
                cost_is_limited=scope.budgets.ignores_unpriced,
                tier=billable.tier,
                provider=call.provider,
                reported=call.record.reported,
                reported_total=call.record.total,
                # The turn counts once its response is accepted, which comes after this.
                turn=scope.tally.turns + 1,
                iteration=scope.tally.iterations + 1,
                after_tools={} if call.is_side else self._tools.of_turn,
                call_id=call.id,
                side=call.is_side,
            )
        )


def estimate_reservation(call: InFlightCall, scope: Scope) -> Reservation:
    """Return a call's possible usage: estimated input, and the model's largest output so far."""
    output = scope.budgets.outputs.get(call.model)
    if output is None:
        output = min(call.output_cap or ASSUMED_OUTPUT, ASSUMED_OUTPUT)
    cost = None
    if scope.budgets.has_cost_limit:
        expected = Usage(input=call.input_estimate, output=output)
        cost = scope.services.quote(call.billable(expected)).charge
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
