"""Throws garbage at every parser: `python -m tests.fuzz 10000`."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from random import Random

from tests.fuzz.cases import CASES


def run(cases: int) -> int:
    """Run that many cases; name those that fail, and return their number."""
    failed = 0
    names = list(CASES)
    # Each case reads our log by itself; nothing else is to be seen here.
    logging.getLogger().addHandler(logging.NullHandler())
    for number in range(cases):
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory() as place:
            try:
                CASES[name](Random(number), Path(place))  # noqa: S311  to be repeated, not secret
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed += 1
                sys.stdout.write(f"{name} {number}: {error!r}\n")
    sys.stdout.write(f"{cases} cases, {failed} failed\n")
    return failed


if __name__ == "__main__":
    sys.exit(bool(run(int(sys.argv[1]))))
