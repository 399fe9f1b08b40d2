"""Runs random programs: `python -m tests.compositions 1000 0` from seed 0."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING, Final

from tests.compositions.chance import concurrent, own, sequential
from tests.compositions.frameworks import FRAMEWORKS
from tests.compositions.run import problems

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.compositions.program import Program
    from tests.compositions.run import Framework

KINDS: Final[Mapping[str, Callable[[int, Framework], Program]]] = {
    "sequential": lambda seed, _: sequential(seed),
    "concurrent": lambda seed, _: concurrent(seed),
    "own": own,
}


def main() -> None:
    """Try as many of each kind as the first argument says, from the seed of the second one.

    Further arguments are the frameworks and kinds to try.
    """
    number, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    asked = sys.argv[3:]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in [each for each in FRAMEWORKS if each in asked] or FRAMEWORKS:
        for kind in [each for each in KINDS if each in asked] or KINDS:
            found, framework = 0, FRAMEWORKS[name]
            for seed in range(first, first + number):
                for problem in problems(KINDS[kind](seed, framework), framework):
                    found += 1
                    print(f"{name} {kind} {seed}: {problem}")  # noqa: T201
            print(f"{number} {kind} programs of {name}: {found} problems")  # noqa: T201


if __name__ == "__main__":
    main()
