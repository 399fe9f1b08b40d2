"""Flush telemetry at exit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.variables import otlp_timeout_seconds

UNSCRAPED: Final = (
    "otel-limits: metrics on {host}:{port} were never scraped and are lost. For short-lived jobs, "
    "set OTEL_EXPORTER_OTLP_ENDPOINT instead of OTEL_LIMITS_PROMETHEUS_PORT.\n"
)


def flush(timeout_seconds: float | None = None) -> bool:
    """Export metrics, logs and spans, and make ledger rows durable.

    For programs that handle SIGTERM themselves and exit without `atexit`, e.g. with `os._exit()` or
    in a server that raises the signal again. Can be called at any time.

    Args:
        timeout_seconds: Maximum wait; `OTEL_EXPORTER_OTLP_TIMEOUT` by default.

    Returns:
        True if everything was sent in time. Data that an endpoint rejects counts as sent; the
        exporter logs it.
    """
    from otel_limits.otel.export import flushes

    seconds = otlp_timeout_seconds() if timeout_seconds is None else timeout_seconds
    deadline = time.monotonic() + seconds
    # Concurrently, because an endpoint that hangs would otherwise take one timeout per signal.
    threads = [_start(suppress_errors("flush")(each)) for each in (*RUNTIME.flushes(), *flushes())]
    for thread in filter(None, threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads if thread is not None)


def _start(task: Callable[[], object]) -> threading.Thread | None:
    """Run a task in a thread, or here if no thread can be started."""
    # A daemon, because a thread that hangs must not keep the process from exiting.
    thread = threading.Thread(target=task, name="otel-limits-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 or later, during shutdown
        task()
        return None
    return thread


@suppress_errors("prometheus")
def report_unscraped() -> None:
    """Report at the exit of a program under `run` that its metrics were never scraped."""
    where = RUNTIME.unscraped()
    if where is not None and RUNTIME.enforcement().source == "run":
        sys.stderr.write(UNSCRAPED.format(host=where[0], port=where[1]))
        sys.stderr.flush()
