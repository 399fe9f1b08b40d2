"""The live view: asks every feed each second, draws, and does what keys say."""

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
from otel_limits.top.scrapes import Feed, Scrape, ScrapeError, scrape

EVERY_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.2
"""How long a key is waited for before it is seen whether there is something new."""

Kill = Callable[[str], str]
"""Ends the agents that fit a glob; returns what came of it as a sentence."""


class Poller(threading.Thread):
    """Asks one feed each second, so that one which is slow keeps nobody else waiting."""

    def __init__(self, feed: Feed, scrapes: queue.SimpleQueue[Scrape]) -> None:
        """Begin to ask."""
        # A daemon: whoever leaves does not wait for an address that does not answer.
        super().__init__(name=f"otel-limits-top {feed.shown}", daemon=True)
        self._feed = feed
        self._scrapes = scrapes
        self._closing = threading.Event()
        self.start()

    def run(self) -> None:
        """Ask until it is enough, the history first."""
        # What is wrong is said by the first question about now, which is asked anyway.
        with contextlib.suppress(ScrapeError):
            for each in self._feed.history(time.time()):
                self._scrapes.put(each)
        while not self._closing.is_set():
            began = time.monotonic()
            self._scrapes.put(scrape(self._feed, time.time()))
            took = time.monotonic() - began
            # As long as it took at least: whoever answers slowly has enough to do.
            self._closing.wait(max(EVERY_SECONDS - took, took))

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()


def run_live(feeds: Sequence[Feed], kill: Kill) -> None:
    """Show the fleet until somebody leaves."""
    # A queue, since answers come in threads of their own and only this one draws.
    scrapes: queue.SimpleQueue[Scrape] = queue.SimpleQueue()
    asking = [Poller(feed, scrapes) for feed in feeds]
    try:
        with (
            contextlib.suppress(KeyboardInterrupt, HangupError),
            exit_on_signal(),
            unbuffered_input(),
        ):
            render_loop(scrapes, track(feeds, time.time()), kill)
    finally:
        for each in asking:
            each.close()


def render_loop(scrapes: queue.SimpleQueue[Scrape], watch: FleetTracker, kill: Kill) -> None:
    """Draw whenever there is something new, until somebody leaves."""
    screen = console()
    view = View()
    fleet, size = watch.fleet(), None
    with screen.screen() as drawn:
        while True:
            # All of them at once: a history of an hour is drawn once, and not minute by minute.
            news = list(drain(scrapes))
            for each in news:
                watch.add(each)
            # Nothing is waited for while there is something to draw.
            keys = read_keys(0.0 if news else LOOK_SECONDS)
            fleet = watch.fleet() if news else fleet
            for key in keys:
                after = press(view, key, fleet)
                if after == "quit":
                    return
                view = kill_chosen(view, kill) if after == "kill" else after
            if news or keys or screen.size != size:
                size = screen.size
                # Over the screen before; rich would write below it.
                screen.control(Control.home())
                drawn.update(Group(*draw(fleet, view, size.width, size.height)))


def drain(scrapes: queue.SimpleQueue[Scrape]) -> Iterator[Scrape]:
    """Yield what feeds have said since the last time."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield scrapes.get_nowait()


def kill_chosen(view: View, kill: Kill) -> View:
    """End the chosen agent's invocations, and say what came of it."""
    try:
        # Escaped, as the name of an agent may have characters that a glob would read.
        said = kill(glob.escape(view.chosen or ""))
    except ValueError as error:
        said = str(error)
    except StoreError as error:
        said = f"The quota store does not answer ({error})."
    return dataclasses.replace(view, mode="rows", message=said)
