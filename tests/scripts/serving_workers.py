"""Two forked workers that both want to serve /metrics on the one port that they are given."""

from __future__ import annotations

import logging
import os
import sys
import urllib.request
import warnings

from strands import Agent

from otel_limits import enable
from otel_limits.testing import ScriptedModel, says

warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes
logging.basicConfig(stream=sys.stdout, level=logging.ERROR)


def start(name: str) -> tuple[int, int]:
    """Fork a worker that is ready when it says so, and stays until it is let go."""
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
    return let_go, wait


held = [start("first"), start("second")]
address = f"http://127.0.0.1:{os.environ['OTEL_LIMITS_PROMETHEUS_PORT']}/metrics"
with urllib.request.urlopen(address, timeout=10) as page:
    sys.stdout.write(page.read().decode())
for let_go, _ in held:
    os.write(let_go, b"!")
    os.wait()
