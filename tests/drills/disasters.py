"""Drills for a ledger: each causes a disaster and proves the ledger's guarantees."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from otel_limits.ledger import database
from otel_limits.ledger import writer as writer_module
from tests.drills.checking import ask, prove, verify
from tests.drills.load import CALLS, Place, start, working

SYNCS = ("invocation", "call", "background")
HOUR = 3600.0

LATEST = writer_module.GATHER_SECONDS + database.BUSY_SECONDS
"""Maximum age in seconds of rows lost by `background`: buffering plus waiting for other writers."""


def kills(directory: Path, size: int) -> str:
    """`kill -9` at random moments, over up to eight processes in one ledger, in all three modes."""
    chance = random.Random(9)  # noqa: S311  a drill, no secret
    results = []
    for sync in SYNCS:
        place = Place(directory / sync)
        workers = [start(place, sync) for _ in range(min(8, size))]
        promised = killed = 0
        for _ in range(-(-size // len(SYNCS))):
            number = chance.randrange(len(workers))
            victim = workers[number]
            victim.await_more(1)
            time.sleep(chance.random() / 5)
            killed_at = time.monotonic()
            victim.end(kill=True)
            promised += _promised(sync, victim.returned, killed_at)
            killed += 1
            workers[number] = start(place, sync)
        for worker in workers:
            assert worker.end() == 0
            promised += len(worker.returned)
        said = prove(place, promised)
        results.append(f"{sync}: {killed} killed, {promised} promised, {said.open} cut off")
    return "; ".join(results)


def _promised(sync: str, returned: list[float], killed_at: float) -> int:
    """Return the number of a killed process's invocations that must be in the ledger."""
    if sync != "background":
        return len(returned)
    return sum(at < killed_at - LATEST for at in returned)


def full_disk(directory: Path, size: int) -> str:
    """A full disk for the database, then for its directory too, then for the data directory too."""
    results = []
    for number, names in enumerate((["home"], ["home", "share"], ["home", "share", "tmp"])):
        place = Place(directory / str(number))
        with full(place, names) as free, working(place, 2) as workers:
            for worker in workers:
                worker.await_more(size)
            if len(names) == 3:  # all are full: rows stay in memory until there is room
                free()
                workers[0].await_more(1)
                time.sleep(2 * writer_module.RETRY_SECONDS)
            returned = [len(each.returned) for each in workers]
        said = prove(place, sum(returned))
        results.append(f"{'+'.join(names)} full: {said.calls} calls, {said.waiting} rows waited")
    return "; ".join(results)


@contextlib.contextmanager
def full(place: Place, names: list[str]) -> Iterator[Callable[[], None]]:
    """Fill the disks of some directories, each a small file system."""
    mounted, ballast = [], []
    try:
        for name in names:
            path = place.directory / name
            path.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=True)
            mounted.append(path)
            ballast.append(path / "ballast")
            with contextlib.suppress(OSError), ballast[-1].open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        def free() -> None:
            for each in ballast:
                each.unlink(missing_ok=True)

        yield free
    finally:
        for path in mounted:
            kept = path.with_name(f"{path.name}-kept")
            shutil.copytree(path, kept, ignore=shutil.ignore_patterns("ballast"))
            subprocess.run(["umount", path], check=True)
            shutil.copytree(kept, path, dirs_exist_ok=True)


def locked(directory: Path, size: int) -> str:
    """Another program locks the database for longer than the timeout."""
    place = Place(directory)
    with working(place, 4) as workers:
        for worker in workers:
            worker.await_more(2)
        with closing(sqlite3.connect(place.ledger, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            until = time.monotonic() + database.BUSY_SECONDS + 1
            for worker in workers:
                worker.await_more(size)
            while time.monotonic() < until:
                workers[0].await_more(1)
            inside = verify(place)
            connection.execute("ROLLBACK")
        returned = [len(each.returned) for each in workers]
    assert inside.status == 0, inside
    said = prove(place, sum(returned))
    return f"{said.calls} calls, {inside.waiting} rows waited while it was locked"


def slow(directory: Path, size: int) -> str:
    """The database is repeatedly locked for longer than an agent waits."""
    place, over = Place(directory), threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(place.ledger, timeout=30, isolation_level=None)) as connection:
            while not over.wait(0.05):
                connection.execute("BEGIN IMMEDIATE")
                over.wait(0.3)
                connection.execute("ROLLBACK")

    with working(place, 4) as workers:
        workers[0].await_more(2)
        thread = threading.Thread(target=hold)
        thread.start()
        for worker in workers:
            worker.await_more(size)
        over.set()
        thread.join()
        returned = [len(each.returned) for each in workers]
    said = prove(place, sum(returned))
    return f"{said.calls} calls"


def read_only(directory: Path, size: int) -> str:
    """The file system of the ledger is read-only for a while."""
    place = Place(directory)
    home = place.ledger.parent
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", home], check=True)
    try:
        with working(place, 1) as workers:
            workers[0].await_more(1)
            before = workers[0].returned
        subprocess.run(["mount", "-o", "remount,ro", home], check=True)
        with working(place, 2) as workers:
            for worker in workers:
                worker.await_more(size)
            inside = verify(place)
            subprocess.run(["mount", "-o", "remount,rw", home], check=True)
            for worker in workers:
                worker.await_more(size)
            returned = [len(each.returned) for each in workers]
        assert inside.status == 0, inside
        assert inside.waiting, inside
        said = prove(place, sum(returned) + len(before))
    finally:
        subprocess.run(["umount", "--lazy", home], check=True)
    return f"{said.calls} calls, {inside.waiting} rows waited while it was read-only"


def vanished(directory: Path, size: int) -> str:
    """The directory of the ledger is deleted under load; all later rows are recorded."""
    place = Place(directory)
    with working(place, 4) as workers:
        for worker in workers:
            worker.await_more(size)
        shutil.rmtree(place.ledger.parent, ignore_errors=True)  # may be recreated immediately
        for worker in workers:
            worker.drain()
        before = [len(each.returned) for each in workers]
        for worker in workers:
            worker.await_more(size)
        # Invocations in progress at the deletion may have lost their first half.
        later = sum(len(w.returned) - n - 1 for w, n in zip(workers, before, strict=True))
    _, spent = ask(place, "spend")
    calls = spent["totals"]["spend"]["calls"]
    assert calls >= later * CALLS, (calls, later)
    # The deleted rows are missing, and verification reports it.
    differ = verify(place).states["Invocation totals match the sums of their calls"]
    return f"{later} invocations after it, {calls} calls; {differ[0]} invocations cut in two"


def clock(directory: Path, size: int) -> str:
    """The clock is set back by an hour, repeatedly."""
    place = Place(directory)
    with working(place, 2, shift=HOUR) as workers:
        for worker in workers:
            worker.await_more(max(size, 12))
    returned = sum(len(each.returned) for each in workers)
    said = prove(place, returned)
    return f"{said.calls} calls"
