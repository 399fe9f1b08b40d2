"""Flushes telemetry: on request, at exit, and on SIGTERM before the process ends."""

from __future__ import annotations

import _thread
import atexit
import functools
import multiprocessing
import multiprocessing.util
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


# --- SIGTERM --------------------------------------------------------------------------------------

FIRST: Final = 1
"""PID of the first process of a container."""
BY_SIGNAL: Final = 128
"""Added to a signal's number in the exit status of a process it ended."""
MARGIN_SECONDS: Final = 2.0
"""Time that a flush may take beyond its timeout before the process ends without it."""
BEGUN: Final = _thread.allocate_lock()
"""Held from the first signal on, which a child notices in two threads."""


def flush_on_sigterm() -> None:
    """Flush on SIGTERM before the process ends, unless the program handles the signal."""
    # Python sets handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
        _prepare_forks()
        # While a spawned child imports its main module, it has a name, but no parent yet.
        if multiprocessing.current_process().name != "MainProcess":
            _prepare_child()


def _end(number: int, _frame: Any) -> None:
    # A second signal ends the process immediately.
    signal.signal(number, signal.SIG_DFL)
    _flush_and_raise(number)


def _flush_and_raise(number: int) -> None:
    if not BEGUN.acquire(blocking=False):
        return
    # The main thread, which runs the handler, may hold any lock that a flush needs, or one of
    # `threading`. So other threads flush, and it waits for none of them.
    is_flushed = _thread.allocate_lock()
    is_flushed.acquire()
    try:
        _thread.start_new_thread(_flush, (is_flushed,))
        _thread.start_new_thread(_raise_when_flushed, (number, is_flushed))
    except RuntimeError:
        # Python 3.12 or later, during shutdown, which flushes as well. Otherwise there are too
        # many threads.
        if threading.main_thread().is_alive():
            os.kill(os.getpid(), number)
        return
    # A program that ends now still ends by the signal.
    atexit.register(time.sleep, _longest_flush_seconds())


def _flush(is_flushed: _thread.LockType) -> None:
    try:
        report_unscraped()
        flush()
    finally:
        is_flushed.release()


def _raise_when_flushed(number: int, is_flushed: _thread.LockType) -> None:
    # Not forever: a flush may need a lock whose thread a fork did not copy.
    is_flushed.acquire(timeout=_longest_flush_seconds())
    # To the process, where the signal has its default action again.
    os.kill(os.getpid(), number)
    # Linux does not deliver signals with the default action to the first process of a container
    # (pid_namespaces(7)), and the container runtime would wait for its grace period.
    if os.getpid() == FIRST and signal.getsignal(number) is signal.SIG_DFL:
        os._exit(BY_SIGNAL + number)


def _longest_flush_seconds() -> float:
    return otlp_timeout_seconds() + MARGIN_SECONDS


# --- child processes ------------------------------------------------------------------------------


@functools.cache
def _prepare_forks() -> None:
    """Lose no signal during a fork, nor in children of `multiprocessing`."""
    if not hasattr(os, "register_at_fork"):
        return
    forking = threading.local()

    # Python discards signals that a child receives before its fork is complete.
    def hold() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def deliver() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    os.register_at_fork(before=hold, after_in_parent=deliver, after_in_child=WATCHER.after_fork)
    os.register_at_fork(after_in_child=deliver)
    multiprocessing.util.register_after_fork(WATCHER, lambda _: _prepare_child())


def _prepare_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _end:
        WATCHER.start()
        # A worker that its pool lets end by itself does not run `atexit`.
        multiprocessing.util.Finalize(None, flush, exitpriority=0)


class Watcher:
    """Ends a child process on SIGTERM although its main thread does not run the handler.

    `multiprocessing.Pool` ends its workers with SIGTERM and waits for them. If the signal arrives
    just when a worker begins to wait for a lock of the pool, the C library keeps waiting, and
    Python does not run the handler. The same is true of other code in C that takes long.
    """

    def __init__(self) -> None:
        """Start without a thread."""
        self._writing = -1

    def start(self) -> None:
        """Start a thread, unless the program itself has signals written to a file descriptor."""
        if self._writing != -1:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            return
        self._writing = writing
        threading.Thread(
            target=self._watch, args=(reading,), name="otel-limits-sigterm", daemon=True
        ).start()

    def after_fork(self) -> None:
        """Stop writing signals to the parent."""
        if self._writing != -1:
            others = signal.set_wakeup_fd(-1)
            if others != self._writing:
                signal.set_wakeup_fd(others)
            self._writing = -1

    def _watch(self, reading: int) -> None:
        # A byte for each signal. The program may have set another handler.
        while (number := os.read(reading, 1)[0]) != signal.SIGTERM or _is_replaced():
            pass
        _restore_default(number)
        _flush_and_raise(number)


WATCHER: Final = Watcher()
"""The watcher of this process."""


def _is_replaced() -> bool:
    return signal.getsignal(signal.SIGTERM) is not _end


def _restore_default(number: int) -> None:
    """Restore the default action, as `signal.signal` does only in the main thread."""
    import ctypes  # most children are not ended by a signal

    ctypes.pythonapi.PyOS_setsig(number, None)
