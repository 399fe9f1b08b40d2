"""Hands every event to those who observe, as it happens and under no lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from otel_limits.core import events
from otel_limits.core.events import Event, Observer, Stop
from otel_limits.core.internal_errors import INTERNAL_ERRORS

if TYPE_CHECKING:
    from otel_limits.runs.gate import QuotaGate

EVERY_KIND: Final[tuple[type, ...]] = get_args(Event)
"""What an observer is told that subscribes to nothing in particular."""

ABOUT_OBSERVERS: Final = (events.InternalError, events.ObserverDropped)
"""Facts whose loss is not told: telling it would have no end."""

Handler: TypeAlias = Callable[[Any], None]
"""The part of an observer that takes facts of one kind."""


class EventDispatcher:
    """Those who are told facts, in this order. None of them is felt by another, or by an agent."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.gate: QuotaGate | None = None
        """Asked before every model call where quotas are set; it is told every event, first."""
        self.all: tuple[Observer, ...] = ()
        self._takers: dict[type, tuple[tuple[Observer, Handler], ...]] = {}

    def set_observers(self, observers: tuple[Observer, ...]) -> None:
        """Tell these from now on, and nobody else."""
        subscriptions = [(each, subscriptions_of(each)) for each in observers]
        # Both are replaced whole and never changed: `publish` reads them in other threads without a
        # lock.
        self.all = observers
        self._takers = {
            kind: tuple((each, taken[kind]) for each, taken in subscriptions if kind in taken)
            for kind in EVERY_KIND
        }

    def replace(self, former: Observer, observer: Observer) -> None:
        """Tell `observer` from now on what `former` was told."""
        self.set_observers(tuple(observer if each is former else each for each in self.all))

    def publish(self, event: Event) -> None:
        """Hand `event` to its subscribers; one that fails does not keep it from the others."""
        if self.gate is not None:
            # First, because it adds to a model call what quotas count of it, which the ledger
            # records.
            event = self.gate(event) or event
        for observer, take in self._takers.get(type(event), ()):
            try:
                take(event)
            except Exception as error:  # noqa: BLE001, PERF203  foreign code
                self.report_dropped_event(observer, event, error)

    def publish_stop(self, stop: Stop) -> None:
        """Hand `stop` to every observer, and tell how long each took for it."""
        if self.gate is not None:
            self.gate(stop)
        # Told after all of them, so that the lag of one is not counted as that of the next.
        lags = []
        # To all, subscribed or not: an observer may hold what only the end lets it write.
        for observer in self.all:
            begin = time.perf_counter()
            try:
                observer(stop)
            except Exception as error:  # noqa: BLE001  foreign code
                self.report_dropped_event(observer, stop, error)
            # Also of one that failed: the invocation has waited for it all the same.
            lags.append(
                events.ObserverLag(
                    observer=component_name(observer), seconds=time.perf_counter() - begin
                )
            )
        for lag in lags:
            self.publish(lag)

    def publish_internal_error(self, component: str) -> None:
        """Tell every observer that `component` failed."""
        self.publish(events.InternalError(component=component))

    def report_dropped_event(self, observer: Observer, event: Event, error: Exception) -> None:
        """Log and count an event that `observer` failed to handle."""
        if not isinstance(event, ABOUT_OBSERVERS):
            INTERNAL_ERRORS.report(component_name(observer), error)
            self.publish(events.ObserverDropped(observer=component_name(observer)))


def subscriptions_of(observer: Observer) -> Mapping[type, Handler]:
    """Return what takes the facts that an observer names, or all: a mock has any attribute."""
    named = getattr(observer, "subscribes_to", None)
    # By type, because a mock has every attribute.
    if isinstance(named, dict):
        return named
    if isinstance(named, tuple):
        return dict.fromkeys(named, observer)
    return dict.fromkeys(EVERY_KIND, observer)


def component_name(observer: Observer) -> str:
    """What a failing observer is called in logs and metrics."""
    return getattr(observer, "component", None) or "observer"
