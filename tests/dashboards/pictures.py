"""Makes the pictures of `dashboards/README.md`: `python -m tests.dashboards.pictures MINUTES`.

The same agents as in the end-to-end test play before the same Prometheus, in random order and with
pauses, for as long as it takes to have something to see: bars are of two minutes.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from PIL import Image

from otel_limits.cli import main
from tests.dashboards.servers import ROOT, rehearsed
from tests.dashboards.workload import ACTORS

PAUSES = 80
"""As many as fit what quotas permit, however long the play is."""

STEP_SECONDS = 120
"""Of bars, which end on full multiples of it."""


def take(minutes: float) -> int:
    """Play for some minutes, then draw; returns the exit status of the command."""
    random = Random(7)  # noqa: S311  no secret
    with (
        tempfile.TemporaryDirectory() as directory,
        rehearsed(Path(directory)) as (agents, url, _),
    ):
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < minutes * 60:
            tide = 0.35 + 0.3 * math.sin(4 * math.pi * passed / minutes / 60)
            agents.play_round([n for n in range(len(ACTORS)) if random.random() < tide])
            time.sleep(minutes * 60 / PAUSES * random.random() * 2)
        time.sleep(STEP_SECONDS - 1 - time.time() % STEP_SECONDS)  # until the last bar is whole
        out = ROOT / "dashboards/pictures"
        looked = f"{math.ceil(minutes)}m"
        options = ("--range", looked, "--scrape-interval", "15s")
        status = main(["dashboards", "preview", "--prometheus", url, "--out", str(out), *options])
        for path in out.glob("*.png"):
            # A third of the size; the page and its panels become one shade.
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
        return status


if __name__ == "__main__":
    sys.exit(take(float(sys.argv[1])))
