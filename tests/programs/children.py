"""A program whose agents run in processes that it starts: by fork, spawn or forkserver."""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any


def work(_number: int) -> Any:
    """Call an agent in a child."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    import served  # type: ignore[import-not-found]  # beside this file

    return served.call()


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
    if "--preload" in sys.argv:
        work(0)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(json.dumps(pool.map(work, [1, 2])))  # noqa: T201  its output
