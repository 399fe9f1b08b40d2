"""A state machine that compares a fleet of waiting calls with a model.

Hypothesis generates the events: calls that request, wait, end and are cancelled, killed workers,
lost replies, ending windows and leases, grants, blocks and resets.
"""

from __future__ import annotations

import asyncio
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from otel_limits.quotas.client import LEASE_SECONDS
from otel_limits.quotas.store import FOREVER, NEED_SECONDS, Block, Freed, Grant, Reset, Withdraw
from otel_limits.quotas.waiting import RENEWALS
from tests.quotas.own_time import AGENTS, POLLING, QUOTAS, WORKERS, SimulatedFleet


class QueueMachine(SimulatedFleet, RuleBasedStateMachine):
    """Drives a fleet and checks its state after every step."""

    # --- events -----------------------------------------------------------------------------------

    @initialize(agents=st.permutations(("p", "p", "p", "pq", "pq", "q", "q", "q")))
    def crowd(self, agents: list[str]) -> None:
        """Start more agents than there are slots: some have to wait."""
        self.do(*(partial(self.begin, self.workers[n % 2], each) for n, each in enumerate(agents)))

    @rule(
        worker=st.integers(0, WORKERS - 1),
        agents=st.lists(st.sampled_from(AGENTS), min_size=1, max_size=4),
        is_lossy=st.booleans(),
    )
    def ask(self, worker: int, agents: list[str], is_lossy: bool) -> None:  # noqa: FBT001
        """Agents of a worker request calls in sequence."""
        self.workers[worker].connection.is_lossy = is_lossy
        self.do(*(partial(self.begin, self.workers[worker], agent) for agent in agents))

    @precondition(lambda self: self.with_state("in flight"))
    @rule(data=st.data(), is_lossy=st.booleans())
    def end(self, data: st.DataObject, is_lossy: bool) -> None:  # noqa: FBT001
        """End a call."""
        call = data.draw(st.sampled_from(self.with_state("in flight")))
        call.worker.connection.is_lossy = is_lossy
        self.do(lambda: self.settle(call))

    @precondition(lambda self: self.with_state("waiting"))
    @rule(data=st.data(), by_signal=st.booleans())
    def cancel(self, data: st.DataObject, by_signal: bool) -> None:  # noqa: FBT001
        """The application cancels a waiting agent: its task, or with `agent.cancel()`."""
        call = data.draw(st.sampled_from(self.with_state("waiting")))
        call.is_cancelled = True
        self.do(*(() if by_signal else (call.task.cancel,)))

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
                call.died = self.clock.now
                call.task.cancel()
        self.do()

    @rule(seconds=st.sampled_from([1, 1, 5, 31]))
    def wait(self, seconds: int) -> None:
        """Let time pass, second by second; windows, waits and leases end."""
        for _ in range(seconds):
            self.clock.now += 1
            self.set_clock(self.clock.time())
            self.do(lambda: self.free(Freed(), polling=True))
        self.time_has_passed = True

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), amount=st.integers(1, 2))
    def grant(self, name: str, amount: int) -> None:
        """Grant more for a minute and a half."""
        assert self.shared is not None
        self.grants.append((name, self.clock.now + 90, amount))
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
            assert standing.used == self.used[count]
            assert standing.limit == self.permitted(count.quota)
            assert self.reserved(count)[0] <= standing.reserved <= self.reserved(count)[1]
            assert self.is_permitted(count, standing)

    @invariant()
    def waits_end_within_max_wait(self) -> None:
        """Each step takes one second."""
        for call in self.with_state("waiting"):
            longest = max(QUOTAS[name].max_wait for name in call.quotas - {"r"})
            assert self.clock.now - call.since <= longest + 1

    @invariant()
    def first_waiters_are_admitted(self) -> None:
        """The first waiter is woken; by polling, within two seconds.

        Room that was left for a call of a killed worker is used when the others ask again.
        """
        for worker in self.workers:
            for call in self.first_of(worker):
                if not self.fits(call):
                    call.could_go_since = FOREVER
                    continue
                call.could_go_since = min(call.could_go_since, self.clock.now)
                is_notified = worker is not self.workers[POLLING] and not self.time_has_passed
                assert not is_notified
                left_room = any(each.needs_until > call.since for each in self.calls)
                longest = 2 + (NEED_SECONDS / RENEWALS if left_room else 0)
                assert self.clock.now - call.could_go_since < longest
        self.time_has_passed = False

    def teardown(self) -> None:
        """Drain the queues and close the event loop."""
        try:
            self.drain()
        finally:
            for call in self.calls:
                call.task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def drain(self) -> None:
        """Every queue drains, and nothing stays reserved."""
        for name in QUOTAS if self.shared else ():
            self.unblock(name)
        while self.with_state("waiting", "in flight"):
            self.do(*(partial(self.settle, call) for call in self.with_state("in flight")))
            self.wait(1)
            self.waits_end_within_max_wait()
        assert [worker.lines._waiters for worker in self.workers] == [{}] * WORKERS
        last = {count.window.start: count for count in self.used if count.quota != "p"}
        self.clock.now += LEASE_SECONDS
        self.set_clock(self.clock.time())
        counts = [(count, 0) for count in (*last.values(), self.count("p"))]
        assert all(each.reserved == 0 for each in self.store.look(counts))
