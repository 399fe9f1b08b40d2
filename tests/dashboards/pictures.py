"""Makes the pictures of `dashboards/README.md`: `python -m tests.dashboards.pictures`.

The same agents as in the end-to-end test play, and what they serve after each round is written to
the past of a Prometheus, minutes apart: nobody has hours, and bars are of two minutes.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random

from PIL import Image

from otel_limits.cli import main
from tests.dashboards.servers import MINUTE, ROOT, SCRAPES, Agents, past, remembering
from tests.dashboards.workload import ACTORS

ROUNDS = 80
"""As many as fit what quotas permit."""


def served(port: int) -> str:
    """What a scrape gets, in the format OpenMetrics."""
    accepted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accepted)
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  its own address
        text: str = answer.read().decode()
        return text


def played() -> list[str]:
    """What was served before the first round and after each, of some agents at random."""
    random = Random(7)  # noqa: S311  no secret
    with tempfile.TemporaryDirectory() as directory:
        agents = Agents(Path(directory))
        try:
            scrapes = [served(agents.port)]
            for number in range(ROUNDS):
                tide = 0.35 + 0.3 * math.sin(4 * math.pi * number / ROUNDS)
                agents.play_round([n for n in range(len(ACTORS)) if random.random() < tide])
                scrapes.append(served(agents.port))
            return scrapes
        finally:
            agents.end()


def take() -> int:
    """Play, then draw; returns the exit status of the command."""
    scrapes = played()
    with tempfile.TemporaryDirectory() as directory:
        samples = past(scrapes, time.time())
        with remembering(Path(directory), samples) as url:
            out = ROOT / "dashboards/pictures"
            looked = f"{ROUNDS * SCRAPES}m"
            options = ("--range", looked, "--scrape-interval", f"{MINUTE}s")
            status = main(
                ["dashboards", "preview", "--prometheus", url, "--out", str(out), *options]
            )
    for path in out.glob("*.png"):
        # A third of the size; the page and its panels become one shade.
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    return status


if __name__ == "__main__":
    sys.exit(take())
