"""`otel-limits demo --serve`: a fleet that runs until Ctrl-C, with metrics and a ledger."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.probing import release
from otel_limits.demo.live_fleet import BURNING, LiveFleet, live_policy
from otel_limits.demo.sample_fleet import AGENTS
from otel_limits.demo.sample_invocation import TENANT
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings

if TYPE_CHECKING:
    from types import FrameType

    from otel_limits.bindings.framework import Framework

DEFAULT_PORT: Final = 9464
HOST: Final = "127.0.0.1"
FAILED: Final = 1
BAD_ARGUMENT: Final = 2

SCRAPE_CONFIG: Final = """\
scrape_configs:
  - job_name: otel-limits-demo
    scrape_interval: 15s
    static_configs: [{{targets: ["{address}"]}}]
"""

TEXT: Final = """\
{agents} agents of {release} run until Ctrl-C. Their models are scripted: no network, no cost.
A day of their work takes a minute. {burning} burns money: its limits are only observed.
Limits, prices and quotas are in limits.yaml. It can be edited while they run.

In another terminal:
  cd {directory}
  otel-limits top --scrape http://{address}/metrics
  otel-limits audit spend --by agent --ledger ledger.db
  prometheus --config.file=prometheus.yaml
  otel-limits dashboards export dashboards

For a Prometheus that already runs on this machine:
{scrape}
Halts:
"""


def serve(framework: Framework, port: int) -> int:
    """Run the fleet until SIGINT or SIGTERM.

    Args:
        framework: An installed framework.
        port: Where /metrics is served, on the loopback address.

    Returns:
        The exit status: 2 if the port is taken.
    """
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)  # without the address that Python adds
        return refuse(
            f"Cannot serve metrics on {HOST}:{port}: {why}. "
            f"Choose another port, e.g. --serve {port + 1}."
        )
    scrape = SCRAPE_CONFIG.format(address=f"{HOST}:{port}")
    try:
        directory = make_directory(scrape)
    except OSError as error:
        return refuse(f"Cannot write a temporary directory: {error.strerror}. Set TMPDIR.")
    try:
        import_module(framework.module)
    except ImportError as error:
        return refuse(str(error), FAILED)
    fleet = LiveFleet(framework)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        start(directory, port)
        text = TEXT.format(
            agents=len(AGENTS),
            release=release(framework),
            burning=" and ".join(BURNING),
            directory=directory,
            address=f"{HOST}:{port}",
            scrape=scrape,
        )
        sys.stdout.write(text)
        sys.stdout.flush()
        fleet.start()
        threading.Event().wait()
    except KeyboardInterrupt:
        sys.stdout.write(f"\nStopped. The ledger is still in {directory}.\n")
    finally:
        fleet.stop()
        RUNTIME.stop()
        signal.signal(signal.SIGTERM, before)
    return 0


def refuse(sentence: str, status: int = BAD_ARGUMENT) -> int:
    """Print why the fleet does not run; return the exit status."""
    sys.stderr.write(f"otel-limits demo: {sentence}\n")
    return status


def make_directory(scrape: str) -> Path:
    """Create the directory of the ledger, with the policy and Prometheus' configuration.

    Raises:
        OSError: It cannot be written.
    """
    directory = Path(tempfile.mkdtemp(prefix="otel-limits-demo-"))
    (directory / "prometheus.yaml").write_text(scrape, encoding="utf-8")
    # JSON is YAML, too.
    policy = json.dumps(live_policy(), indent=2)
    (directory / "limits.yaml").write_text(f"{policy}\n", encoding="utf-8")
    return directory


def start(directory: Path, port: int) -> None:
    """Enforce the limits of the fleet, and with no other setting of this process."""
    # Autoload may have enabled this process, with the user's ledger and exporters.
    RUNTIME.stop()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("otel_limits").addHandler(handler)
    # Those of the framework report errors that the fleet is meant to have.
    logging.getLogger().addHandler(logging.NullHandler())
    policy = str(directory / "limits.yaml")
    settings = read_settings(
        {
            "OTEL_LIMITS_POLICY": policy,
            "OTEL_LIMITS_LEDGER": str(directory / "ledger.db"),
            "OTEL_LIMITS_PROMETHEUS_PORT": str(port),
            "OTEL_LIMITS_AUDIT_KEYS": TENANT,
            "OTEL_LIMITS_QUIET": "true",
        }
    ).settings
    RUNTIME.start(settings, policy_file=PolicyFile(policy))


def interrupt(_: int, __: FrameType | None) -> None:
    """End the wait as Ctrl-C does."""
    raise KeyboardInterrupt
