"""Sends off what was told before the process ends: when it is asked to, and on SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.variables import otlp_timeout_seconds

FIRST: Final = 1
"""The id of the process that a container begins with."""
BY_SIGNAL: Final = 128
"""What shells and container runtimes add to the number of the signal that ended a process."""

UNSCRAPED: Final = (
    "otel-limits: nobody scraped the metrics on {host} port {port} while this process ran, and now "
    "they are lost. What ends before it is scraped sends them: set OTEL_EXPORTER_OTLP_ENDPOINT in "
    "the place of OTEL_LIMITS_PROMETHEUS_PORT.\n"
)


def flush(timeout_seconds: float | None = None) -> bool:
    """Send off metrics, logs and spans, and bring the rows of the ledger to where they last.

    For a program that handles SIGTERM itself and then ends without `atexit`, such as with
    `os._exit()` or in a server that raises the signal again. It may be called at any time.

    Args:
        timeout_seconds: How long it waits at most; `OTEL_EXPORTER_OTLP_TIMEOUT` unless given.

    Returns:
        True when all of it was done in time. Where an endpoint refuses what it is sent, that is
        done as well: the exporter logs it.
    """
    from otel_limits.otel.export import flushes

    seconds = otlp_timeout_seconds() if timeout_seconds is None else timeout_seconds
    deadline = time.monotonic() + seconds
    # All at once: one after the other, three signals and an endpoint that hangs would take three
    # timeouts.
    threads = [_begun(suppress_errors("flush")(each)) for each in (*RUNTIME.flushes(), *flushes())]
    for thread in filter(None, threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads if thread is not None)


def _begun(task: Callable[[], object]) -> threading.Thread | None:
    """Have a thread do it, or do it here where none can be started."""
    # A daemon, as one that hangs must not keep the process from ending.
    thread = threading.Thread(target=task, name="otel-limits-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on an interpreter that shuts down starts none
        task()
        return None
    return thread


@suppress_errors("prometheus")
def say_if_unscraped() -> None:
    """Say at the end of a program under `run` that its metrics are lost, if they are."""
    where = RUNTIME.unscraped()
    if where is not None and RUNTIME.enforcement().source == "run":
        sys.stderr.write(UNSCRAPED.format(host=where[0], port=where[1]))
        sys.stderr.flush()


def flush_on_sigterm() -> None:
    """Flush on SIGTERM, and then end by it, unless the program uses the signal itself."""
    # Python permits handlers to be set in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        return
    # An application that handles the signal ends in a way of its own.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: Any) -> None:
    # At once: whoever sends it a second time does not want to wait.
    signal.signal(number, signal.SIG_DFL)
    # A handler runs between two instructions of whatever the main thread does, which may hold a
    # lock that a flush takes: a thread can wait for it. Not a daemon, or a program that comes
    # to its end meanwhile would end without the signal.
    thread = threading.Thread(target=_flush_and_raise, args=(number,), name="otel-limits-sigterm")
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on an interpreter that is shutting down starts none: the process ends
        # by itself, and flushes as it does.
        return


def _flush_and_raise(number: int) -> None:
    try:
        say_if_unscraped()
        flush()
    finally:
        # To the process and not to this thread; by now it has its default action again.
        os.kill(os.getpid(), number)
        # The first process of a container has no default action: Linux withholds the signal from
        # it, and the runtime would wait for the end of its grace period (pid_namespaces(7)).
        if os.getpid() == FIRST and signal.getsignal(number) is signal.SIG_DFL:
            os._exit(BY_SIGNAL + number)
