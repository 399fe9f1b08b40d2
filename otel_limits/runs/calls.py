"""Model calls of one invocation: reserved for before they go out, counted once when they end."""

from __future__ import annotations

import contextvars
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import CallKind, ModelCall
from otel_limits.core.terms import DEFAULT_TERMS, billable_call
from otel_limits.core.usage import EXACT, NO_COST, NOTHING_REPORTED, Usage, UsageRecord
from otel_limits.runs.budget import ASSUMED_OUTPUT, Reservation
from otel_limits.runs.unreported_calls import UnreportedCalls
from otel_limits.usage.normaliser import completed
from otel_limits.usage.text import tokens_of_text

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.core.policy import Verdict
    from otel_limits.core.price import Quote
    from otel_limits.core.terms import BillableCall
    from otel_limits.core.usage import Tally
    from otel_limits.runs.run import Run

NOTHING: Final = Reservation()
ONE_TURN: Final = Reservation(turns=1)


class InFlightCall:
    """A model call whose end has not been seen yet."""

    is_open = True
    """False once it has been counted, or given up before it went out."""
    started: float | None = None
    """When it went out, by the clock of its run; `None` where nobody saw it."""
    reservation: Reservation | None = None
    """What is kept for it in every budget of its run; `None` while it may not go out."""
    is_paused = False
    """True while whoever reads the answer does something else, or has forgotten it."""
    is_of_loop = False
    """True when the agent's loop asks, so that the response is to become a turn."""
    span_id: str | None = None
    """Its `chat` span, as soon as that has begun."""
    has_ended = False
    """True when its end was seen, be it counted or not."""
    answered = False
    """True when the provider took the request on, so that it will bill the input."""
    has_content = False
    """True when it has sent a part of an answer, or usage."""
    record: UsageRecord = NOTHING_REPORTED
    """What it said that the call used."""
    terms = DEFAULT_TERMS
    """What the request asks for that its price depends on."""

    def __init__(
        self,
        model: str,
        input_estimate: int = 0,
        provider: str = "unknown",
        output_cap: int | None = None,
    ) -> None:
        """Remember what is known before the answer comes: little, where nobody saw it begin."""
        self.model = model
        self.provider = provider
        self.input_estimate = input_estimate
        self.output_cap = output_cap
        self.parts: list[str] = []
        """The texts, thoughts and arguments that it has answered by now."""
        self.answer_estimate = 0
        """Tokens of its answer, where only its span has told the text."""

    @property
    def is_side(self) -> bool:
        """True when something other than the agent's loop asks."""
        return not self.is_of_loop

    @property
    def output_estimate(self) -> int:
        """Tokens of what it has answered by now, about."""
        return self.answer_estimate + tokens_of_text("".join(self.parts))

    def billable(self, usage: Usage) -> BillableCall:
        """Put together what its price depends on, if it used so much."""
        return billable_call(self.model, self.provider, usage, self.record.tier, self.terms)


class CallTracker:
    """The model calls of one invocation, and the only way in which they are counted.

    Each is admitted, goes out, and is settled; one that is not made after all is released. From
    the first to the last of these, what it may use is reserved in the budget of the invocation
    and in every tree around it, so that no other call gets the same twice.
    """

    def __init__(self, run: Run) -> None:
        """Begin with none under way."""
        self._run = run
        self.in_flight: set[InFlightCall] = set()
        """A loop has one at most; tools and middleware may have more beside it."""
        self._turn = NOTHING
        """The turn that the loop has reserved, until its response is taken or nobody asks again."""
        self._kept = NOTHING
        """The tokens of the loop's call that failed, until it is tried again."""
        self.unreported = UnreportedCalls(run)
        """Those that only spans show, without their tokens."""

    def admit(
        self,
        call: InFlightCall,
        *,
        turn: bool = False,
        forces_output: bool = False,
        last: bool = False,
    ) -> Verdict | None:
        """Decide whether a call may go out, and reserve what it may use, in one step.

        It may when it has a `reservation` afterwards: nothing is against it, what is against it
        is only observed, or it is the one last answer that may pass a cap, which the action
        `wrap_up` of the verdict says.

        Args:
            call: The call.
            turn: It is one of the agent's loop, so that its response becomes a turn. A side call is
                judged by the limits alone that it could pass.
            forces_output: It only forces structured output, which some limits yield to.
            last: It can be made a last answer without tools.
        """
        run = self._run
        self.unreported.settle()
        reservation = estimate_reservation(call, run)
        run.measure_time()
        with run.services.lock:
            had_turn = self._turn is not NOTHING
            if turn:  # what is tried again has kept its place, and nobody gets in between
                self._forget_kept()
            verdict = run.decide(with_reserved=True, forces_output=forces_output, side=not turn)
            if verdict is None or verdict.action == "observe" or (last and self._is_last()):
                call.is_of_loop = turn
                self._hold(call, reservation)
            elif not (had_turn and self.in_flight):  # a call beside this one may need the turn
                turn = False
            if turn:
                self._turn = run.budgets.reserve(ONE_TURN)
        return run.with_subjects(verdict)

    def reserve(self, call: InFlightCall) -> None:
        """Reserve for a call that nobody can refuse."""
        reservation = estimate_reservation(call, self._run)
        with self._run.services.lock:
            self._hold(call, reservation)

    def open(self, call: InFlightCall) -> InFlightCall:
        """A call goes out now; one that was not admitted before is not refused any more."""
        if call.reservation is None:
            self.reserve(call)
        call.started = self._run.services.now()
        return call

    def resume(self, call: InFlightCall) -> None:
        """The answer of a call is read on, which may have lost what was reserved for it."""
        call.is_paused = False
        if call.is_open and call.reservation is None:
            self.reserve(call)

    def release(self, call: InFlightCall) -> None:
        """A call that was admitted is not made after all."""
        with self._run.services.lock:
            self._give_back(call)
            call.is_open = False

    def on_response_accepted(self) -> None:
        """The response of the loop was taken into the conversation: what was reserved is used."""
        with self._run.services.lock:
            self._forget_kept()
            for budget in self._run.budgets:
                budget.tally.turns += 1

    def release_unused(self) -> None:
        """The loop asks for nothing more: give back what it has kept."""
        with self._run.services.lock:
            self._forget_kept()

    def settle(
        self,
        call: InFlightCall,
        record: UsageRecord | None = None,
        *,
        failed: bool = False,
        aborted: bool = False,
    ) -> None:
        """The end of a model call was seen: count it.

        Args:
            call: The call; one that nobody saw begin was never opened.
            record: What the provider said; `None` for what was noted of the call, if anything.
            failed: The call ended without a response.
            aborted: Nobody waited for the response, so that it is billed all the same.
        """
        run, call.has_ended = self._run, True
        if record is not None:
            call.record = record
        kind = call_kind(call.record, failed=failed)
        # A call that failed is billed all the same once the provider has taken it on.
        is_billed = not failed or aborted or call.answered
        estimated = is_billed and call.record.sure != "measured"
        counted = call.record.usage
        if estimated and run.policy.unmeasured != "ignore":
            counted = completed(call.record, call.input_estimate, call.output_estimate)
        sale = call.billable(counted)
        quote = run.services.quote(sale)
        retried = failed and not aborted
        number = self._count(call, counted, quote.price, estimated=estimated, retried=retried)
        if number is not None:
            self._publish(call, number, kind, sale, quote, estimated=estimated)

    def settle_all(self) -> None:
        """The invocation is over: nobody waits for what its loop has still under way.

        A side call may well be waited for, by a background task. It is settled when it ends, and
        one that nobody waits for just now takes nothing from the trees unless it is read on.
        """
        # A copy, as settling a call takes it out of the set.
        for call in tuple(self.in_flight):
            if call.started is None:
                self.release(call)
            elif call.has_ended:  # a fault has kept it from being counted
                self.settle(call)
            elif call.is_of_loop:
                self.settle(call, failed=True, aborted=True)
            elif call.is_paused:
                self._let_wait(call)
        self.unreported.settle()
        self.release_unused()

    # --- what is reserved; all of it under the lock -----------------------------------------------

    def _hold(self, call: InFlightCall, reservation: Reservation) -> None:
        call.reservation = self._run.budgets.reserve(reservation)
        self.in_flight.add(call)

    def _give_back(self, call: InFlightCall, *, failed: bool = False) -> None:
        """Give back what a call has not used; one of the loop that failed is tried again."""
        reservation, call.reservation = call.reservation, None
        self.in_flight.discard(call)
        if reservation is None:
            return
        self._run.budgets.release(reservation)
        if failed and call.is_of_loop and self._kept is NOTHING:
            self._kept = self._run.budgets.reserve(replace(reservation, model_calls=0))

    def _let_wait(self, call: InFlightCall) -> None:
        """Give back what is reserved for a call whose end is still to be seen."""
        with self._run.services.lock:
            reservation, call.reservation = call.reservation, None
            if reservation is not None:
                self._run.budgets.release(reservation)

    def _is_last(self) -> bool:
        """Take the last answer that may pass a cap, if there is one."""
        run = self._run
        refusing = [budget for _, budget in run.tools.refusals.values()]
        return not run.killed and run.budgets.claim_wrap_up(refusing)

    def _forget_kept(self) -> None:
        """Give back what the loop has reserved beside its calls."""
        for kept in (self._turn, self._kept):
            if kept is not NOTHING:
                self._run.budgets.release(kept)
        self._turn = self._kept = NOTHING

    def _count(
        self,
        call: InFlightCall,
        usage: Usage,
        price: Decimal | None,
        *,
        estimated: bool,
        retried: bool,
    ) -> int | None:
        """Add a call to every budget in the place of its reservation; `None` for one that was."""
        run = self._run
        # One step for the invocation and its trees, as another agent may be judged by those.
        with run.services.lock:
            if not call.is_open:  # its invocation was ended meanwhile by another thread
                return None
            for budget in run.budgets:
                add_call(budget.tally, call.model, usage, price, estimated=estimated)
            if usage.output > run.budgets.outputs.get(call.model, 0):
                run.budgets.outputs[call.model] = usage.output
            self._give_back(call, failed=retried)
            # Until here a fault leaves the call open, and it is settled when the invocation ends.
            call.is_open = False
            # Two that end at once must not have one number: it is what tells their rows apart.
            return run.tally.model_calls

    def _publish(
        self,
        call: InFlightCall,
        number: int,
        kind: CallKind,
        sale: BillableCall,
        quote: Quote,
        *,
        estimated: bool,
    ) -> None:
        run = self._run
        run.services.observers.publish(
            ModelCall(
                invocation=run.invocation,
                number=number,
                model=call.model,
                kind=kind,
                usage=sale.usage,
                estimated=estimated,
                span_id=call.span_id,
                seconds=None if call.started is None else run.services.now() - call.started,
                price=quote.price,
                price_source=quote.source,
                price_version=quote.version,
                price_basis=sale.basis,
                unpriced=quote.unknown,
                cache_saved=quote.cache_saved,
                cost_is_limited=run.budgets.passes_unpriced,
                tier=sale.tier,
                provider=call.provider,
                reported=call.record.reported,
                reported_total=call.record.total,
                # The turn counts once its response is taken into the conversation, which comes
                # after this.
                turn=run.tally.turns + 1,
                iteration=run.tally.iterations + 1,
                after_tools={} if call.is_side else run.tools.of_turn,
                side=call.is_side,
            )
        )


def estimate_reservation(call: InFlightCall, run: Run) -> Reservation:
    """What a call may use: its projected input, and as much output as the model ever gave."""
    output = run.budgets.outputs.get(call.model)
    if output is None:
        output = min(call.output_cap or ASSUMED_OUTPUT, ASSUMED_OUTPUT)
    cost = None
    if run.budgets.has_cost_limit:
        expected = Usage(input=call.input_estimate, output=output)
        cost = run.services.quote(call.billable(expected)).price
    return Reservation(
        model_calls=1, input=call.input_estimate, output=output, cost=cost or NO_COST
    )


def add_call(
    tally: Tally, model: str, usage: Usage, price: Decimal | None, *, estimated: bool
) -> None:
    """Add one model call to a tally."""
    tally.input += usage.input
    tally.output += usage.output
    tally.cache_read += usage.cache_read
    tally.cache_write += usage.cache_write
    tally.model_calls += 1
    if estimated:
        tally.unmeasured_calls += 1
        tally.unmeasured_model = model
    if price is not None:
        tally.cost = EXACT.add(tally.cost, price)
    elif usage.total:
        tally.unpriced_calls += 1
        tally.unpriced_model = model


def call_kind(record: UsageRecord, *, failed: bool) -> CallKind:
    """Tell a failed, a measured, a real zero-token and an unmeasured call apart."""
    if failed:
        return "failed"
    if record.sure != "measured":
        return "unmeasured"
    return "measured" if record.usage.total else "zero_token"


class EnclosingCall:
    """A place within a model call, from which a provider may ask further ones."""

    # No `__init__`: a fault of recursion would come out of it where nobody could take it.
    run: Run | None = None
    call: InFlightCall | None = None
    model: object = None
    """The model that is asked."""
    is_carried = False
    """True when a request was made further in, and is this call."""
    is_over = False
    """True when that request has ended."""
    is_shared = False
    """True when further requests were made, each a call of its own."""


# Set only while the provider's code runs, never across a `yield`: an async generator has no context
# of its own (PEP 568 was never accepted), so that whoever reads the stream would be within the
# call.
ENCLOSING_CALL: Final[contextvars.ContextVar[EnclosingCall | None]] = contextvars.ContextVar(
    "otel_limits_followed", default=None
)
"""Where we are: what a provider asks in turn, or traces, is that same call."""


def enclosing_call_of(run: Run) -> InFlightCall | None:
    """Return the call of `run` that the present task is within, or was when it began.

    It may be over: a client may have put aside, with all of its context, to tell of it later.
    """
    within = ENCLOSING_CALL.get()
    return within.call if within is not None and within.run is run else None
