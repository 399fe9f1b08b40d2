"""Admits model calls by quotas: reserves what they may take, settles what they took.

No thread and no event loop of an agent is held up by the network: a call awaits its answer, and no
longer than the timeout. While the store does not answer, every quota does what its
`on_store_error` says.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.core.events import Decision, Event, ModelCall, Stop
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.quotas.leases import Leases
from otel_limits.quotas.open_tickets import OpenTickets
from otel_limits.quotas.recovery import as_text
from otel_limits.quotas.store import (
    CountState,
    PermanentStoreError,
    Reply,
    StoreError,
    StoreOutageError,
)
from otel_limits.quotas.store_worker import LOOK_INTERVAL_SECONDS
from otel_limits.quotas.tickets import (
    UNPRICED,
    Denied,
    PriceOf,
    QuotaNeed,
    Ticket,
    after_wait,
    decision_of,
    exceeded,
    unanswered,
    unmet_needs,
    use_of,
    verdict_of,
)
from otel_limits.quotas.waiting import Admission, AdmissionQueue, WaitCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_limits.core.policy import Verdict
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.fallback import OutageDecision
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.wait_queues import WaitQueues
    from otel_limits.runs.deadlines import Deadlines
    from otel_limits.runs.gate import Request


class Engine:
    """The gate of a process.

    Args:
        quotas: What is to be held now.
        client: Asks the store.
        publish: Takes facts.
        price: Request and usage → USD, for quotas in money.
        lines: Where calls wait for what others have.
        deadlines: The timer of the process.
    """

    component = "quotas"

    def __init__(
        self,
        quotas: Callable[[], Sequence[Quota]],
        client: StoreClient,
        *,
        publish: Callable[[Event], None],
        price: PriceOf,
        lines: WaitQueues,
        deadlines: Deadlines,
    ) -> None:
        """Begin with nobody admitted."""
        self._publish = publish
        self._quotas = quotas
        self._client = client
        self._tickets = OpenTickets(quotas, price, self._client)
        self._lines = lines
        self._leases = Leases(deadlines, self._tickets.held, self._client.renew)
        self._queue = AdmissionQueue(lines, self._client, self._reserve, publish)

    @property
    def holds_quotas(self) -> bool:
        """True while there is a quota that a call may have to ask."""
        return self._tickets.has_quotas

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas that are held now."""
        return self._quotas()

    @property
    def client(self) -> StoreClient:
        """What asks the store."""
        return self._client

    # --- the gate ---------------------------------------------------------------------------------

    async def admit(self, request: Request) -> Verdict | None:
        """Reserve what the call may take; a verdict when it may not go out."""
        try:
            ticket = self._tickets.open(request)
            if ticket is None:
                return None
            return self._leave_unpriced(ticket) or await self._admit(ticket)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report(self.component, error)
            return None

    async def settle(self, invocation_id: str) -> None:
        """Count what the call took; while the store does not answer, the store worker keeps it."""
        try:
            # Taken before it is sent: whoever takes a ticket is the only one who settles it.
            ticket = self._tickets.close(invocation_id)
            if ticket is not None:
                reply = await self._client.settle(ticket)
                self._publish_use(ticket, reply.standings)
        # The courier has it, and has said so in the log.
        except StoreError:
            return
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            INTERNAL_ERRORS.report(self.component, error)

    @suppress_errors("quotas")
    def __call__(self, event: Event) -> Event:
        """Note what an admitted call took; settle what an invocation that is over left open."""
        if isinstance(event, ModelCall):
            ticket = self._tickets.record(event)
            # The ledger keeps it with the call, for when this worker is killed before it settles.
            if ticket is not None and self._client.is_shared:
                charges = as_text(ticket.charges())
                return replace(event, quota_operation=ticket.id, quota_charges=charges)
        elif isinstance(event, Stop):
            self._tickets.end(event.invocation_id)
        return event

    def after_fork(self) -> None:
        """Start afresh in a child."""
        self._client.after_fork()
        self._tickets.reset()
        self._lines.reset()
        self._leases.reset()

    def close(self) -> None:
        """Send what is left and let go of the store, and of all that waits."""
        self._lines.close()
        self._leases.close()
        self._client.close()

    # --- before a call ----------------------------------------------------------------------------

    def _leave_unpriced(self, ticket: Ticket) -> Verdict | None:
        """Leave out the quotas in money where no price is known, or refuse because of them."""
        unpriced = [need for need in ticket.needs if need.amount == UNPRICED]
        for need in unpriced:
            self._decide(ticket, need, "unpriced")
        ticket.leave_out(unpriced)
        if ticket.request.unpriced != "halt":
            return None
        verdict = verdict_of(
            [(need, self._client.without_price(need)) for need in unpriced if need.is_enforced]
        )
        if verdict is not None:
            self._tickets.drop(ticket)
        return verdict

    async def _admit(self, ticket: Ticket) -> Verdict | None:
        if not ticket.needs:
            return None
        try:
            admission = await self._queue.reserve(ticket)
        except WaitCancelledError:
            # Where it goes out all the same, it is counted like one that did not ask.
            self._tickets.drop(ticket)
            return None
        except StoreError as error:
            # One that answers to others is not lost: there is no share of what cannot be counted.
            if not isinstance(error, PermanentStoreError):
                self._client.fallback.enter_outage()
            # A store that is slow may still reserve what nobody will use: then it has to
            # be taken back.
            return self._degrade(ticket, was_sent=not isinstance(error, StoreOutageError))
        reply = admission.reply
        if reply.status == "refused":
            return await self._refuse(ticket, admission)
        # What is only observed lets the call go out, and its verdict is noted all the same.
        observed = unmet_needs(ticket.asked, reply, enforced=False)
        # An admitted call can only lack what is not enforced.
        short = [need for need, _ in observed]
        for need in ticket.needs:
            admitted: Decision = "waited" if need.quota.name in admission.waited else "admitted"
            self._decide(ticket, need, "observed" if need in short else admitted)
        return verdict_of(observed)

    async def _reserve(self, ticket: Ticket) -> Reply:
        reply = await self._client.reserve(ticket, forced=False)
        self._publish_use(ticket, reply.standings)
        if reply.status == "admitted":
            self._hold(ticket)
        return reply

    async def _refuse(self, ticket: Ticket, admission: Admission) -> Verdict | None:
        """Say why the call may not go out."""
        denied = unmet_needs(ticket.asked, admission.reply, enforced=True)
        for need, _ in denied:
            self._decide(ticket, need, "gave_up" if admission.gave_up else "refused")
        denied = [(need, after_wait(need, breach, admission.gave_up)) for need, breach in denied]
        verdict = verdict_of(denied)
        if verdict is not None and verdict.action == "wrap_up":
            # One last call goes out all the same. Without a reservation its settlement books it.
            # A store that is lost between the two replies must not take the last answer away.
            with contextlib.suppress(StoreError):
                await self._client.reserve(ticket, forced=True)
                self._hold(ticket)
        else:
            self._tickets.drop(ticket)
        return verdict

    # --- without the store ------------------------------------------------------------------------

    def _degrade(self, ticket: Ticket, *, was_sent: bool) -> Verdict | None:
        """Use this worker's share, and without one do what every quota says for this case."""
        fallback = self._client.fallback
        # Anew, as an attempt may have ended half-way, and as the windows of now are those
        # to decide in.
        self._client.fill(ticket, forced=False)
        denied = self._blocked(ticket)
        if not denied:
            outcome = fallback.decide(ticket)
            self._decide_without_store(ticket, outcome)
            if outcome.is_admitted:
                self._client.reserve_later(ticket)
                self._hold(ticket)
                return None
            denied = self._denied(outcome)
        self._tickets.drop(ticket)
        if was_sent:
            self._client.release(ticket)
        return verdict_of(denied)

    def _blocked(self, ticket: Ticket) -> list[Denied]:
        """Say which keys an operator has blocked, as far as this process has seen it."""
        fallback, now = self._client.fallback, self._client.now()
        seen = [(need, demand, fallback.blocked(demand)) for need, demand in ticket.asked]
        denied = [
            (need, exceeded(need, demand, Reply("refused", now), standing))
            for need, demand, standing in seen
            if standing is not None and need.is_enforced
        ]
        for need, _ in denied:
            self._decide(ticket, need, "refused")
        return denied

    def _denied(self, outcome: OutageDecision) -> list[Denied]:
        """Say what refuses a call without the store."""
        known, retry = self._client.fallback.known, LOOK_INTERVAL_SECONDS
        denied = [
            (need, unanswered(need, demand, known(demand.count), retry))
            for need, demand in outcome.unanswered
        ]
        if outcome.reply is not None:
            denied += unmet_needs(outcome.asked, outcome.reply, enforced=True)
        return denied

    def _decide_without_store(self, ticket: Ticket, outcome: OutageDecision) -> None:
        if outcome.unanswered:
            for need, _ in outcome.unanswered:
                self._decide(ticket, need, "degraded_denied")
            return
        local: Decision = (
            "degraded_local_admitted" if outcome.is_admitted else "degraded_local_refused"
        )
        for need, rule in outcome.rules:
            if rule == "grace" and outcome.is_admitted:
                self._decide(ticket, need, "degraded_grace_admitted")
            elif rule != "grace":
                self._decide(ticket, need, local if rule == "local" else "degraded_allowed")

    def _hold(self, ticket: Ticket) -> None:
        """Keep what is set aside for a call until it ends, however long it takes."""
        self._client.start_lease(ticket)
        self._leases.begin()

    # --- what is published ------------------------------------------------------------------------

    def _decide(self, ticket: Ticket, need: QuotaNeed, decision: Decision) -> None:
        self._publish(decision_of(ticket, need, decision))

    def _publish_use(self, ticket: Ticket, standings: Iterable[CountState]) -> None:
        """Remember and publish how the counts stand now."""
        # Strict, as a store that answers to another number of counts would be read as if
        # they were ours.
        for need, demand, standing in zip(ticket.needs, ticket.demands, standings, strict=True):
            latest = self._client.remember(need, demand, standing)
            self._publish(use_of(need, demand, latest))
