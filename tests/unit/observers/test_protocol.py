"""Built-in observers: their subscriptions and life cycle."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import importlib
import pkgutil
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

import otel_limits
from otel_limits import Cycle, Event, Invocation, Limits, Turn, enable, observers
from otel_limits.observers.protocol import BaseObserver, LazyObserver, QueuedObserver
from otel_limits.runtime import wiring
from otel_limits.runtime.wiring import ObserverEntry
from otel_limits.testing import ScriptedModel, endless, uses
from tests.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from otel_limits.core.events import Observer
    from tests.conftest import MakeAgent, Metric

INVOCATION = Invocation(agent="research", id="i1", root_id="i1")
TURN = Turn(invocation=INVOCATION, number=1)


class Diary(BaseObserver):
    """Writes down what becomes of it."""

    component = "diary"

    def __init__(self) -> None:
        self.pages: list[object] = []
        self.subscribes_to = {Turn: self.pages.append}

    def after_fork(self) -> None:
        """Write that down."""
        self.pages.append("after_fork")

    def close(self) -> None:
        """Write that down."""
        self.pages.append("close")


@pytest.fixture
def replaced() -> list[tuple[Observer, Observer]]:
    """The replaced observers, with their replacements."""
    return []


@pytest.fixture
def lazy(replaced: list[tuple[Observer, Observer]]) -> LazyObserver[Diary]:
    """A diary that is not begun yet."""
    return LazyObserver("diary", Diary, lambda *pair: replaced.append(pair))


def test_every_observer_is_in_the_table() -> None:
    """An observer without a line in `OBSERVERS` would receive no event."""
    modules = [
        importlib.import_module(f"{observers.__name__}.{each.name}")
        for each in pkgutil.iter_modules(observers.__path__)
    ]
    # Base classes have no component.
    found = {
        kind.component
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BaseObserver) and hasattr(kind, "component")
    }
    assert found == {entry.name for entry in wiring.OBSERVERS}, (
        "give each observer a line in OBSERVERS of runtime/wiring.py, named like its component"
    )


def test_an_observer_takes_what_it_subscribes_to() -> None:
    """Other events pass it by."""
    diary = Diary()
    events: list[Event] = [Cycle(invocation=INVOCATION), TURN]
    for event in events:
        diary(event)
    assert diary.pages == [TURN]


def test_a_lazy_observer_is_made_with_the_first_fact(
    lazy: LazyObserver[Diary], replaced: list[tuple[Observer, Observer]]
) -> None:
    """The one that is made takes that event, and the place of the lazy one."""
    lazy(TURN)
    assert lazy.made is not None
    assert lazy.made.pages == [TURN]
    assert replaced == [(lazy, lazy.made)]


def test_a_lazy_observer_passes_its_life_cycle_on(lazy: LazyObserver[Diary]) -> None:
    """Its holder need not know whether the observer was created."""
    diary = lazy.make()
    assert diary is not None
    lazy.after_fork()
    lazy.close()
    assert (lazy.make(), diary.pages) == (diary, ["after_fork", "close"])


def test_a_lazy_observer_that_is_closed_makes_none(lazy: LazyObserver[Diary]) -> None:
    """An event that another thread is about to publish does not recreate it."""
    lazy.after_fork()
    lazy.close()
    lazy(TURN)
    assert lazy.made is None


def test_a_lazy_observer_that_cannot_be_made_is_tried_again() -> None:
    """The event is lost; the next one may find what was missing."""
    failures = [ImportError("no such module")]

    def make() -> Diary:
        if failures:
            raise failures.pop()
        return Diary()

    lazy = LazyObserver("diary", make, lambda *_: None)
    with pytest.raises(ImportError):
        lazy(TURN)
    lazy(TURN)
    assert lazy.made is not None


# --- observers that do I/O ------------------------------------------------------------------------


class SlowObserver(QueuedObserver):
    """A sender: slow, or blocked until `gate` opens; it fails for a turn of number -1."""

    component = "slow"

    def __init__(self, gate: threading.Event | None = None, max_queued: int = 10) -> None:
        super().__init__({Turn: self._send}, max_queued)
        self.sent: list[Event] = []
        self.is_busy = threading.Event()
        self._gate = gate

    def _send(self, event: Turn) -> None:
        self.is_busy.set()
        if self._gate is not None:
            self._gate.wait(10)
        else:
            time.sleep(0.05)
        if event.number == -1:
            raise OSError
        self.sent.append(event)


@pytest.fixture
def new_observer(monkeypatch: pytest.MonkeyPatch) -> SlowObserver:
    """An observer that is in the table `OBSERVERS`, and nowhere else."""
    observer = SlowObserver()
    entry = ObserverEntry("slow", lambda *_: observer)
    monkeypatch.setattr(wiring, "OBSERVERS", (*wiring.OBSERVERS, entry))
    return observer


def test_event_within_the_handling_of_another_does_not_block() -> None:
    """The garbage collector may end a forgotten invocation anywhere, even while one is queued."""
    gate = threading.Event()
    gate.set()
    observer = SlowObserver(gate, max_queued=1_000)

    def publish() -> None:
        sys.setprofile(lambda *_: observer.subscribes_to[Turn](TURN))
        observer.subscribes_to[Turn](TURN)
        sys.setprofile(None)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(10)
    is_blocked = thread.is_alive()
    atexit.unregister(observer.flush)  # would wait for the blocked thread
    assert not is_blocked
    observer.flush()
    assert len(observer.sent) > 1
    observer.close()
    assert not [each for each in threading.enumerate() if each.name == "otel-limits-slow"]


def test_new_observer_is_flushed_on_request(
    new_observer: SlowObserver, make_agent: MakeAgent
) -> None:
    """A line in the table is enough for `otel_limits.flush()` to wait for its events."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    assert otel_limits.flush()
    assert [event.number for event in new_observer.sent if isinstance(event, Turn)] == [1, 2]


def test_new_observer_is_closed_by_disable(
    new_observer: SlowObserver, make_agent: MakeAgent
) -> None:
    """Queued events are sent, and no thread is left."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    otel_limits.disable()
    assert len(new_observer.sent) == 2
    assert "otel-limits-slow" not in {each.name for each in threading.enumerate()}


def test_full_queue_drops_new_events() -> None:
    """A network that hangs must neither delay agents nor fill the memory."""
    gate = threading.Event()
    observer = SlowObserver(gate, max_queued=2)
    observer(TURN)
    assert observer.is_busy.wait(PATIENCE_SECONDS)
    observer(TURN)
    observer(TURN)
    with pytest.raises(RuntimeError, match="queue of 2 events is full"):
        observer(TURN)
    gate.set()
    observer.close()
    assert len(observer.sent) == 3


@pytest.mark.usefixtures("faulty")
def test_failed_event_is_counted_and_the_next_is_sent(metric: Metric) -> None:
    """One failure must not end the thread; nothing is lost without a trace."""
    enable()
    observer = SlowObserver()
    observer(dataclasses.replace(TURN, number=-1))
    observer(TURN)
    observer.flush()
    assert observer.sent == [TURN]
    assert metric("otel_limits_observer_dropped_events_total", observer="slow") == 1
    observer.close()


def test_fork_leaves_the_queue_to_the_parent() -> None:
    """Otherwise both would send the same events."""
    gate = threading.Event()
    observer = SlowObserver(gate)
    observer(TURN)
    parent = copy.copy(observer)  # with the same queue and thread
    observer.after_fork()
    observer.flush()  # returns: nothing is queued here
    gate.set()
    parent.close()
    last = dataclasses.replace(TURN, number=9)
    observer(last)
    observer.close()
    assert last in observer.sent
