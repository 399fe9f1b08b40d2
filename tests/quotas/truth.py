"""A plain model of a quota store, and a state machine that compares the two.

Hypothesis generates the events: calls of several workers that are admitted, settled, repeated or
forgotten, killed and suspended workers, a clock that jumps, ending windows, grants, blocks and
resets, and a server that restarts without data or with old data. Afterwards counts are rebuilt from
a ledger, and calls that ended during the outage are settled, in any order. One quota charges lost
calls, and one is a token bucket, whose level is compared whenever time passes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from otel_limits.quotas.known_counts import KnownCounts
from otel_limits.quotas.store import (
    FOREVER,
    REMEMBERED_CALLS,
    REMEMBERED_SECONDS,
    Block,
    Charge,
    Count,
    CountState,
    Demand,
    Grant,
    KnownCount,
    QuotaStore,
    Refill,
    Renew,
    Reply,
    Reserve,
    Reset,
    Restores,
    Settle,
    Withdraw,
)
from otel_limits.quotas.windows import Window, Windows

LEASE: Final = 300.0
WORKERS: Final = 4
QUOTAS: Final = {"q": (Windows("hour"), 100), "r": (Windows("PT2H"), 60), "s": (None, 60)}
"""The windows and limits of the quotas; the last is a token bucket."""
REFILL: Final = Refill(3600, 20)
UNENDING: Final = Window(0, 10**10)
MODELS: Final = {"q": "", "r": "m", "s": ""}
"""The model by whose last calls a lost call is charged; empty for a quota that frees it."""


class Lease(NamedTuple):
    """A reservation of one call."""

    amount: int
    certain: bool
    ends: float
    lost: int
    """Charged if it expires."""


@dataclass
class Book:
    """The expected state of one count."""

    limit: int
    used: int = 0
    base: int = 0
    """The part of it that is from earlier runs of the server."""
    leases: dict[str, Lease] = field(default_factory=dict)
    lost: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Calls whose reservation expired → what they were charged, and the last reset before."""
    expired: set[str] = field(default_factory=set)
    """Calls whose reservation expired: others may have used what they reserved."""
    latest: float = 0.0
    """The time of its last reservation."""
    reset: str = ""
    """The last reset that the store knows."""
    late: int = 0
    """Usage settled after its reservation expired, with its worker assumed dead."""
    most: int = 0
    """The highest limit it ever had."""
    pace: int = 0
    """Of a token bucket, what flows back in its time; 0 if unknown."""
    unpaced_since: float = math.inf
    """When the server first lost its pace."""
    unseen: int = 0
    """Usage that the server lost, and that no living worker saw."""

    @property
    def reserved(self) -> int:
        """The reserved amount."""
        return sum(each.amount for each in self.leases.values())

    def purge(self, now: float) -> None:
        """Release expired reservations, and charge those that are charged."""
        for name, each in list(self.leases.items()):
            if each.ends <= now:
                del self.leases[name]
                self.expired.add(name)
                self.used += each.lost
                if each.lost:
                    self.lost[name] = each.lost, self.reset

    def charged(self, name: str) -> int:
        """Return what a call was charged when its reservation expired, since the last reset."""
        charge, reset = self.lost.get(name, (0, ""))
        return charge if reset == self.reset else 0


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
    ended_at: float = math.inf
    """When it ended; only then it is in the ledger."""
    resets: dict[str, int] = field(default_factory=dict)
    """How often each of its quotas had been reset before."""


class Kept(NamedTuple):
    """Contents of a snapshot of the server, besides usage."""

    grants: dict[str, list[tuple[float, int]]]
    blocks: dict[str, Block]
    history: dict[str, list[int]]
    lost: dict[Count, dict[str, tuple[int, str]]]
    rebuilt: set[str]


class Stores(NamedTuple):
    """A store, and a function that sets its clock."""

    store: QuotaStore
    set_clock: Callable[[float], None]
    begin: float
    shared: Restores | None = None
    """The same store, if it restores counts."""
    server: LossyServer | None = None
    """The server, if it can lose what was written."""


class LossyServer(Protocol):
    """A server that loses what was written after the last snapshot."""

    def save(self) -> None:
        """Take a snapshot."""

    def restart(self, *, everything: bool) -> None:
        """Restart with the snapshot, or without any data."""


class StoreMachine(RuleBasedStateMachine):
    """Applies operations to a store and a model, and compares them after every step."""

    def __init__(self, place: Stores) -> None:
        """Start with empty counts."""
        super().__init__()
        self.store, self.set_clock, self.now, self.shared, self.server = place
        self.set_clock(self.now)
        self.latest = self.now
        self.names = itertools.count()
        self.books: dict[Count, Book] = {}
        self.calls: list[Call] = []
        self.grants: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.blocks: dict[str, Block] = {}
        self.history: dict[str, list[int]] = defaultdict(list)
        """Usage of the calls of each quota."""
        self.rebuilt: set[str] = set()
        """Calls that were counted from the ledger."""
        self.saved = self.kept()
        """The last snapshot, besides usage."""
        self.knowledge = [KnownCounts() for _ in range(WORKERS)]
        self.suspended: dict[int, bool] = {}
        """Suspended workers, and whether the server lost counts since."""
        self.resets: dict[str, int] = defaultdict(int)
        """How often each quota was reset."""
        self.run_begun = -math.inf
        """When the server restarted."""
        self.is_rebuilt = True
        """Whether counts were rebuilt from the ledger since."""
        self.settled_since: set[str] = set()
        """Calls that ended before and were settled since."""

    # --- events -----------------------------------------------------------------------------------

    @initialize(amounts=st.lists(st.integers(1, 20), min_size=3, max_size=3))
    def crowd(self, amounts: list[int]) -> None:
        """Some calls are in flight from the beginning."""
        for worker, amount in enumerate(amounts):
            self.ask(worker, dict.fromkeys(QUOTAS, amount), certain=True)

    @rule(
        worker=st.integers(0, WORKERS - 1),
        amounts=st.dictionaries(st.sampled_from(sorted(QUOTAS)), st.integers(0, 70), min_size=1),
        certain=st.booleans(),
    )
    def ask(self, worker: int, amounts: dict[str, int], certain: bool) -> None:  # noqa: FBT001
        """A worker reserves for a call."""
        assume(worker not in self.suspended)
        demands = tuple(
            Demand(
                count=self.count(name),
                amount=amount,
                limit=QUOTAS[name][1],
                certain=certain,
                model=MODELS[name],
            )
            for name, amount in amounts.items()
        )
        call = Call(f"{worker}-{next(self.names)}", worker, demands, self.now)
        self.calls.append(call)
        self.reserve(call)

    @precondition(lambda self: self.awake("admitted"))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """A call ends with at most its reserved usage, on time or late."""
        call = data.draw(st.sampled_from(self.awake("admitted")))
        call.took = data.draw(st.integers(0, min(each.amount for each in call.demands)))
        for demand in call.demands:
            book = self.book(demand.count)
            book.purge(self.now)
            if book.leases.pop(call.id, None) is None:
                book.late += call.took
                book.used -= book.charged(call.id)
                book.lost.pop(call.id, None)
            book.used += call.took
            if demand.model:
                self.history[demand.count.quota].append(call.took)
        self.end(call)
        call.status, call.at = "settled", self.now
        self.send_settlement(call)

    @precondition(lambda self: self.awake("ended") and not self.is_too_late())
    @rule(data=st.data())
    def settle_after_the_outage(self, data: st.DataObject) -> None:
        """A call ended while the server was unavailable, and its settlement arrives now."""
        call = data.draw(st.sampled_from(self.awake("ended")))
        is_counted = call.id in self.rebuilt
        for demand in () if is_counted else call.demands:
            book = self.book(demand.count)
            book.purge(self.now)
            charge = book.charged(call.id)
            book.late += call.took
            book.used += call.took - charge
            book.base = max(0, book.base - charge)
            book.lost.pop(call.id, None)
            if demand.model:
                self.history[demand.count.quota].append(call.took)
        call.status, call.at = "settled", self.now
        if not is_counted:
            self.settled_since.add(call.id)
        self.send_settlement(call, is_earlier=True)

    @precondition(lambda self: self.server and not self.is_rebuilt and not self.is_too_late())
    @rule()
    def rebuild(self) -> None:
        """A process reads the ledger, which has every call that ended before the restart."""
        assert self.shared is not None
        recorded = [call for call in self.calls if call.ended_at < self.run_begun]
        counted = self.shared.count_from_ledger([call.id for call in recorded])
        assert counted == self.settled_since & {call.id for call in recorded}
        for count, state in self.look().items():
            if count.refill is not None or self.now not in count.window:
                continue
            used = sum(
                call.took
                for call in recorded
                if call.id not in counted
                and any(each.count == count for each in call.demands)
                and call.resets.get(count.quota, 0) == self.resets[count.quota]
            )
            self.shared.restore([KnownCount(count, used, state.reset)] if used else [])
            book = self.book(count)
            lacking = max(0, used - book.base)
            book.used, book.base, book.late = (
                each + lacking for each in (book.used, book.base, book.late)
            )
        self.is_rebuilt = True
        self.rebuilt |= {call.id for call in recorded}

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
    @rule(worker=st.integers(0, WORKERS - 1))
    def die(self, worker: int) -> None:
        """A worker is killed, and its in-flight calls are never settled."""
        for call in self.calls:
            if call.worker == worker and call.status == "admitted":
                call.status = "dead"
        self.knowledge[worker] = KnownCounts()
        self.suspended.pop(worker, None)

    @rule(worker=st.integers(0, WORKERS - 1))
    def suspend(self, worker: int) -> None:
        """A worker is stopped, and neither renews its leases nor restores counts."""
        self.suspended.setdefault(worker, False)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """It continues, and first restores what it knew before the server lost counts."""
        worker = data.draw(st.sampled_from(sorted(self.suspended)))
        if self.suspended.pop(worker):
            self.rejoin([worker])

    @precondition(lambda self: self.server)
    @rule()
    def snapshot(self) -> None:
        """The server saves its data."""
        assert self.server is not None
        self.server.save()
        self.saved = self.kept()

    @precondition(lambda self: self.server)
    @rule(everything=st.booleans(), data=st.data())
    def restart_server(self, everything: bool, data: st.DataObject) -> None:  # noqa: FBT001
        """The server restarts with old data or none; each worker restores what it knows.

        Some calls end before that.
        """
        assert self.server is not None
        for call in self.awake("admitted"):
            if data.draw(st.booleans()):
                call.took = data.draw(st.integers(0, min(each.amount for each in call.demands)))
                call.status = "ended"
                self.end(call)
        # It takes some time, and the name of a run contains its time.
        self.now += 1.0
        self.latest = max(self.latest, self.now)
        self.set_clock(self.now)
        self.run_begun, self.is_rebuilt = self.now, False
        self.settled_since.clear()
        self.server.restart(everything=everything)
        saved = Kept({}, {}, {}, {}, set()) if everything else self.saved
        self.blocks = dict(saved.blocks)
        self.grants = defaultdict(list, {name: list(each) for name, each in saved.grants.items()})
        self.history = defaultdict(list, {name: list(each) for name, each in saved.history.items()})
        self.rebuilt = set(saved.rebuilt)
        # The server has forgotten the IDs of their operations.
        for call in self.calls:
            call.at = -math.inf
        self.suspended = dict.fromkeys(self.suspended, True)
        before = {count: book.used for count, book in self.books.items()}
        for count, state in self.look().items():
            book = self.book(count)
            book.used = book.base = state.used
            book.reset = state.reset
            book.expired |= book.lost.keys()
            book.lost = dict(saved.lost.get(count, {}))
            book.leases.clear()
            book.pace, book.unpaced_since = 0, min(self.now, book.unpaced_since)
        self.rejoin([each for each in range(WORKERS) if each not in self.suspended])
        for count, book in self.books.items():
            book.unseen += max(0, before[count] - book.used)
        # In any order, and more of them later by their own rules.
        steps: list[str] = data.draw(st.permutations(["settle", "rebuild", "continue"]))
        for step in steps[: steps.index("continue")]:
            if step == "rebuild":
                self.rebuild()
            elif self.awake("ended"):
                self.settle_after_the_outage(data)

    @rule(
        seconds=st.sampled_from(
            [1.0, 30.0, 60.0, 200.0, 299.0, 300.0, 1000.0, 3600.0, -10.0, -400.0, -3600.0]
        )
    )
    def jump(self, seconds: float) -> None:
        """Time passes, windows end, and sometimes the clock is set back."""
        assume(self.now + seconds >= 0)
        bucket, level = self.book(self.count("s")), self.level()
        self.now += seconds
        self.latest = max(self.latest, self.now)
        self.set_clock(self.now)
        if seconds < 0:
            bucket.pace = 0  # its next reservation starts the flow over
        elif seconds > 0 and bucket.pace:
            rest = max(0.0, level - bucket.pace * seconds / REFILL.seconds)
            ended = sum(each.amount for each in bucket.leases.values() if each.ends <= self.now)
            assert rest - ended - 1 <= self.level() <= rest + 1

    @rule(name=st.sampled_from(sorted(QUOTAS)), amount=st.integers(1, 50))
    def grant(self, name: str, amount: int) -> None:
        """An operator grants more for twenty minutes."""
        self.grants[name].append((self.now + 1200, amount))
        self.store.change(self.count(name), Grant(amount, self.now + 1200))
        self.book(self.count("s")).pace *= name != "s"

    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def reset(self, name: str) -> None:
        """An operator resets a count to 0."""
        book = self.book(self.count(name))
        book.used = 0
        book.lost.clear()
        self.resets[name] += 1
        self.store.change(self.count(name), Reset())

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def revoke(self, name: str) -> None:
        """An operator revokes the active grants; expired ones stay expired."""
        assert self.shared is not None
        live = [each for each in self.grants[name] if each[0] > self.now]
        self.grants[name] = [each for each in self.grants[name] if each not in live]
        assert self.shared.change(self.count(name), Withdraw(Grant)) == len(live)

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), seconds=st.sampled_from([60.0, 1200.0, None]))
    def block(self, name: str, seconds: float | None) -> None:
        """An operator blocks a key; a second block replaces the first."""
        assert self.shared is not None
        until = FOREVER if seconds is None else self.now + seconds
        self.blocks[name] = Block(until, "unpaid: 5 % of it")
        self.shared.change(self.count(name), self.blocks[name])

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def unblock(self, name: str) -> None:
        """An operator removes the block."""
        assert self.shared is not None
        was_blocked = self.blocked(name) is not None
        # An expired block stays, in case the clock is set back.
        if was_blocked:
            del self.blocks[name]
        assert self.shared.change(self.count(name), Withdraw(Block)) == was_blocked

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
            book.reset = standing.reset
            if count.refill is not None:
                assert standing.limit == count.refill.capacity(self.permitted(count))
                assert standing.block == block
                assert standing.used >= 0 <= standing.reserved <= book.reserved
                continue
            assert standing == CountState(book.used, book.reserved, self.permitted(count), block)

    @invariant()
    def never_more_is_admitted_than_permitted(self) -> None:
        """Except for calls whose reservation expired while they were in flight."""
        for count, book in self.books.items():
            if count.refill is None:
                assert book.used + book.reserved <= book.most + book.late

    def teardown(self) -> None:
        """Nothing stays reserved once every call is settled, or its worker assumed dead."""
        for call in self.with_status("admitted"):
            call.status = "settled"
            self.send_settlement(call)
        self.set_clock(self.latest + 2 * LEASE)
        counts = [(count, 0) for count in self.books]
        assert all(each.reserved == 0 for each in self.store.look(counts))

    # --- operations -------------------------------------------------------------------------------

    def run(self, operation: Reserve | Settle, worker: int | None = None) -> Reply:
        """Run one operation."""
        (reply,) = self.store.run([operation])
        if worker is not None:
            self.knowledge[worker].observe(operation, reply)
        return reply

    def look(self) -> dict[Count, CountState]:
        """Return the state of every count in the store."""
        counts = list(self.books)
        states = self.store.look([(count, 0) for count in counts])
        return dict(zip(counts, states, strict=True))

    def rejoin(self, workers: Sequence[int]) -> None:
        """Let workers restore what they know, and reserve again for their in-flight calls."""
        assert self.shared is not None
        for worker in workers:
            known = self.knowledge[worker].of_windows_at(self.now)
            self.shared.restore(known)
            for each in known:
                book = self.book(each.count)
                if (each.reset, each.used) > (book.reset, book.base):
                    book.used += each.used - book.base
                    book.base, book.reset = each.used, each.reset
        for call in self.with_status("admitted"):
            if call.worker in workers:
                self.store.run([Renew(call.id, call.demands, LEASE, again=True)])
                for demand in call.demands:
                    book = self.book(demand.count)
                    amount = self.wanted(demand)
                    if call.id in book.leases or book.charged(call.id):
                        continue
                    lost = amount if demand.model else 0
                    book.leases[call.id] = Lease(amount, demand.certain, self.now + LEASE, lost)
                    book.late += amount if call.id in book.expired else 0

    def kept(self) -> Kept:
        """Return the contents of a snapshot now, besides usage."""
        return Kept(
            {name: list(each) for name, each in self.grants.items()},
            dict(self.blocks),
            {name: list(each) for name, each in self.history.items()},
            {count: dict(book.lost) for count, book in self.books.items()},
            set(self.rebuilt),
        )

    def reservation(self, call: Call) -> Reserve:
        """The reservation of a call."""
        return Reserve(call.id, call.demands, LEASE)

    def reserve(self, call: Call) -> None:
        """Reserve, and compare the reply with the model."""
        again = call.status == "admitted"
        is_here = all(self.now in each.count.window for each in call.demands)
        wanted = [self.wanted(demand) for demand in call.demands]
        is_open = is_here and all(self.blocked(each.count.quota) is None for each in call.demands)
        lacks = [
            amount - self.room(demand, amount)
            for demand, amount in zip(call.demands, wanted, strict=True)
        ]
        fits = is_open and all(each <= 0 for each in lacks)
        may_fit = is_open and all(map(operator.le, lacks, map(self.flowed_unseen, call.demands)))
        status = self.run(self.reservation(call), call.worker).status
        if not (again or is_here):
            assert status == "elsewhere"
            return
        if again or fits or not may_fit:
            assert status == ("admitted" if again or fits else "refused")
        self.shorten(call)
        if again:
            return
        call.status, call.at = status, self.now
        for demand, amount in zip(call.demands, wanted, strict=True):
            book = self.book(demand.count)
            if status == "admitted":
                last = self.history[demand.count.quota][-REMEMBERED_CALLS:]
                lost = min(amount, math.ceil(sum(last) / len(last))) if last else amount
                lost = lost if demand.model else 0
                book.leases[call.id] = Lease(amount, demand.certain, self.now + LEASE, lost)
                book.latest = self.now
                book.pace = self.permitted(demand.count)

    def end(self, call: Call) -> None:
        """Record a call in the ledger."""
        call.ended_at, call.resets = self.now, dict(self.resets)

    def is_too_late(self) -> bool:
        """Return whether the store may have forgotten what it did since its restart."""
        return self.latest - self.run_begun >= REMEMBERED_SECONDS

    def send_settlement(self, call: Call, *, is_earlier: bool = False) -> None:
        """Settle the usage of a call in all of its counts."""
        charges = tuple(
            Charge(count=each.count, amount=call.took, model=each.model) for each in call.demands
        )
        settlement = Settle(call.id, charges, is_earlier)
        assert self.run(settlement, call.worker).status == "settled"

    def wanted(self, demand: Demand) -> int:
        """The reserved amount: doubled for a call of unknown size next to another one."""
        book = self.book(demand.count)
        book.purge(self.now)
        is_alone = demand.certain or all(each.certain for each in book.leases.values())
        return demand.amount if is_alone else 2 * demand.amount

    def room(self, demand: Demand, amount: int) -> int:
        """How much of a count is left, for a call that wants an amount."""
        count, book = demand.count, self.book(demand.count)
        if count.refill is None:
            return self.permitted(count) - book.used - book.reserved
        (found,) = self.store.look([(count, demand.limit)])
        # A call above the burst goes out when the bucket is full.
        return found.limit - found.used - found.reserved + max(0, amount - found.limit)

    def flowed_unseen(self, demand: Demand) -> int:
        """How much may have flowed back since a restart without being seen in a look.

        A look does not have the pace of a token bucket before its first reservation in a run.
        """
        count, book = demand.count, self.book(demand.count)
        seconds = self.now - book.unpaced_since
        if count.refill is None or book.pace or seconds <= 0:
            return 0
        return math.ceil(self.permitted(count) * seconds / count.refill.seconds)

    def level(self) -> int:
        """Return how full the token bucket is."""
        (found,) = self.store.look([(self.count("s"), 0)])
        return found.used + found.reserved

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
        windows = QUOTAS[name][0]
        window = UNENDING if windows is None else windows.at(self.now)
        refill = REFILL if windows is None else None
        return Count(name, "k", window, "tokens", "global", refill=refill)

    def book(self, count: Count) -> Book:
        """Return the expected state of a count."""
        return self.books.setdefault(count, Book(QUOTAS[count.quota][1]))

    def with_status(self, status: str) -> list[Call]:
        """Return the calls of live workers with this status."""
        return [each for each in self.calls if each.status == status]

    def awake(self, status: str) -> list[Call]:
        """Return the calls with this status of workers that are not suspended."""
        return [each for each in self.with_status(status) if each.worker not in self.suspended]

    def remembered(self) -> list[Call]:
        """Return the calls whose IDs the store still remembers."""
        since = self.latest - REMEMBERED_SECONDS
        return [
            each
            for each in self.calls
            if each.status in ("admitted", "settled", "refused")
            and each.at > since
            and each.worker not in self.suspended
        ]
