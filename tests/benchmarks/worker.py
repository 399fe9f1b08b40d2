"""Times one loop in a separate process: `python -m tests.benchmarks.worker strands_limited`.

Each line of its input is a number of turns; each line of its output is the time of one such run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

from tests.benchmarks.loops import LOOPS


def share_a_core() -> None:
    """Stay on one core with the other workers if the system supports it.

    They take turns, and moving between cores costs more than the difference to measure.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    """Time one run for each line of input."""
    share_a_core()
    run = LOOPS[sys.argv[1]]()
    run(5)
    for line in sys.stdin:
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        run(int(line))
        times = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        sys.stdout.write(json.dumps(times) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
