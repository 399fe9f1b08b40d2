"""Reserves quota for model calls, and queues them if a quota has on_exceeded: wait."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import QuotaWait
from otel_limits.quotas.store import CountState, Reply

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.tickets import QuotaNeed, Ticket
    from otel_limits.quotas.wait_queues import QueueKey, Waiter, WaitQueues

SHORTEST_SECONDS: Final = 0.01
"""How long is waited for a moment at least: the store's clock may not be there yet."""


class WaitCancelledError(Exception):
    """Quotas were disabled, or the agent was cancelled, while a call waited."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a call was answered, after all that it waited for."""

    reply: Reply
    waited: frozenset[str] = frozenset()
    """The quotas that it waited for."""
    gave_up: Mapping[str, float] = field(default_factory=dict)
    """The quotas for which it waits no longer, and the seconds that it did."""


@dataclass(slots=True)
class AdmissionAttempt:
    """One call that asks, and waits where it has to."""

    ticket: Ticket
    needs: dict[QueueKey, QuotaNeed]
    """Those that it may wait for."""
    waiter: Waiter
    since: dict[QueueKey, float] = field(default_factory=dict)
    """When it began to wait in each line."""
    changes_at: float = 0.0
    """When the store may answer otherwise without anybody's doing, by its clock."""

    @property
    def ends(self) -> float:
        """When it gives up, in monotonic seconds: no quota may keep it longer than it says."""
        longest = min(self.needs[line].quota.max_wait for line in self.waiter.lacks)
        return min(self.since.values()) + longest

    def unmet(self, reply: Reply) -> set[QueueKey]:
        """Return the lines to wait in after a reply; none where waiting would not help."""
        if reply.status != "refused":
            return set()
        lacking = [(*self.ticket.asked[n], reply.standings[n]) for n in reply.unmet]
        enforced = [each for each in lacking if each[0].is_enforced]
        for need, demand, standing in enforced:
            # Nothing that ends makes room for a call that is more than the whole quota, and what
            # an operator has blocked is not there to be waited for.
            could_fit = need.amount <= standing.limit or demand.alone
            if not need.waits or standing.block is not None or not could_fit:
                return set()
        ends = (demand.count.window.end for _, demand, _ in enforced)
        self.changes_at = min(reply.changes_at, *ends)
        return {need.queue for need, _, _ in enforced}


class AdmissionQueue:
    """Serializes admission attempts per quota.

    Args:
        lines: Those of the process.
        client: Knows the store's clock, and how counts stood last.
        ask: Reserves for a ticket; raises `StoreError`.
        publish: Takes events.
    """

    def __init__(
        self,
        lines: WaitQueues,
        client: StoreClient,
        ask: Callable[[Ticket], Awaitable[Reply]],
        publish: Callable[[Event], None],
    ) -> None:
        """Create an empty queue."""
        self._lines = lines
        self._client = client
        self._ask = ask
        self._publish = publish

    async def reserve(self, ticket: Ticket) -> Admission:
        """Reserve for a ticket, at once or when it is its turn.

        Raises:
            LetGoError: Quotas were switched off meanwhile, or the agent was cancelled.
            StoreError: The store did not answer.
        """
        needs = {need.queue: need for need in ticket.needs if need.waits}
        if not needs:
            return Admission(await self._ask(ticket))
        waiter = self._lines.join(needs, ticket.request.is_cancelled)
        attempt = AdmissionAttempt(ticket, needs, waiter)
        try:
            return await self._retry(attempt)
        finally:
            # Whatever ends it: a call that was cancelled holds nobody up.
            self._lines.leave(attempt.waiter)
            for line, since in attempt.since.items():
                self._publish_wait(ticket, needs[line], time.monotonic() - since)

    async def _retry(self, attempt: AdmissionAttempt) -> Admission:
        """Ask whenever it is woken, until it is admitted, refused for good, or gives up."""
        is_due = not attempt.waiter.lacks
        while not self._lines.is_closed and not attempt.waiter.is_cancelled():
            if is_due:
                reply = await self._ask(attempt.ticket)
                lacking = attempt.unmet(reply)
                if not lacking:
                    waited = {attempt.needs[line].quota.name for line in attempt.since}
                    return Admission(reply, frozenset(waited))
                self._lines.requeue(attempt.waiter, lacking)
            self._note_waits(attempt)
            left = attempt.ends - time.monotonic()
            if left <= 0:
                return self._give_up(attempt)
            change = self._until_change(attempt)
            is_due = await attempt.waiter.sleep(min(left, change))
            if not is_due and change < left:
                self._lines.notify_next(attempt.waiter)
        raise WaitCancelledError

    def _note_waits(self, attempt: AdmissionAttempt) -> None:
        """Tell what it waits for from now on."""
        for line in attempt.waiter.lacks - attempt.since.keys():
            attempt.since[line] = time.monotonic()
            self._publish_wait(attempt.ticket, attempt.needs[line], None)

    def _until_change(self, attempt: AdmissionAttempt) -> float:
        """Return the seconds until something ends by itself, for one that has asked."""
        if not attempt.changes_at:
            return float("inf")
        left = attempt.changes_at - self._client.now()
        # Only once: whoever is first then is woken, and asks.
        if left <= 0:
            attempt.changes_at = 0.0
        return max(SHORTEST_SECONDS, left)

    def _give_up(self, attempt: AdmissionAttempt) -> Admission:
        """Answer by what is known here: it may not have asked at all, if others were first."""
        ticket, now = attempt.ticket, time.monotonic()
        self._client.fill(ticket, forced=False)
        standings = [
            self._client.fallback.known(demand.count) or CountState(0, 0, demand.limit)
            for demand in ticket.demands
        ]
        lacks = attempt.waiter.lacks
        lacking = [n for n, need in enumerate(ticket.needs) if need.queue in lacks]
        reply = Reply("refused", self._client.now(), tuple(standings), tuple(lacking))
        seconds = {attempt.needs[line].quota.name: now - attempt.since[line] for line in lacks}
        return Admission(reply, gave_up=seconds)

    def _publish_wait(self, ticket: Ticket, need: QuotaNeed, seconds: float | None) -> None:
        self._publish(
            QuotaWait(
                invocation=ticket.request.invocation,
                quota=need.quota.name,
                key=need.key.shown,
                seconds=seconds,
            )
        )
