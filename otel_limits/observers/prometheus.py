"""Publishes the metrics through prometheus_client, and optionally serves them.

They are registered in the default registry, so an application that already serves `/metrics`
includes them. With `PROMETHEUS_MULTIPROC_DIR` set, prometheus_client stores them in files, and any
process of the application serves the metrics of all.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector

from otel_limits.core.labels import MAX_AGENTS, NO_NAMES, Names
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.counting import CountingObserver
from otel_limits.observers.metrics import ENFORCING, METRICS, MetricSpec, Series

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.samples import Sample

logger = logging.getLogger("otel_limits")

READ_TIMEOUT_SECONDS: Final = 10
"""Idle connections to the endpoint are closed after this time."""

RETRY_SECONDS: Final = 0.5
"""How often a process tries to get the port that another process of its application has."""

UPDATE_METHODS: Final = {
    "counter": "inc",
    "updown": "inc",
    "gauge": "set",
    "minimum": "set",
    "histogram": "observe",
}
"""The prometheus_client method that updates a series, by kind of metric."""

MULTIPROCESS_MODES: Final[Mapping[str, Any]] = {
    "updown": "livesum",
    "gauge": "livemostrecent",
    "minimum": "livemin",
}
"""How prometheus_client aggregates a gauge across processes that share files, by kind."""


class WithoutCreatedSeries(MetricWrapperBase):
    """A metric without its `_created` series, which would double the scraped series."""

    def _child_samples(self) -> Iterable[Sample]:
        # `disable_created_metrics()` would also remove them from the application's own metrics.
        return [each for each in super()._child_samples() if each.name != "_created"]


class Counter(WithoutCreatedSeries, prometheus_client.Counter):
    """A counter without its `_created` series."""


class Histogram(WithoutCreatedSeries, prometheus_client.Histogram):
    """A histogram without its `_created` series."""


class PrometheusObserver(CountingObserver):
    """Counts events in prometheus_client metrics.

    Args:
        registry: Where the metrics are registered.
        max_agents: As in `CountingObserver`.
        named: As in `CountingObserver`.
        conventions: As in `CountingObserver`.
        created: Export the `_created` series of counters and histograms.
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
            ValueError: The registry already has metrics with these names.
        """
        super().__init__(max_agents, named, conventions=conventions)
        self._registry = registry
        self._server: Server | NextServer | None = None
        self._metrics: dict[str, MetricWrapperBase] = {}
        try:
            for spec in (*METRICS, *(CONVENTIONAL if conventions else ())):
                self._metrics[spec.name] = register(spec, registry, created=created)
        except ValueError:
            self.close()  # those already registered would make the next attempt fail
            raise

    def make_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> Series:
        """Create one series, at 0."""
        # A metric without labels is its only series.
        metric = self._metrics[spec.name]
        child = metric.labels(*labels) if labels else metric
        update: Any = getattr(child, UPDATE_METHODS[spec.kind])
        if spec.kind in ("counter", "histogram"):
            return update  # type: ignore[no-any-return]
        return lambda value, exemplar=None: update(value)  # noqa: ARG005  gauges have no exemplar

    @property
    def can_drop(self) -> bool:
        """False in multiprocess mode, where prometheus_client cannot remove a series."""
        return not is_shared()

    def drop_series(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """Remove one series."""
        if self.can_drop:
            self._metrics[spec.name].remove(*labels)

    def serve(self, port: int, host: str) -> None:
        """Serve the registry over HTTP, if processes share files as soon as the port is free.

        Raises:
            OSError: The address cannot be bound, or is in use by another program.
        """
        # Only if the address changes, because scrapes fail during a restart.
        if self._server is not None and self._server.address == (host, port):
            return
        self.stop_serving()
        registry = served_registry(self._registry)
        try:
            self._server = Server(port, host, registry)
        except OSError as error:
            if not is_shared() or error.errno != errno.EADDRINUSE:
                raise
            # Workers of a pre-forking server share files and port, and one serves all metrics.
            logger.info("otel-limits: another process of the application serves /metrics.")
            self._server = NextServer(port, host, registry)
        if is_shared():
            # Before the interpreter clears up, which takes seconds: the next process waits.
            atexit.register(self.stop_serving)

    @property
    def unscraped(self) -> tuple[str, int] | None:
        """Host and port of the endpoint if it has received no request yet."""
        return None if self._server is None or self._server.was_requested else self._server.address

    def stop_serving(self) -> None:
        """Close the endpoint, if any."""
        # Unset first, so that a concurrent call does not close it twice.
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        """Unregister the metrics and close the endpoint."""
        super().close()
        self.stop_serving()
        for metric in self._metrics.values():
            self._registry.unregister(metric)

    def after_fork(self) -> None:
        """Reset endpoint, active invocations and counts in the child, and renew every lock.

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
        # The parent reports its own counts, so the child starts from 0. In multiprocess mode it
        # writes to separate files, so only the counts of active invocations must be reset.
        counted = {"updown"} if is_shared() else {"updown", "counter", "histogram"}
        for spec in (*METRICS, *CONVENTIONAL):
            is_ours = spec.name in self._metrics and spec.kind in counted
            for value in values_of(self._metrics[spec.name]) if is_ours else ():
                value._value = 0.0  # noqa: SLF001
        if is_shared():
            # The first value that the child sets creates its file with 0 for every metric, but this
            # gauge is aggregated by minimum: set it before the application sets its own.
            for value in values_of(self._metrics[ENFORCING.name]):
                value.set(value._value)  # noqa: SLF001


def register(spec: MetricSpec, registry: CollectorRegistry, *, created: bool) -> MetricWrapperBase:
    """Create and register the metric of `spec`."""
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
        # `live…`, because the last values of a dead worker no longer apply.
        multiprocess_mode=MULTIPROCESS_MODES[spec.kind],
    )


def is_shared() -> bool:
    """Return whether prometheus_client runs in multiprocess mode."""
    return bool(values.ValueClass._multiprocess)  # noqa: SLF001


def served_registry(registry: CollectorRegistry) -> CollectorRegistry:
    """Return the registry to serve: `registry`, or in multiprocess mode one of all processes."""
    if not is_shared():
        return registry
    # A new registry, because the default one would count this process twice.
    shared = CollectorRegistry()
    WrittenFiles(shared)  # type: ignore[no-untyped-call]
    return shared


class WrittenFiles(MultiProcessCollector):
    """The metrics in the files of all processes, except for files that are just being created.

    prometheus_client fails to read an empty file, and a process may be killed while it creates one.
    """

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, as the base class does."""
        files = [str(file) for file in Path(self._path).glob("*.db") if has_content(file)]
        return self.merge(files, accumulate=True)  # type: ignore[no-any-return, no-untyped-call]


def has_content(file: Path) -> bool:
    """Return whether a file exists and is not empty."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # removed because its process has ended
        return False


def values_of(metric: MetricWrapperBase) -> Iterator[Any]:
    """Yield every value object of a metric."""
    for child in (metric, *getattr(metric, "_metrics", {}).values()):
        for name in ("_value", "_sum", "_buckets"):
            found = getattr(child, name, ())
            for value in found if isinstance(found, list | tuple) else [found]:
                if hasattr(value, "_lock"):
                    yield value


def renew_file_lock() -> None:
    """Replace the lock shared by all values in files, which only their closure refers to."""
    inc = values.ValueClass.inc
    cells = dict(zip(inc.__code__.co_freevars, inc.__closure__ or (), strict=True))
    cells["lock"].cell_contents = threading.Lock()


def with_read_timeout(handler: Any) -> Any:
    """Return a request handler that closes idle connections.

    Each connection has a thread, and prometheus_client keeps those of idle ones forever.
    """

    class TimeoutHandler(handler):  # type: ignore[misc]  # a class known at run time only
        """Closes the connection if no request arrives in time."""

        timeout = READ_TIMEOUT_SECONDS

        def handle(self) -> None:
            """Serve a request, or close the connection on timeout."""
            with contextlib.suppress(TimeoutError):
                super().handle()

        def parse_request(self) -> bool:
            """Record that a request arrived: an idle connection is not a scrape."""
            self.server.was_requested = True
            return bool(super().parse_request())

    return TimeoutHandler


class Server:
    """The `/metrics` endpoint."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        """Bind and serve in a daemon thread."""
        self.address = (host, port)
        # `Any`, because it gets an attribute that its class does not declare.
        self._httpd: Any
        self._httpd, self._thread = prometheus_client.start_http_server(
            port, addr=host, registry=registry
        )
        self._httpd.was_requested = False
        # Connections that the thread has already accepted keep the original handler.
        self._httpd.RequestHandlerClass = with_read_timeout(self._httpd.RequestHandlerClass)

    @property
    def was_requested(self) -> bool:
        """True if a request has arrived."""
        return bool(self._httpd.was_requested)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def after_fork(self) -> None:
        """Release the port, which no thread would serve in the child."""
        # Not `close()`: `shutdown()` would wait for a loop that no thread runs here.
        self._httpd.socket.close()


class NextServer:
    """The `/metrics` endpoint of a process that has to wait for the port.

    The process that has it may end at any time: a server replaces its workers, and starting a new
    one takes seconds.
    """

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        """Wait for the port in a daemon thread."""
        self.address = (host, port)
        self._server: Server | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve_when_free, args=(registry,), daemon=True)
        self._thread.start()

    def _serve_when_free(self, registry: CollectorRegistry) -> None:
        host, port = self.address
        while self._server is None and not self._is_closed.wait(RETRY_SECONDS):
            with contextlib.suppress(OSError):  # still taken
                self._server = Server(port, host, registry)

    @property
    def was_requested(self) -> bool:
        """True if a request has arrived, or if none can arrive yet."""
        return self._server is None or self._server.was_requested

    def close(self) -> None:
        """Stop waiting or serving."""
        self._is_closed.set()
        self._thread.join()
        if self._server is not None:
            self._server.close()

    def after_fork(self) -> None:
        """Release the port, if this process had it: the thread exists in the parent only."""
        if self._server is not None:
            self._server.after_fork()
