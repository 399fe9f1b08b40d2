"""Reads single keys from a terminal and restores its modes afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

ENDING: Final = ("SIGTERM", "SIGHUP")
"""Signals that would end the program without restoring the terminal."""

KEYS: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "\x1bOH": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "\x1bOF": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
"""Escape sequences of xterm, in both cursor key modes, and of the Linux console."""

SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)|.", re.DOTALL)


class HangupError(Exception):
    """The terminal was closed."""


def keys_of(text: str) -> Iterator[str]:
    """Yield the names of the pressed keys, ignoring unknown ones."""
    for found in SEQUENCE.findall(text):
        name = KEYS.get(found, found)
        # Ignore an unknown sequence as a whole, as its letters are keys.
        if not name.startswith("\x1b"):
            yield name


def read_keys(seconds: float) -> list[str]:
    """Wait up to `seconds` for keys and return them.

    Raises:
        HangupError: The terminal was closed.
    """
    stdin = sys.stdin.fileno()
    # A blocking read would stop the display.
    if not select.select([stdin], [], [], seconds)[0]:
        return []
    try:
        data = os.read(stdin, 1024)
    except OSError:
        data = b""
    if not data:
        raise HangupError
    # The last character may be incomplete.
    return list(keys_of(data.decode(errors="ignore")))


@contextlib.contextmanager
def unbuffered_input() -> Iterator[None]:
    """Read keys without Enter and echo; restore the terminal afterwards."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        modes = termios.tcgetattr(stdin)
        # Disable Ctrl-Z, which would leave the shell in our modes.
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(stdin, termios.TCSANOW, modes)
        yield
    finally:
        # Discard pending input, which was not meant for the shell.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """Clean up on a terminating signal, then end by it."""
    received: list[int] = []

    def leave(number: int, _frame: FrameType | None) -> None:
        # Only once, or a second signal would interrupt the cleanup.
        if not received:
            received.append(number)
            raise HangupError

    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before: dict[int, Any] = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            # So the exit status reports the signal.
            signal.raise_signal(received[0])
