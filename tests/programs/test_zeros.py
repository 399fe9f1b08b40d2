"""Zeros leave a process over OTLP before there is something to count, and not in a flood."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import warnings
from dataclasses import replace

from opentelemetry.sdk.metrics import MeterProvider

from otel_limits.observers.otlp_observer import FLUSH_INTERVAL_SECONDS, OtlpObserver
from tests.clock import Clock
from tests.unit.test_counting import INVOCATION, STARTED


class Exports:
    """Counts the exports that an observer asks for."""

    def __init__(self) -> None:
        self.times: queue.Queue[float] = queue.Queue()
        self.observer = OtlpObserver(MeterProvider().get_meter("otel_limits"), flush=self.flush)

    def flush(self) -> None:
        """Export."""
        self.times.put(time.monotonic())

    def begin(self, *agents: str) -> None:
        """Publish an invocation of each of these agents."""
        for agent in agents:
            invocation = replace(INVOCATION, agent=agent, id=f"{agent} {time.monotonic_ns()}")
            self.observer(replace(STARTED, invocation=invocation))


def exporting() -> list[threading.Thread]:
    """The threads that export."""
    return [each for each in threading.enumerate() if each.name == "otel-limits-zeros"]


def test_zeros_are_exported_when_an_agent_is_first_seen() -> None:
    """Immediately and in the background, and only once per agent."""
    exports = Exports()
    exports.begin("research")
    exports.times.get(timeout=20)
    for thread in exporting():
        thread.join()
    exports.begin("research", "research")
    assert exporting() == []
    assert exports.times.empty()


def test_a_flood_of_agents_is_one_export_a_second() -> None:
    """The second export comes a second after the first, and has everything published between."""
    exports, begin = Exports(), time.monotonic()
    exports.begin("first")
    exports.times.get(timeout=20)
    exports.begin(*(f"agent {number}" for number in range(40)))
    again = exports.times.get(timeout=20)
    assert again - begin >= FLUSH_INTERVAL_SECONDS
    assert exports.times.empty()


def test_agent_does_not_wait_for_the_network() -> None:
    """An export that hangs keeps no invocation from beginning."""
    hanging, asked = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        hanging.wait(60)

    meter = MeterProvider().get_meter("otel_limits")
    observer = OtlpObserver(meter, flush=hang)
    observer(STARTED)
    assert asked.wait(20)
    observer(replace(STARTED, invocation=replace(INVOCATION, agent="other", id="i2")))
    hanging.set()


def test_a_forked_child_exports_its_own_zeros() -> None:
    """Also where the parent was about to export: the thread that would is not in the child."""
    exports = Exports()
    exports.begin("first")
    exports.times.get(timeout=20)
    exports.begin("second")  # exported a second later
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this tests forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        exports.observer.after_fork()
        exports.begin("research")
        exports.times.get()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    exports.times.get(timeout=20)


def test_a_forked_child_does_not_wait_for_the_second_of_its_parent() -> None:
    """Its parent has just exported; the child's first export contains only its own counts."""
    exports = Exports()
    exports.begin("research")
    exports.times.get(timeout=20)
    with Clock() as clock:
        exports.observer.after_fork()
        exports.begin("other")
        exports.times.get(timeout=20)
        assert clock() < FLUSH_INTERVAL_SECONDS / 2
