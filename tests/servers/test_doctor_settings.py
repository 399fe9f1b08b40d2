"""`otel-limits doctor` looks at ports and at a store."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING

import pytest

from otel_limits import Limits, enable
from tests.processes import SOON, free_port
from tests.unit.test_doctor_settings import only

if TYPE_CHECKING:
    from collections.abc import Iterator


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
