"""`otel-limits demo --serve`: a fleet with metrics and a ledger, until it is stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from tests.launching import BIN, execute, fresh_environment
from tests.processes import bounded, free_port, tied

OTEL_LIMITS = str(BIN / "otel-limits")


@contextlib.contextmanager
def fleet(port: int, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a fleet; provide it with the lines that it prints before its agents run."""
    process = subprocess.Popen(
        tied(OTEL_LIMITS, "demo", "--serve", str(port)),
        env=fresh_environment(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, bounded(process):
        assert process.stdout is not None
        printed = list(iter(process.stdout.readline, "Halts and would-be halts:\n"))
        yield process, [line.strip() for line in printed]


def test_fleet_has_metrics_and_a_ledger_until_ctrl_c(tmp_path: Path) -> None:
    """The commands that it prints work as they are."""
    port = free_port()
    with fleet(port, tmp_path) as (process, lines):
        assert process.stderr is not None
        halts = iter(process.stderr.readline, "")
        assert any("'delivery-watcher' would have been halted by" in line for line in halts)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        directory = Path(next(line.removeprefix("cd ") for line in lines if line[:3] == "cd "))
        activate = BIN / "activate"
        assert (f". {activate}" in lines) is activate.exists()
        commands = [line.split()[1:] for line in lines if line.startswith("otel-limits ")]
        top, spend, _ = ([*words] for words in commands)
        ran = [
            subprocess.run(
                [OTEL_LIMITS, *words],
                cwd=directory,
                env=fresh_environment(),
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
            for words in ([*top, "--once", "--json"], [*spend, "--format", "json"])
        ]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()

    assert 'otel_limits_cost_usd_total{agent="delivery-watcher"' in metrics
    assert 'otel_limits_quota_used{key="(all)",quota="deliveries"}' in metrics
    assert 'otel_limits_unsampled_invocations_total{agent="ticket-triager"} 0.0' in metrics
    shown, spent = map(json.loads, ran)
    assert "delivery-watcher" in json.dumps(shown)
    assert {row["agent"] for row in spent["spend"]} > {"delivery-watcher", "ticket-triager"}
    assert directory.parent == tmp_path
    assert (process.returncode, output) == (0, f"\nStopped. The ledger is still in {directory}.\n")
    assert "Traceback" not in errors


def test_second_fleet_needs_another_port(tmp_path: Path) -> None:
    """The first one continues, and SIGTERM ends it as Ctrl-C does."""
    port = free_port()
    with fleet(port, tmp_path) as (process, _):
        second = execute(OTEL_LIMITS, "demo", "--serve", str(port))
        process.terminate()
        process.communicate()
    assert second.status == 2
    assert f"Cannot serve metrics on 127.0.0.1:{port}: Address already in use." in second.log
    assert f"e.g. --serve {port + 1}." in second.log
    assert process.returncode == 0


def test_foreign_listen_address_is_refused() -> None:
    """The address is a setting, so its fix is one, too."""
    elsewhere = {"OTEL_LIMITS_PROMETHEUS_HOST": "192.0.2.1"}
    refused = execute(OTEL_LIMITS, "demo", "--serve", str(free_port()), **elsewhere)
    assert refused.status == 2
    assert "no address of this machine. Set OTEL_LIMITS_PROMETHEUS_HOST" in refused.log
