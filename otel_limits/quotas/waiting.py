"""Reserves quota for model calls, and queues them if a quota has on_exceeded: wait."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import QuotaWait
from otel_limits.quotas.store import NEED_SECONDS, CountState, Demand, Reply, resets_at

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.needs import QuotaNeed, QuotaReservation
    from otel_limits.quotas.wait_queues import QueueKey, Waiter, WaitQueues

RENEWALS: Final = 3
"""Times that a waiting call asks again while later ones leave room for it."""

SHORTEST_SECONDS: Final = 0.01
"""Minimum sleep until an expected change: the store's clock may lag behind."""


class WaitCancelledError(Exception):
    """Quotas were disabled, or the agent was cancelled, while a call waited."""


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
        self.changes_at = min(reply.changes_at, *ends, reply.now + NEED_SECONDS / RENEWALS)
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
            WaitCancelledError: Quotas were disabled, or the agent was cancelled.
            StoreError: The store did not answer.
        """
        needs = {need.queue: need for need in reservation.needs if need.waits}
        if not needs:
            return AdmissionOutcome(await self._ask(reservation))
        sharers = {queue: need.sharer for queue, need in needs.items()}
        waiter = self._queues.join(sharers, reservation.request.is_cancelled)
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
