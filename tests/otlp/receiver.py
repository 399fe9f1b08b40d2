"""An OTLP receiver: the servicers of opentelemetry-proto, over gRPC and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_grpc

from tests.processes import SOON

Behaviour = Literal["taking", "refusing", "hanging"]

REQUESTS: dict[str, Any] = {
    "/v1/traces": traces.ExportTraceServiceRequest,
    "/v1/metrics": metrics.ExportMetricsServiceRequest,
    "/v1/logs": logs.ExportLogsServiceRequest,
}


class Received:
    """The received telemetry, flattened."""

    def __init__(self, behaviour: Behaviour = "taking") -> None:
        """Begin with nothing."""
        self.behaviour = behaviour
        self.let_go = threading.Event()
        """Set when the requests that hang may end."""
        self.sent_spans = threading.Event()
        """Set when a request with spans has come, whatever becomes of it."""
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        """The last state of each metric, by name."""
        self.logs: list[Any] = []
        self.resources: list[Any] = []

    def receive(self, request: Any) -> None:
        """Keep what a request carries, or behave badly."""
        if getattr(request, "resource_spans", ()):
            self.sent_spans.set()
        if self.behaviour == "hanging":
            self.let_go.wait(60)
        if self.behaviour != "taking":
            raise ConnectionRefusedError
        for resource in getattr(request, "resource_spans", ()):
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        for resource in getattr(request, "resource_metrics", ()):
            self.resources.append(resource.resource)
            for scope in resource.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope.metrics})
        for resource in getattr(request, "resource_logs", ()):
            self.resources.append(resource.resource)
            for scope in resource.scope_logs:
                self.logs.extend(scope.log_records)


@contextmanager
def grpc_receiver(received: Received) -> Iterator[str]:
    """Serve over gRPC; gives the endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    services: tuple[tuple[Any, type, type], ...] = (
        (
            traces_grpc.add_TraceServiceServicer_to_server,
            traces_grpc.TraceServiceServicer,
            traces.ExportTraceServiceResponse,
        ),
        (
            metrics_grpc.add_MetricsServiceServicer_to_server,
            metrics_grpc.MetricsServiceServicer,
            metrics.ExportMetricsServiceResponse,
        ),
        (
            logs_grpc.add_LogsServiceServicer_to_server,
            logs_grpc.LogsServiceServicer,
            logs.ExportLogsServiceResponse,
        ),
    )
    for add, base, answer in services:
        add(servicer(base, answer, received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        received.let_go.set()
        server.stop(None).wait()


def servicer(base: type, answer: type, received: Received) -> Any:
    """Make a servicer that keeps what it gets."""

    def export(self: object, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            received.receive(request)
        except ConnectionRefusedError:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "refused")
        return answer()

    return type("Servicer", (base,), {"Export": export})()


@contextmanager
def http_receiver(received: Received) -> Iterator[str]:
    """Serve over HTTP; gives the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = REQUESTS[self.path]()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                received.receive(request)
                status = 200
            except ConnectionRefusedError:
                status = 403
            with suppress(BrokenPipeError):  # the client hung up
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Be silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(SOON,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        received.let_go.set()
        server.shutdown()
        server.server_close()
