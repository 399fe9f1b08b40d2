"""The order in which waiting calls of several processes are admitted."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from otel_limits.quotas import redis_scripts
from otel_limits.quotas.keys import Template
from otel_limits.quotas.needs import SLOT_LEASE_SECONDS
from otel_limits.quotas.store import Charge, Count, Demand, Reserve, Settle
from otel_limits.quotas.windows import UnboundedWindow
from tests.drills.lines import open_queue

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.quotas.store import SharedStore
    from tests.quotas.fixtures import Server


def test_fleet_is_admitted_in_the_order_of_its_requests(
    server: Server, store: SharedStore, tmp_path: Path
) -> None:
    """Within a process by arrival; between processes, by a request after a slot is free."""
    reserve, settle = (redis_scripts.sha_of(script) for script in ("reserve", "settle"))
    count = Count(
        "q",
        Template("").key("q", dict[str, object]().get).id,
        UnboundedWindow().at(store.now()),
        "concurrency",
    )
    store.run([Reserve("held-0", (Demand(count=count, amount=1, limit=1),), 300.0)])
    with (
        open_queue(server, tmp_path, SLOT_LEASE_SECONDS) as queue,
        server.client.monitor() as monitor,
    ):
        processes = [queue.join([f"{each}1", f"{each}2", f"{each}3"]) for each in "ab"]
        store.run([Settle("held-0", (Charge(count=count, amount=0),))])
        said = [each.communicate()[0] for each in processes]
        server.client.publish("done", "")
        asked = _asked(monitor, reserve, settle)
    for name, lines in zip("ab", said, strict=True):
        assert lines.split("\n")[:3] == [f"asked {name}{number}" for number in (1, 2, 3)]
    # Each settlement frees a slot for one of the requests after it: of the older call, if both
    # have been refused before.
    settled = [n for n, (script, _) in enumerate(asked) if script == settle]
    assert len(settled) == 7
    for one, other in pairwise(settled):
        assert asked[other][1] in {name for _, name in asked[one + 1 : other]}


def _asked(monitor: Any, reserve: str, settle: str) -> list[tuple[str, str]]:
    """Return the scripts called, each with its operation, in order."""
    asked: list[tuple[str, str]] = []
    for said in monitor.listen():
        words = said["command"].split()
        if words[0] == "PUBLISH" and words[1] == "done":
            return asked
        if words[0] == "EVALSHA" and words[1] in (reserve, settle):
            asked.append((words[1], words[3 + int(words[2])]))
    raise AssertionError("the server went away")
