"""Writes everything that is generated: `python -m tests.generate [STEP ...]`.

Without arguments, every step runs except `screenshots`, which needs
Prometheus.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from tests import pages, picture, policy_schema, readme, surface
from tests.top import picture as top_picture


def generate_dashboards() -> None:
    """Write the dashboards and alert rules (Python 3.11 or newer)."""
    if sys.version_info < (3, 11):
        print("dashboards: skipped, grafana-foundation-sdk needs Python 3.11.")  # noqa: T201
        return
    from dashboards import build

    build.write(build.COMMITTED)


def generate_images() -> None:
    """Draw the terminal images of the demo and of `otel-limits top`."""
    os.environ["TZ"] = "UTC"  # the image of `top` contains local times
    time.tzset()
    picture.write()
    top_picture.write()


def generate_launchers() -> None:
    """Write the table of launchers, each cell of which is a run of a program."""
    from tests import matrix  # it needs the packages of the tests

    matrix.write()


def generate_frameworks() -> None:
    """Write the tables of what each framework has, each cell of which is observed."""
    from tests.features import page  # as above

    page.write()


def generate_screenshots() -> None:
    """Draw the dashboards of a simulated fleet."""
    from tests.dashboards.pictures import write

    write()


STEPS: Final[Mapping[str, Callable[[], None]]] = {
    "dashboards": generate_dashboards,
    "schema": policy_schema.write,
    "tables": readme.write,
    "vendors": readme.write_vendors,
    "launchers": generate_launchers,
    "frameworks": generate_frameworks,
    "images": generate_images,
    "outputs": pages.write,
    "surface": surface.write,
    "screenshots": generate_screenshots,
}
"""Each step may read what the steps before it wrote."""


def main() -> None:
    """Run the steps of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.generate", description=__doc__)
    default = [step for step in STEPS if step != "screenshots"]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    chosen = parser.parse_args().steps or default
    if unknown := set(chosen) - STEPS.keys():
        parser.error(f"unknown step: {', '.join(sorted(unknown))}")
    for step, run in STEPS.items():
        if step in chosen:
            run()


if __name__ == "__main__":
    main()
