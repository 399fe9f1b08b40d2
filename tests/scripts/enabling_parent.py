"""A program that calls `enable()` in its main block and whose agents run in child processes.

Prints the outcome of each way to start a child, as JSON. `--path` prints the environment variables
that change before, during and after limits are enabled.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)


def work(_number: int = 0) -> Any:
    """Call an agent in a child."""
    sys.path.insert(0, HERE)
    import served  # type: ignore[import-not-found, unused-ignore]  # in this folder

    return served.call()


def by_process(method: str) -> Any:
    """Start one child of `multiprocessing`."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(work)


def by_executor() -> Any:
    """Start one child of an executor."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work).result()


def by_subprocess(**variables: str) -> Any:
    """Start another program."""
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); import served; "
    done = subprocess.run(
        [sys.executable, "-c", f"{program}print(json.dumps(served.call()))", HERE],
        check=True,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        cwd="/",
    )
    return json.loads(done.stdout)


def by_joblib() -> Any:
    """Start children of joblib."""
    from joblib import Parallel, delayed  # type: ignore[import-not-found, unused-ignore]

    return Parallel(n_jobs=2)(delayed(work)(number) for number in range(2))


def by_dask() -> Any:
    """Start a worker of dask."""
    from dask.distributed import (  # type: ignore[import-not-found, unused-ignore]
        Client,
        LocalCluster,
    )

    with LocalCluster(n_workers=1, processes=True, dashboard_address=None) as cluster:  # noqa: SIM117
        with Client(cluster) as client:
            return client.submit(work).result()


WAYS: dict[str, Any] = {
    "spawn": lambda: by_process("spawn"),
    "forkserver": lambda: by_process("forkserver"),
    "executor": by_executor,
    "subprocess": by_subprocess,
    "other": lambda: by_subprocess(OTEL_LIMITS_MAX_TURNS="5"),
    "joblib": by_joblib,
    "dask": by_dask,
}


def show_path() -> None:
    """Print our variables, which children inherit."""
    ours = {
        name: text
        for name, text in os.environ.items()
        if name in ("PYTHONPATH", "_ENABLED_BY_OTEL_LIMITS")
    }
    print(json.dumps(ours))  # noqa: T201  its output


if __name__ == "__main__":
    import otel_limits

    arguments = json.loads(sys.argv[1])
    if "--observers" in sys.argv:
        arguments["observers"] = [lambda _event: None]
    if "--path" in sys.argv:
        show_path()
        otel_limits.enable(**arguments)
        otel_limits.enable(**arguments)
        show_path()
        otel_limits.disable()
        show_path()
    else:
        otel_limits.enable(**arguments)
        ways = [word for word in sys.argv[2:] if not word.startswith("-")]
        print(json.dumps({way: WAYS[way]() for way in ways}))  # noqa: T201  its output
