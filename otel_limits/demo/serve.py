"""`otel-limits demo --serve`: a fleet that runs until Ctrl-C, with metrics and a ledger."""

from __future__ import annotations

import errno
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

from opentelemetry import trace

from otel_limits.bindings.recognition import release
from otel_limits.demo.live_fleet import BURNING, LiveFleet, live_policy
from otel_limits.demo.sample_fleet import AGENTS
from otel_limits.demo.sample_invocation import TENANT
from otel_limits.otel.provider import FallbackProvider, set_fallback
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings, settings_with
from otel_limits.settings.variables import reachable

if TYPE_CHECKING:
    from types import FrameType

    from otel_limits.bindings.framework import Framework

DEFAULT_PORT: Final = 9464
FAILED: Final = 1
BAD_ARGUMENT: Final = 2

SCRAPE_CONFIG: Final = """\
scrape_configs:
  - job_name: otel-limits-demo
    scrape_interval: 15s
    static_configs: [{{targets: ["{address}"]}}]
"""

RULES: Final = """\
# Alerts, once `otel-limits dashboards export dashboards` has written them.
rule_files: [dashboards/prometheus/rule*.yaml, dashboards/prometheus/threshold*.yaml]
global: {evaluation_interval: 15s}
"""

TEXT: Final = """\
{agents} agents of {release} run until Ctrl-C. Their models are scripted: no network, no cost.
A day of their work takes a minute. {burning} burns money: its action is observe, not halt.
Limits, prices and quotas are in limits.yaml. It can be edited while they run.

In another terminal:
  cd {directory}
  otel-limits top --scrape http://{address}/metrics
  otel-limits audit spend --by agent --ledger ledger.db
  otel-limits dashboards export dashboards   # import grafana/dashboards/*.json into Grafana
  prometheus --config.file=prometheus.yaml   # its alerts: http://localhost:9090/alerts

For a Prometheus that already runs on this machine:
{scrape}
Halts:
"""


def serve(framework: Framework, port: int) -> int:
    """Run the fleet until SIGINT or SIGTERM.

    Args:
        framework: An installed framework.
        port: Where /metrics is served, on the address of `OTEL_LIMITS_PROMETHEUS_HOST`.

    Returns:
        The exit status: 2 if the port is taken.
    """
    host = settings_with("prometheus_host").prometheus_host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return refuse(f"Cannot serve metrics on {host}:{port}: {_why(error, port)}")
    address = f"{reachable(host)}:{port}"
    scrape = SCRAPE_CONFIG.format(address=address)
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
        start(directory, host, port)
        text = TEXT.format(
            agents=len(AGENTS),
            release=release(framework),
            burning=" and ".join(BURNING),
            directory=directory,
            address=address,
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
    (directory / "prometheus.yaml").write_text(RULES + scrape, encoding="utf-8")
    # JSON is YAML, too.
    policy = json.dumps(live_policy(), indent=2)
    (directory / "limits.yaml").write_text(f"{policy}\n", encoding="utf-8")
    return directory


def start(directory: Path, host: str, port: int) -> None:
    """Enforce the limits of the fleet, and only the listen address of this process."""
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
            "OTEL_LIMITS_PROMETHEUS_HOST": host,
            "OTEL_LIMITS_PROMETHEUS_PORT": str(port),
            "OTEL_LIMITS_AUDIT_KEYS": TENANT,
            "OTEL_LIMITS_QUIET": "true",
        }
    ).settings
    RUNTIME.start(settings, policy_file=PolicyFile(policy))
    if type(trace.get_tracer_provider()) is trace.ProxyTracerProvider:
        # Exports nothing. Without it, all spans of the fleet would be reported as missing.
        set_fallback(FallbackProvider())


def _why(error: OSError, port: int) -> str:
    """Describe why a port cannot be bound, and the fix."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        # Without the address that Python adds.
        return f"{os.strerror(error.errno)}. Choose another port, e.g. --serve {port + 1}."
    return "no address of this machine. Set OTEL_LIMITS_PROMETHEUS_HOST, e.g. to 0.0.0.0."


def interrupt(_: int, __: FrameType | None) -> None:
    """End the wait as Ctrl-C does."""
    raise KeyboardInterrupt
