"""The model calls of an invocation: admitted by its limits, reserved for, and counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import CallKind, ModelCall
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.price_lookup import because_of
from otel_limits.core.usage import EXACT, NO_COST, Usage, UsageRecord
from otel_limits.runs.budget import ASSUMED_OUTPUT, Reservation
from otel_limits.usage.normaliser import combined, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from otel_limits.core.policy import Verdict
    from otel_limits.core.price import Quote
    from otel_limits.core.terms import BillableCall
    from otel_limits.core.usage import Tally
    from otel_limits.runs.account import Account
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.spans import Spans, UnreportedCall
    from otel_limits.runs.tool_calls import ToolCalls

NOTHING: Final = Reservation()
ONE_TURN: Final = Reservation(turns=1)
ONE_OF_SEVERAL: Final = Reservation(turns=1, iterations=1)
"""The turn of a call whose loop may have several in flight."""

MOST_UNREPORTED: Final = 1_000
"""Calls of one invocation that wait for other spans; beyond that the oldest is counted."""


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
        """Concurrent calls that have ended, and are neither accepted nor rejected yet."""
        self._turn = NOTHING
        """The loop's reserved turn, until its response is accepted or it makes no more calls."""
        self._kept = NOTHING
        """The tokens of the loop's failed call, until it is retried."""
        self.unreported = UnreportedCalls(account, spans, self.settle)
        """Calls that only spans show, without their tokens."""

    def admit_by_limits(
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
            owner = call.owner_of_turn
            shared = self._withdraw_turn(owner)  # an answer needs one, however many calls it takes
            verdict = account.reached_limits(
                with_reserved=True, forces_output=call.forces_output, side=not turn
            )
            if verdict is None or verdict.action == "observe" or (last and self._claim_wrap_up()):
                call.is_of_loop = turn
                self._reserve(call, reservation)
                if turn and call.id:
                    shared = ONE_OF_SEVERAL
            elif not (had_turn and self.in_flight):  # a concurrent call may need the turn
                turn = False
            if shared is not None:
                owner.turn = account.budgets.reserve(shared)
            if turn and not call.id:
                self._turn = account.budgets.reserve(ONE_TURN)
        return account.with_subjects(verdict)

    def reached_before(
        self, call: InFlightCall, *, turn: bool = False, last: bool = False
    ) -> Verdict | None:
        """Return the limits that refuse a call whatever it waits for; nothing is reserved.

        Reservations do not count, because the calls in flight may use less while it waits.

        Args:
            call: The call.
            turn: As for `admit_by_limits`.
            last: As for `admit_by_limits`.
        """
        account = self._account
        self.unreported.settle()
        account.measure_time()
        with account.services.lock:
            verdict = account.reached_limits(forces_output=call.forces_output, side=not turn)
            if verdict is None or verdict.action == "observe" or (last and self._may_wrap_up()):
                return None
        return account.with_subjects(verdict)

    def has_room_again(self) -> bool:
        """Return whether limits leave room for one more attempt, without reservations."""
        account = self._account
        self.unreported.settle()
        account.measure_time()
        with account.services.lock:
            return not account.killed and account.budgets.leave_room(with_reserved=False)

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

    def count_turn(self, call: InFlightCall | None = None) -> int:
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
        """Release the turn of a concurrent call: no response to it joins the conversation."""
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
            # Until it is accepted or rejected: another call could take the turn in between.
            if call.has_ended:
                self._answered.add(call.owner_of_turn)
            elif call.around is None:
                self._release_turn(call)
        elif failed and call.is_of_loop and self._kept is NOTHING:
            self._kept = self._account.budgets.reserve(replace(reservation, model_calls=0))

    def _release_turn(self, call: InFlightCall) -> None:
        owner = call.owner_of_turn
        self._answered.discard(owner)
        self._withdraw_turn(owner)

    def _withdraw_turn(self, owner: InFlightCall) -> Reservation | None:
        turn, owner.turn = owner.turn, None
        if turn is not None:
            self._account.budgets.release(turn)
        return turn

    def _claim_wrap_up(self) -> bool:
        """Claim the final answer that may exceed a cap, if it is available."""
        account = self._account
        return not account.killed and account.budgets.claim_wrap_up(
            self._refusing(), self._trees_to_answer()
        )

    def _may_wrap_up(self) -> bool:
        """Return whether that answer is available, apart from reservations."""
        account = self._account
        spent = account.budgets.wrapping_up(
            self._refusing(), self._trees_to_answer(), with_reserved=False
        )
        return not account.killed and spent is not None

    def _refusing(self) -> list[Budget]:
        """Return the budgets that have refused a tool call."""
        return [budget for _, budget in self._account.refusals.values()]

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
            tally.unbounded_because = because_of(quote)


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
