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
from collections.abc import Sequence
from pathlib import Path
from random import Random

from PIL import Image

from otel_limits.cli import main
from tests.dashboards.servers import ROOT, Agents, remembering
from tests.dashboards.workload import ACTORS

ROUNDS = 80
"""As many as fit what quotas permit."""

SCRAPE_SECONDS = 60
SCRAPES = 2
"""Of each round."""


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


def past(scrapes: Sequence[str], end: float) -> str:
    """Give every sample the labels of a target and a time, and bring metrics together."""
    target = 'job="agents",instance="agents-0:9464"'
    metrics: dict[str, list[str]] = {}
    times = [end - SCRAPE_SECONDS * n for n in reversed(range(len(scrapes) * SCRAPES))]
    for number, when in enumerate(times):
        for line in scrapes[number // SCRAPES].splitlines():
            if line.startswith("# TYPE"):
                samples = metrics.setdefault(line, [])
            elif line.startswith("otel_limits"):
                series, _, value = line.partition(" # ")[0].rpartition(" ")
                name, _, labels = series.partition("{")
                own = f",{labels}" if labels else "}"
                samples.append(f"{name}{{{target}{own} {value} {when:.3f}")
    lines = (line for of, samples in metrics.items() if samples for line in (of, *samples))
    return "\n".join((*lines, "# EOF", ""))


def take() -> int:
    """Play, then draw; returns the exit status of the command."""
    scrapes = played()
    with tempfile.TemporaryDirectory() as directory:
        samples = past(scrapes, time.time())
        with remembering(Path(directory), samples) as url:
            out = ROOT / "dashboards/pictures"
            looked = f"{ROUNDS * SCRAPES * SCRAPE_SECONDS // 60}m"
            options = ("--range", looked, "--scrape-interval", f"{SCRAPE_SECONDS}s")
            status = main(
                ["dashboards", "preview", "--prometheus", url, "--out", str(out), *options]
            )
    for path in out.glob("*.png"):
        # A third of the size; the page and its panels become one shade.
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    return status


if __name__ == "__main__":
    sys.exit(take())
