"""Drills for a ledger and for a store of quotas: `python -m tests.drills [--small] [NAME ...]`.

Each lets a disaster happen to real agents that record in a ledger, and proves that what was
promised is there, and that `otel-limits audit verify` tells the truth before and after the rows
that wait are taken back. Without names all are held; --small is what CI has time for. Disks are
filled and made read-only as small file systems of their own, which only root can mount.
"""

from __future__ import annotations

from tests.drills import clock  # isort: skip  # noqa: F401  before anybody takes the clock

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tests.drills import disasters, lines, power, server, store
from tests.drills.deployments import DEPLOYMENTS

Drill = Callable[[Path, int], str]

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
}
"""What is done, and how much of it (for a line: the seconds of a lease): in full, and in small."""

NEED_MOUNTS: Final = ("full-disk", "read-only")


def main() -> int:
    """Hold the drills, and say how each went."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few of everything")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRILLS))
    options = parser.parse_args()
    for name in options.names or DRILLS:
        if name in NEED_MOUNTS and os.geteuid():
            sys.stdout.write(f"{name}: left out, as only root can mount a file system\n")
            continue
        drill, full, small = DRILLS[name]
        began = time.monotonic()
        tempfile.tempdir = None  # that of the last drill is gone
        with tempfile.TemporaryDirectory(prefix="drill-") as directory:
            told = drill(Path(directory), small if options.small else full)
        sys.stdout.write(f"{name}: {told} ({time.monotonic() - began:.1f} s)\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
