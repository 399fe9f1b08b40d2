"""A machine that holds a fleet whose calls wait against the truth.

Hypothesis makes up what happens: calls that ask, wait, end and are cancelled, workers that die,
replies that are lost, windows and leases that end, grants, blocks and resets.
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
from otel_limits.quotas.store import FOREVER, Block, Freed
from tests.quotas.own_time import AGENTS, DEAF, QUOTAS, WORKERS, Asking


class Queues(Asking, RuleBasedStateMachine):
    """Lets a fleet ask, wait and die, and looks after every step whether all is as it must be."""

    # --- what happens -----------------------------------------------------------------------------

    @initialize(agents=st.permutations(("p", "p", "p", "pq", "pq", "q", "q", "q")))
    def crowd(self, agents: list[str]) -> None:
        """More agents than there is room for: some have to wait."""
        self.do(*(partial(self.begin, self.workers[n % 2], each) for n, each in enumerate(agents)))

    @rule(
        worker=st.integers(0, WORKERS - 1),
        agents=st.lists(st.sampled_from(AGENTS), min_size=1, max_size=4),
        is_lossy=st.booleans(),
    )
    def ask(self, worker: int, agents: list[str], is_lossy: bool) -> None:  # noqa: FBT001
        """Agents of a worker ask one after the other."""
        self.workers[worker].way.is_lossy = is_lossy
        self.do(*(partial(self.begin, self.workers[worker], agent) for agent in agents))

    @precondition(lambda self: self.with_state("under way"))
    @rule(data=st.data(), is_lossy=st.booleans())
    def end(self, data: st.DataObject, is_lossy: bool) -> None:  # noqa: FBT001
        """A call is over."""
        call = data.draw(st.sampled_from(self.with_state("under way")))
        call.worker.way.is_lossy = is_lossy
        self.do(lambda: self.settle(call))

    @precondition(lambda self: self.with_state("waiting"))
    @rule(data=st.data(), by_signal=st.booleans())
    def cancel(self, data: st.DataObject, by_signal: bool) -> None:  # noqa: FBT001
        """The application cancels an agent that waits: its task, or with `agent.cancel()`."""
        call = data.draw(st.sampled_from(self.with_state("waiting")))
        call.is_cancelled = True
        self.do(*(() if by_signal else (call.task.cancel,)))

    @rule(worker=st.integers(0, WORKERS - 1))
    def die(self, worker: int) -> None:
        """A worker is killed, whatever its agents do; another one takes its place."""
        dead, self.workers[worker] = self.workers[worker], self.worker()
        dead.way.is_dead = True
        for call in self.calls:
            if call.worker is dead and call.state in ("waiting", "under way"):
                call.state = "dead" if call.state == "under way" else "gone"
                call.died = self.clock.now
                call.task.cancel()
        self.do()

    @rule(seconds=st.sampled_from([1, 1, 5, 31]))
    def wait(self, seconds: int) -> None:
        """Time passes, second by second; windows, waits and leases end."""
        for _ in range(seconds):
            self.clock.now += 1
            self.set_clock(self.clock.time())
            self.do(lambda: self.free(Freed(), deaf=True))
        self.time_has_passed = True

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), amount=st.integers(1, 2))
    def grant(self, name: str, amount: int) -> None:
        """An operator permits more for a minute and a half."""
        assert self.shared is not None
        self.grants.append((name, self.clock.now + 90, amount))
        self.shared.grant(self.count(name), amount, self.clock.time() + 90)
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def revoke(self, name: str) -> None:
        """An operator takes back what was granted."""
        assert self.shared is not None
        self.grants = [each for each in self.grants if each[0] != name]
        self.shared.revoke(self.count(name))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)), seconds=st.sampled_from([15.0, FOREVER]))
    def block(self, name: str, seconds: float) -> None:
        """An operator blocks a key; who waits for it is refused at once."""
        assert self.shared is not None
        self.blocks[name] = self.clock.now + seconds
        until = min(FOREVER, self.clock.time() + seconds)
        self.shared.block(self.count(name), Block(until, "unpaid"))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(sorted(QUOTAS)))
    def unblock(self, name: str) -> None:
        """An operator takes a block back."""
        assert self.shared is not None
        self.blocks.pop(name, None)
        self.shared.unblock(self.count(name))
        self.do()

    @precondition(lambda self: self.shared)
    @rule(name=st.sampled_from(["q", "r"]))
    def reset(self, name: str) -> None:
        """An operator has a count begin from 0."""
        assert self.shared is not None
        self.used[self.count(name)] = 0
        self.shared.reset(self.count(name))
        self.do()

    # --- what must be so --------------------------------------------------------------------------

    @invariant()
    def the_store_and_the_calls_agree(self) -> None:
        """On what is used, and on what is reserved."""
        counts = [self.count(name) for name in QUOTAS]
        looked = self.store.look([(count, QUOTAS[count.quota].amount) for count in counts])
        for count, standing in zip(counts, looked, strict=True):
            assert standing.used == self.used[count]
            assert standing.limit == self.permitted(count.quota)
            assert self.reserved(count)[0] <= standing.reserved <= self.reserved(count)[1]
            assert self.is_permitted(count, standing)

    @invariant()
    def nobody_waits_longer_than_a_quota_says(self) -> None:
        """Each step is a second long."""
        for call in self.with_state("waiting"):
            longest = max(QUOTAS[name].max_wait for name in call.quotas - {"r"})
            assert self.clock.now - call.since <= longest + 1

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """Whoever is first where it waits is woken; by the time, within two seconds."""
        for worker in self.workers:
            for call in self.first_of(worker):
                if not self.fits(call):
                    call.could_go_since = FOREVER
                    continue
                call.could_go_since = min(call.could_go_since, self.clock.now)
                must_hear = worker is not self.workers[DEAF] and not self.time_has_passed
                assert not must_hear
                assert self.clock.now - call.could_go_since < 2
        self.time_has_passed = False

    def teardown(self) -> None:
        """Let go of the event loop."""
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
        while self.with_state("waiting", "under way"):
            self.do(*(partial(self.settle, call) for call in self.with_state("under way")))
            self.wait(1)
            self.nobody_waits_longer_than_a_quota_says()
        assert [worker.lines._waiters for worker in self.workers] == [{}] * WORKERS
        last = {count.window.start: count for count in self.used if count.quota != "p"}
        self.clock.now += LEASE_SECONDS
        self.set_clock(self.clock.time())
        counts = [(count, 0) for count in (*last.values(), self.count("p"))]
        assert all(each.reserved == 0 for each in self.store.look(counts))
