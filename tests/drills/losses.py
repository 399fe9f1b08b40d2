"""Losses of what was written during a block: each is caused when the block ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

from tests.quotas.fixtures import eventually

if TYPE_CHECKING:
    from tests.drills.deployments import Deployment


@contextmanager
def no_data(place: Deployment) -> Iterator[None]:
    """The servers restart without any data."""
    yield
    place.stop()
    place.start()


@contextmanager
def old_snapshot(place: Deployment) -> Iterator[None]:
    """They restart with an RDB file from before."""
    place.master.client.save()
    yield
    place.stop()
    place.start()


@contextmanager
def old_log(place: Deployment) -> Iterator[None]:
    """They restart with an append-only file that lacks its end."""
    master = place.master
    master.client.config_set("appendfsync", "always")
    master.client.config_set("appendonly", "yes")
    log = master.folder / "appendonlydir"
    eventually(lambda: not master.client.info("persistence")["aof_rewrite_in_progress"])
    shutil.copytree(log, log.with_name("copy"))
    yield
    place.stop()
    shutil.rmtree(log)
    log.with_name("copy").rename(log)
    place.start("--appendonly", "yes")


@contextmanager
def lagging_replica(place: Deployment) -> Iterator[None]:
    """A replica that received nothing takes over from a killed master."""
    master = place.master
    (replica,) = (each for each in place.keepers if each is not master)
    # It cannot connect again.
    replica.client.config_set("masteruser", "unknown")
    replica.client.config_set("masterauth", "x")
    master.client.client_kill_filter(_type="replica")
    eventually(lambda: replica.client.info("replication")["master_link_status"] == "down")
    yield
    master.stop()
    eventually(lambda: replica.client.info("replication")["role"] == "master")


Loss = Callable[["Deployment"], AbstractContextManager[None]]

OF_ANY: Final[dict[str, Loss]] = {
    "no data": no_data,
    "old RDB": old_snapshot,
    "old AOF": old_log,
}
"""Losses of any server."""

OF_REPLICAS: Final[dict[str, Loss]] = {"lagging replica": lagging_replica}
"""Losses of servers with a replica."""
