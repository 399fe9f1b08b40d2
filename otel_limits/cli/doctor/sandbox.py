"""A place for the runaway agent in which nothing that it writes or sends reaches anybody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from otel_limits.settings.declared import harmless_copy
from otel_limits.settings.table import PREFIX
from otel_limits.settings.variables import OTLP_PREFIX

FORCED: Final = {
    PREFIX + "MAX_TURNS": "3",
    PREFIX + "ACTION": "halt",
    PREFIX + "LEDGER": "none",
    PREFIX + "METRICS": "prometheus",
}
"""Settings of the runaway; it has no other: quotas in memory, no port, no policy, no tool log."""

NEVER: Final = "86400000"
"""Milliseconds until something is exported: the runaway ends before."""

HELD_BACK: Final = {
    "OTEL_BSP_SCHEDULE_DELAY": NEVER,
    "OTEL_BLRP_SCHEDULE_DELAY": NEVER,
    "OTEL_METRIC_EXPORT_INTERVAL": NEVER,
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
}
"""What would send by itself, batch by batch."""

DROPPED: Final = ("PROMETHEUS_MULTIPROC_DIR", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")


class _Answer(BaseHTTPRequestHandler):
    """Takes everything, and keeps nothing."""

    def do_POST(self) -> None:
        """Take what would have gone to a collector."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_POST  # noqa: N815  how Datadog's traces are sent

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Stand in for whatever the environment exports to; yields its URL."""
    # Port 0: a free one, as the doctor may run beside anything.
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sandboxed(environ: Mapping[str, str], place: Path, url: str) -> dict[str, str]:
    """Make the environment of the runaway.

    Args:
        environ: That of an application.
        place: Where it may write.
        url: Where it may send to.
    """
    # Our own settings go, or a real ledger and real quotas would count a runaway.
    kept = {
        name: text
        for name, text in environ.items()
        if not name.startswith(PREFIX) and name not in DROPPED
    }
    for name in [name for name in kept if name.startswith(OTLP_PREFIX)]:
        # What leads somewhere, and what opens the doors there: the rest of a configuration is
        # examined.
        if name.endswith(("_ENDPOINT", "_HEADERS", "_CERTIFICATE", "_CLIENT_KEY", "_INSECURE")):
            del kept[name]
    return {
        **kept,
        **harmless_copy(kept, place, url),
        # Also where none is named: a collector may be where exporters look for it by default.
        OTLP_PREFIX + "ENDPOINT": url,
        **HELD_BACK,
        **FORCED,
        "DD_TRACE_AGENT_URL": url,
        "XDG_DATA_HOME": str(place),
    }
