"""Processes of a fleet whose agents call when a drill says so."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_limits.quotas.redis_scripts import KeyNames
from tests.quotas.fixtures import PATIENCE, eventually
from tests.servers.quotas.test_fleet import process, variables

if TYPE_CHECKING:
    import subprocess

    from tests.drills.deployments import Deployment

OUTPUT = 10
"""Output tokens of a call, unless told otherwise."""


class Caller:
    """One process."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self._process = started
        self.is_running = True
        self.slowest = 0.0
        """Seconds of the slowest of the last calls."""

    def write_line(self, line: str) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read_line(self) -> str:
        """Read a line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def call(self, agent: str = "a", output: int = OUTPUT) -> str:
        """Make a call; return how it ended."""
        return self._call_each([(agent, output)])[0]

    def use(self, *calls: tuple[str, int]) -> None:
        """Make calls in sequence, each with its agent and output tokens, until all are admitted.

        In an outage, a call is refused that the store would admit.
        """
        left, give_up = list(calls), time.monotonic() + PATIENCE
        while left:
            ends = self._call_each(left)
            assert set(ends) <= {"end_turn", "quota_unavailable"}, ends
            assert time.monotonic() < give_up, ends
            left = [one for one, end in zip(left, ends, strict=True) if end != "end_turn"]

    def use_up(self, agent: str = "a") -> int:
        """Call until the store refuses; return how many calls were admitted."""
        admitted, give_up = 0, time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            end = self.call(agent)
            admitted += end == "end_turn"
            if end == "quota_exceeded":
                return admitted
        raise AssertionError(f"{admitted} calls were admitted, and none refused")

    def _call_each(self, calls: list[tuple[str, int]]) -> list[str]:
        self.write_line(json.dumps({"calls": calls}))
        return self._ends()

    def hold(self, agent: str = "a", output: int = OUTPUT) -> None:
        """Begin a call that lasts until `answer`."""
        self.write_line(json.dumps({"calls": [(agent, output)], "is_held": True}))
        assert self.read_line() == "asked"

    def answer(self) -> None:
        """End the held call."""
        self.write_line("answer")
        assert self._ends() == ["end_turn"]

    def kill(self) -> None:
        """End it with `kill -9`."""
        self.is_running = False
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def suspend(self) -> None:
        """Stop it until `resume`."""
        self.is_running = False
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self.is_running = True
        self._process.send_signal(signal.SIGCONT)

    def _ends(self) -> list[str]:
        ends, self.slowest = json.loads(self.read_line())
        return list(ends)


class Callers:
    """Starts processes with a policy and a store.

    Args:
        place: The store.
        directory: Directory of the policy file and the ledger.
        stack: Ends the processes.
    """

    def __init__(self, place: Deployment, directory: Path, stack: ExitStack) -> None:
        self.settings = variables(place, directory / "ledger.db")
        self._place = place
        self._callers: list[Caller] = []
        self._policy = directory / "limits.yaml"
        self._stack = stack

    def set_quota(self, **quota: Any) -> None:
        """Write the policy file, with one quota."""
        self._policy.write_text(json.dumps({"quotas": {"q": quota}}))

    def start(self, number: int = 1, lease: float | None = None) -> list[Caller]:
        """Start processes, with the default lease or another one, in seconds."""
        command = [sys.executable, "-m", "tests.quotas.worker", "serve"]
        command.append(json.dumps({"lease": lease}))
        before = self._looked_since(0)
        started = [
            Caller(self._stack.enter_context(process(command, self.settings)))
            for _ in range(number)
        ]
        for each in started:
            assert each.read_line() == "ready"
            each.write_line("go")
        self._callers += started
        eventually(lambda: self._looked_since(0) >= before + number)
        # From here on, each knows the others.
        now = int(1000 * self._place.master.client.time()[0])
        running = sum(each.is_running for each in self._callers)
        eventually(lambda: self._looked_since(now + 1000) >= running)
        return started

    def _looked_since(self, milliseconds: int) -> int:
        """Return how many processes have read from the store since a time."""
        return int(self._place.master.client.zcount(KeyNames().living, milliseconds, "+inf"))


@contextmanager
def calling(place: Deployment, directory: Path, **quota: Any) -> Iterator[Callers]:
    """Start processes under a quota, and end them afterwards."""
    with ExitStack() as stack:
        callers = Callers(place, directory, stack)
        callers.set_quota(**quota)
        yield callers
