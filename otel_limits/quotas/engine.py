"""Admits model calls by quota: reserves their worst case, or waits, and settles their usage.

Whether an amount is left is decided in the store: by `memory.py`, or on Redis by
`scripts/reserve.lua`. The network never blocks a thread or event loop of an agent: a call awaits
the reply, within the timeout. During an outage each quota uses its local share, then its
`on_store_error`.
"""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
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
    CountState,
    Demand,
    PermanentStoreError,
    Reply,
    StoreError,
    resets_at,
)
from otel_limits.quotas.store_worker import LOOK_INTERVAL_SECONDS
from otel_limits.runs.quota_gate import AdmissionRequest

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
        conversations: Those that other processes share; `None` if none do.
    """

    def __init__(
        self,
        quotas: Callable[[], Sequence[Quota]],
        client: StoreClient,
        *,
        publish: Callable[[Event], None],
        price: PriceOf,
        queues: WaitQueues,
        conversations: ConversationSync | None = None,
    ) -> None:
        """Create a gate without open reservations."""
        self._publish = publish
        self.quotas = quotas
        self.client = client
        self._reservations = Reservations(quotas, price, self.client)
        self._queues = queues
        self._conversations = conversations
        self.client.in_flight = self._reservations.held
        self._admissions = Admissions(queues, self.client, self._reserve, publish)

    @property
    def holds_quotas(self) -> bool:
        """Whether any quota is configured."""
        return bool(self.quotas())

    # --- admission and settlement -----------------------------------------------------------------

    async def admit_by_quotas(self, request: AdmissionRequest) -> Verdict | None:
        """Reserve quota for the call; return a verdict if a quota was reached."""
        reservation: QuotaReservation | None = None
        try:
            if self._conversations is not None:
                refusal = await self._conversations.refresh(request)
                if refusal is not None:
                    return halting(refusal, UNCOUNTED)
            if request.is_refused():
                return None
            reservation = self._reservations.ask(request)
            if reservation is None:
                return None
            await self._wait_for_first_call(reservation)
            return self._leave_unpriced(reservation) or await self._reserve_or_refuse(reservation)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report("quotas", error)
            return None
        except GeneratorExit:
            # By the garbage collector at any moment, also under a lock of the store: it expires.
            if reservation is not None:
                reservation.is_unclaimed = False
            raise
        finally:
            # Also for a call whose task was cancelled. One that is sent without a grant counts
            # like a call without admission.
            if reservation is not None:
                self._withdraw(reservation)

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
            reservation = self._reservations.record(event)
            # The ledger records it with the call, in case this worker is killed before settling.
            if reservation is not None and self.client.executor.is_shared:
                charges = encode_charges(reservation.last_charges())
                return replace(event, quota_operation=reservation.id, quota_charges=charges)
        elif isinstance(event, Stop):
            self._reservations.end(event.invocation_id)
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
        """Wait for an earlier call whose grant counts the invocation; without it, this one may."""
        while (first := self._reservations.first_of(reservation)) is not None:
            waits = (need.quota.max_wait for need in first.needs if need.waits)
            if not await self.client.wait_for_first(first, max(waits, default=0.0)):
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
        except WaitCancelledError:
            return None
        except StoreError as error:
            # A permanent error is not an outage: a count that cannot be kept has no share.
            if not isinstance(error, PermanentStoreError):
                self.client.fallback.enter_outage()
            return self._degrade(reservation)
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
        """Reserve for the model's last answer; False if it cannot be counted, or has no slot."""
        reservation.needs = [
            replace(need, is_of_last=need.admits_last) for need in reservation.needs
        ]
        try:
            admission = await self._admissions.reserve(reservation)
        except (StoreError, WaitCancelledError):
            return False
        return admission.reply.status == "admitted" and self._grant(reservation)

    # --- without the store ------------------------------------------------------------------------

    def _degrade(self, reservation: QuotaReservation) -> Verdict | None:
        """Decide by this worker's local share, then by `on_store_error`."""
        fallback = self.client.fallback
        # Fill again: an attempt may have ended half-way, and the current windows decide.
        self.client.fill(reservation, forced=False)
        denied = self._blocked(reservation)
        if not denied:
            outcome = fallback.decide(reservation)
            self._publish_decisions_without_store(reservation, outcome)
            if outcome.is_admitted:
                self.client.reserve_later(reservation)
                self._grant(reservation)
                return None
            denied = self._denied(outcome)
        verdict = verdict_of(denied)
        return None if verdict is None else halting(verdict, UNCOUNTED)

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

    def _denied(self, outcome: OutageDecision) -> list[Denied]:
        """Return the refusals of a decision without the store."""
        known, retry = self.client.fallback.known, LOOK_INTERVAL_SECONDS
        denied = [
            (need, unanswered(need, demand, known(demand.count), self.client.now(), retry))
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
        if reservation in self.granted.values():
            return None
        reservation.status = "ended"
        return reservation


class Reservations:
    """Reservations by invocation until they are settled, and estimates from earlier calls.

    Each is asked for, then granted, and then settled with its call; or it ends without a grant, if
    it is refused, its request is abandoned, or its invocation ends.

    Args:
        quotas: Returns the current quotas.
        price: AdmissionRequest and usage → USD, for quotas in USD.
        client: Sends settlements.
    """

    def __init__(
        self, quotas: Callable[[], Sequence[Quota]], price: PriceOf, client: StoreClient
    ) -> None:
        """Create it without open reservations."""
        self._quotas = quotas
        self._price = price
        self._client = client
        self.reset()

    def reset(self) -> None:
        """Reset in a forked child: open reservations belong to its parent."""
        # Threads of one invocation may call models concurrently. Reentrant, because recording a
        # call without admission opens a reservation.
        self._lock = threading.RLock()
        # New in a child: a reused operation ID would not be applied.
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._invocations: dict[str, InvocationState] = {}
        self._estimates = Estimates()

    def ask(self, request: AdmissionRequest) -> QuotaReservation | None:
        """Begin a reservation, which the caller must end; `None` when no quota applies."""
        # Before the lock, because it runs application code of attribute types.
        lookup = lookup_of(request)
        applying = [quota for quota in self._quotas() if fits(quota.where, lookup)]
        if not applying:
            return None
        with self._lock:
            state = self._invocations.setdefault(request.invocation.id, InvocationState())
            # The end of the previous call was not observed.
            self._settle(state, request.call_id)
            # For side calls, such as a summary: they only have their invocation.
            state.attributes = request.attributes
            counted = state.counted_in()
            needs = [
                sum_of([self._need(quota, each, lookup) for each in request.calls])
                for quota in applying
                # An invocation is counted by its first call only.
                if quota.name not in counted
            ]
            if not needs:
                return None
            reservation = QuotaReservation(f"{self._owner}-{next(self._numbers)}", request, needs)
            state.asked.append(reservation)
            return reservation

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
                if earlier.counts_invocation_in & (names - counted):
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
            reservation.status, reservation.is_unclaimed = "granted", False
        reservation.decided.set_result(None)
        return True

    def withdraw(self, reservation: QuotaReservation) -> None:
        """End a request that was not granted."""
        with self._lock:
            if reservation.status != "asked":
                return
            state = self._invocations.get(reservation.request.invocation.id)
            if state is not None:
                state.asked.remove(reservation)
            reservation.status = "ended"
        reservation.decided.set_result(None)

    def record(self, call: ModelCall) -> QuotaReservation | None:
        """Record the usage of a call on its reservation; `None` if no quota applies."""
        with self._lock:
            state = self._invocations.get(call.invocation.id)
            reservation = None if state is None else state.granted.get(call.call_id)
            # A second call after one admission gets its own reservation: the first may be settled
            # by now, and a reservation counts once.
            if reservation is None or call.call_id in reservation.ended:
                return self._count_unadmitted(call, state)
            self._note(reservation, call)
            return reservation

    def held(self) -> list[QuotaReservation]:
        """Return the reservations that are held in the store."""
        with self._lock:
            return [
                reservation
                for state in self._invocations.values()
                for reservation in state.granted.values()
                if reservation.leased_at is not None
            ]

    def close(self, invocation_id: str, call_id: str) -> QuotaReservation | None:
        """Remove and return the reservation of a call in flight; the caller settles it."""
        with self._lock:
            state = self._invocations.get(invocation_id)
            return None if state is None else state.close(call_id)

    def end(self, invocation_id: str) -> None:
        """Settle the calls in flight of a finished invocation, end its requests, and forget it."""
        with self._lock:
            state = self._invocations.get(invocation_id)
            if state is None:
                return
            for reservation in tuple(state.asked):
                self.withdraw(reservation)
            for call_id in tuple(state.granted):
                self._settle(state, call_id)
            del self._invocations[invocation_id]

    # --- under the lock ---------------------------------------------------------------------------

    def _need(self, quota: Quota, call: AdmissionRequest, lookup: Lookup) -> QuotaNeed:
        estimate = self._estimates.estimate(quota.reserve, call.model, call.input, call.output_cap)
        return need_of(quota, call, lookup, estimate, self._price)

    def _count_unadmitted(
        self, call: ModelCall, state: InvocationState | None
    ) -> QuotaReservation | None:
        """Count a call without admission: a side call, such as a summary."""
        request = AdmissionRequest(
            invocation=call.invocation,
            call_id=call.call_id,
            model=call.model,
            input=call.usage.input,
            attributes=state.attributes if state is not None else {},
        )
        reservation = self.ask(request)
        if reservation is not None:
            # It was already sent and cannot be refused.
            reservation.needs = [
                replace(need, amount=max(0, need.amount))
                for need in reservation.needs
                if need.quota.unit != "usd" or call.charge is not None
            ]
            self._client.fill(reservation, forced=True)
            self.grant(reservation)
            self._note(reservation, call)
            self._settle(self._invocations[call.invocation.id], call.call_id)
        return reservation

    def _note(self, reservation: QuotaReservation, call: ModelCall) -> None:
        reservation.note(call)
        # Only measured usage improves estimates.
        if call.kind == "measured":
            for each in reservation.request.calls:
                if each.call_id == call.call_id:
                    self._estimates.record(each.model, each.input, call.usage)

    def _settle(self, state: InvocationState, call_id: str) -> None:
        reservation = state.close(call_id)
        if reservation is not None:
            self._client.settle_later(reservation)


# --- reserving, and waiting -----------------------------------------------------------------------

NEED_RENEWALS: Final = 3
"""Times that a waiting call asks again while later ones leave room for it."""

SHORTEST_SECONDS: Final = 0.01
"""Minimum sleep until an expected change: the store's clock may lag behind."""


class WaitCancelledError(Exception):
    """Quotas were disabled, or the agent was cancelled or has ended, while a call waited."""


def is_cancelled(reservation: QuotaReservation) -> bool:
    """Return whether a call need not wait for its reservation any longer."""
    return reservation.status == "ended" or reservation.request.is_cancelled()


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
    """

    def __init__(
        self,
        queues: WaitQueues,
        client: StoreClient,
        ask: Callable[[QuotaReservation], Awaitable[Reply]],
        publish: Callable[[Event], None],
    ) -> None:
        """Begin with no call."""
        self._queues = queues
        self._client = client
        self._now = queues.clock.now
        self._ask = ask
        self._publish = publish

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
        waiter = self._queues.join(sharers, lambda: is_cancelled(reservation))
        attempt = AdmissionAttempt(reservation, needs, waiter, self._now)
        try:
            return await self._retry(attempt)
        finally:
            # In any case: a cancelled call must not block its queues.
            self._queues.leave(attempt.waiter)
            for queue, since in attempt.since.items():
                self._publish_wait(reservation, needs[queue], self._now() - since)

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
            is_due = await attempt.waiter.sleep(min(ends, change))
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
