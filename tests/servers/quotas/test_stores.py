"""Every store in the table `STORES` applies operations in the same way.

Stores without a server are skipped; `OTEL_LIMITS_TEST_<MODULE>` sets the URL of one.
"""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import MAX_PARTS
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import (
    REMEMBERED_MODELS,
    RETENTION_SECONDS,
    Charge,
    ConversationRecord,
    Count,
    CountConversation,
    CountState,
    Demand,
    Grant,
    KeepsConversations,
    KnownCount,
    Operation,
    QuotaStore,
    ReadConversation,
    ReadCounts,
    Refill,
    Renew,
    Reply,
    Reserve,
    Reset,
    Settle,
    SharedStore,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.stores import STORES, open_store
from otel_limits.quotas.windows import UnboundedWindow, Window, Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.quotas.stores import StoreKind
    from tests.quotas.fixtures import Server, Timed

LEASE = 60.0
HOUR, DAY = 3600, 86_400
TODAY = Windows("day").at(time.time() + 2 * DAY)
"""A day in the future, so that a server does not treat its counts as expired."""


class Place(Protocol):
    """A store whose clock the test sets."""

    store: QuotaStore
    set_clock: Callable[[float], None]


class Bench:
    """Runs one operation at a time on a store, at a given time."""

    def __init__(self, store: QuotaStore, set_clock: Callable[[float], None]) -> None:
        self.store = store
        self.set_clock = set_clock
        set_clock(TODAY.start + HOUR)

    def run(self, operation: Operation) -> Reply:
        """Run one operation."""
        (reply,) = self.store.run([operation])
        return reply

    def reserve(self, name: str, amount: int, limit: int = 100, **more: object) -> Reply:
        """Reserve an amount of one count."""
        demand = Demand(count=count(), amount=amount, limit=limit, **more)  # type: ignore[arg-type]
        return self.run(Reserve(name, (demand,), LEASE))

    def settle(self, name: str, amount: int, *, known: int = 0, model: str = "") -> Reply:
        """Settle a reservation."""
        charge = Charge(count=count(), amount=amount, known=known, model=model)
        return self.run(Settle(name, (charge,)))

    def standing(self, which: Count | None = None, amount: int = 100) -> CountState:
        """The state of a count."""
        (standing,) = self.store.look([(which or count(), amount)])
        return standing


def count(name: str = "q", window: Window | None = None) -> Count:
    """A count for the tests."""
    return Count(name, "k", window or TODAY, "tokens", "global")


@pytest.fixture
def in_memory() -> Bench:
    """A store in memory."""
    clock = [0.0]
    return Bench(MemoryStore(lambda: clock[0]), lambda now: clock.__setitem__(0, now))


@pytest.fixture
def on_server(timed_store: Timed) -> Bench:
    """A real server."""
    return Bench(*timed_store)


@pytest.fixture(params=STORES, ids=lambda kind: kind.module)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A store of each kind."""
    kind: StoreKind = request.param
    fixture = {"memory": "in_memory", "redis_server": "on_server"}.get(kind.module)
    if fixture is not None:
        yield request.getfixturevalue(fixture)
        return
    # The clock is real: count in the current window, and skip tests that would move it.
    monkeypatch.setattr(sys.modules[__name__], "TODAY", Windows("P366D").at(time.time()))
    fixture = {"redis_cluster": "shared_cluster", "redis_sentinel": "shared_sentinel"}.get(
        kind.module
    )
    variable = f"OTEL_LIMITS_TEST_{kind.module.upper()}"
    url = request.getfixturevalue(fixture) if fixture else os.environ.get(variable, kind.example)
    store = open_store(StorePlace(url, 5.0, uuid.uuid4().hex))
    try:
        if isinstance(store, SharedStore):
            store.check()
    except StoreError as error:
        pytest.skip(f"no store at {url} ({error}): start one, or name one in {variable}")
    is_set = [True]

    def set_clock(_: float) -> None:
        if not is_set:
            pytest.skip(f"tests cannot set the clock of {kind.module}")
        is_set.clear()

    yield Bench(store, set_clock)
    if isinstance(store, SharedStore):
        store.close()


# --- reserving and settling -----------------------------------------------------------------------


def test_a_reservation_holds_what_a_call_may_take_until_it_is_settled(bench: Bench) -> None:
    """Then its usage counts, and the rest is released."""
    assert bench.reserve("a", 60).states == (CountState(0, 60, 100),)
    assert bench.settle("a", 7).states == (CountState(7, 0, 0),)
    assert bench.standing() == CountState(7, 0, 100)


def test_a_quota_of_n_permits_exactly_n(bench: Bench) -> None:
    """The last unit can be reserved, and not one more."""
    assert bench.reserve("a", 100).status == "admitted"
    refused = bench.reserve("b", 1)
    assert (refused.status, refused.unmet) == ("refused", (0,))
    assert refused.states == (CountState(0, 100, 100),)
    assert bench.standing() == CountState(0, 100, 100)


def test_settlement_above_its_reservation_counts_in_full(bench: Bench) -> None:
    """The overshoot stays, and no other call is admitted."""
    bench.reserve("a", 60)
    bench.settle("a", 130)
    assert bench.standing() == CountState(130, 0, 100)
    assert bench.reserve("b", 0).status == "refused"


def test_unenforced_demand_is_reserved_and_reported_as_unmet(bench: Bench) -> None:
    """Observed quotas depend on it."""
    reply = bench.reserve("a", 130, enforced=False)
    assert (reply.status, reply.unmet) == ("admitted", (0,))
    assert bench.standing() == CountState(0, 130, 100)


def test_all_counts_are_reserved_or_none(bench: Bench) -> None:
    """One unmet demand leaves the others unchanged, in any order."""
    small, large = count("small"), count("large")
    for order in ((small, large), (large, small)):
        demands = tuple(
            Demand(count=each, amount=10, limit=5 if each is small else 100) for each in order
        )
        reply = bench.run(Reserve("a", demands, LEASE))
        assert (reply.status, reply.unmet) == ("refused", (order.index(small),))
        assert bench.standing(large) == CountState(0, 0, 100)


# --- idempotence ----------------------------------------------------------------------------------


def test_a_reservation_that_is_sent_again_reserves_once(bench: Bench) -> None:
    """And the reply is the same."""
    first, second = bench.reserve("a", 60), bench.reserve("a", 60)
    assert replace(second, now=first.now) == first
    assert bench.standing() == CountState(0, 60, 100)


def test_a_settlement_that_is_sent_again_counts_once(bench: Bench) -> None:
    """Also when it is repeated much later."""
    bench.reserve("a", 60)
    first = bench.settle("a", 7)
    bench.set_clock(TODAY.start + HOUR + 50 * 60)
    assert bench.settle("a", 7).states == first.states
    assert bench.standing() == CountState(7, 0, 100)


def test_a_reservation_that_arrives_after_its_settlement_reserves_nothing(bench: Bench) -> None:
    """It was delayed in a queue, and the agent has continued."""
    bench.settle("a", 0)
    bench.reserve("a", 60)
    assert bench.standing() == CountState(0, 0, 100)


# --- leases ---------------------------------------------------------------------------------------


def test_dead_workers_reservation_expires_after_its_lease(bench: Bench) -> None:
    """Not a second earlier."""
    bench.reserve("a", 100)
    bench.set_clock(TODAY.start + HOUR + LEASE - 1)
    assert bench.reserve("b", 1).status == "refused"
    bench.set_clock(TODAY.start + HOUR + LEASE)
    assert bench.standing() == CountState(0, 0, 100)
    assert bench.reserve("b", 100).status == "admitted"


def test_a_settlement_after_the_lease_still_counts(bench: Bench) -> None:
    """Nothing is released twice: reserved never becomes negative."""
    bench.reserve("a", 60)
    bench.set_clock(TODAY.start + HOUR + LEASE)
    bench.reserve("b", 30)
    bench.settle("a", 55)
    assert bench.standing() == CountState(55, 30, 100)


def test_a_call_of_unknown_size_reserves_double_beside_another(bench: Bench) -> None:
    """A single one reserves its estimate, so a small remainder can be used up."""
    bench.reserve("a", 10, certain=False)
    assert bench.standing().reserved == 10
    bench.reserve("b", 10, certain=False)
    assert bench.standing().reserved == 30
    bench.reserve("c", 10)
    assert bench.standing().reserved == 40
    for name in "abc":
        bench.settle(name, 10)
    bench.reserve("d", 10, certain=False)
    assert bench.standing() == CountState(30, 10, 100)


def test_expired_call_of_unknown_size_does_not_double_others(bench: Bench) -> None:
    """Its lease has expired."""
    bench.reserve("a", 10, certain=False)
    bench.set_clock(TODAY.start + HOUR + LEASE)
    bench.reserve("b", 10, certain=False)
    assert bench.standing() == CountState(0, 10, 100)


# --- lost calls -----------------------------------------------------------------------------------

MODEL = "a model: 1"


def expire_call(bench: Bench, name: str, amount: int) -> None:
    """Reserve for a call that is charged when its lease expires, and let it expire."""
    bench.reserve(name, amount, limit=10**6, model=MODEL)
    bench.set_clock(bench.run(ReadCounts(())).now + LEASE)


def test_lost_call_without_history_is_charged_all_that_it_reserved(bench: Bench) -> None:
    """A process that crashes again and again would otherwise use the provider for free."""
    expire_call(bench, "a", 60)
    assert bench.standing() == CountState(60, 0, 100)
    assert bench.reserve("b", 41).status == "refused"


def test_lost_call_is_charged_the_mean_of_the_last_twenty(bench: Bench) -> None:
    """Of its model, in any process; rounded up."""
    for n, amount in enumerate([90, *[1] * 19, 4]):
        bench.reserve(f"call {n}", amount, limit=10**6, model=MODEL)
        bench.settle(f"call {n}", amount, model=MODEL)
    bench.settle("of another", 50, model="other")
    bench.settle("of none", 50)
    used = bench.standing().used
    expire_call(bench, "a", 60)
    assert bench.standing().used == used + 2  # 1.15


def test_lost_call_is_charged_what_it_reserved_at_most(bench: Bench) -> None:
    """Its worst case was less than the usual call."""
    bench.settle("usual", 50, model=MODEL)
    expire_call(bench, "a", 20)
    assert bench.standing() == CountState(70, 0, 100)


def test_last_calls_of_many_models_are_forgotten(bench: Bench) -> None:
    """The names are those that clients send: without a bound, they would fill the store."""
    bench.settle("usual", 2, model=MODEL)
    bench.settle("oldest", 2, model="model 0")
    bench.set_clock(TODAY.start + HOUR + 1)
    bench.settle("again", 2, model=MODEL)
    bench.set_clock(TODAY.start + HOUR + 2)
    for number in range(1, REMEMBERED_MODELS):
        bench.settle(f"of model {number}", 1, model=f"model {number}")
    used = bench.standing().used
    for name, model in (("usual again", MODEL), ("oldest again", "model 0")):
        bench.reserve(name, 50, limit=10**6, model=model)
    bench.set_clock(TODAY.start + HOUR + 2 + LEASE)
    assert bench.standing().used == used + 2 + 50


def test_last_calls_expire_with_their_count(server: Server, on_server: Bench) -> None:
    """As every key does."""
    on_server.settle("usual", 2, model=MODEL)
    (key,) = server.client.keys("*:history")
    assert server.client.expiretime(key) == TODAY.end + RETENTION_SECONDS


@pytest.mark.parametrize("actual", [7, 60, 90])
def test_late_settlement_replaces_the_charge_of_a_lost_call(bench: Bench, actual: int) -> None:
    """Its process was only suspended, or a ledger has the call; also if it is sent twice."""
    expire_call(bench, "a", 60)
    assert bench.standing().used == 60
    assert bench.settle("a", actual).states == (CountState(actual, 0, 0),)
    assert bench.settle("a", actual).states == (CountState(actual, 0, 0),)
    assert bench.standing() == CountState(actual, 0, 100)


def test_charged_call_that_is_reserved_again_counts_once(bench: Bench) -> None:
    """Its process was only suspended, and the store restarted with what it had charged."""
    expire_call(bench, "a", 60)
    assert bench.standing().used == 60
    demand = Demand(count=count(), amount=60, limit=100, model=MODEL)
    bench.run(Renew("a", (demand,), LEASE, again=True))
    bench.settle("a", 7)
    assert bench.standing() == CountState(7, 0, 100)


def test_late_settlement_after_a_reset_counts_in_full(bench: Bench) -> None:
    """The reset removed the charge already."""
    expire_call(bench, "a", 60)
    assert bench.standing().used == 60
    bench.store.change(count(), Reset())
    bench.settle("a", 7)
    assert bench.standing() == CountState(7, 0, 100)


def restart(server: Server, timed_store: Timed) -> None:
    """Let the server be a new run that has lost nothing."""
    server.client.hset(KeyNames().marker, "server", "an earlier one")
    cast("SharedStore", timed_store.store).close()  # its next operation connects


def test_late_settlement_never_empties_a_bucket(bench: Bench) -> None:
    """Its charge has been flowing back since: others would get that part twice."""
    bucket = Count("b", "k", Window(0, TODAY.end), "tokens", "global", refill=Refill(HOUR, 100))
    for name in "ab":
        demand = Demand(count=bucket, amount=50, limit=100, model=MODEL)
        bench.run(Reserve(name, (demand,), LEASE))
    bench.set_clock(TODAY.start + HOUR + LEASE)
    charged = bench.standing(bucket).used
    assert charged == 100 - 1  # what flows back in a minute
    bench.run(Settle("a", (Charge(count=bucket, amount=7),)))
    assert bench.standing(bucket).used == charged


def test_bucket_whose_reset_is_restored_later_is_full_and_not_more(
    server: Server, on_server: Bench, timed_store: Timed
) -> None:
    """Its usage before the reset has flowed back: removed twice, it would be admitted again."""
    bucket = Count("b", "k", Window(0, TODAY.end), "tokens", "global", refill=Refill(HOUR, 100))
    on_server.run(Reserve("a", (Demand(count=bucket, amount=80, limit=100),), LEASE))
    on_server.run(Settle("a", (Charge(count=bucket, amount=80),)))
    on_server.set_clock(TODAY.start + 2 * HOUR)
    restart(server, timed_store)
    timed_store.store.restore([KnownCount(bucket, 0, "99999999999999.later")])
    on_server.set_clock(TODAY.start + 2 * HOUR + 1)
    state = on_server.standing(bucket)
    assert (state.used, state.reserved) == (0, 0)


def test_replaced_charge_hides_no_usage_that_a_ledger_has(
    server: Server, on_server: Bench, timed_store: Timed
) -> None:
    """The charge survived a restart, the usage of 60 in other calls did not."""
    expire_call(on_server, "a", 60)
    assert on_server.standing().used == 60
    restart(server, timed_store)
    on_server.run(Settle("a", (Charge(count=count(), amount=7),), is_earlier=True))
    timed_store.store.restore([KnownCount(count(), 60)])
    assert on_server.standing().used == 7 + 60


# --- windows and clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [TODAY.start - 1, TODAY.end])
def test_demand_in_another_window_than_the_stores_is_not_counted(
    bench: Bench, moment: float
) -> None:
    """The store replies with its own time, and changes nothing."""
    bench.set_clock(moment)
    reply = bench.reserve("a", 60)
    assert (reply.status, reply.now) == ("elsewhere", moment)
    assert bench.standing() == CountState(0, 0, 100)


@pytest.mark.parametrize("moment", [TODAY.start, TODAY.end - 1])
def test_a_window_holds_its_first_and_its_last_second(bench: Bench, moment: float) -> None:
    """Both belong to it."""
    bench.set_clock(moment)
    assert bench.reserve("a", 60).status == "admitted"


def test_a_call_is_counted_in_the_window_in_which_it_began(bench: Bench) -> None:
    """It ends after midnight and does not count in the new day."""
    bench.set_clock(TODAY.end - 1)
    bench.reserve("a", 60)
    bench.set_clock(TODAY.end + 30)
    bench.settle("a", 50)
    tomorrow = count(window=Windows("day").at(TODAY.end))
    assert bench.standing() == CountState(50, 0, 100)
    assert bench.standing(tomorrow) == CountState(0, 0, 100)


def test_a_clock_that_goes_back_finds_what_was_used(bench: Bench) -> None:
    """An hour back over midnight, and a day forward and back: no usage is lost."""
    bench.reserve("a", 60)
    bench.settle("a", 60)
    bench.set_clock(TODAY.end + DAY)
    tomorrow = count(window=Windows("day").at(TODAY.end + DAY))
    bench.run(Reserve("b", (Demand(count=tomorrow, amount=1, limit=100),), LEASE))
    bench.set_clock(TODAY.end - HOUR)
    assert bench.reserve("c", 41).status == "refused"
    assert bench.reserve("d", 40).status == "admitted"


def test_counts_outlive_their_window_by_more_than_a_day(server: Server, on_server: Bench) -> None:
    """A clock step of a day still finds them."""
    on_server.reserve("a", 60)
    (key,) = server.client.keys("*q:k:*:tokens")
    assert server.client.expiretime(key) == TODAY.end + RETENTION_SECONDS
    assert RETENTION_SECONDS > DAY


def test_a_count_lives_as_long_as_its_longest_window(server: Server, on_server: Bench) -> None:
    """A rule is edited from a day to 20 days, which begin at the same time."""
    on_server.reserve("a", 60)
    on_server.settle("a", 60)
    longer = count(window=Window(TODAY.start, TODAY.start + 20 * DAY))
    demand = Demand(count=longer, amount=41, limit=100)
    assert on_server.run(Reserve("b", (demand,), LEASE)).status == "refused"
    assert on_server.run(Reserve("c", (replace(demand, amount=40),), LEASE)).status == "admitted"
    on_server.reserve("d", 0)  # a worker with the former rule
    expires = {key: server.client.expiretime(key) for key in server.client.keys("*q:k:*:tokens*")}
    assert set(expires.values()) == {longer.window.end + RETENTION_SECONDS}
    assert len(expires) == 2  # also the reservations


def test_a_lease_does_not_grow_when_the_clock_goes_back(bench: Bench) -> None:
    """A dead worker's capacity is released within one lease of the new time."""
    bench.set_clock(TODAY.start + 3 * HOUR)
    bench.reserve("a", 100)
    bench.set_clock(TODAY.start + HOUR)
    assert bench.reserve("b", 1).status == "refused"
    bench.set_clock(TODAY.start + HOUR + LEASE)
    assert bench.reserve("c", 1).status == "admitted"


def test_a_clock_that_leaps_ahead_frees_leases_and_still_counts(bench: Bench) -> None:
    """The in-flight calls settle late."""
    bench.reserve("a", 60)
    bench.set_clock(TODAY.start + 12 * HOUR)
    assert bench.standing() == CountState(0, 0, 100)
    bench.settle("a", 60)
    assert bench.standing() == CountState(60, 0, 100)


# --- concurrency ----------------------------------------------------------------------------------

PLACE = Count("q", "k", UnboundedWindow().at(time.time()), "concurrency", "global")


def test_a_lease_is_renewed_only_while_it_lasts(bench: Bench) -> None:
    """The slot of an expired lease may already belong to another call."""
    demand = Demand(count=PLACE, amount=1, limit=1, lease_seconds=30.0)
    now = float(int(time.time()))
    renewal = Renew("a", (demand,), 30.0)
    bench.set_clock(now)
    assert bench.run(Reserve("a", (demand,), 300.0)).status == "admitted"
    bench.set_clock(now + 29)
    assert bench.run(renewal).status == "renewed"
    bench.set_clock(now + 58)
    assert bench.run(Reserve("b", (demand,), 300.0)).status == "refused"
    bench.set_clock(now + 59)
    bench.run(renewal)
    assert bench.run(Reserve("b", (demand,), 300.0)).status == "admitted"


def test_count_without_a_window_is_kept_while_used(server: Server, on_server: Bench) -> None:
    """Its keys live for a day or more after each call, not only after the first."""
    now = float(int(time.time()))
    for days in (0, 3):
        on_server.set_clock(now + days * DAY)
        this = replace(PLACE, window=UnboundedWindow().at(now + days * DAY))
        on_server.run(Reserve(f"at {days}", (Demand(count=this, amount=1, limit=9),), 60.0))
        for key in server.client.scan_iter("*:q:*"):
            assert server.client.expiretime(key) > now + (days + 2) * DAY


# --- lost counts, grants and resets ---------------------------------------------------------------


def test_lost_count_resumes_from_the_clients_last_count(bench: Bench) -> None:
    """A server restarted empty forgets what others used, not what the client saw."""
    assert bench.reserve("a", 41, known=60).status == "refused"
    assert bench.reserve("a", 40, known=60).states == (CountState(60, 40, 100),)
    bench.settle("a", 40, known=60)
    assert bench.standing() == CountState(100, 0, 100)


def test_a_settlement_restores_a_lost_count_too(bench: Bench) -> None:
    """The reservation is gone; the call's usage is added to the known count."""
    bench.settle("a", 7, known=60)
    assert bench.standing() == CountState(67, 0, 100)


def test_a_refused_call_hides_no_lost_count(bench: Bench) -> None:
    """It counted nothing: the next client still restores what it knows."""
    assert bench.reserve("a", 101).status == "refused"
    assert bench.reserve("b", 40, known=60).states == (CountState(60, 40, 100),)


def test_clients_count_does_not_change_an_existing_count(bench: Bench) -> None:
    """It causes no double count, and a reset stays a reset."""
    bench.reserve("a", 10)
    bench.settle("a", 10)
    bench.reserve("b", 10, known=90)
    assert bench.standing() == CountState(10, 10, 100)
    bench.store.change(count(), Reset())
    bench.reserve("c", 10, known=90)
    assert bench.standing() == CountState(0, 20, 100)


def test_a_grant_permits_more_until_its_end(bench: Bench) -> None:
    """Two of them add up, each until its own expiry."""
    now = max(TODAY.start + HOUR, bench.store.now())
    bench.store.change(count(), Grant(50, now + 100))
    bench.store.change(count(), Grant(50, now + 200))
    assert bench.standing().limit == 200
    assert bench.reserve("a", 200).states == (CountState(0, 200, 200),)
    bench.set_clock(now + 100)
    assert bench.standing().limit == 150
    bench.set_clock(now + 200)
    assert bench.standing().limit == 100


def test_a_reset_forgets_what_was_used_and_keeps_what_is_reserved(bench: Bench) -> None:
    """In-flight calls stay in flight."""
    bench.reserve("a", 60)
    bench.settle("a", 60)
    bench.reserve("b", 30)
    bench.store.change(count(), Reset())
    assert bench.standing() == CountState(0, 30, 100)


def test_second_reset_in_a_millisecond_is_the_later_one(bench: Bench) -> None:
    """Clients would otherwise report the usage before the second one until the window ends."""
    found = []
    for _ in range(10):
        bench.store.change(count(), Reset())
        found.append(bench.standing().reset)
    assert found == sorted(set(found))


def test_numbers_are_exact_up_to_nine_million_dollars(bench: Bench) -> None:
    """2^53 - 1 billionths, to the last unit."""
    most = 2**53 - 1
    bench.reserve("a", most - 1, limit=most)
    bench.settle("a", most - 1)
    assert bench.reserve("b", 2, limit=most).status == "refused"
    assert bench.reserve("c", 1, limit=most).states == (CountState(most - 1, 1, most),)


def test_memory_forgets_windows_that_are_long_over() -> None:
    """A process that runs for years keeps only windows that can still be queried."""
    clock = [0.0]
    store = MemoryStore(lambda: clock[0])
    windows = Windows("hour")
    for hour in range(5000):
        clock[0] = hour * 3600.0
        demand = Demand(count=count(window=windows.at(clock[0])), amount=1, limit=1)
        store.run([Reserve(f"a{hour}", (demand,), LEASE)])
    kept = [count(window=windows.at(hour * 3600.0)) for hour in range(5000)]
    known = store.look([(each, 1) for each in kept])
    assert sum(each.used + each.reserved for each in known) <= 2100


def test_memory_forgets_keys_that_are_no_longer_used() -> None:
    """Callers may choose keys: each would otherwise stay until the process ends."""
    clock = [0.0]
    store = MemoryStore(lambda: clock[0])
    for number in range(5000):
        clock[0] = number * 3600.0
        of_key = replace(count(window=Windows("hour").at(clock[0])), key=f"key {number}")
        store.run([Reserve(f"a{number}", (Demand(count=of_key, amount=1, limit=1),), LEASE)])
    kept = [value for value in vars(store).values() if isinstance(value, dict)]
    assert max(map(len, kept)) <= 2100


# --- equivalence ----------------------------------------------------------------------------------

# --- conversations --------------------------------------------------------------------------------

IDLE = 600.0


def addition(name: str, conversation: str = "c", idle: float = IDLE, **parts: int) -> Operation:
    """Add to a conversation of the agent `writer`."""
    return CountConversation(name, conversation, "writer", parts, idle)


def record(bench: Bench, conversation: str = "c") -> ConversationRecord | None:
    """The record of a conversation."""
    return bench.run(ReadConversation(conversation)).conversation


def test_additions_to_a_conversation_are_summed_up(bench: Bench) -> None:
    """The reply to each has the sums of the whole fleet; other conversations have their own."""
    assert record(bench) is None
    bench.run(addition("a", turns=1, cost=MAX_PARTS))
    bench.run(addition("other", "d", turns=5))
    reply = bench.run(addition("b", turns=2, cost=2, tokens=7))
    found = record(bench)
    assert found is not None
    assert found == reply.conversation
    assert (found.conversation, found.agent) == ("c", "writer")
    # Above 2**53, where a double is no longer exact.
    assert found.sums == {"turns": 3, "cost": MAX_PARTS + 2, "tokens": 7}
    assert reply.now - 60 < found.changed_at <= reply.now


def test_an_addition_that_is_sent_again_counts_once(bench: Bench) -> None:
    """Its reply was lost; the second one has the sums, too."""
    bench.run(addition("a", turns=1))
    again = bench.run(addition("a", turns=1)).conversation
    assert again is not None
    assert again.sums == {"turns": 1}


def test_idle_conversation_expires(in_memory: Bench) -> None:
    """Each addition keeps it for another idle time."""
    for name, seconds in (("a", 0), ("b", IDLE - 1)):
        in_memory.set_clock(TODAY.start + HOUR + seconds)
        in_memory.run(addition(name, turns=1))
    in_memory.set_clock(TODAY.start + HOUR + 2 * IDLE - 2)
    assert record(in_memory) is not None
    in_memory.set_clock(TODAY.start + HOUR + 2 * IDLE - 1)
    assert record(in_memory) is None
    in_memory.run(addition("c", turns=1))
    found = record(in_memory)
    assert found is not None
    assert found.sums == {"turns": 1}


def test_record_on_a_server_expires_when_its_conversation_is_idle(
    server: Server, on_server: Bench
) -> None:
    """And the list of records with the last of them."""
    on_server.run(addition("a", turns=1))
    on_server.run(addition("b", "d", 10 * IDLE, turns=1))
    on_server.set_clock(TODAY.start + HOUR + 60)
    on_server.run(addition("c", turns=1))
    begun, names = TODAY.start + HOUR, KeyNames()
    assert server.client.expiretime(names.conversation("c")) == begun + 60 + IDLE
    assert server.client.expiretime(names.conversation("d")) == begun + 10 * IDLE
    assert server.client.expiretime(names.conversations) == begun + 10 * IDLE


def test_records_are_listed_and_forgotten(bench: Bench) -> None:
    """By an operator."""
    store = bench.store
    if not isinstance(store, KeepsConversations):
        pytest.skip("only processes see what they keep in memory")
    for number in range(3):
        bench.run(addition(str(number), f"c{number}", turns=number))
    assert store.forget_conversation("c1")
    assert not store.forget_conversation("c1")
    found = {each.conversation: each.sums for each in store.conversations()}
    assert found == {"c0": {"turns": 0}, "c2": {"turns": 2}}


@pytest.mark.parametrize("fields", [{"agent": "a", "changed": "1", "turns": "x"}, {"turns": "1"}])
def test_foreign_record_fails_alone(
    server: Server, on_server: Bench, fields: dict[str, str]
) -> None:
    """Another program has written it; no other operation of the batch suffers."""
    server.client.hset(KeyNames().conversation("c"), mapping=fields)
    reading, other = on_server.store.run([ReadConversation("c"), addition("a", "d", turns=1)])
    assert (reading.status, other.status) == ("failed", "looked")


NAMES = st.sampled_from("abcdef")
UNENDING = Window(0, TODAY.end)
BUCKETS = [
    Count(name, "k", UNENDING, "tokens", "global", refill=refill)
    for name, refill in (("s", Refill(60)), ("t", Refill(600, 50)))
]
COUNTS = st.sampled_from([count("q"), count("r"), *BUCKETS])
DEMANDS = st.lists(
    st.builds(
        Demand,
        count=COUNTS,
        amount=st.integers(0, 60),
        limit=st.sampled_from((100, 100, 70)),
        enforced=st.booleans(),
        certain=st.booleans(),
        known=st.integers(0, 30),
        waits=st.sampled_from((0.0, 30.0)),
        model=st.sampled_from(("", "a model: 1")),
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda demand: demand.count,
).map(tuple)
CHARGES = st.lists(
    st.builds(
        Charge,
        count=COUNTS,
        amount=st.integers(0, 80),
        known=st.integers(0, 30),
        model=st.sampled_from(("", "a model: 1")),
    ),
    max_size=2,
    unique_by=lambda charge: charge.count,
).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.one_of(
            st.builds(Reserve, NAMES, DEMANDS, st.just(LEASE), st.sampled_from((0.0, 5.0, 40.0))),
            st.builds(Settle, NAMES, CHARGES),
            st.builds(
                Renew,
                NAMES,
                st.tuples(
                    st.builds(Demand, count=COUNTS, amount=st.integers(0, 60), limit=st.just(0))
                ),
                st.just(LEASE),
            ),
        ),
        st.integers(0, 50),
    ),
    max_size=20,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_a_server_and_memory_answer_alike(
    on_server: Bench, server: Server, steps: list[tuple[Operation, int]]
) -> None:
    """Any sequence of operations over time has the same replies in both."""
    server.client.flushdb()
    clock = [0.0]
    memory = Bench(MemoryStore(lambda: clock[0]), lambda now: clock.__setitem__(0, now))
    now = TODAY.start + HOUR
    on_server.set_clock(now)
    for operation, seconds in steps:
        now += seconds
        for bench in (memory, on_server):
            bench.set_clock(now)
        assert on_server.run(operation) == memory.run(operation)
    counts = [(each, 100) for each in (count("q"), count("r"), *BUCKETS)]
    states = memory.store.look(counts)
    assert on_server.store.look(counts) == states
    assert [each.full_at for each in on_server.store.look(counts)] == [
        each.full_at for each in states
    ]
    assert all(math.isfinite(each.used) and each.reserved >= 0 for each in states)
