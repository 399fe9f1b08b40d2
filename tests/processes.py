"""Programs that tests start: none of them blocks a test, or outlives it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Final

PATIENCE_SECONDS = 110
"""Less than a test has: a program that hangs fails its own test, and nothing else."""

SETPRIV: Final = shutil.which("setpriv")
"""Linux has it."""

SOON = 0.02
"""Seconds after which a server of `http.server` sees that it is to end, instead of half of one."""


def tied(*command: str, signal: str = "KILL", user: str = "") -> list[str]:
    """Return a command whose program does not outlive this process, not even if it is killed.

    The system sends it a signal when the thread that started it ends, so that must outlive it.
    Without `setpriv`, the command is returned as it is.

    Args:
        command: The program, which does not fork into the background, and its arguments.
        signal: The signal. Only the program receives it, and has to end its child processes.
        user: Who runs it if this is root: for servers that refuse to be run by root.
    """
    if SETPRIV is None:
        return list(command)
    options = ["--pdeathsig", signal]
    if user and os.geteuid() == 0:
        # Not by another program: a later change of the user would clear the signal.
        options += ["--reuid", user, "--regid", str(pwd.getpwnam(user).pw_gid), "--init-groups"]
    return [SETPRIV, *options, *command]


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


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
PORTS = range(12_000 + WORKER, 22_000, WORKERS)
"""Below those that systems give to connections: that of another test would take one before a server
listens there. Each process of tests has its own."""


FOUND: Final[set[int]] = set()
"""Ports that this process has found."""


def free_port() -> int:
    """Find a free port, another one each time: a server may not have bound the last one yet."""
    while True:
        # Not of `random`, which Hypothesis seeds alike in every process of tests.
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in FOUND:
                FOUND.add(port)
                return port
