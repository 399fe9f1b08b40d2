"""An application that a matrix of launchers starts: an agent that loops, and one in a child.

It is a script, a module, and an application of WSGI and ASGI servers. It knows nothing of limits
unless `CALL_ENABLE` is set: then it calls `enable()`, as an application would.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # not there with `python -I`

if os.environ.get("CALL_ENABLE") and __name__ != "__mp_main__":
    # Not again in the child, which imports the main module: it inherits the limits.
    import otel_limits

    otel_limits.enable(max_turns=3)

import served  # type: ignore[import-not-found, unused-ignore]  # noqa: E402  in this folder


def calls() -> dict[str, int]:
    """Call the agent here and in a spawned child; return the number of model calls of each."""
    if multiprocessing.current_process().daemon:  # a worker of Celery cannot have such a child
        program = "import served; print(served.call()['model_calls'])"
        child = subprocess.check_output([sys.executable, "-c", program], cwd=HERE)
        return {"own": served.call()["model_calls"], "child": int(child)}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(served.call)
        own = served.call()
        return {"own": own["model_calls"], "child": future.result()["model_calls"]}


def main() -> None:
    """Print the numbers of model calls."""
    print(json.dumps(calls()), flush=True)  # noqa: T201  its output


wsgi, asgi = served.wsgi_app(calls), served.asgi_app(calls)

if __name__ == "__main__":
    main()
