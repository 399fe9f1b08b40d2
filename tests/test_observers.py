"""What observers of ours are: told the facts they subscribe to, through one life cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from otel_limits import Cycle, Event, Invocation, Turn
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.observers.log import LogObserver
from otel_limits.observers.log_events import EventObserver
from otel_limits.observers.otlp import OtlpObserver
from otel_limits.observers.prometheus import PrometheusObserver
from otel_limits.observers.protocol import LazyObserver, OwnObserver

if TYPE_CHECKING:
    from otel_limits.core.events import Observer

INVOCATION = Invocation(agent="research", id="i1", root_id="i1")
TURN = Turn(invocation=INVOCATION, number=1)


class Diary(OwnObserver):
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
    """What was put in the place of what."""
    return []


@pytest.fixture
def lazy(replaced: list[tuple[Observer, Observer]]) -> LazyObserver[Diary]:
    """A diary that is not begun yet."""
    return LazyObserver("diary", Diary, lambda *pair: replaced.append(pair))


@pytest.mark.parametrize(
    "kind", [EventObserver, LedgerObserver, LogObserver, OtlpObserver, PrometheusObserver]
)
def test_every_observer_of_ours_is_one(kind: type[OwnObserver]) -> None:
    """It goes through the life cycle, and its failures have a name."""
    assert issubclass(kind, OwnObserver)
    assert kind.component


def test_an_observer_takes_what_it_subscribes_to() -> None:
    """Other facts pass it by."""
    diary = Diary()
    facts: list[Event] = [Cycle(invocation=INVOCATION), TURN]
    for event in facts:
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
    """Whoever holds it need not know whether the observer was made."""
    diary = lazy.make()
    assert diary is not None
    lazy.after_fork()
    lazy.close()
    assert (lazy.make(), diary.pages) == (diary, ["after_fork", "close"])


def test_a_lazy_observer_that_is_closed_makes_none(lazy: LazyObserver[Diary]) -> None:
    """An event that another thread is about to tell does not bring it back."""
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
