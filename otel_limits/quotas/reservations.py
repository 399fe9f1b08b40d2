"""Reservations of model calls in progress, from admission to settlement."""

from __future__ import annotations

import itertools
import threading
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from otel_limits.core.usage import NO_COST
from otel_limits.quotas.estimates import Estimates
from otel_limits.quotas.keys import fits
from otel_limits.quotas.needs import QuotaReservation, lookup_of, need_of
from otel_limits.runs.calls import AdmissionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_limits.core.events import ModelCall
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.needs import PriceOf
    from otel_limits.quotas.quota import Quota


@dataclass(slots=True)
class InvocationState:
    """Quota state of an invocation in progress."""

    reservations: dict[str, QuotaReservation] = field(default_factory=dict)
    """The open reservation of each call in flight, by its ID."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Trace attributes of its agent."""
    counted: set[str] = field(default_factory=set)
    """Names of quotas that already counted the invocation."""

    def counts_invocation(self, quota: str) -> bool:
        """Return whether a quota has counted the invocation, or is about to."""
        return quota in self.counted or any(
            need.quota.name == quota and need.quota.unit == "invocations"
            for reservation in self.reservations.values()
            for need in reservation.needs
        )

    def close(self, call_id: str) -> QuotaReservation | None:
        """Remove and return the reservation of a call; the caller must settle it."""
        reservation = self.reservations.pop(call_id, None)
        # Only after a sent call: a refused call leaves the invocation uncounted.
        if reservation is not None and reservation.calls:
            self.counted.update(
                need.quota.name for need in reservation.needs if need.quota.unit == "invocations"
            )
        return reservation


class Reservations:
    """Open reservations by invocation, and estimates from earlier calls.

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

    def open(self, request: AdmissionRequest) -> QuotaReservation | None:
        """Open a reservation; `None` when no quota applies."""
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
            estimates = {
                what: self._estimates.estimate(
                    what, request.model, request.input, request.output_cap
                )
                for what in {quota.reserve for quota in applying}
            }
            needs = [
                need_of(quota, request, lookup, estimates[quota.reserve], self._price)
                for quota in applying
                # An invocation is counted by its first call only.
                if not state.counts_invocation(quota.name)
            ]
            if not needs:
                return None
            reservation = QuotaReservation(f"{self._owner}-{next(self._numbers)}", request, needs)
            state.reservations[request.call_id] = reservation
            return reservation

    def record(self, call: ModelCall) -> QuotaReservation | None:
        """Record the usage of a call on its reservation; `None` if no quota applies."""
        with self._lock:
            state = self._invocations.get(call.invocation.id)
            reservation = None if state is None else state.reservations.get(call.call_id)
            # A second call after one admission gets its own reservation: the first may be settled
            # by now, and a reservation counts once.
            if reservation is None or reservation.calls:
                return self._count_unadmitted(call, state)
            self._note(reservation, call)
            return reservation

    def held(self) -> list[QuotaReservation]:
        """Return the reservations that were admitted."""
        with self._lock:
            return [
                reservation
                for state in self._invocations.values()
                for reservation in state.reservations.values()
                if reservation.leased_at is not None
            ]

    def close(self, invocation_id: str, call_id: str) -> QuotaReservation | None:
        """Remove and return the open reservation of a call, if any; the caller settles it."""
        with self._lock:
            state = self._invocations.get(invocation_id)
            return None if state is None else state.close(call_id)

    def drop(self, reservation: QuotaReservation) -> None:
        """Discard the reservation of a call that is not sent."""
        with self._lock:
            request = reservation.request
            state = self._invocations.get(request.invocation.id)
            if state is not None:
                state.reservations.pop(request.call_id, None)

    def end(self, invocation_id: str) -> None:
        """Settle the open reservations of a finished invocation and forget it."""
        with self._lock:
            state = self._invocations.pop(invocation_id, None)
            if state is not None:
                for call_id in tuple(state.reservations):
                    self._settle(state, call_id)

    # --- under the lock ---------------------------------------------------------------------------

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
        reservation = self.open(request)
        if reservation is not None:
            # It was already sent and cannot be refused.
            reservation.needs = [
                replace(need, amount=max(0, need.amount))
                for need in reservation.needs
                if need.quota.unit != "usd" or call.charge is not None
            ]
            self._client.fill(reservation, forced=True)
            self._note(reservation, call)
            self._settle(self._invocations[call.invocation.id], call.call_id)
        return reservation

    def _note(self, reservation: QuotaReservation, call: ModelCall) -> None:
        reservation.calls = 1
        reservation.tokens = call.usage.total
        reservation.cost = call.charge or NO_COST
        # Only measured usage improves estimates.
        if call.kind == "measured":
            self._estimates.record(reservation.request.model, reservation.request.input, call.usage)

    def _settle(self, state: InvocationState, call_id: str) -> None:
        reservation = state.close(call_id)
        if reservation is not None:
            self._client.settle_later(reservation)
