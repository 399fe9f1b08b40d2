"""`otel-limits doctor` asks real servers: ports, OTLP endpoints, rights of a quota store."""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from otel_limits import Limits, enable
from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import RETENTION_SECONDS
from tests.processes import SOON, free_port
from tests.unit.cli.test_doctor_settings import only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.cli.doctor.finding import Finding
    from tests.quotas.fixtures import Server


@pytest.fixture
def occupied_port() -> Iterator[int]:
    """A port whose server hangs up."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(SOON,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


# --- port -----------------------------------------------------------------------------------------


def test_a_free_port_is_left_free() -> None:
    """It is tried and let go."""
    port = str(free_port())
    for _ in range(2):
        assert only("metrics port", PROMETHEUS_PORT=port).status == "ok"


def test_a_port_that_is_taken_is_a_failure(occupied_port: int) -> None:
    """The advice names what workers of one application need."""
    finding = only("metrics port", PROMETHEUS_PORT=str(occupied_port))
    assert (finding.status, "Address already in use" in finding.text) == ("FAIL", True)
    assert "PROMETHEUS_MULTIPROC_DIR" in finding.advice


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104  as in a container
def test_a_port_that_agents_serve_already_is_not_a_failure(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container is examined while its agents are at work."""
    port = str(free_port())
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", port)
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_HOST", host)
    enable(Limits(max_turns=3))
    finding = only("metrics port", PROMETHEUS_PORT=port, PROMETHEUS_HOST=host)
    assert (finding.status, "already served by a process with otel-limits" in finding.text) == (
        "ok",
        True,
    )


# --- quota store ----------------------------------------------------------------------------------


def test_a_store_that_does_not_answer_is_a_failure_without_its_password() -> None:
    """Nothing of the secret is shown."""
    finding = only("quota store", QUOTA_STORE=f"redis://user:hunter2@127.0.0.1:{free_port()}/0")
    assert finding.status == "FAIL"
    assert "hunter2" not in finding.text + finding.advice


# --- OTLP endpoints -------------------------------------------------------------------------------

KEY = "api-key=sesame"


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Serve OTLP over HTTP to clients with the key: URL, and path and length of each request."""
    sent: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((self.path, int(self.headers["Content-Length"] or 0)))
            self.send_response(200 if self.headers.get("api-key") == "sesame" else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(SOON,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()


@pytest.fixture
def grpc_collector() -> Iterator[tuple[str, list[str]]]:
    """Serve OTLP over gRPC: URL, and the keys that it was sent."""
    keys: list[str] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, _request: Any, context: Any) -> Any:  # noqa: N802  its name in the protocol
            keys.append(str(dict(context.invocation_metadata()).get("api-key")))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # without types
    add(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", keys
    server.stop(None).wait()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is found where variables have these values, named without OTEL_EXPORTER_OTLP_."""

    def find(**variables: str) -> list[Finding]:
        for name, text in variables.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)
        findings = findings_of("doctor", Context(dict(os.environ)))
        return [each for each in findings if each.name == "otlp"]

    return find


def test_an_endpoint_is_sent_what_the_exporters_send(
    found: Any, collector: tuple[str, list[tuple[str, int]]]
) -> None:
    """With the headers that are set and no telemetry, once for each signal; named once."""
    url, sent = collector
    sent.clear()
    (finding,) = found(ENDPOINT=url, HEADERS=KEY)
    assert finding.status == "ok"
    place = url.removeprefix("http://").replace(":", " port ")
    assert finding.text == f"{place} (traces, metrics, logs) accepts exports."
    assert sent == [("/v1/traces", 0), ("/v1/metrics", 0), ("/v1/logs", 0)]


def test_an_endpoint_that_refuses_is_a_failure(
    found: Any, collector: tuple[str, list[tuple[str, int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the key that it did not like, also in the log of the exporter."""
    (finding,) = found(ENDPOINT=collector[0], HEADERS="api-key=hunter2")
    assert (finding.status, finding.text.endswith(" rejects traces.")) == ("FAIL", True)
    assert "hunter2" not in finding.text + finding.advice + caplog.text


def test_a_server_without_tls_is_not_taken_for_one_with_it(
    found: Any, collector: tuple[str, list[tuple[str, int]]]
) -> None:
    """It answers on its port, which is not enough."""
    (finding,) = found(ENDPOINT=collector[0].replace("http", "https"), HEADERS=KEY)
    assert finding.status == "FAIL"


def test_grpc_is_asked_in_its_protocol(found: Any, grpc_collector: tuple[str, list[str]]) -> None:
    """With the headers that are set."""
    url, keys = grpc_collector
    (finding,) = found(TRACES_ENDPOINT=url, TRACES_PROTOCOL="grpc", TRACES_HEADERS=KEY)
    assert (finding.status, keys) == ("ok", ["sesame"])


def test_http_is_not_grpc(found: Any, collector: tuple[str, list[tuple[str, int]]]) -> None:
    """It answers on its port, which is not enough."""
    (finding,) = found(TRACES_ENDPOINT=collector[0], TRACES_PROTOCOL="grpc")
    assert (finding.status, "rejects traces" in finding.text) == ("FAIL", True)


def test_silent_collector_times_out(found: Any, silent: int) -> None:
    """The doctor must finish within seconds."""
    (finding,) = found(TRACES_ENDPOINT=f"http://127.0.0.1:{silent}/v1/traces")
    assert (finding.status, "rejects traces" in finding.text) == ("FAIL", True)


def test_each_endpoint_is_looked_at(
    found: Any, collector: tuple[str, list[tuple[str, int]]]
) -> None:
    """A signal may have its own endpoint."""
    other = free_port()
    first, second = found(
        ENDPOINT=collector[0], HEADERS=KEY, LOGS_ENDPOINT=f"http://127.0.0.1:{other}/v1/logs"
    )
    assert (first.status, second.status) == ("ok", "FAIL")
    assert f"127.0.0.1 port {other} (logs) is unavailable" in second.text


# --- the rights of a store ------------------------------------------------------------------------


def examined(url: str) -> Finding:
    """Return the finding about a store."""
    findings = findings_of("doctor", Context({"OTEL_LIMITS_QUOTA_STORE": url}))
    (finding,) = (each for each in findings if each.name == "quota store")
    return finding


def add_user(server: Server, name: str, without: str) -> None:
    """Add a user with all rights but one."""
    rights = ("on", ">hunter2", "~*", "&*", "+@all", without)
    server.client.execute_command("ACL", "SETUSER", name, *rights)


def test_a_store_that_answers_is_timed_and_left_as_it_was(server: Server) -> None:
    """The test key expires within a second; the marker of the server's run stays for a day."""
    finding = examined(server.url)
    assert finding.status == "ok", finding
    assert finding.text.startswith("Round trip: ")
    assert finding.text.endswith(" (timeout: 2000 ms).")
    keys = set(server.client.keys()) - {KeyNames().marker}
    assert 0 < server.client.ttl(KeyNames().marker) <= RETENTION_SECONDS
    assert all(0 < server.client.pttl(key) <= 1000 for key in keys)


def test_a_user_without_the_right_to_run_scripts_is_a_failure(server: Server) -> None:
    """Agents could reserve nothing."""
    add_user(server, "weak", "-@scripting")
    finding = examined(server.url.replace("redis://", "redis://weak:hunter2@"))
    assert (finding.status, "hunter2" in finding.text) == ("FAIL", False)


def test_a_user_without_the_right_to_write_is_a_failure(server: Server) -> None:
    """For example, on a replica."""
    add_user(server, "reader", "-set")
    finding = examined(server.url.replace("redis://", "redis://reader:hunter2@"))
    assert (finding.status, "hunter2" in finding.text) == ("FAIL", False)
