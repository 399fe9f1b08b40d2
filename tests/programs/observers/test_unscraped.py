"""A job whose endpoint was never scraped reports it at its end: its metrics are lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.launching import ENDLESS, RUN, execute, fresh_environment
from tests.processes import bounded, free_port

if TYPE_CHECKING:
    from pathlib import Path

SAID = "metrics on 127.0.0.1:{port} were never scraped"
LOUD = {"OTEL_LIMITS_QUIET": "false", "OTEL_LIMITS_LEDGER": "none"}


def command(port: int, *arguments: str) -> tuple[str, ...]:
    """Run an agent to its halt, with an endpoint."""
    options = ("--max-turns", "2", "--prometheus-port", str(port))
    return (*RUN, *options, "--", sys.executable, ENDLESS, *arguments)


def test_unscraped_job_reports_lost_metrics() -> None:
    """And how such a job sends its metrics."""
    port = free_port()
    ended = execute(*command(port), **LOUD)

    assert ended.status == 0
    assert SAID.format(port=port) in ended.log
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in ended.log


@pytest.mark.parametrize(
    "environ",
    [{"OTEL_LIMITS_QUIET": "true"}, {**LOUD, "OTEL_LIMITS_METRICS": "prometheus,otlp"}],
    ids=["quiet", "sent over OTLP"],
)
def test_no_warning_where_nothing_is_lost(environ: dict[str, str]) -> None:
    """One message is enough."""
    assert "never scraped" not in execute(*command(free_port()), **environ).log


@pytest.mark.parametrize("is_scraped", [True, False])
def test_terminated_job_reports_lost_metrics(*, is_scraped: bool, tmp_path: Path) -> None:
    """Unless it was scraped before the signal."""
    port = free_port()
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(port, "--stay"),
            env=fresh_environment(**LOUD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with bounded(process):
            assert process.stdout is not None
            process.stdout.readline()  # the agent was halted
            if is_scraped:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
                    assert b"otel_limits_turns_total" in page.read()
            process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    said = SAID.format(port=port) in (tmp_path / "log").read_text(encoding="utf-8")
    assert said is not is_scraped
