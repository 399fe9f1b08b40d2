"""The live view: polls feeds, draws the screen, and reads single keys."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

from rich.console import Group
from rich.control import Control

from otel_limits.cli.terminal import console
from otel_limits.cli.top.screen import View, draw, press
from otel_limits.quotas.store import PermanentStoreError, StoreError
from otel_limits.top.fleet_state import FleetTracker, track
from otel_limits.top.scrapes import Feed, Scrape, first_scrapes, scrape

# --- the loop: poll, draw, handle keys ------------------------------------------------------------

EVERY_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.2
"""How long to wait for a key before checking for new scrapes."""

Kill = Callable[[str], str]
"""Kills the invocations of agents matching a glob; returns a message."""


class Poller(threading.Thread):
    """Scrapes one feed every second in its own thread, so a slow feed delays no other."""

    def __init__(self, feed: Feed, scrapes: queue.SimpleQueue[Scrape]) -> None:
        """Start polling."""
        # A daemon, so quitting does not wait for an unavailable feed.
        super().__init__(name=f"otel-limits-top {feed.shown}", daemon=True)
        self._feed = feed
        self._scrapes = scrapes
        self._closing = threading.Event()
        self.start()

    def run(self) -> None:
        """Read the history, then scrape until closed."""
        for each in first_scrapes(self._feed):
            self._scrapes.put(each)
        pause = EVERY_SECONDS
        while not self._closing.wait(pause):
            began = time.monotonic()
            self._scrapes.put(scrape(self._feed, time.time()))
            took = time.monotonic() - began
            # A slow feed is polled less often.
            pause = max(EVERY_SECONDS - took, took)

    def close(self) -> None:
        """Stop polling."""
        self._closing.set()


def run_live(feeds: Sequence[Feed], kill: Kill, cannot_kill: str = "") -> None:
    """Show the fleet until the user quits.

    Args:
        feeds: Endpoints of the fleet's metrics.
        kill: Kills agents by their name.
        cannot_kill: Why it cannot, if that is known already.
    """
    # Pollers run in threads; only this one draws.
    scrapes: queue.SimpleQueue[Scrape] = queue.SimpleQueue()
    pollers = [Poller(feed, scrapes) for feed in feeds]
    try:
        with (
            contextlib.suppress(KeyboardInterrupt, HangupError),
            exit_on_signal(),
            unbuffered_input(),
        ):
            render_loop(scrapes, track(feeds, time.time()), View(cannot_kill=cannot_kill), kill)
    finally:
        for each in pollers:
            each.close()


def render_loop(
    scrapes: queue.SimpleQueue[Scrape], tracker: FleetTracker, view: View, kill: Kill
) -> None:
    """Redraw on each scrape and key until the user quits."""
    screen = console()
    fleet, size = tracker.fleet(), None
    with screen.screen() as drawn:
        while True:
            # Process all pending scrapes before drawing: a history contains many.
            news = list(drain(scrapes))
            for each in news:
                tracker.add(each)
            keys = read_keys(0.0 if news else LOOK_SECONDS)
            fleet = tracker.fleet() if news else fleet
            for key in keys:
                after = press(view, key, fleet)
                if after == "quit":
                    return
                view = kill_chosen(view, kill) if after == "kill" else after
            if news or keys or screen.size != size:
                size = screen.size
                # Overwrite the previous screen; rich would write below it.
                screen.control(Control.home())
                drawn.update(Group(*draw(fleet, view, size.width, size.height)))


def drain(scrapes: queue.SimpleQueue[Scrape]) -> Iterator[Scrape]:
    """Yield the pending scrapes."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield scrapes.get_nowait()


def kill_chosen(view: View, kill: Kill) -> View:
    """Kill the invocations of the chosen agent and show the result."""
    try:
        message = kill(glob.escape(view.chosen or ""))
    except ValueError as error:
        message = str(error)
    except PermanentStoreError as error:
        message = f"Not sent: {error}."
    except StoreError as error:
        message = f"Quota store unavailable ({error})."
    return dataclasses.replace(view, mode="rows", message=message)


# --- keys -----------------------------------------------------------------------------------------

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
