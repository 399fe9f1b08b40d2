"""The store and a worker are lost together, and the counts are rebuilt from PostgreSQL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from otel_limits.quotas.store import CountState
from tests.drills.callers import calling
from tests.drills.deployments import DEPLOYMENTS
from tests.drills.rows import FAULTS, expect, state
from tests.postgresql import running
from tests.quotas.fixtures import eventually
from tests.quotas.fleets import quota

DATABASE: Final = "drill"


def rebuild(directory: Path, calls: int, kind: str = "alone") -> str:
    """One worker is killed, one suspended and one lives on while the store restarts empty.

    The living one has not seen all calls of the killed one. A call of the suspended one ended when
    the store was unavailable: the rebuild counts it, and its late settlement changes nothing.
    """
    # Each of the three workers makes some calls, and some are left.
    amount = 4 * calls
    held = {"model_calls": amount, "window": "P366D", "grace": 0}
    with (
        running() as ledger,
        DEPLOYMENTS[kind](directory) as place,
        calling(place, directory, **held) as callers,
    ):
        ledger.ask("postgres", f"CREATE DATABASE {DATABASE}")
        callers.settings["OTEL_LIMITS_LEDGER"] = ledger.url(DATABASE)
        living, killed, suspended = callers.start(3)
        living.use(*[("a", 1)] * calls)
        suspended.use(*[("a", 1)] * (calls - 1))
        suspended.hold()
        killed.use(*[("a", 1)] * calls)
        place.freeze()
        killed.kill()
        suspended.answer()
        suspended.suspend()
        place.stop()
        place.start()
        place.faults.extend(FAULTS)
        restarted = time.monotonic()
        living.use(("a", 1))
        seconds = time.monotonic() - restarted
        eventually(lambda: state(place, quota(amount=amount)).used == 3 * calls + 1)
        rebuilt = time.monotonic() - restarted
        assert living.use_up() == calls - 1
        suspended.resume()
        assert suspended.use_up() == 0
        expect(place, quota(amount=amount), CountState(amount, 0, amount))
    return (
        f"{amount} of {amount} calls admitted, served {seconds:.1f} s after an empty restart, "
        f"counts rebuilt after {rebuilt:.1f} s"
    )
