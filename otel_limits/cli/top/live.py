"""The live view: polls feeds, draws the screen and handles keys."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Group
from rich.control import Control

from otel_limits.cli.terminal import console
from otel_limits.cli.top.keyboard import HangupError, exit_on_signal, read_keys, unbuffered_input
from otel_limits.cli.top.screen import draw
from otel_limits.cli.top.view import View, press
from otel_limits.quotas.store import StoreError
from otel_limits.top.fleet_state import FleetTracker, track
from otel_limits.top.scrapes import Feed, Scrape, first_scrapes, scrape

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


def run_live(feeds: Sequence[Feed], kill: Kill) -> None:
    """Show the fleet until the user quits."""
    # Pollers run in threads; only this one draws.
    scrapes: queue.SimpleQueue[Scrape] = queue.SimpleQueue()
    pollers = [Poller(feed, scrapes) for feed in feeds]
    try:
        with (
            contextlib.suppress(KeyboardInterrupt, HangupError),
            exit_on_signal(),
            unbuffered_input(),
        ):
            render_loop(scrapes, track(feeds, time.time()), kill)
    finally:
        for each in pollers:
            each.close()


def render_loop(scrapes: queue.SimpleQueue[Scrape], tracker: FleetTracker, kill: Kill) -> None:
    """Redraw on each scrape and key until the user quits."""
    screen = console()
    view = View()
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
    except StoreError as error:
        message = f"Quota store unavailable ({error})."
    return dataclasses.replace(view, mode="rows", message=message)
