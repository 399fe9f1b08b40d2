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
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

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


def wsgi(_environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
    """Answer a request of a server such as gunicorn."""
    start("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(calls()).encode()]


async def asgi(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer a request of a server such as uvicorn."""
    if scope["type"] == "lifespan":
        for answer in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{answer}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(calls()).encode()})


if __name__ == "__main__":
    main()
