"""Reservations of in-flight calls: leased, renewed, and released when their worker is dead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from otel_limits.quotas.client import LEASE_SECONDS
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from otel_limits.quotas.store import Reserve
from tests.quotas.own_time import Clock, Place, SimulatedFleet
from tests.servers.quotas.test_truth import BEGIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.quotas.fixtures import Timed

LONG: Final = int(2.2 * LEASE_SECONDS)
"""Seconds of a long call: without a renewal, its reservations would have expired."""


class Fleet(SimulatedFleet):
    """A fleet driven by a test, in simulated time."""

    def wait(self, seconds: float) -> None:
        """Let time pass, second by second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.set_clock(self.clock.time())
            self.do()

    def held(self) -> tuple[int, int]:
        """The reserved amounts of a slot quota and a call quota in the first window."""
        place, calls = self.store.look([(self.count(name, 0.0), 9) for name in "pr"])
        return place.reserved, calls.reserved


@pytest.fixture(params=["memory", "redis"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet with one in-flight call, which holds a slot and is counted."""
    clock = Clock(BEGIN)
    if request.param == "memory":
        place = Place(MemoryStore(clock.time), lambda _: None)
    else:
        timed: Timed = request.getfixturevalue("timed_store")
        place = Place(*timed)
    fleet = Fleet(place, clock)
    fleet.do((fleet.workers[0], lambda: fleet.begin(fleet.workers[0], "pr")))
    yield fleet
    for worker in fleet.workers:
        worker.close()


def test_a_call_keeps_what_it_holds_however_long_it_takes(fleet: Fleet) -> None:
    """Some answers stream for ten minutes; at the end everything is released."""
    fleet.wait(LONG)
    assert fleet.held() == (1, 1)
    fleet.do((fleet.workers[0], lambda: fleet.settle(fleet.calls[0])))
    assert fleet.held() == (0, 0)


def test_dead_workers_reservations_expire_with_their_leases(fleet: Fleet) -> None:
    """Independent of how long its call had taken: renewals end with the worker."""
    fleet.wait(LONG)
    fleet.workers[0].connection.is_dead = True
    fleet.wait(SLOT_LEASE_SECONDS)
    assert fleet.held() == (0, 1)
    fleet.wait(LEASE_SECONDS - SLOT_LEASE_SECONDS)
    assert fleet.held() == (0, 0)


def test_reservation_made_in_an_outage_is_renewed_locally(fleet: Fleet) -> None:
    """Calls longer than a lease also use up a share or a local amount."""
    engine = fleet.workers[0].engine
    reservation = engine.client.in_flight()[0]
    memory = reservation.reserved_in = MemoryStore(fleet.clock.time)
    asked = fleet.count("r", 0.0)
    (reply,) = memory.run([Reserve(reservation.id, reservation.demands, LEASE_SECONDS)])
    assert reply.status == "admitted"
    fleet.wait(LONG)
    assert memory.look([(asked, 9)])[0].reserved == 1
