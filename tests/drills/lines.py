"""Processes that wait in line for a quota, or hold what others wait for, and are killed there."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.drills.deployments import DEPLOYMENTS
from tests.quotas.test_fleet import process, variables

if TYPE_CHECKING:
    import subprocess

    from tests.drills.deployments import Deployment
    from tests.quotas.conftest import Server

ONE_PLACE: Final = {"concurrency": 1, "on_exceeded": "wait", "max_wait": "5m"}
FOR_EVER: Final = 1000.0
BUSY: Final = 20.0
"""Seconds that a busy machine may take to go on with a process: less than a lease that ships."""


class Line:
    """Lets processes queue for one place.

    Args:
        server: Where it is counted.
        directory: Where their policy file is.
        lease: Seconds for which a place is held of one that was killed.
    """

    def __init__(self, server: Server | Deployment, directory: Path, lease: float) -> None:
        self._lease = lease
        self._settings = variables(server, directory / "ledger.db")
        self._stack = ExitStack()
        (directory / "limits.yaml").write_text(json.dumps({"quotas": {"q": ONE_PLACE}}))

    def join(self, names: list[str], seconds: float = 0.0) -> subprocess.Popen[str]:
        """Start a process whose agents ask one after the other; returns when they have."""
        arguments = {"names": names, "seconds": seconds, "lease": self._lease}
        command = [sys.executable, "-m", "tests.quotas.worker", "line_up", json.dumps(arguments)]
        begun = self._stack.enter_context(process(command, self._settings))
        assert begun.stdin is not None
        begun.stdin.write("go\n")
        begun.stdin.flush()
        assert read(begun)[-1] == "in line"
        return begun

    def close(self) -> None:
        """End them all."""
        self._stack.close()


@contextmanager
def line(server: Server | Deployment, directory: Path, lease: float) -> Iterator[Line]:
    """Make a line, and end all that stand in it."""
    made = Line(server, directory, lease)
    try:
        yield made
    finally:
        made.close()


def read(one: subprocess.Popen[str], last: str = "in line") -> list[str]:
    """Return what a process says up to a line."""
    assert one.stdout is not None
    said = [one.stdout.readline().strip()]
    while said[-1] != last:
        assert said[-1], f"it ended before it said {last!r}: {said}"
        said.append(one.stdout.readline().strip())
    return said


def kills(directory: Path, lease: int, kind: str = "alone") -> str:
    """Kill who holds the place and who is first in line: the next has it when the lease ends."""
    with DEPLOYMENTS[kind](directory) as place, line(place, directory, lease) as queue:
        holder = queue.join(["holder"], FOR_EVER)
        first, second = queue.join(["a", "b"]), queue.join(["c", "d"])
        for each in (first, holder):
            each.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        read(second, "asked c")
        seconds = time.monotonic() - killed
        said, _ = second.communicate()
    assert said.split("\n", 1)[0] == "asked d"
    assert json.loads(said.split("\n")[-1]) == {"end_turn": 2}
    assert seconds < lease + BUSY, f"the place was free after {seconds:.1f} s"
    return f"the place of a killed process was free after {seconds:.1f} s"
