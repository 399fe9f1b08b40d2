"""Keeps the metrics in prometheus_client, and serves them where asked to.

They live in the default registry, so that an application that serves `/metrics` already has them.
With `PROMETHEUS_MULTIPROC_DIR` set, prometheus_client keeps them in files and any process of the
application answers for all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector

from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.counting import CountingObserver
from otel_limits.observers.instruments import ENFORCING, METRICS, MetricSpec, Series

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

SILENCE_SECONDS: Final = 10
"""How long a connection to the endpoint may send nothing."""

TAKES: Final = {
    "counter": "inc",
    "updown": "inc",
    "gauge": "set",
    "minimum": "set",
    "histogram": "observe",
}
"""How a series of each kind takes a value."""

OVER_PROCESSES: Final[Mapping[str, Any]] = {
    "updown": "livesum",
    "gauge": "livemostrecent",
    "minimum": "livemin",
}
"""What is shown of a gauge of each kind where several processes share their files."""


class WithoutCreatedSeries(MetricWrapperBase):
    """A metric without its `_created` series, which would double what is scraped."""

    def _child_samples(self) -> Iterable[Sample]:
        # By our own classes and not by `disable_created_metrics()`, which would take the series
        # away from the application's metrics as well.
        return [each for each in super()._child_samples() if each.name != "_created"]


class Counter(WithoutCreatedSeries, prometheus_client.Counter):
    """A number that only goes up."""


class Histogram(WithoutCreatedSeries, prometheus_client.Histogram):
    """Counts values by size."""


class PrometheusObserver(CountingObserver):
    """Counts events in prometheus_client.

    Args:
        registry: Where the metrics live; the default registry unless told otherwise.
        max_agents: As in `CountingObserver`.
        named: As in `CountingObserver`.
        conventions: As in `CountingObserver`.
        created: Tell of each counter and histogram since when it counts.
    """

    component = "prometheus"

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        max_agents: int = MAX_AGENTS,
        named: Callable[[], Names] = lambda: NO_NAMES,
        *,
        conventions: bool = False,
        created: bool = False,
    ) -> None:
        """Register the metrics.

        Raises:
            ValueError: The registry has metrics of these names already.
        """
        super().__init__(max_agents, named, conventions=conventions)
        self._registry = registry
        self._server: Server | None = None
        self._metrics: dict[str, MetricWrapperBase] = {}
        try:
            for spec in (*METRICS, *(CONVENTIONAL if conventions else ())):
                self._metrics[spec.name] = register(spec, registry, created=created)
        except ValueError:
            self.close()  # half of them would stand in the way of the next attempt
            raise

    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0."""
        # A metric without labels is its own and only series.
        metric = self._metrics[spec.name]
        child = metric.labels(*labels) if labels else metric
        taker: Any = getattr(child, TAKES[spec.kind])
        if spec.kind in ("counter", "histogram"):
            return taker  # type: ignore[no-any-return]
        return lambda value, exemplar=None: taker(value)  # noqa: ARG005  gauges have no exemplar

    @property
    def can_drop(self) -> bool:
        """False in files that processes share: prometheus_client cannot remove a series there."""
        return not is_shared()

    def drop_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """Take one series back."""
        if self.can_drop:
            self._metrics[spec.name].remove(*labels)

    def serve(self, port: int, host: str) -> None:
        """Serve the registry over HTTP.

        Raises:
            OSError: The address is taken or cannot be bound.
        """
        # Only where it changes: a restart would refuse the scrapes of that moment.
        if self._server is None or self._server.address != (host, port):
            self.stop_serving()
            self._server = Server(port, host, served(self._registry))

    @property
    def unscraped(self) -> tuple[str, int] | None:
        """Host and port of the endpoint, if there is one that nobody has asked so far."""
        return None if self._server is None or self._server.was_asked else self._server.address

    def stop_serving(self) -> None:
        """Close the endpoint, if there is one."""
        # Taken away before it is closed: otherwise a second call would close it twice.
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        """Take the metrics out of the registry and close the endpoint."""
        super().close()
        self.stop_serving()
        for metric in self._metrics.values():
            self._registry.unregister(metric)

    def after_fork(self) -> None:
        """Leave the endpoint and the live invocations to the parent, and renew every lock.

        Another thread of the parent may have held one. prometheus_client has no hook for this,
        hence the private names.
        """
        super().after_fork()
        server, self._server = self._server, None
        if server is not None:
            server.after_fork()
        self._registry._lock = threading.Lock()  # noqa: SLF001
        if is_shared():
            renew_file_lock()
        for metric in self._metrics.values():
            metric._lock = threading.Lock()  # noqa: SLF001
            for value in values_of(metric):
                value._lock = threading.Lock()  # noqa: SLF001
        # Whatever the parent has counted is told by the parent, and the child counts its own: in
        # files of its own, where there are any, so that only what is live has to be taken back.
        counted = {"updown"} if is_shared() else {"updown", "counter", "histogram"}
        for spec in (*METRICS, *CONVENTIONAL):
            is_ours = spec.name in self._metrics and spec.kind in counted
            for value in values_of(self._metrics[spec.name]) if is_ours else ():
                value._value = 0.0  # noqa: SLF001
        if is_shared():
            # The child begins files of its own with its next value, with 0 for all others. Of this
            # one the least counts, and an application may set its own first: it is there at once.
            for value in values_of(self._metrics[ENFORCING.name]):
                value.set(value._value)  # noqa: SLF001


def register(spec: MetricSpec, registry: CollectorRegistry, *, created: bool) -> MetricWrapperBase:
    """Make the metric of `spec`."""
    labels = spec.label_names
    if spec.kind == "counter":
        counter = prometheus_client.Counter if created else Counter
        return counter(spec.name, spec.help, labels, registry=registry)
    if spec.kind == "histogram":
        histogram = prometheus_client.Histogram if created else Histogram
        return histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)
    return prometheus_client.Gauge(
        spec.name,
        spec.help,
        labels,
        registry=registry,
        # `live…`: what a dead worker last said of the present is not true any more.
        multiprocess_mode=OVER_PROCESSES[spec.kind],
    )


def is_shared() -> bool:
    """Tell whether the values are kept in files that several processes share."""
    return bool(values.ValueClass._multiprocess)  # noqa: SLF001


def served(registry: CollectorRegistry) -> CollectorRegistry:
    """What an endpoint answers with: the registry, or what all processes have counted."""
    if not is_shared():
        return registry
    # A registry of its own: with the default one beside the files, this process would count twice.
    shared = CollectorRegistry()
    MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    return shared


def values_of(metric: MetricWrapperBase) -> Iterator[Any]:
    """Every number that a metric keeps in memory."""
    for child in (metric, *getattr(metric, "_metrics", {}).values()):
        for name in ("_value", "_sum", "_buckets"):
            found = getattr(child, name, ())
            for value in found if isinstance(found, list | tuple) else [found]:
                if hasattr(value, "_lock"):
                    yield value


def renew_file_lock() -> None:
    """Replace the one lock of all values in files; it is only to be found in their closure."""
    inc = values.ValueClass.inc
    cells = dict(zip(inc.__code__.co_freevars, inc.__closure__ or (), strict=True))
    cells["lock"].cell_contents = threading.Lock()


def with_read_timeout(handler: Any) -> Any:
    """Make a handler of requests that gives up on a connection which sends nothing.

    Each connection has a thread. prometheus_client keeps those of silent ones for ever.
    """

    class PatientHandler(handler):  # type: ignore[misc]  # whichever class it is
        """Waits for a request, but not for ever."""

        timeout = SILENCE_SECONDS

        def handle(self) -> None:
            """Answer, or close the connection without a word."""
            with contextlib.suppress(TimeoutError):
                super().handle()

        def parse_request(self) -> bool:
            """Note that somebody asks: a connection that sends nothing is not a scrape."""
            self.server.was_asked = True
            return bool(super().parse_request())

    return PatientHandler


class Server:
    """The `/metrics` endpoint."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        """Bind and serve in a daemon thread."""
        self.address = (host, port)
        # Of any type, as it is given an attribute that its class knows nothing of.
        self._httpd: Any
        self._httpd, self._thread = prometheus_client.start_http_server(
            port, addr=host, registry=registry
        )
        self._httpd.was_asked = False
        # Nobody has connected yet, but for whom the thread has accepted meanwhile.
        self._httpd.RequestHandlerClass = with_read_timeout(self._httpd.RequestHandlerClass)

    @property
    def was_asked(self) -> bool:
        """True when anybody has asked for anything."""
        return bool(self._httpd.was_asked)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def after_fork(self) -> None:
        """Let go of the port: nobody would ever answer on it in the child."""
        # Not `close()`: `shutdown()` would wait for a loop that no thread runs here.
        self._httpd.socket.close()
