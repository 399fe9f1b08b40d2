"""A plain model of a quota store, and a state machine that compares the two.

Hypothesis generates the events: calls of several workers that are admitted, settled, repeated or
forgotten, a clock that jumps, ending windows, grants, blocks and resets.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from otel_limits.quotas.store import (
    FOREVER,
    REMEMBERED_SECONDS,
    Block,
    Charge,
    Count,
    CountState,
    Demand,
    QuotaStore,
    Reply,
    Reserve,
    Settle,
    SharedStore,
)
from otel_limits.quotas.windows import Windows

LEASE: Final = 300.0
QUOTAS: Final = {"q": (Windows("hour"), 100), "r": (Windows("PT2H"), 60)}
"""The windows and limits of the quotas."""


class Lease(NamedTuple):
    """A reservation of one call."""

    amount: int
    certain: bool
    ends: float


@dataclass
class Book:
    """The expected state of one count."""

    limit: int
    used: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    latest: float = 0.0
    """The time of its last reservation."""
    late: int = 0
    """Usage settled after its reservation expired, with its worker assumed dead."""
    most: int = 0
    """The highest limit it ever had."""

    @property
    def reserved(self) -> int:
        """The reserved amount."""
        return sum(each.amount for each in self.leases.values())

    def purge(self, now: float) -> None:
        """Release expired reservations."""
        self.leases = {name: each for name, each in self.leases.items() if each.ends > now}


@dataclass
class Call:
    """A call that requested admission."""

    id: str
    worker: int
    demands: tuple[Demand, ...]
    at: float
    """The time of its last operation that the store applied."""
    status: str = "asked"
    took: int = 0


class Stores(NamedTuple):
    """A store, and a function that sets its clock."""

    store: QuotaStore
    set_clock: Callable[[float], None]
    begin: float
    shared: SharedStore | None = None
    """The same store, for an operator's blocks and grants."""


class StoreMachine(RuleBasedStateMachine):
    """Applies operations to a store and a model, and compares them after every step."""

    def __init__(self, place: Stores) -> None:
        """Start with empty counts."""
        super().__init__()
        self.store, self.set_clock, self.now, self.shared = place
        self.set_clock(self.now)
        self.latest = self.now
        self.names = itertools.count()
        self.books: dict[Count, Book] = {}
        self.calls: list[Call] = []
        self.grants: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.blocks: dict[str, Block] = {}

    # --- events -----------------------------------------------------------------------------------

    @rule(
        worker=st.integers(0, 3),
        amounts=st.dictionaries(st.sampled_from(sorted(QUOTAS)), st.integers(0, 70), min_size=1),
        certain=st.booleans(),
    )
    def ask(self, worker: int, amounts: dict[str, int], certain: bool) -> None:  # noqa: FBT001
        """A worker reserves for a call."""
        demands = tuple(
            Demand(count=self.count(name), amount=amount, limit=QUOTAS[name][1], certain=certain)
            for name, amount in amounts.items()
        )
        call = Call(f"{worker}-{next(self.names)}", worker, demands, self.now)
        self.calls.append(call)
        self.reserve(call)

    @precondition(lambda self: self.with_status("admitted"))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """A call ends with at most its reserved usage, on time or late."""
        call = data.draw(st.sampled_from(self.with_status("admitted")))
        call.took = data.draw(st.integers(0, min(each.amount for each in call.demands)))
        for demand in call.demands:
            book = self.book(demand.count)
            book.purge(self.now)
            book.late += 0 if book.leases.pop(call.id, None) else call.took
            book.used += call.took
        call.status, call.at = "settled", self.now
        self.send_settlement(call)

    @precondition(lambda self: self.remembered())
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """A reply was lost: the operation is sent again and changes nothing."""
        call = data.draw(st.sampled_from(self.remembered()))
        if call.status == "settled" and data.draw(st.booleans()):
            self.send_settlement(call)
        elif call.status == "settled":
            assert self.run(self.reservation(call)).status == "settled"
            self.shorten(call)
        else:
            self.reserve(call)

    @precondition(lambda self: self.calls)
    @rule(worker=st.integers(0, 3))
    def die(self, worker: int) -> None:
        """A worker is killed, and its in-flight calls are never settled."""
        for call in self.calls:
            if call.worker == worker and call.status == "admitted":
                call.status = "dead"

    @rule(
        seconds=st.sampled_from([1.0, 30.0, 299.0, 300.0, 1000.0, 3600.0, -10.0, -400.0, -3600.0])
    )
    def jump(self, seconds: float) -> None:
        """Time passes, windows end, and sometimes the clock is set back."""
        assume(self.now + seconds >= 0)
        self.now += seconds
        self.latest = max(self.latest, self.now)
        self.set_clock(self.now)

    @rule(name=st.sampled_from(sorted(QUOTAS)), amount=st.integers(1, 50))
    def grant(self, name: str, amount: int) -> None:
        """An operator grants more for twenty minutes."""
        self.grants[name].append((self.now + 1200, amount))
        self.store.grant(self.count(name), amount, self.now + 1200)

    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def reset(self, name: str) -> None:
        """An operator resets a count to 0."""
        self.book(self.count(name)).used = 0
        self.store.reset(self.count(name))

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def revoke(self, name: str) -> None:
        """An operator revokes the active grants; expired ones stay expired."""
        assert self.shared is not None
        live = [each for each in self.grants[name] if each[0] > self.now]
        self.grants[name] = [each for each in self.grants[name] if each not in live]
        assert self.shared.revoke(self.count(name)) == len(live)

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), seconds=st.sampled_from([60.0, 1200.0, None]))
    def block(self, name: str, seconds: float | None) -> None:
        """An operator blocks a key; a second block replaces the first."""
        assert self.shared is not None
        until = FOREVER if seconds is None else self.now + seconds
        self.blocks[name] = Block(until, "unpaid: 5 % of it")
        self.shared.block(self.count(name), self.blocks[name])

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def unblock(self, name: str) -> None:
        """An operator removes the block."""
        assert self.shared is not None
        was_blocked = self.blocked(name) is not None
        # An expired block stays, in case the clock is set back.
        if was_blocked:
            del self.blocks[name]
        assert self.shared.unblock(self.count(name)) == was_blocked

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def the_store_and_the_books_agree(self) -> None:
        """Used, reserved and limit match the model."""
        counts = [*self.books, *(self.count(name) for name in QUOTAS)]
        looked = self.store.look([(count, QUOTAS[count.quota][1]) for count in counts])
        for count, standing in zip(counts, looked, strict=True):
            book = self.book(count)
            book.purge(self.now)
            block = self.blocked(count.quota)
            assert standing == CountState(book.used, book.reserved, self.permitted(count), block)

    @invariant()
    def never_more_is_admitted_than_permitted(self) -> None:
        """Except for calls whose reservation expired while they were in flight."""
        for book in self.books.values():
            assert book.used + book.reserved <= book.most + book.late

    def teardown(self) -> None:
        """Nothing stays reserved once every call is settled, or its worker assumed dead."""
        for call in self.with_status("admitted"):
            call.status = "settled"
            self.send_settlement(call)
        self.set_clock(self.latest + LEASE)
        counts = [(count, 0) for count in self.books]
        assert all(each.reserved == 0 for each in self.store.look(counts))

    # --- operations -------------------------------------------------------------------------------

    def run(self, operation: Reserve | Settle) -> Reply:
        """Run one operation."""
        (reply,) = self.store.run([operation])
        return reply

    def reservation(self, call: Call) -> Reserve:
        """The reservation of a call."""
        return Reserve(call.id, call.demands, LEASE)

    def reserve(self, call: Call) -> None:
        """Reserve, and compare the reply with the model."""
        again = call.status == "admitted"
        is_here = all(self.now in each.count.window for each in call.demands)
        wanted = [self.wanted(demand) for demand in call.demands]
        fits = all(
            self.blocked(demand.count.quota) is None
            and self.book(demand.count).used + self.book(demand.count).reserved + amount
            <= self.permitted(demand.count)
            for demand, amount in zip(call.demands, wanted, strict=True)
        )
        status = "admitted" if again or (is_here and fits) else "refused"
        assert self.run(self.reservation(call)).status == (
            status if again or is_here else "elsewhere"
        )
        if again or is_here:
            self.shorten(call)
        if again or not is_here:
            return
        call.status, call.at = status, self.now
        for demand, amount in zip(call.demands, wanted, strict=True):
            book = self.book(demand.count)
            if status == "admitted":
                book.leases[call.id] = Lease(amount, demand.certain, self.now + LEASE)
                book.latest = self.now

    def send_settlement(self, call: Call) -> None:
        """Settle the usage of a call in all of its counts."""
        charges = tuple(Charge(count=each.count, amount=call.took) for each in call.demands)
        assert self.run(Settle(call.id, charges)).status == "settled"

    def wanted(self, demand: Demand) -> int:
        """The reserved amount: doubled for a call of unknown size next to another one."""
        book = self.book(demand.count)
        book.purge(self.now)
        is_alone = demand.certain or all(each.certain for each in book.leases.values())
        return demand.amount if is_alone else 2 * demand.amount

    def shorten(self, call: Call) -> None:
        """After the clock is set back, no lease is longer than a new one."""
        latest = self.now + LEASE
        for demand in call.demands:
            leases = self.book(demand.count).leases
            for name, each in leases.items():
                leases[name] = each._replace(ends=min(each.ends, latest))

    def permitted(self, count: Count) -> int:
        """Return the limit of a quota now, grants included."""
        granted = sum(amount for until, amount in self.grants[count.quota] if until > self.now)
        book = self.book(count)
        limit = QUOTAS[count.quota][1] + granted
        book.most = max(book.most, limit)
        return limit

    def blocked(self, name: str) -> Block | None:
        """Return the active block of a key."""
        block = self.blocks.get(name)
        return block if block is not None and block.until > self.now else None

    def count(self, name: str) -> Count:
        """The current count of a quota."""
        return Count(name, "k", QUOTAS[name][0].at(self.now), "tokens", "global")

    def book(self, count: Count) -> Book:
        """Return the expected state of a count."""
        return self.books.setdefault(count, Book(QUOTAS[count.quota][1]))

    def with_status(self, status: str) -> list[Call]:
        """Return the calls of live workers with this status."""
        return [each for each in self.calls if each.status == status]

    def remembered(self) -> list[Call]:
        """Return the calls whose IDs the store still remembers."""
        since = self.latest - REMEMBERED_SECONDS
        return [
            each
            for each in self.calls
            if each.status in ("admitted", "settled", "refused") and each.at > since
        ]
