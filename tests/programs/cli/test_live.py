"""The live view in a real pseudo-terminal, from the first screen to the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len

from tests.processes import PATIENCE_SECONDS
from tests.servers.top.test_scrapes import answering
from tests.top.pages import page

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (60, 80, 100, 120, 200)
HEIGHT = 24
ALTERNATE, MAIN = "\x1b[?1049h", "\x1b[?1049l"
HIDDEN, SEEN = "\x1b[?25l", "\x1b[?25h"

FLEET = page(
    """
    invocations_in_progress{agent="researcher"} 2
    turns_total{agent="researcher"} 14
    invocation_turns_sum{agent="researcher"} 0
    limit{agent="researcher",limit="max_turns"} 10
    stops_total{agent="researcher",reason="max_turns",action="halted"} 3
    invocations_in_progress{agent="writer"} 0
    turns_total{agent="writer"} 5
    invocation_turns_sum{agent="writer"} 5
    """
)
COMMAND = (sys.executable, "-m", "otel_limits.cli", "top", "--scrape")
BROKEN = (
    sys.executable,
    "-c",
    (
        "import sys; from otel_limits.cli.top import live; from otel_limits.cli import main\n"
        "def draw(*_): raise RuntimeError('broken')\n"
        "live.draw = draw; main(['top', '--scrape', sys.argv[1]])"
    ),
)


class Terminal:
    """A pseudo-terminal, and the program in it."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._main, self._end = pty.openpty()
        self.resize(80)
        self.before = termios.tcgetattr(self._end)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            env=environment | {"TERM": "xterm-256color"},
            stdin=self._end,
            stdout=self._end,
            stderr=self._end,
            # The terminal is its own, so that Ctrl-C in it is a signal to it.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        self.output = ""

    def resize(self, width: int) -> None:
        """Make it so wide."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, width, 0, 0))

    def press(self, keys: str) -> None:
        """Press some keys."""
        os.write(self._main, keys.encode())

    def until(self, is_so: Callable[[list[str]], Any], what: str) -> list[str]:
        """Read until the screen is as it should be; returns its lines without colours."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so(self.lines()):
            if not select.select([self._main], [], [], deadline - time.monotonic())[0]:
                pytest.fail(f"Never: {what}. It is:\n{self.output[-4000:]}")
            self.output += os.read(self._main, 65_536).decode()
        return self.lines()

    def lines(self) -> list[str]:
        """The lines of the newest whole screen."""
        screens = self.output.split("\x1b[H")
        whole = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", each) for each in screens[1:]]
        found = [each.replace("\r", "").split("\n") for each in whole]
        return next((lines for lines in reversed(found) if len(lines) >= HEIGHT), [])

    def end(self) -> int:
        """Wait for the end, and read what is left; returns the exit status."""
        status = self.process.wait(PATIENCE_SECONDS)
        while select.select([self._main], [], [], 0)[0]:
            self.output += os.read(self._main, 65_536).decode()
        return status

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its modes, its screen and its cursor."""
        return (
            termios.tcgetattr(self._end) == self.before
            and self.output.rindex(MAIN) > self.output.rindex(ALTERNATE)
            and self.output.rindex(SEEN) > self.output.rindex(HIDDEN)
        )

    def close(self) -> None:
        """Let go of it."""
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._end)


@contextmanager
def looking(command: tuple[str, ...] = COMMAND, *, at: str = FLEET) -> Iterator[Terminal]:
    """Look at a fleet in a terminal."""
    with answering(at) as (place, _):
        terminal = Terminal((*command, place))
        try:
            yield terminal
        finally:
            terminal.close()


def has(text: str) -> Callable[[list[str]], bool]:
    """Return a check that the screen shows a text."""
    return lambda lines: any(text in line for line in lines)


def is_wide(width: int) -> Callable[[list[str]], bool]:
    """Return a check that every line has `width` columns."""
    return lambda lines: {*map(cell_len, lines)} == {width}


def test_a_person_looks_at_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every width, with every kind of key, and the terminal is as it was afterwards."""
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "redis://127.0.0.1:1/0")
    with looking() as terminal:
        terminal.until(has("researcher"), "the first row")
        for width in WIDTHS:
            terminal.resize(width)
            lines = terminal.until(is_wide(width), f"{width} columns")
            row = next(line for line in lines if line.startswith("researcher"))
            assert row.split()[1] == "2"
            assert "70%" in row
        terminal.press("?")
        terminal.until(has("Press any key to return"), "the help")
        terminal.press("x/writ\r")
        terminal.until(lambda lines: not has("researcher")(lines), "the filter")
        terminal.press("\x1b")
        terminal.until(has("researcher"), "all rows")
        terminal.press("a\x1b[Bk")
        terminal.until(has("Kill the invocations of agent 'writer' (0 running)"), "the question")
        terminal.press("y")
        terminal.until(has("Quota store unavailable"), "what became of it")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored
        assert "Traceback" not in terminal.output


def test_a_kill_without_a_store_is_refused_before_the_question() -> None:
    """It says what a kill needs."""
    with looking() as terminal:
        terminal.until(has("researcher"), "the first row")
        terminal.press("k")
        terminal.until(has("Kills are sent through the quota store"), "what a kill needs")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored
        assert "Traceback" not in terminal.output


def ended_by(number: signal.Signals) -> int:
    """Look, and be ended by a signal."""
    with looking() as terminal:
        terminal.until(has("researcher"), "the first row")
        if number == signal.SIGINT:
            terminal.press("\x03")
        else:
            terminal.process.send_signal(number)
        status = terminal.end()
        assert terminal.is_restored
        assert "Traceback" not in terminal.output
        return status


def test_ctrl_c_restores_the_terminal() -> None:
    """It is a way to leave like any other."""
    assert ended_by(signal.SIGINT) == 0


def test_sigterm_restores_the_terminal() -> None:
    """The sender of the signal sees that it ended the program."""
    assert ended_by(signal.SIGTERM) == -signal.SIGTERM


def test_an_exception_restores_the_terminal() -> None:
    """It is shown where it can be read, behind the screen that was."""
    with looking(BROKEN) as terminal:
        assert terminal.end() == 1
        assert terminal.is_restored
        assert terminal.output.rindex("RuntimeError: broken") > terminal.output.rindex(MAIN)


def test_an_address_that_does_not_answer_is_a_sentence() -> None:
    """The view continues and shows the error."""
    with looking(at="") as terminal:
        lines = terminal.until(has("has no otel-limits metrics."), "the sentence")
        assert any("0 of 1 address up" in line for line in lines)
        terminal.press("q")
        assert terminal.end() == 0
