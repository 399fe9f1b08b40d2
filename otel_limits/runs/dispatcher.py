"""Delivers every event to the observers as it happens, without holding a lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from otel_limits.core import events
from otel_limits.core.events import Event, Observer, Stop
from otel_limits.core.internal_errors import INTERNAL_ERRORS

if TYPE_CHECKING:
    from otel_limits.runs.quota_gate import QuotaGate

EVERY_KIND: Final[tuple[type, ...]] = get_args(Event)
"""The events for an observer without subscriptions."""

ABOUT_OBSERVERS: Final = (events.InternalError, events.ObserverDropped)
"""Events whose loss is not reported, because that would never end."""

Handler: TypeAlias = Callable[[Any], None]
"""The function of an observer that handles events of one type."""


class EventDispatcher:
    """The observers, in order. A failing one affects neither the others nor an agent."""

    def __init__(self) -> None:
        """Create a dispatcher without observers."""
        self.gate: QuotaGate | None = None
        """Admits model calls if there are quotas; receives every event first."""
        self.all: tuple[Observer, ...] = ()
        self._handlers: dict[type, tuple[tuple[Observer, Handler], ...]] = {}

    def set_observers(self, observers: tuple[Observer, ...]) -> None:
        """Replace all observers."""
        subscriptions = [(each, subscriptions_of(each)) for each in observers]
        # Both are replaced as a whole and never changed: `publish` reads them in other threads
        # without a lock.
        self.all = observers
        self._handlers = {
            kind: tuple((each, by_type[kind]) for each, by_type in subscriptions if kind in by_type)
            for kind in EVERY_KIND
        }

    def replace(self, former: Observer, observer: Observer) -> None:
        """Replace one observer, keeping its position."""
        self.set_observers(tuple(observer if each is former else each for each in self.all))

    def publish(self, event: Event) -> None:
        """Deliver `event` to its subscribers; a failing one does not affect the others."""
        if self.gate is not None:
            # First, because it adds the quota charges to a model call, which the ledger records.
            event = self.gate(event) or event
        for observer, handle in self._handlers.get(type(event), ()):
            try:
                handle(event)
            except Exception as error:  # noqa: BLE001, PERF203  third-party code
                self.report_dropped_event(observer, event, error)

    def publish_stop(self, stop: Stop) -> None:
        """Deliver `stop` to every observer, and publish how long each took."""
        if self.gate is not None:
            self.gate(stop)
        # Published after all of them, so that the lag of one does not count as that of the next.
        lags = []
        # To all, subscribed or not: an observer may buffer events until the end.
        for observer in self.all:
            begin = time.perf_counter()
            try:
                observer(stop)
            except Exception as error:  # noqa: BLE001  third-party code
                self.report_dropped_event(observer, stop, error)
            # Also for one that failed: the invocation has waited for it.
            lags.append(
                events.ObserverLag(
                    observer=component_name(observer), seconds=time.perf_counter() - begin
                )
            )
        for lag in lags:
            self.publish(lag)

    def publish_internal_error(self, component: str) -> None:
        """Publish that `component` failed."""
        self.publish(events.InternalError(component=component))

    def report_dropped_event(self, observer: Observer, event: Event, error: Exception) -> None:
        """Log and count an event that `observer` failed to handle."""
        if not isinstance(event, ABOUT_OBSERVERS):
            INTERNAL_ERRORS.report(component_name(observer), error)
            self.publish(events.ObserverDropped(observer=component_name(observer)))


def subscriptions_of(observer: Observer) -> Mapping[type, Handler]:
    """Return an observer's handlers by event type; all types if it does not subscribe."""
    named = getattr(observer, "subscribes_to", None)
    # By type, because a mock has every attribute.
    if isinstance(named, dict):
        return named
    if isinstance(named, tuple):
        return dict.fromkeys(named, observer)
    return dict.fromkeys(EVERY_KIND, observer)


def component_name(observer: Observer) -> str:
    """Return the name of an observer in logs and metrics."""
    return getattr(observer, "component", None) or "observer"
