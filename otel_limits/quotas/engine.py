"""Admits model calls by quota: reserves their worst case, settles their actual usage.

The network never blocks a thread or event loop of an agent: a call awaits the reply, within the
timeout. During an outage each quota uses its local share, then its `on_store_error`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.core.events import Decision, Event, ModelCall, Stop
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.needs import UNPRICED, PriceOf, QuotaNeed, QuotaReservation
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
from otel_limits.quotas.reservations import Reservations
from otel_limits.quotas.store import (
    CountState,
    PermanentStoreError,
    Reply,
    StoreError,
    StoreOutageError,
)
from otel_limits.quotas.store_worker import LOOK_INTERVAL_SECONDS
from otel_limits.quotas.waiting import AdmissionOutcome, Admissions, WaitCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_limits.core.policy import Verdict
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.conversation_sync import ConversationSync
    from otel_limits.quotas.fallback import OutageDecision
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.wait_queues import WaitQueues
    from otel_limits.runs.calls import AdmissionRequest


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

    # --- the gate ---------------------------------------------------------------------------------

    async def admit(self, request: AdmissionRequest) -> Verdict | None:
        """Reserve quota for the call; return a verdict if a quota was reached."""
        try:
            if self._conversations is not None:
                refusal = await self._conversations.admit(request)
                if refusal is not None:
                    return refusal
            reservation = self._reservations.open(request)
            if reservation is None:
                return None
            return self._leave_unpriced(reservation) or await self._admit(reservation)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report("quotas", error)
            return None

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
                charges = encode_charges(reservation.charges())
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

    def _leave_unpriced(self, reservation: QuotaReservation) -> Verdict | None:
        """Skip quotas in USD if the price is unknown, or refuse because of them."""
        unpriced = [need for need in reservation.needs if need.amount == UNPRICED]
        for need in unpriced:
            self._decide(reservation, need, "unpriced")
        reservation.leave_out(unpriced)
        if reservation.request.unpriced != "halt":
            return None
        verdict = verdict_of(
            [(need, self.client.without_price(need)) for need in unpriced if need.is_enforced]
        )
        if verdict is not None:
            self._reservations.drop(reservation)
        return verdict

    async def _admit(self, reservation: QuotaReservation) -> Verdict | None:
        if not reservation.needs:
            return None
        try:
            admission = await self._admissions.reserve(reservation)
        except WaitCancelledError:
            # If it is sent anyway, it is counted like a call without admission.
            self._reservations.drop(reservation)
            self.client.release(reservation)
            return None
        except StoreError as error:
            # A permanent error is not an outage: a count that cannot be kept has no share.
            if not isinstance(error, PermanentStoreError):
                self.client.fallback.enter_outage()
            # A slow store may still make the reservation, which must then be released.
            return self._degrade(reservation, was_sent=not isinstance(error, StoreOutageError))
        reply = admission.reply
        if reply.status == "refused":
            return await self._refuse(reservation, admission)
        # A quota in observe mode admits the call and still returns its verdict.
        observed = unmet_needs(reservation.asked, reply, enforced=False)
        # For an admitted call, only unenforced needs can be unmet.
        short = [need for need, _ in observed]
        for need in reservation.needs:
            admitted: Decision = "waited" if need.quota.name in admission.waited else "admitted"
            self._decide(reservation, need, "observed" if need in short else admitted)
        return verdict_of(observed)

    async def _reserve(self, reservation: QuotaReservation) -> Reply:
        reply = await self.client.reserve(reservation, forced=False)
        self._publish_use(reservation, reply.states)
        if reply.status == "admitted":
            self.client.hold(reservation)
        return reply

    async def _refuse(
        self, reservation: QuotaReservation, admission: AdmissionOutcome
    ) -> Verdict | None:
        """Return the verdict for a refused call."""
        denied = unmet_needs(reservation.asked, admission.reply, enforced=True)
        for need, _ in denied:
            self._decide(reservation, need, "gave_up" if admission.gave_up else "refused")
        denied = [(need, after_wait(need, breach, admission.gave_up)) for need, breach in denied]
        verdict = verdict_of(denied)
        if verdict is not None and verdict.action == "wrap_up":
            # One last call is sent anyway. An outage at this point must not cost the last answer:
            # without a reservation, the call is still settled.
            with contextlib.suppress(StoreError):
                await self.client.reserve(reservation, forced=True)
                self.client.hold(reservation)
        else:
            self._reservations.drop(reservation)
            # Later calls must not leave room for it.
            if any(need.waits for need in reservation.needs):
                self.client.release(reservation)
        return verdict

    # --- without the store ------------------------------------------------------------------------

    def _degrade(self, reservation: QuotaReservation, *, was_sent: bool) -> Verdict | None:
        """Decide by this worker's local share, then by `on_store_error`."""
        fallback = self.client.fallback
        # Fill again: an attempt may have ended half-way, and the current windows decide.
        self.client.fill(reservation, forced=False)
        denied = self._blocked(reservation)
        if not denied:
            outcome = fallback.decide(reservation)
            self._decide_without_store(reservation, outcome)
            if outcome.is_admitted:
                self.client.reserve_later(reservation)
                self.client.hold(reservation)
                return None
            denied = self._denied(outcome)
        self._reservations.drop(reservation)
        if was_sent:
            self.client.release(reservation)
        return verdict_of(denied)

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
            self._decide(reservation, need, "refused")
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

    def _decide_without_store(self, reservation: QuotaReservation, outcome: OutageDecision) -> None:
        if outcome.unanswered:
            for need, _ in outcome.unanswered:
                self._decide(reservation, need, "degraded_denied")
            return
        local: Decision = (
            "degraded_local_admitted" if outcome.is_admitted else "degraded_local_refused"
        )
        for need, rule in outcome.rules:
            if rule == "grace" and outcome.is_admitted:
                self._decide(reservation, need, "degraded_grace_admitted")
            elif rule != "grace":
                self._decide(reservation, need, local if rule == "local" else "degraded_allowed")

    # --- events -----------------------------------------------------------------------------------

    def _decide(self, reservation: QuotaReservation, need: QuotaNeed, decision: Decision) -> None:
        self._publish(decision_of(reservation, need, decision))

    def _publish_use(self, reservation: QuotaReservation, states: Iterable[CountState]) -> None:
        """Cache and publish the current counts."""
        # Strict: a reply with a different number of counts must not be misread.
        for need, demand, state in zip(reservation.needs, reservation.demands, states, strict=True):
            latest = self.client.remember(need, demand, state)
            self._publish(use_of(need, demand, latest, self.client.now()))
