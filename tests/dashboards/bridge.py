"""Serves metrics received over OTLP to a Prometheus, as a collector does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from otel_limits.observers.metrics import METRICS
from tests.otlp.receiver import Received, http_receiver

SPECS = {spec.otel_name: spec for spec in METRICS}


class Bridge(Received):
    """Keeps the latest state of each metric by process."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.processes: dict[str, dict[str, Any]] = {}

    def receive(self, request: Any) -> None:
        """Keep the metrics of a request."""
        for resource in getattr(request, "resource_metrics", ()):
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            metrics = self.processes.setdefault(names["service.instance.id"], {})
            for scope in resource.scope_metrics:
                metrics.update({metric.name: metric for metric in scope.metrics})

    def page(self) -> str:
        """Return the page for a scrape."""
        return "".join(
            line
            for instance, metrics in list(self.processes.items())
            for name, metric in list(metrics.items())
            if name in SPECS
            for line in lines(SPECS[name].name, metric, instance)
        )


def lines(name: str, metric: Any, instance: str) -> Iterator[str]:
    """Yield the samples of one metric, by OpenTelemetry's rules for Prometheus."""
    for point in getattr(metric, metric.WhichOneof("data")).data_points:
        labels = {each.key: each.value.string_value for each in point.attributes}
        labels["instance"] = instance
        if not hasattr(point, "bucket_counts"):
            value = getattr(point, point.WhichOneof("value"))
            yield sample(name, labels, value)
            continue
        bounds = (*map(repr, point.explicit_bounds), "+Inf")
        for bound, count in zip(bounds, itertools.accumulate(point.bucket_counts), strict=True):
            yield sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield sample(f"{name}_sum", labels, point.sum)
        yield sample(f"{name}_count", labels, point.count)


def sample(name: str, labels: dict[str, str], value: float) -> str:
    """Format one sample."""
    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}\n"


@contextmanager
def bridged() -> Iterator[tuple[Bridge, str, int]]:
    """Serve a bridge; yield it, its OTLP endpoint and the port to scrape."""
    bridge = Bridge()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = bridge.page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with http_receiver(bridge) as endpoint:
            yield bridge, endpoint, server.server_port
    finally:
        server.shutdown()
        server.server_close()
