"""Two forked workers that both want to serve /metrics on the one port that they are given."""

from __future__ import annotations

import logging
import os
import sys
import threading
import urllib.request
import warnings

from strands import Agent

from otel_limits import enable
from otel_limits.testing import ScriptedModel, says

warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes
logging.basicConfig(stream=sys.stdout, level=logging.ERROR)


def start(name: str) -> int:
    """Fork a worker that is ready when it says so, and stays until a byte lets it go."""
    ready, tell = os.pipe()
    wait, let_go = os.pipe()
    if os.fork() == 0:
        os.close(let_go)
        enable()
        Agent(model=ScriptedModel([says("done")]), callback_handler=None, name=name)("go")
        sys.stdout.flush()
        os.write(tell, b"!")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    return let_go


def page() -> str:
    """Return the page of the first scrape that is answered."""
    address = f"http://127.0.0.1:{os.environ['OTEL_LIMITS_PROMETHEUS_PORT']}/metrics"
    pause = threading.Event()
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:  # noqa: PERF203  the second worker does not serve yet
            pause.wait(0.1)


def end(let_go: int) -> None:
    """Let a worker end, and wait for its end."""
    os.write(let_go, b"!")
    os.wait()


first, second = start("first"), start("second")
pages = [page()]
end(first)
pages.append(page())
end(second)
sys.stdout.write("\f".join(pages))
