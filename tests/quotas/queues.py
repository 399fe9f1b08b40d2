"""A state machine that compares a fleet of waiting calls with a model.

Hypothesis generates the events: calls that request, wait, end and are cancelled, killed workers,
suspended workers, lost replies, ending windows and leases, grants, blocks and resets.
"""

from __future__ import annotations

import itertools
from functools import partial

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from otel_limits.quotas.client import LEASE_SECONDS
from otel_limits.quotas.engine import NEED_RENEWALS
from otel_limits.quotas.store import FOREVER, NEED_SECONDS, Block, Freed, Grant, Reset, Withdraw
from tests.quotas.own_time import AGENTS, POLLING, QUOTAS, WORKERS, SimulatedFleet


class QueueMachine(SimulatedFleet, RuleBasedStateMachine):
    """Drives a fleet and checks its state after every step."""

    # --- events -----------------------------------------------------------------------------------

    @initialize(agents=st.permutations(("p", "p", "p", "pq", "pq", "q", "q", "q")))
    def crowd(self, agents: list[str]) -> None:
        """Start more agents than there are slots: some have to wait."""
        workers = self.workers[: len(self.workers) - 1]
        self.do(
            *(
                (worker, partial(self.begin, worker, agent))
                for worker, agent in zip(itertools.cycle(workers), agents, strict=False)
            )
        )

    @rule(
        worker=st.integers(0, WORKERS - 1),
        agents=st.lists(st.sampled_from(AGENTS), min_size=1, max_size=4),
        is_lossy=st.booleans(),
    )
    def ask(self, worker: int, agents: list[str], is_lossy: bool) -> None:  # noqa: FBT001
        """Agents of a worker request calls in sequence."""
        asker = self.workers[worker]
        assume(asker.suspended_at is None)
        asker.connection.is_lossy = is_lossy
        self.do(*((asker, partial(self.begin, asker, agent)) for agent in agents))

    @precondition(lambda self: self.active("in flight"))
    @rule(data=st.data(), is_lossy=st.booleans())
    def end(self, data: st.DataObject, is_lossy: bool) -> None:  # noqa: FBT001
        """End a call."""
        call = data.draw(st.sampled_from(self.active("in flight")))
        call.worker.connection.is_lossy = is_lossy
        self.do((call.worker, lambda: self.settle(call)))

    @precondition(lambda self: self.active("waiting"))
    @rule(data=st.data(), by_signal=st.booleans())
    def cancel(self, data: st.DataObject, by_signal: bool) -> None:  # noqa: FBT001
        """The application cancels a waiting agent: its task, or with `agent.cancel()`."""
        call = data.draw(st.sampled_from(self.active("waiting")))
        call.is_cancelled = True
        self.do(*(() if by_signal else ((call.worker, call.task.cancel),)))

    @rule(worker=st.integers(0, WORKERS - 1))
    def die(self, worker: int) -> None:
        """Kill a worker and replace it."""
        dead, self.workers[worker] = self.workers[worker], self.worker()
        dead.connection.is_dead = True
        for call in self.calls:
            if call.worker is dead and call.state in ("waiting", "in flight"):
                if call.state == "waiting":
                    call.needs_until = self.clock.now + NEED_SECONDS
                call.state = "dead" if call.state == "in flight" else "gone"
                call.died = min(self.clock.now, dead.suspended_at or self.clock.now)
                call.task.cancel()
        dead.close()
        self.do()

    @rule(worker=st.integers(0, WORKERS - 1))
    def suspend(self, worker: int) -> None:
        """Suspend a worker: it neither asks nor renews, and its notifications wait."""
        stopped = self.workers[worker]
        assume(stopped.suspended_at is None)
        stopped.suspended_at = self.clock.now
        for call in self.with_state("waiting"):
            if call.worker is stopped:
                call.needs_until = self.clock.now + NEED_SECONDS
                call.could_go_since = FOREVER

    @precondition(lambda self: len(self.awake()) < WORKERS)
    @rule(data=st.data())
    def proceed(self, data: st.DataObject) -> None:
        """A suspended worker continues."""
        stopped = [each for each in self.workers if each.suspended_at is not None]
        self.resume(data.draw(st.sampled_from(stopped)))
        self.do()

    @rule(seconds=st.sampled_from([1, 1, 5, 31, 310]))
    def wait(self, seconds: int) -> None:
        """Let time pass; windows, waits and leases end."""
        step = 1 if seconds < 100 else 10
        for _ in range(0, seconds, step):
            self.clock.now += step
            self.set_clock(self.clock.time())
            self.free(Freed(), polling=True)
            self.do()
        self.time_has_passed = True

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), amount=st.integers(1, 2))
    def grant(self, name: str, amount: int) -> None:
        """Grant more for a minute and a half."""
        assert self.shared is not None
        self.grants.append((name, self.clock.now + 90, amount))
        self.given.append(self.grants[-1])
        self.shared.change(self.count(name), Grant(amount, self.clock.time() + 90))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def revoke(self, name: str) -> None:
        """Revoke all grants."""
        assert self.shared is not None
        self.grants = [each for each in self.grants if each[0] != name]
        self.shared.change(self.count(name), Withdraw(Grant))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), seconds=st.sampled_from([15.0, FOREVER]))
    def block(self, name: str, seconds: float) -> None:
        """Block a key; its waiters are refused immediately."""
        assert self.shared is not None
        self.blocks[name] = self.clock.now + seconds
        until = min(FOREVER, self.clock.time() + seconds)
        self.shared.change(self.count(name), Block(until, "unpaid"))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def unblock(self, name: str) -> None:
        """Remove a block."""
        assert self.shared is not None
        self.blocks.pop(name, None)
        self.shared.change(self.count(name), Withdraw(Block))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(["q", "r"]))
    def reset(self, name: str) -> None:
        """Reset a count to 0."""
        assert self.shared is not None
        self.used[self.count(name)] = 0
        self.shared.change(self.count(name), Reset())
        self.do()

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def the_store_and_the_calls_agree(self) -> None:
        """Used and reserved amounts match the model."""
        counts = [self.count(name) for name in QUOTAS]
        looked = self.store.look([(count, QUOTAS[count.quota].amount) for count in counts])
        for count, standing in zip(counts, looked, strict=True):
            assert standing.limit == self.permitted(count.quota)
            assert self.is_permitted(count, standing)
            surely, possibly = self.reserved(count)
            if count.refill is not None:
                assert 0 <= standing.reserved <= possibly
                continue
            assert surely <= standing.reserved <= possibly
            if QUOTAS[count.quota].on_lost == "charge":
                # Each call is reserved, charged or counted.
                assert standing.used + standing.reserved == self.occupied(count)
            else:
                assert standing.used == self.used[count]

    @invariant()
    def the_token_bucket_keeps_its_pace(self) -> None:
        """In any time, calls are at most what flows back in it, and the burst."""
        bucket = QUOTAS["s"]
        pace = (bucket.amount + sum(each[2] for each in self.given if each[0] == "s")) / 60
        for number, at in enumerate(reversed(self.paced), 1):
            assert number <= bucket.burst + pace * (self.paced[-1] - at)

    @invariant()
    def waits_end_within_max_wait(self) -> None:
        """Each step takes one second."""
        for call in self.active("waiting"):
            longest = max(QUOTAS[name].max_wait for name in call.quotas - {"r"})
            assert self.clock.now - call.since <= longest + 1

    @invariant()
    def first_waiters_are_admitted(self) -> None:
        """The first waiter is woken; by polling, within two seconds.

        Room that was left for a call of a killed worker is used when the others ask again.
        """
        for worker in self.awake():
            for call in self.first_of(worker):
                if not self.fits(call):
                    call.could_go_since = FOREVER
                    continue
                call.could_go_since = min(call.could_go_since, self.clock.now)
                is_notified = worker is not self.workers[POLLING] and not self.time_has_passed
                assert not is_notified
                left_room = any(each.needs_until > call.since for each in self.calls)
                longest = 2 + (NEED_SECONDS / NEED_RENEWALS if left_room else 0)
                assert self.clock.now - call.could_go_since < longest
        self.time_has_passed = False

    def teardown(self) -> None:
        """Drain the queues and close the event loops."""
        try:
            self.drain()
        finally:
            for call in self.calls:
                if not call.task.done() and not call.worker.loop.is_closed():
                    call.task.cancel()
            for worker in self.workers:
                worker.close()

    def drain(self) -> None:
        """Every queue drains, and nothing stays reserved."""
        for name in QUOTAS if self.shared else ():
            self.unblock(name)
        for worker in self.workers:
            if worker.suspended_at is not None:
                self.resume(worker)
        while self.with_state("waiting", "in flight"):
            ends = [(each.worker, partial(self.settle, each)) for each in self.active("in flight")]
            self.do(*ends)
            self.wait(1)
            self.waits_end_within_max_wait()
        held = QUOTAS.values()
        waits_for = {(each.name, each.key.key(each.name, lambda _: None).id): "" for each in held}
        for worker in self.workers:
            assert worker.queued(waits_for) == frozenset()
        last = {count.window.start: count for count in self.used if count.quota != "p"}
        self.clock.now += LEASE_SECONDS
        self.set_clock(self.clock.time())
        counts = [(count, 0) for count in (*last.values(), self.count("p"), self.count("s"))]
        assert all(each.reserved == 0 for each in self.store.look(counts))
