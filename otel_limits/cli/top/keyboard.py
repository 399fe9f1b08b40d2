"""The keyboard of a terminal, key by key, and the terminal as it was when all is over."""

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
"""Signals that end a program, which then has no chance to put the terminal right."""

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
"""What terminals send (xterm, in both of its modes for arrows, and the Linux console)."""

SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)|.", re.DOTALL)


class HangupError(Exception):
    """The terminal is gone, and with it whoever looked at it."""


def keys_of(text: str) -> Iterator[str]:
    """Return the names of the keys that were pressed; those that nobody knows are left out."""
    for found in SEQUENCE.findall(text):
        name = KEYS.get(found, found)
        # A sequence that nobody knows is left out as a whole: its letters are keys themselves.
        if not name.startswith("\x1b"):
            yield name


def read_keys(seconds: float) -> list[str]:
    """Wait for keys, at most so long, and return them.

    Raises:
        HangupError: Nobody will press a key any more.
    """
    stdin = sys.stdin.fileno()
    # `select` and not a blocking read, so that a screen goes on without keys.
    if not select.select([stdin], [], [], seconds)[0]:
        return []
    try:
        data = os.read(stdin, 1024)
    except OSError:
        data = b""
    if not data:
        raise HangupError
    # A character may have been cut at the end of what was read.
    return list(keys_of(data.decode(errors="ignore")))


@contextlib.contextmanager
def unbuffered_input() -> Iterator[None]:
    """Have keys at once and unseen, and the terminal as it was afterwards."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        modes = termios.tcgetattr(stdin)
        # Ctrl-Z would leave the shell with our screen and without its own modes.
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(stdin, termios.TCSANOW, modes)
        yield
    finally:
        # What was typed meanwhile was meant for us, and not for the shell.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """Leave in order on a signal that ends the program, and then end by it."""
    received: list[int] = []

    def leave(number: int, _frame: FrameType | None) -> None:
        # Once: a second one must not interrupt the way out.
        if not received:
            received.append(number)
            raise HangupError

    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    # Put back in the end: whoever uses this in a program of his own has handlers, too.
    before: dict[int, Any] = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            # Whoever sent it sees that it was this that ended the program.
            signal.raise_signal(received[0])
