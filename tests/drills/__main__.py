"""Drills for a ledger and for a store of quotas: `python -m tests.drills [--small] [NAME ...]`.

Each drill causes a disaster while real agents record in a ledger. It proves that the promised rows
are there, and that `otel-limits audit verify` is correct before and after pending rows are
restored. Without names all of them run; --small is the size for CI. Full and read-only disks are
small mounted file systems, which require root.
"""

from __future__ import annotations

from tests.drills import clock  # isort: skip  # noqa: F401  before other modules import the clock

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tests.drills import disasters, lines, power, rebuild, rows, server, store
from tests.drills.deployments import DEPLOYMENTS

Drill = Callable[[Path, int], str]

KINDS: Final = ("alone", "guarded", "sentinel", "cluster")

ROWS: Final[dict[str, tuple[Callable[..., str], int, int]]] = {
    "restart": (rows.restarts, 200, 20),
    "share": (rows.shares, 400, 40),
    "large": (lines.starve, 100, 40),
    "wait": (rows.exhausted, 300, 3),
    "pace": (rows.paces, 200, 20),
    "lost": (rows.charges, 300, 3),
    "change": (rows.changes, 50, 3),
    "delay": (rows.delay, 100, 3),
    "rebuild": (rebuild.rebuild, 100, 5),
}
"""Drills of promises of quotas, which run on each kind of store."""

DRILLS: Final[dict[str, tuple[Drill, int, int]]] = {
    "kills": (disasters.kills, 100, 3),
    "full-disk": (disasters.full_disk, 40, 3),
    "locked": (disasters.locked, 40, 3),
    "slow": (disasters.slow, 100, 5),
    "read-only": (disasters.read_only, 40, 3),
    "vanished": (disasters.vanished, 40, 3),
    "clock": (disasters.clock, 200, 12),
    "power-spill": (power.spill_file, 100, 3),
    "power-log": (power.log_of_the_database, 100, 1),
    "postgresql": (server.disasters, 40, 3),
    **{f"quota-store-{kind}": (partial(store.faults, kind=kind), 10, 1) for kind in DEPLOYMENTS},
    **{f"quota-line-{kind}": (partial(lines.kills, kind=kind), 30, 2) for kind in DEPLOYMENTS},
    **{f"quota-stop-{kind}": (partial(lines.suspend, kind=kind), 30, 30) for kind in DEPLOYMENTS},
    **{
        f"quota-{row}-{kind}": (partial(drill, kind=kind), full, small)
        for row, (drill, full, small) in ROWS.items()
        for kind in KINDS
    },
}
"""Each drill with its full and its small size (for queues: the seconds of a lease)."""

NEED_MOUNTS: Final = ("full-disk", "read-only")


def main() -> int:
    """Run the drills and print their results."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few of everything")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRILLS))
    options = parser.parse_args()
    for name in options.names or DRILLS:
        if name in NEED_MOUNTS and os.geteuid():
            sys.stdout.write(f"{name}: skipped, as only root can mount a file system\n")
            continue
        drill, full, small = DRILLS[name]
        began = time.monotonic()
        tempfile.tempdir = None  # the directory of the last drill no longer exists
        with tempfile.TemporaryDirectory(prefix="drill-") as directory:
            summary = drill(Path(directory), small if options.small else full)
        sys.stdout.write(f"{name}: {summary} ({time.monotonic() - began:.1f} s)\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
