"""Promises of quotas on each kind of store, while processes and servers are killed or stall.

Each drill lets real processes call, kills one of them, suspends one for longer than a lease, and
cuts or truncates replies of the store.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.store import LOOKED_AT, CountState, StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from tests.drills.callers import Callers, calling
from tests.drills.deployments import DEPLOYMENTS
from tests.drills.losses import OF_ANY, OF_REPLICAS
from tests.quotas.fixtures import PATIENCE, eventually
from tests.quotas.fleets import quota
from tests.servers.quotas.test_fleet import COMMAND

if TYPE_CHECKING:
    from tests.drills.deployments import Deployment

YEAR: Final = "P366D"
DAY: Final = 86_400
FAULTS: Final = ("cut", "truncate", "hang")
"""Of replies: the connection is cut, in the middle of one, too, or one never arrives."""
STALL: Final = 0.1
"""Seconds by which each reply is late, where a missing one would delay a process for too long."""
IMMEDIATELY: Final = 10.0
"""Seconds that no call on a busy machine takes, and much less than the default `max_wait`."""
DELAY: Final = 0.25
"""Seconds by which a proxy delays each reply."""


def restarts(directory: Path, amount: int, kind: str = "alone") -> str:
    """The store loses what was written last, in every way: neither more nor less is admitted.

    The process that used the quota has a call in flight, and the one that calls next was idle. A
    third one is suspended: the others cannot wait for it, and it knows less than they do.
    """
    held = {"model_calls": amount, "window": YEAR, "key": "agent", "grace": 0}
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        user, idle, suspended = callers.start(3)
        losses = OF_ANY | (OF_REPLICAS if place.has_replica else {})
        suspended.use(*[(agent, 1) for agent in losses])
        suspended.suspend()
        for agent, lose in losses.items():
            user.use(*[(agent, 1)] * 4)
            with lose(place):
                user.use(*[(agent, 1)] * (amount // 2))
                user.hold(agent)
            # Calls wait for five seconds at most for a process that cannot restore its counts.
            place.faults.append("cut")
            for wire in place.wires:
                wire.delay = STALL
            admitted = 6 + amount // 2 + idle.use_up(agent)
            assert admitted == amount, f"{admitted} of {amount} were admitted after {agent}"
            user.answer()
            place.faults.clear()
            for wire in place.wires:
                wire.delay = 0.0
            each = quota(amount=amount, key=Template("agent"))
            expect(place, each, CountState(amount, 0, amount), agent)
        suspended.resume()
        assert [suspended.use_up(agent) for agent in losses] == [0] * len(losses)
        expect(place, each, CountState(amount, 0, amount), agent)
    return f"{amount} of {amount} after {', '.join(losses)}"


def shares(directory: Path, amount: int, kind: str = "alone") -> str:
    """All servers freeze, and are then killed: no process has a share of a key it no longer reads.

    One process called as Joe, then as many others. Another, suspended now, used up Joe's quota.
    """
    held = {"model_calls": amount, "window": YEAR, "key": "agent"}
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        first, second = callers.start(2)
        first.use(("joe", 1))
        others = [(f"other {number}", 1) for number in range(LOOKED_AT + 5)]
        first.use(*others)
        place.faults.extend(FAULTS)
        assert second.use_up("joe") == amount - 1
        place.faults.clear()
        second.suspend()
        looked = place.master.calls()
        eventually(lambda: place.master.calls() > looked + 2)
        place.freeze()
        ends = [first.call("joe") for _ in range(5)]
        shared = first.call(others[-1][0])
        place.stop()
        ends += [first.call("joe") for _ in range(amount)]
    assert shared == "end_turn", "a key that is read has a share"
    assert set(ends) == {"quota_unavailable"}, f"{ends.count('end_turn')} calls of Joe"
    return f"{amount} of Joe's {amount}, 0 more in the outage"


def exhausted(directory: Path, lease: int, kind: str = "alone") -> str:
    """A call waits while a reservation can come back, and is refused immediately where none can.

    Of three processes, one is killed and one suspended, each with a call in flight.
    """
    held = {"model_calls": 3, "window": YEAR, "on_exceeded": "wait", "max_wait": "5m", "grace": 0}
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        killed, suspended, living = callers.start(3, lease)
        living.use(("a", 1))
        for each in (killed, suspended):
            each.hold()
        suspended.suspend()
        killed.kill()
        began = time.monotonic()
        place.faults.extend(FAULTS)
        living.use(("a", 1), ("a", 1))
        waited = time.monotonic() - began
        place.faults.clear()
        assert living.use_up() == 0
        refused = living.slowest
        suspended.resume()
        suspended.answer()
        # Its call could no longer be prevented.
        expect(place, quota(amount=3), CountState(4, 0, 3))
        assert living.use_up() == 0
    assert max(refused, living.slowest) < IMMEDIATELY
    return f"admitted {waited:.1f} s after the kill, then refused within {refused:.2f} s"


def charges(directory: Path, lease: int, kind: str = "alone") -> str:
    """Lost calls are charged the mean of the last; a suspended process replaces its charge."""
    held = {"tokens": 10_000, "window": YEAR, "on_lost": "charge"}
    tokens = Quota(name="q", unit="tokens", amount=10_000, windows=Windows(YEAR))
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        living, killed, suspended = callers.start(3, lease)
        place.faults.extend(FAULTS)
        # With 10 input tokens each, their mean is 50.
        living.use(("a", 10), ("a", 30), ("a", 80))
        place.faults.clear()
        expect(place, tokens, CountState(150, 0, 10_000))
        killed.hold()
        suspended.hold(output=5)
        suspended.suspend()
        killed.kill()
        expect(place, tokens, CountState(150 + 2 * 50, 0, 10_000))
        suspended.resume()
        suspended.answer()
        expect(place, tokens, CountState(150 + 50 + 15, 0, 10_000))
    return "50 tokens for each of two lost calls, then 15 for the suspended one"


def paces(directory: Path, burst: int, kind: str = "alone") -> str:
    """A token bucket continues at its level when the store restarts without data.

    One call is refilled every 10 seconds. Of four processes, one is killed and one suspended, each
    with a call in flight, which may be available again.
    """
    held = {"model_calls": 360, "window": "PT1H", "pace": "smooth", "burst": burst, "grace": 0}
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        user, idle, killed, suspended = callers.start(4, 3)
        began = time.monotonic()
        user.use(*[("a", 1)] * (burst // 2))
        for each in (killed, suspended):
            each.hold()
        suspended.suspend()
        killed.kill()
        place.stop()
        place.start()
        place.faults.extend(FAULTS)
        admitted = burst // 2 + 2 + idle.use_up()
        place.faults.clear()
        suspended.resume()
        suspended.answer()
        admitted += suspended.use_up()
        seconds = time.monotonic() - began
    assert burst <= admitted <= burst + seconds / 10 + 2, f"{admitted} in {seconds:.1f} s"
    return f"{admitted} calls in {seconds:.1f} s of a bucket of {burst}, and one in 10 s"


def changes(directory: Path, amount: int, kind: str = "alone") -> str:
    """An operator's amount applies in every process, and a longer window to an existing count."""
    day = int(time.time()) // DAY
    longer = next(days for days in range(2, day + 1) if day % days == 0)
    held: dict[str, Any] = {"model_calls": {"free": amount, "default": 1}, "key": "agent"}
    held |= {"plan": "agent", "grace": 0}
    with (
        DEPLOYMENTS[kind](directory) as place,
        calling(place, directory, window="P1D", **held) as callers,
    ):
        living, killed, suspended = callers.start(3)
        assert living.use_up("free") == amount
        suspended.suspend()
        _operate(callers, "set", "free", str(amount + 3))
        place.faults.extend(FAULTS)
        killed.use(("free", 1))
        killed.kill()
        suspended.resume()
        suspended.use(("free", 1))
        place.faults.clear()
        # The new window begins at the same time.
        callers.set_quota(window=f"P{longer}D", **held)
        (later,) = callers.start()
        assert later.use_up("free") == 1
        if place.has_replica:
            master = place.master
            master.client.wait(1, 0)
            master.stop()
        assert living.use_up("free") == 0
        client = place.master.client
        name = Template("agent").key_of_text("q", "free").id
        (left,) = (client.ttl(each) for each in client.keys(f"*:q:{name}:*:model_calls"))
        _operate(callers, "unset", "free")
        assert living.use_up("free") == 0
    assert left > (longer - 1) * DAY
    return f"{amount + 3} of {amount + 3} after `set`, kept for {left // DAY} of {longer} days"


def delay(directory: Path, calls: int, kind: str = "alone") -> str:
    """Over a slow network, the first call takes as long as later ones: all else is prepared."""
    held = {"model_calls": 10**6, "window": YEAR, "where": {"agent": "a"}}
    with DEPLOYMENTS[kind](directory) as place, calling(place, directory, **held) as callers:
        for wire in place.wires:
            wire.delay = DELAY
        (caller,) = callers.start()
        asked = place.master.calls()
        eventually(lambda: place.master.calls() > asked + 1)
        # The first call of a process also imports modules.
        assert caller.call("without a quota") == "end_turn"
        assert caller.call() == "end_turn"
        first, later = caller.slowest, []
        for _ in range(calls):
            assert caller.call() == "end_turn"
            later.append(caller.slowest)
    assert first < max(later) + DELAY, f"{first:.2f} s, later {max(later):.2f} s"
    return f"the first call took {first:.2f} s, later ones {min(later):.2f} to {max(later):.2f} s"


# --- the store ------------------------------------------------------------------------------------


def state(place: Deployment, held: Quota, agent: str = "") -> CountState:
    """Return the state of a quota, or of an agent's part of it."""
    store = open_shared_store(StorePlace(place.url, 5.0))
    try:
        key = held.key.key_of_text(held.name, agent)
        (found,) = store.look([(held.count(key, time.time()), held.amount)])
    finally:
        store.close()
    return found


def expect(place: Deployment, held: Quota, expected: CountState, agent: str = "") -> None:
    """Wait for the state of a quota; every key of the store expires."""
    give_up = time.monotonic() + PATIENCE
    while (found := replace(state(place, held, agent), reset="")) != expected:
        assert time.monotonic() < give_up, found
        time.sleep(0.2)  # each look opens a connection
    client = place.master.client
    assert not [key for key in client.scan_iter() if client.ttl(key) == -1]


def _operate(callers: Callers, command: str, *arguments: str) -> None:
    """Run a command of an operator."""
    subprocess.run(
        [sys.executable, "-c", COMMAND, "quotas", command, "q", *arguments],
        env=os.environ | callers.settings,
        check=True,
        capture_output=True,
    )
