"""An application's `/metrics`: its address, and its connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

import otel_limits
from otel_limits import Limits, enable
from tests.processes import free_port
from tests.unit.observers.test_prometheus import halted, scrape

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeAgent, Metric


def test_a_scrape_before_the_first_agent_finds_nothing_of_agents(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output does not depend on the reader: two scrapers see the same."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    enable(Limits(max_turns=9))
    first, second = (
        [line for line in scrape(port).splitlines() if line.startswith("otel_limits_")]
        for _ in range(2)
    )
    assert first == second
    assert not any("agent=" in line for line in first)


LAZY = """
import sys
import otel_limits

def loaded():
    heavy = "prometheus_client", "opentelemetry.exporter", "opentelemetry.sdk._logs", "grpc"
    return [name for name in heavy if name in sys.modules]

otel_limits.enable()
print(loaded())
from otel_limits.testing import ScriptedModel, says
from strands import Agent
Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
print(loaded())
"""


def test_nothing_is_made_to_count_before_there_is_something_to_count() -> None:
    """The import of prometheus_client waits for that of Strands, exporters are never imported.

    It would take longer than all else that `enable()` does.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAZY],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["[]", "['prometheus_client']"], done.stderr[-2000:]


@pytest.fixture
def port() -> int:
    """A TCP port that is free."""
    return free_port()


def test_the_endpoint_serves_loopback_alone(
    make_agent: MakeAgent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OTEL_LIMITS_PROMETHEUS_PORT` serves 127.0.0.1, and no other address of the machine."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    enable(Limits(max_turns=2))
    halted(make_agent)
    assert 'otel_limits_turns_total{agent="tester"} 2.0' in scrape(port)
    with pytest.raises(urllib.error.URLError):
        scrape(port, host="127.0.0.2")


def test_endpoint_binds_to_the_given_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_LIMITS_PROMETHEUS_HOST` names another address."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_HOST", "127.0.0.2")
    enable()
    assert "otel_limits_build_info" in scrape(port, host="127.0.0.2")


def test_the_endpoint_closes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`disable()` frees the port, and so does an `enable()` without one."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    for close in (otel_limits.disable, without_port(monkeypatch)):
        monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
        enable()
        scrape(port)
        close()
        with pytest.raises(urllib.error.URLError):
            scrape(port)


def without_port(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make a function that enables again without the endpoint."""

    def close() -> None:
        monkeypatch.delenv("OTEL_LIMITS_PROMETHEUS_PORT")
        enable()

    return close


def answering() -> list[threading.Thread]:
    """Threads of the endpoint that have a connection each."""
    return [each for each in threading.enumerate() if "process_request_thread" in each.name]


def test_connections_that_send_nothing_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 10 seconds, with their threads; half of a request is nothing more to wait for."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    enable(Limits(max_turns=2))
    before = threading.active_count()
    began = time.monotonic()
    silent: list[socket.socket] = []
    for _ in range(40):
        silent.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        # A client that finds the server's queue full retries seconds later.
        give_up = time.monotonic() + 1
        while len(answering()) < len(silent) and time.monotonic() < give_up:
            time.sleep(0.001)
    for connection in silent[:20]:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
    ends = [connection.recv(1) for connection in silent]
    for connection in silent:
        connection.close()

    assert ends == [b""] * 40
    assert time.monotonic() - began > 8  # a slow scraper is not cut off
    for thread in answering():
        thread.join(10)
    assert threading.active_count() <= before


@pytest.mark.usefixtures("faulty")
def test_a_port_that_is_taken_is_no_catastrophe(
    make_agent: MakeAgent,
    metric: Metric,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged with what to do, counted, and limits are in force."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(taken))
        enable(Limits(max_turns=2))
    assert f"cannot serve /metrics on 127.0.0.1 port {taken}" in caplog.text
    assert "share this port, set PROMETHEUS_MULTIPROC_DIR; otherwise choose" in caplog.text
    assert metric("otel_limits_internal_errors_total", component="prometheus") == 1
    assert str(halted(make_agent).messages[-1]["metadata"]["custom"]["synthetic"]) == "True"
