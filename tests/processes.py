"""Programs that tests start: none of them blocks a test, or outlives it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator

PATIENCE_SECONDS = 110
"""Less than a test has: a program that hangs fails its own test, and nothing else."""

SOON = 0.02
"""Seconds after which a server of `http.server` sees that it is to end, instead of half of one."""


@contextlib.contextmanager
def bounded(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    """Let a program come to its end; kill it when the test fails, or after a minute.

    Leaving the `with` block of a `Popen` waits without any limit, also after a failure.
    """
    alarm = threading.Timer(PATIENCE_SECONDS, process.kill)
    alarm.start()
    try:
        yield
        process.communicate()
    except BaseException:
        process.kill()
        raise
    finally:
        alarm.cancel()


PORTS = range(12_000, 22_000)
"""Below those that systems give to connections: that of another test would take one before a server
listens there."""


def free_port() -> int:
    """Find a free port."""
    while True:
        # Not of `random`, which Hypothesis seeds alike in every process of tests.
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
