"""Admits model calls by quota: reserves their worst case, or waits, and settles their usage.

Whether an amount is left is decided in the store: by `memory.py`, or on Redis by
`scripts/reserve.lua`. The network never blocks a thread or event loop of an agent: a call awaits
the reply, within the timeout. During an outage each quota uses its local share, then its
`on_store_error`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import Decision, Event, ModelCall, QuotaWait, Stop
from otel_limits.core.halt_texts import no_last_answer
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.estimates import Estimates
from otel_limits.quotas.keys import fits
from otel_limits.quotas.needs import (
    UNPRICED,
    PriceOf,
    QuotaNeed,
    QuotaReservation,
    lookup_of,
    need_of,
    sum_of,
)
from otel_limits.quotas.recovery import encode_charges
from otel_limits.quotas.refusals import (
    UNAVAILABLE,
    Denied,
    after_wait,
    decision_of,
    exceeded,
    unanswered,
    unmet_needs,
    use_of,
    verdict_of,
)
from otel_limits.quotas.store import (
    NEED_SECONDS,
    Charge,
    CountState,
    Demand,
    PermanentStoreError,
    Reply,
    StoreError,
    resets_at,
)
from otel_limits.quotas.store_worker import LOOK_INTERVAL_SECONDS
from otel_limits.runs.quota_gate import BLOCKED_LOOPS, AdmissionRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_limits.core.policy import Verdict
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.conversation_sync import ConversationSync
    from otel_limits.quotas.fallback import OutageDecision
    from otel_limits.quotas.keys import Lookup
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.wait_queues import QueueKey, Waiter, WaitQueues


# --- the gate of model calls ----------------------------------------------------------------------


class Engine:
    """The quota gate of a process.

    Args:
        quotas: Returns the current quotas.
        client: Sends operations to the store.
        publish: Publishes events.
        price: AdmissionRequest and usage → USD, for quotas in USD.
        queues: Queues of calls that wait for quota.
        is_active: Returns whether the invocation with an ID is in progress.
        conversations: Those that other processes share; `None` if none do.
    """

    def __init__(  # noqa: PLR0913  what it connects
        self,
        quotas: Callable[[], Sequence[Quota]],
        client: StoreClient,
        *,
        publish: Callable[[Event], None],
        price: PriceOf,
        queues: WaitQueues,
        is_active: Callable[[str], bool],
        conversations: ConversationSync | None = None,
    ) -> None:
        """Create a gate without open reservations."""
        self._publish = publish
        self.quotas = quotas
        self.client = client
        self._reservations = Reservations(quotas, price, self.client, is_active)
        self._queues = queues
        self._conversations = conversations
        self.client.in_flight = self._reservations.held
        self._admissions = Admissions(
            queues, self.client, self._reserve, publish, self._reservations.is_asked
        )

    @property
    def holds_quotas(self) -> bool:
        """Whether any quota is configured."""
        return bool(self.quotas())

    # --- admission and settlement -----------------------------------------------------------------

    async def admit_by_quotas(self, request: AdmissionRequest) -> Verdict | None:
        """Reserve quota for the call; return a verdict if a quota was reached."""
        self._queues.end_abandoned()
        try:
            verdict = await self._admit(request)
        except WaitCancelledError:
            return None
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report("quotas", error)
            return None
        # Quotas that were disabled in the meantime refuse nothing.
        return None if self._queues.is_closed else verdict

    async def _admit(self, request: AdmissionRequest) -> Verdict | None:
        if self._conversations is not None:
            refusal = await self._conversations.refresh(request)
            if refusal is not None:
                return halting(refusal, UNCOUNTED)
        if request.is_refused():
            return None
        reservation = self._reservations.ask(request)
        if reservation is None:
            return None
        reservation.loop = asyncio.get_running_loop()
        # Also for a call whose task was cancelled. One that is sent without a grant counts like a
        # call without admission.
        with self._queues.ending(partial(self._withdraw, reservation)):
            await self._wait_for_first_call(reservation)
            return self._leave_unpriced(reservation) or await self._reserve_or_refuse(reservation)

    async def settle(self, invocation_id: str, call_id: str = "") -> None:
        """Settle the call; during an outage, the store worker buffers the settlement."""
        try:
            # Removed before it is sent, so that it is settled once.
            reservation = self._reservations.close(invocation_id, call_id)
            if reservation is not None:
                reply = await self.client.settle(reservation)
                self._publish_use(reservation, reply.states)
        # The store worker has buffered it and logged the outage.
        except StoreError:
            return
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report("quotas", error)

    @suppress_errors("quotas")
    def __call__(self, event: Event) -> Event:
        """Record the usage of a call; settle open reservations when an invocation ends."""
        if self._conversations is not None:
            self._conversations.observe(event)
        if isinstance(event, ModelCall):
            recorded = self._reservations.record(event)
            # The ledger records it with the call, in case this worker is killed before settling.
            if recorded is not None and self.client.executor.is_shared:
                operation, charges = recorded
                return replace(
                    event, quota_operation=operation, quota_charges=encode_charges(charges)
                )
        elif isinstance(event, Stop):
            # What bounded memory forgets has not ended: its waiting calls are sent as usual.
            self._reservations.end(event.invocation_id, keep_asked=event.reason == "evicted")
            self._queues.notify_freed(queue_of_first(event.invocation_id))
        return event

    def after_fork(self) -> None:
        """Reset inherited state in a forked child."""
        self.client.after_fork()
        self._reservations.reset()
        self._queues.reset()
        if self._conversations is not None:
            self._conversations.after_fork()

    def close(self) -> None:
        """Cancel all waits, flush pending operations and close the store."""
        self._queues.close()
        self.client.close()

    # --- before a call ----------------------------------------------------------------------------

    async def _wait_for_first_call(self, reservation: QuotaReservation) -> None:
        """Wait for an earlier call whose grant counts the invocation; without it, this one may.

        It waits while the earlier one waits for quota. Apart from that, it waits no longer than for
        the store, because the thread of that call may be blocked.

        Raises:
            WaitCancelledError: Quotas were disabled, or the agent was cancelled or has ended.
        """
        if self._reservations.first_of(reservation) is None:
            return
        queue, now = queue_of_first(reservation.request.invocation.id), self._queues.clock.now
        waiter = self._queues.join({queue: ""}, partial(self._admissions.is_cancelled, reservation))
        with self._queues.ending(partial(self._queues.leave, waiter)):
            self._queues.requeue(waiter, [queue])
            while (first := self._reservations.first_of(reservation)) is not None:
                if self._queues.is_closed or waiter.is_cancelled():
                    raise WaitCancelledError
                is_woken = await waiter.sleep(now() + self.client.timeout)
                if not is_woken and first.waits_until <= now():
                    return

    def _grant(self, reservation: QuotaReservation) -> bool:
        """Hand a reservation over to its call; False if the invocation has ended."""
        is_granted = self._reservations.grant(reservation)
        if is_granted and reservation.demands:
            self.client.hold(reservation)
        return is_granted

    @suppress_errors("quotas")
    def _withdraw(self, reservation: QuotaReservation) -> None:
        """End a request; without a grant, release what the store may have reserved."""
        self._reservations.withdraw(reservation)
        self._queues.notify_freed(queue_of_first(reservation.request.invocation.id))
        if reservation.is_unclaimed:
            self.client.settle_later(reservation)

    def _leave_unpriced(self, reservation: QuotaReservation) -> Verdict | None:
        """Skip quotas in USD if the price is unknown, or refuse because of them."""
        unpriced = [need for need in reservation.needs if need.amount == UNPRICED]
        for need in unpriced:
            self._publish_decision(reservation, need, "unpriced")
        reservation.leave_out(unpriced)
        if reservation.request.unpriced != "halt":
            return None
        verdict = verdict_of(
            [(need, self.client.without_price(need)) for need in unpriced if need.is_enforced]
        )
        return None if verdict is None else halting(verdict, UNCOUNTED)

    async def _reserve_or_refuse(self, reservation: QuotaReservation) -> Verdict | None:
        if not reservation.needs:
            self._grant(reservation)
            return None
        try:
            admission = await self._admissions.reserve(reservation)
        except StoreError as error:
            return await self._reserve_despite(error, reservation)
        reply = admission.reply
        if reply.status == "refused":
            return await self._refuse(reservation, admission)
        if not self._grant(reservation):
            return None
        # A quota in observe mode admits the call and still returns its verdict.
        observed = unmet_needs(reservation.asked, reply, enforced=False)
        # For an admitted call, only unenforced needs can be unmet.
        short = [need for need, _ in observed]
        for need in reservation.needs:
            admitted: Decision = "waited" if need.quota.name in admission.waited else "admitted"
            self._publish_decision(reservation, need, "observed" if need in short else admitted)
        return verdict_of(observed)

    async def _reserve(self, reservation: QuotaReservation) -> Reply:
        reply = await self.client.reserve(reservation)
        self._publish_use(reservation, reply.states)
        return reply

    async def _refuse(
        self, reservation: QuotaReservation, admission: AdmissionOutcome
    ) -> Verdict | None:
        """Return the verdict for a refused call, which may still be the model's last answer."""
        denied = unmet_needs(reservation.asked, admission.reply, enforced=True)
        for need, _ in denied:
            self._publish_decision(reservation, need, "gave_up" if admission.gave_up else "refused")
        denied = [(need, after_wait(need, breach, admission.gave_up)) for need, breach in denied]
        verdict = verdict_of(denied)
        obstacle = obstacle_to_last(reservation, admission)
        if not obstacle:
            if await self._reserve_last(reservation):
                return verdict
            obstacle = NOT_ADMITTED
        return None if verdict is None else halting(verdict, obstacle)

    async def _reserve_last(self, reservation: QuotaReservation) -> bool:
        """Reserve for the model's last answer; False if it cannot be counted, or has no slot.

        Raises:
            WaitCancelledError: As `Admissions.reserve`.
        """
        reservation.needs = [
            replace(need, is_of_last=need.admits_last) for need in reservation.needs
        ]
        try:
            admission = await self._admissions.reserve(reservation)
        except StoreError:
            return False
        return admission.reply.status == "admitted" and self._grant(reservation)

    # --- without the store ------------------------------------------------------------------------

    async def _reserve_despite(
        self, error: StoreError, reservation: QuotaReservation
    ) -> Verdict | None:
        """Decide without the store: about all quotas, or only about those whose data is damaged."""
        # That is not an outage: a count that cannot be kept has no share.
        if not isinstance(error, PermanentStoreError):
            self.client.fallback.enter_outage()
        elif error.damaged:
            apart = reservation.split(error.damaged)
            denied = self._denied_without_store(apart, str(error))
            if denied is None:
                return await self._reserve_or_refuse(reservation)
            return self._halting(denied)
        return self._degrade(reservation)

    def _degrade(self, reservation: QuotaReservation) -> Verdict | None:
        """Decide by this worker's local share, then by `on_store_error`."""
        denied = self._denied_without_store(reservation, UNAVAILABLE)
        if denied is not None:
            return self._halting(denied)
        self.client.reserve_later(reservation)
        self._grant(reservation)
        return None

    def _halting(self, denied: Sequence[Denied]) -> Verdict | None:
        verdict = verdict_of(denied)
        return None if verdict is None else halting(verdict, UNCOUNTED)

    def _denied_without_store(
        self, reservation: QuotaReservation, why: str
    ) -> Sequence[Denied] | None:
        """Reserve locally, or return the refusals.

        Args:
            reservation: What to reserve.
            why: Why the store cannot be asked.
        """
        # Fill again: an attempt may have ended half-way, and the current windows decide.
        self.client.fill(reservation, forced=False)
        denied = self._blocked(reservation)
        if denied:
            return denied
        outcome = self.client.fallback.decide(reservation)
        self._publish_decisions_without_store(reservation, outcome)
        return None if outcome.is_admitted else self._denied(outcome, why)

    def _blocked(self, reservation: QuotaReservation) -> list[Denied]:
        """Return refusals for keys that this process has seen blocked."""
        fallback, now = self.client.fallback, self.client.now()
        seen = [(need, demand, fallback.blocked(demand)) for need, demand in reservation.asked]
        denied = [
            (need, exceeded(need, demand, Reply("refused", now), state))
            for need, demand, state in seen
            if state is not None and need.is_enforced
        ]
        for need, _ in denied:
            self._publish_decision(reservation, need, "refused")
        return denied

    def _denied(self, outcome: OutageDecision, why: str) -> list[Denied]:
        """Return the refusals of a decision without the store."""
        known, retry = self.client.fallback.known, LOOK_INTERVAL_SECONDS
        denied = [
            (need, unanswered(need, demand, known(demand.count), self.client.now(), retry, why))
            for need, demand in outcome.unanswered
        ]
        if outcome.reply is not None:
            denied += unmet_needs(outcome.asked, outcome.reply, enforced=True)
        return denied

    def _publish_decisions_without_store(
        self, reservation: QuotaReservation, outcome: OutageDecision
    ) -> None:
        if outcome.unanswered:
            for need, _ in outcome.unanswered:
                self._publish_decision(reservation, need, "degraded_denied")
            return
        local: Decision = (
            "degraded_local_admitted" if outcome.is_admitted else "degraded_local_refused"
        )
        for need, rule in outcome.rules:
            if rule == "grace" and outcome.is_admitted:
                self._publish_decision(reservation, need, "degraded_grace_admitted")
            elif rule != "grace":
                self._publish_decision(
                    reservation, need, local if rule == "local" else "degraded_allowed"
                )

    # --- events -----------------------------------------------------------------------------------

    def _publish_decision(
        self, reservation: QuotaReservation, need: QuotaNeed, decision: Decision
    ) -> None:
        self._publish(decision_of(reservation, need, decision))

    def _publish_use(self, reservation: QuotaReservation, states: Iterable[CountState]) -> None:
        """Cache and publish the current counts."""
        # Strict: a reply with a different number of counts must not be misread.
        for need, demand, state in zip(reservation.needs, reservation.demands, states, strict=True):
            latest = self.client.remember(need, demand, state)
            self._publish(use_of(need, demand, latest, self.client.now()))


def queue_of_first(invocation_id: str) -> QueueKey:
    """Return the queue of calls that wait for the first one of their invocation."""
    return "", invocation_id  # no quota has an empty name


# --- the model's last answer ----------------------------------------------------------------------

UNCOUNTED: Final = no_last_answer("the quotas could not count it")
NOT_ADMITTED: Final = no_last_answer("the quotas did not admit it")
BLOCKED: Final = no_last_answer("a blocked quota admits no call")
NO_FURTHER: Final = no_last_answer("a quota admits no further call")


def obstacle_to_last(reservation: QuotaReservation, admission: AdmissionOutcome) -> str:
    """Return why a refused call may not be the model's last answer; empty if it may.

    A last answer may exceed the amount of a window, once for each invocation. It needs a slot like
    any other call, and waits for one if the quota says so.
    """
    reply = admission.reply
    for n in reply.unmet:
        need = reservation.needs[n]
        if need.is_enforced and reply.states[n].block is not None:
            return BLOCKED
        may_wait = need.waits and need.quota.unit == "concurrency" and not admission.gave_up
        if need.is_enforced and not need.admits_last and not may_wait:
            return NO_FURTHER
    return reservation.request.obstacle


def halting(verdict: Verdict, obstacle: str) -> Verdict:
    """Return a refusal that does not ask for a last answer, and says why if that was its action."""
    if verdict.action != "wrap_up":
        return verdict
    return replace(verdict, action="halt", remark=obstacle)


# --- reservations of calls in progress ------------------------------------------------------------


@dataclass(slots=True)
class InvocationState:
    """Quota state of an invocation in progress."""

    asked: list[QuotaReservation] = field(default_factory=list)
    """Those that are not decided yet, in the order of their requests."""
    granted: dict[str, QuotaReservation] = field(default_factory=dict)
    """Those of the calls in flight, by the ID of each call."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of its agent."""
    counted: set[str] = field(default_factory=set)
    """Names of quotas that already counted the invocation."""

    def counted_in(self) -> set[str]:
        """Return the quotas that have counted the invocation, or do so with a call in flight."""
        return self.counted.union(*(each.counts_invocation_in for each in self.granted.values()))

    def close(self, call_id: str) -> QuotaReservation | None:
        """Remove a call in flight; return its reservation if the caller must settle it.

        That is with the last call of its request.
        """
        reservation = self.granted.pop(call_id, None)
        if reservation is None:
            return None
        # Only after a sent call: one that is not sent leaves the invocation uncounted.
        if reservation.ended:
            self.counted |= reservation.counts_invocation_in
        return None if reservation in self.granted.values() else reservation


class Reservations:
    """Reservations by invocation until they are settled, and estimates from earlier calls.

    Each is asked for, then granted, and then settled with its call; or it ends without a grant, if
    it is refused, its request is abandoned, or its invocation ends.

    Args:
        quotas: Returns the current quotas.
        price: AdmissionRequest and usage → USD, for quotas in USD.
        client: Sends settlements.
        is_active: Returns whether the invocation with an ID is in progress.
    """

    def __init__(
        self,
        quotas: Callable[[], Sequence[Quota]],
        price: PriceOf,
        client: StoreClient,
        is_active: Callable[[str], bool],
    ) -> None:
        """Create it without open reservations."""
        self._quotas = quotas
        self._price = price
        self._client = client
        self._is_active = is_active
        self.reset()

    def reset(self) -> None:
        """Reset in a forked child: open reservations belong to its parent."""
        # Threads of one invocation may call models concurrently. Reentrant, and no other lock is
        # acquired under it, because the garbage collector can end an invocation at any moment, in a
        # thread that holds any lock.
        self._lock = threading.RLock()
        # New in a child: a reused operation ID would not be applied.
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._invocations: dict[str, InvocationState] = {}
        self._estimates = Estimates()

    def ask(self, request: AdmissionRequest) -> QuotaReservation | None:
        """Begin a reservation, which the caller must end; `None` when no quota applies."""
        needs = self._needs(request)
        if not needs:
            return None
        with self._lock:
            state = self._state(request.invocation.id)
            # For side calls, such as a summary: they only have their invocation.
            state.attributes = request.attributes
            reservation, late = self._open(state, request, needs)
            if reservation.needs:
                state.asked.append(reservation)
            self._forget(request.invocation.id)
        self._settle(late)
        return reservation if reservation.needs else None

    def is_asked(self, reservation: QuotaReservation) -> bool:
        """Return whether it is neither granted nor ended."""
        with self._lock:
            state = self._invocations.get(reservation.request.invocation.id)
            return state is not None and reservation in state.asked

    def first_of(self, reservation: QuotaReservation) -> QuotaReservation | None:
        """Return an earlier request whose grant would count the invocation, if there is one.

        Needs of quotas that have counted it are left out.
        """
        with self._lock:
            names = reservation.counts_invocation_in
            state = self._invocations.get(reservation.request.invocation.id)
            if not names or state is None or reservation not in state.asked:
                return None
            counted = names & state.counted_in()
            done = [each for each in reservation.needs if each.quota.name in counted]
            reservation.leave_out(done)
            for earlier in state.asked:
                if earlier is reservation:
                    break
                # Not one in the thread that this call blocks.
                if (
                    earlier.counts_invocation_in & (names - counted)
                    and earlier.loop not in BLOCKED_LOOPS
                ):
                    return earlier
            return None

    def grant(self, reservation: QuotaReservation) -> bool:
        """Make it the reservation of a call in flight; False if the invocation has ended."""
        with self._lock:
            state = self._invocations.get(reservation.request.invocation.id)
            if state is None or reservation not in state.asked:
                return False
            # Only if requests could not wait for each other, as an event loop was blocked.
            reservation.repeated = reservation.counts_invocation_in & state.counted_in()
            state.asked.remove(reservation)
            for call in reservation.request.calls:
                state.granted[call.call_id] = reservation
            reservation.is_unclaimed = False
            return True

    def withdraw(self, reservation: QuotaReservation) -> None:
        """End a request, unless it was granted."""
        invocation_id = reservation.request.invocation.id
        with self._lock:
            state = self._invocations.get(invocation_id)
            if state is not None and reservation in state.asked:
                state.asked.remove(reservation)
                self._forget(invocation_id)

    def record(self, call: ModelCall) -> tuple[str, tuple[Charge, ...]] | None:
        """Record the usage of a call on its reservation.

        Returns:
            The operation that settles it, and its usage; `None` if no quota applies.
        """
        with self._lock:
            state = self._invocations.get(call.invocation.id)
            reservation = None if state is None else state.granted.get(call.call_id)
            # A second call after one admission gets its own reservation: the first may be settled
            # by now, and a reservation counts once.
            if reservation is not None and call.call_id not in reservation.ended:
                return reservation.id, self._note(reservation, call)
            attributes = {} if state is None else state.attributes
        return self._count_unadmitted(call, attributes)

    def held(self) -> list[QuotaReservation]:
        """Return the reservations that are held in the store, each once."""
        with self._lock:
            # Copies, because the garbage collector may end an invocation in between.
            granted = [
                reservation
                for state in tuple(self._invocations.values())
                for reservation in tuple(state.granted.values())
            ]
        return [each for each in dict.fromkeys(granted) if each.leased_at is not None]

    def close(self, invocation_id: str, call_id: str) -> QuotaReservation | None:
        """Remove and return the reservation of a call in flight; the caller settles it."""
        with self._lock:
            state = self._invocations.get(invocation_id)
            if state is None:
                return None
            reservation = state.close(call_id)
            self._forget(invocation_id)
            return reservation

    def end(self, invocation_id: str, *, keep_asked: bool) -> None:
        """Settle the calls in flight of a finished invocation, end its requests, and forget it.

        Args:
            invocation_id: Its ID.
            keep_asked: Its requests continue, although it is no longer followed.
        """
        with self._lock:
            state = self._invocations.get(invocation_id)
            if state is None:
                return
            late = [state.close(call_id) for call_id in tuple(state.granted)]
            if not keep_asked:
                state.asked.clear()
            if not state.asked:
                del self._invocations[invocation_id]
        self._settle(late)

    # --- parts ------------------------------------------------------------------------------------

    def _needs(self, request: AdmissionRequest) -> list[QuotaNeed]:
        """Return what a request needs of the quotas that apply to it.

        Not under the lock, because it runs application code of attribute types and of prices.
        """
        lookup = lookup_of(request)
        return [
            sum_of([self._need(quota, each, lookup) for each in request.calls])
            for quota in self._quotas()
            if fits(quota.where, lookup)
        ]

    def _need(self, quota: Quota, call: AdmissionRequest, lookup: Lookup) -> QuotaNeed:
        with self._lock:
            estimate = self._estimates.estimate(
                quota.reserve, call.model, call.input, call.output_cap
            )
        return need_of(quota, call, lookup, estimate, self._price)

    def _count_unadmitted(
        self, call: ModelCall, attributes: Mapping[str, object]
    ) -> tuple[str, tuple[Charge, ...]] | None:
        """Count a call without admission: a side call, such as a summary."""
        request = AdmissionRequest(
            invocation=call.invocation,
            call_id=call.call_id,
            model=call.model,
            input=call.usage.input,
            attributes=attributes,
        )
        # It was already sent and cannot be refused.
        needs = [
            replace(need, amount=max(0, need.amount))
            for need in self._needs(request)
            if need.quota.unit != "usd" or call.charge is not None
        ]
        with self._lock:
            state = self._state(call.invocation.id)
            reservation, late = self._open(state, request, needs)
            self._client.fill(reservation, forced=True)
            charges = self._note(reservation, call)
            state.counted |= reservation.counts_invocation_in
            self._forget(call.invocation.id)
        self._settle(late)
        if not reservation.needs:
            return None
        self._client.settle_later(reservation)
        return reservation.id, charges

    def _settle(self, reservations: Iterable[QuotaReservation | None]) -> None:
        """Settle those that are to be settled. Not under the lock."""
        for each in reservations:
            if each is not None:
                self._client.settle_later(each)

    # --- under the lock ---------------------------------------------------------------------------

    def _state(self, invocation_id: str) -> InvocationState:
        return self._invocations.setdefault(invocation_id, InvocationState())

    def _forget(self, invocation_id: str) -> None:
        """Forget an invocation that has ended before, with the last of its late calls."""
        state = self._invocations.get(invocation_id)
        is_empty = state is not None and not state.asked and not state.granted
        if is_empty and not self._is_active(invocation_id):
            del self._invocations[invocation_id]

    def _open(
        self, state: InvocationState, request: AdmissionRequest, needs: Iterable[QuotaNeed]
    ) -> tuple[QuotaReservation, list[QuotaReservation | None]]:
        """Create the reservation of a request; return also those of earlier calls, to be settled.

        The end of a call with the same ID was not observed.
        """
        late = [state.close(each.call_id) for each in request.calls]
        # An invocation is counted by its first call only.
        counted = state.counted_in()
        open_needs = [each for each in needs if each.quota.name not in counted]
        operation = f"{self._owner}-{next(self._numbers)}"
        return QuotaReservation(operation, request, open_needs), late

    def _note(self, reservation: QuotaReservation, call: ModelCall) -> tuple[Charge, ...]:
        # Only measured usage improves estimates.
        if call.kind == "measured":
            for each in reservation.request.calls:
                if each.call_id == call.call_id:
                    self._estimates.record(each.model, each.input, call.usage)
        return reservation.note(call)


# --- reserving, and waiting -----------------------------------------------------------------------

NEED_RENEWALS: Final = 3
"""Times that a waiting call asks again while later ones leave room for it."""

SHORTEST_SECONDS: Final = 0.01
"""Minimum sleep until an expected change: the store's clock may lag behind."""


class WaitCancelledError(Exception):
    """Quotas were disabled, or the agent was cancelled or has ended, while a call waited."""


@dataclass(frozen=True, slots=True)
class AdmissionOutcome:
    """The outcome of an admission, after any waiting."""

    reply: Reply
    waited: frozenset[str] = frozenset()
    """Quotas that the call waited for."""
    gave_up: Mapping[str, float] = field(default_factory=dict)
    """Quotas that it gave up waiting for → seconds waited."""


@dataclass(slots=True)
class AdmissionAttempt:
    """The admission attempts of one call."""

    reservation: QuotaReservation
    needs: dict[QueueKey, QuotaNeed]
    """Needs that it may wait for."""
    waiter: Waiter
    now: Callable[[], float]
    """Returns the time, in monotonic seconds."""
    since: dict[QueueKey, float] = field(default_factory=dict)
    """When it joined each queue."""
    changes_at: float = 0.0
    """When to try again at the latest, by the store's clock; 0 if it need not."""

    def ends(self, queues: Collection[QueueKey]) -> float:
        """Return when it gives up, in monotonic seconds: the shortest `max_wait` applies."""
        longest = min(self.needs[queue].quota.max_wait for queue in queues)
        return min(self.since.values(), default=self.now()) + longest

    def unmet(self, reply: Reply) -> set[QueueKey]:
        """Return the queues to wait in after a reply; empty if waiting would not help."""
        if reply.status != "refused":
            return set()
        lacking = [(*self.reservation.asked[n], reply.states[n]) for n in reply.unmet]
        enforced = [each for each in lacking if each[0].is_enforced]
        # Blocked keys do not wait.
        if not all(need.waits and state.block is None for need, _, state in enforced):
            return set()
        queues = {need.queue for need, _, _ in enforced}
        left = self.ends(queues) - self.now()
        for need, demand, state in enforced:
            if not waiting_helps(need, demand, state, reply.now, left):
                return set()
        ends = (demand.count.window.end for _, demand, _ in enforced)
        # At the latest, it shows that it still waits.
        self.changes_at = min(reply.changes_at, *ends, reply.now + NEED_SECONDS / NEED_RENEWALS)
        return queues


def waiting_helps(
    need: QuotaNeed, demand: Demand, state: CountState, now: float, seconds: float
) -> bool:
    """Return whether a call would fit within `seconds` if all reservations were released."""
    ends = resets_at(demand.count, state, now) - now
    if demand.count.refill is not None:
        # What is used flows back evenly, with what is reserved.
        level = state.used + state.reserved
        used = state.used - level * seconds / ends if ends > seconds else 0
        return used + min(need.amount, state.limit) <= state.limit
    # A call of unknown size may exceed the whole limit as the only one in flight.
    least = 1 if demand.alone and need.amount > state.limit else need.amount
    return (0 if ends <= seconds else state.used) + least <= state.limit


class Admissions:
    """Reserves quota for the calls of a process, which may wait for it in queues.

    Args:
        queues: Queues of the process.
        client: Provides the store's time and the last known counts.
        ask: Reserves what a call needs; raises `StoreError`.
        publish: Publishes events.
        is_asked: Returns whether a reservation is neither granted nor ended.
    """

    def __init__(
        self,
        queues: WaitQueues,
        client: StoreClient,
        ask: Callable[[QuotaReservation], Awaitable[Reply]],
        publish: Callable[[Event], None],
        is_asked: Callable[[QuotaReservation], bool],
    ) -> None:
        """Begin with no call."""
        self._queues = queues
        self._client = client
        self._now = queues.clock.now
        self._ask = ask
        self._publish = publish
        self._is_asked = is_asked

    def is_cancelled(self, reservation: QuotaReservation) -> bool:
        """Return whether a call need not wait for its reservation any longer."""
        return not self._is_asked(reservation) or reservation.request.is_cancelled()

    async def reserve(self, reservation: QuotaReservation) -> AdmissionOutcome:
        """Reserve what a call needs, immediately or after queueing.

        Raises:
            WaitCancelledError: Quotas were disabled, or the agent was cancelled or has ended.
            StoreError: The store did not answer.
        """
        needs = {need.queue: need for need in reservation.needs if need.waits}
        if not needs:
            return AdmissionOutcome(await self._ask(reservation))
        sharers = {queue: need.sharer for queue, need in needs.items()}
        waiter = self._queues.join(sharers, partial(self.is_cancelled, reservation))
        attempt = AdmissionAttempt(reservation, needs, waiter, self._now)
        # In any case: a cancelled call must not block its queues.
        with self._queues.ending(partial(self._leave, attempt)):
            return await self._retry(attempt)

    def _leave(self, attempt: AdmissionAttempt) -> None:
        self._queues.leave(attempt.waiter)
        for queue, since in attempt.since.items():
            self._publish_wait(attempt.reservation, attempt.needs[queue], self._now() - since)

    async def _retry(self, attempt: AdmissionAttempt) -> AdmissionOutcome:
        """Try whenever woken, until admitted, refused for good, or timed out."""
        is_due = not attempt.waiter.lacks
        while not self._queues.is_closed and not attempt.waiter.is_cancelled():
            if is_due:
                since = min(attempt.since.values(), default=self._now())
                attempt.reservation.waited = self._now() - since
                reply = await self._ask(attempt.reservation)
                lacking = attempt.unmet(reply)
                if not lacking:
                    waited = {attempt.needs[queue].quota.name for queue in attempt.since}
                    return AdmissionOutcome(reply, frozenset(waited))
                self._queues.requeue(attempt.waiter, lacking)
            change = self._next_change(attempt)
            for queue in attempt.waiter.lacks - attempt.since.keys():
                attempt.since[queue] = self._now()
                self._publish_wait(attempt.reservation, attempt.needs[queue], None)
            ends = attempt.ends(attempt.waiter.lacks)
            # Woken, it tries once more: the event loop may have been busy until now.
            if ends <= self._now() and not attempt.waiter.is_woken:
                return self._give_up(attempt)
            attempt.reservation.waits_until = ends
            is_due = await attempt.waiter.sleep(min(ends, change))
            attempt.reservation.waits_until = 0.0
            if not is_due and change < ends:
                self._queues.notify_next(attempt.waiter)
        raise WaitCancelledError

    def _next_change(self, attempt: AdmissionAttempt) -> float:
        """Return when it has to try again, in monotonic seconds."""
        if not attempt.changes_at:
            return math.inf
        now = self._now()
        left = attempt.changes_at - self._client.now()
        # Only once: then the first waiter is woken and tries.
        if left <= 0:
            attempt.changes_at = 0.0
        return now + max(SHORTEST_SECONDS, left)

    def _give_up(self, attempt: AdmissionAttempt) -> AdmissionOutcome:
        """Refuse by cached counts: the call may never have reached the front."""
        reservation, now = attempt.reservation, self._now()
        self._client.fill(reservation, forced=False)
        states = [
            self._client.fallback.known(demand.count) or CountState(0, 0, demand.capacity)
            for demand in reservation.demands
        ]
        lacks = attempt.waiter.lacks
        lacking = [n for n, need in enumerate(reservation.needs) if need.queue in lacks]
        reply = Reply("refused", self._client.now(), tuple(states), tuple(lacking))
        seconds = {attempt.needs[queue].quota.name: now - attempt.since[queue] for queue in lacks}
        return AdmissionOutcome(reply, gave_up=seconds)

    def _publish_wait(
        self, reservation: QuotaReservation, need: QuotaNeed, seconds: float | None
    ) -> None:
        self._publish(
            QuotaWait(
                invocation=reservation.request.invocation,
                quota=need.quota.name,
                key=need.key.shown,
                seconds=seconds,
            )
        )
