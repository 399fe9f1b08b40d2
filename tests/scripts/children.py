"""A program whose agents run in child processes, started in each supported way."""

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
    import served  # type: ignore[import-not-found]  # in this folder

    return served.call()


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes
    if "--preload" in sys.argv:
        work(0)
    told = {}
    for method in [word for word in sys.argv[1:] if not word.startswith("-")]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            told[method] = pool.map(work, [1, 2])
    print(json.dumps(told))  # noqa: T201  its output
