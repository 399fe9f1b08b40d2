"""Reading `/metrics` over HTTP: real agents, and everything else that may answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

import otel_limits
from otel_limits import Limits
from otel_limits.testing import ScriptedModel, endless, says, uses
from otel_limits.top.fleet_state import FleetTracker
from otel_limits.top.scrapes import Endpoint, ScrapeError, scrape
from tests.processes import free_port
from tests.top.pages import page, row_of

if TYPE_CHECKING:
    from otel_limits.top.fleet import Fleet
    from tests.conftest import MakeAgent


@contextmanager
def answering(
    body: str, status: int = 200, kind: str = "text/plain; version=0.0.4"
) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """Serve a page; what was asked is noted."""
    asked: list[Mapping[str, str]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append({"path": self.path, **self.headers})
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode(errors="surrogateescape"))

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def refusal(address: str) -> str:
    """Return the sentence with which an address is not read."""
    with pytest.raises(ScrapeError) as caught:
        Endpoint(address).samples(0)
    return str(caught.value)


# --- real agents ----------------------------------------------------------------------------------


@pytest.fixture
def looking(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> list[Fleet]:
    """The fleet's state in the third turn of an agent, and a minute after its end."""
    port = free_port()
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(port))
    otel_limits.enable(Limits(max_turns=4, max_token_budget=1000))
    endpoint, began = Endpoint(f"127.0.0.1:{port}"), time.time()
    watch, fleets = FleetTracker(began, 60.0, 5.0), list[Any]()

    @tool
    def search(query: str = "") -> str:
        """Look at the fleet from within."""
        calls.append(query)
        if len(calls) == 3:
            watch.add(scrape(endpoint, began))
            fleets.append(watch.fleet())
        return "nothing found"

    calls: list[str] = []
    # One that has ended does not count among what is running.
    make_agent(ScriptedModel([says("done")]), name="looker")("go")
    make_agent(ScriptedModel(endless(uses("search"))), name="looker", tools=[search])("go")
    watch.add(scrape(endpoint, began + 60))
    return [*fleets, watch.fleet()]


def test_an_agent_is_seen_while_it_runs(looking: list[Fleet]) -> None:
    """One invocation, that has taken two or three of four turns: the third may not be over."""
    row = row_of(looking[0], "looker")
    assert row.in_progress == 1
    caps = {cap.limit: cap.share for cap in row.now}
    assert caps["max_turns"] == 0.75
    assert 0 < caps["max_token_budget"] < 1


def test_an_agent_is_seen_when_it_was_halted(looking: list[Fleet]) -> None:
    """One more turn in the minute, the halt, and how much of its caps it had used."""
    row = row_of(looking[1], "looker")
    assert row.in_progress == 0
    assert row.now == ()
    assert row.rates.turns_per_minute == pytest.approx(1)
    assert row.halts == {"max_turns": 1}
    assert {cap.limit: cap.share for cap in row.hour}["max_turns"] == 1
    (halt,) = looking[1].last_halts
    assert (halt.agent, halt.reason, halt.action) == ("looker", "max_turns", "halted")
    assert halt.trace_id is not None
    assert len(halt.trace_id) == 32


def test_credentials_of_the_address_are_sent() -> None:
    """As a header, and not as a part of the path."""
    with answering(page("policy_valid 1")) as (place, asked):
        Endpoint(f"http://me:s3cret@{place}/m").samples(0)
    assert asked[0]["path"] == "/m"
    assert asked[0]["Authorization"] == "Basic bWU6czNjcmV0"


# --- whatever answers -----------------------------------------------------------------------------


def test_unreachable_address_is_an_error_with_advice() -> None:
    """The message suggests a check."""
    port = free_port()
    said = refusal(f"127.0.0.1:{port}")
    assert "is unavailable (Connection refused)" in said
    assert f"--prometheus-port {port}? To try it: otel-limits demo --serve {port}." in said


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("", 503, "returned HTTP status 503."),
        ("up 1\n", 200, "has no otel-limits metrics."),
        ("process_start_time_seconds 1.5e9\n", 200, "has no otel-limits metrics."),
        ("otel_limits_turns_total{agent=", 200, "returned invalid metrics"),
        ("otel_limits_turns_total nothing\n", 200, "returned invalid metrics"),
    ],
)
def test_unexpected_answer_is_an_error_with_address(body: str, status: int, said: str) -> None:
    """The message contains the address."""
    with answering(body, status) as (place, _):
        told = refusal(place)
    assert f"http://{place}/metrics {said}" in told


def test_non_http_server_is_an_error() -> None:
    """Another server listens there."""
    with answering(page("policy_valid 1")) as (place, _):
        assert "is unavailable" in refusal(f"https://{place}")
