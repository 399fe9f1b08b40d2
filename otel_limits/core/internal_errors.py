"""Our own failures: counted, logged at most once a minute, never felt by the agent."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("otel_limits")

LOG_INTERVAL_SECONDS = 60.0
"""What fails at every token of a stream would flood the log of the application."""


class ErrorReporter:
    """Where every swallowed failure goes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing counted."""
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.unreported: list[str] = []
        """Components whose failure could not be told at the time."""
        self.publish: Callable[[str], None] = lambda component: None  # noqa: ARG005

    def report(self, component: str, error: BaseException, sentence: str | None = None) -> None:
        """Count a failure of `component`, and log it unless one was logged within the minute.

        This is the last line of defence, so that nothing that it calls may get out of it.

        Args:
            component: What failed.
            error: With what.
            sentence: What that means, where more is known than that it was skipped.
        """
        try:
            # Counted before it is logged: handlers of the application may raise, and the count must
            # stand.
            self.publish(component)
            self.report_deferred()
            self._log(component, error, sentence)
        except RecursionError:  # a runaway, deep down: there is no frame left to tell anybody
            self.unreported.append(component)
        except Exception:  # noqa: BLE001, S110  there is nobody left to tell
            pass

    def report_deferred(self) -> None:
        """Count what could not be told at the time."""
        # Popped before it is told: a fault in telling would otherwise be told for ever.
        while self.unreported:
            self.publish(self.unreported.pop())

    def _log(self, component: str, error: BaseException, sentence: str | None) -> None:
        # Without a lock: at worst two threads log the same fault once more.
        now = self._clock()
        if now - self._logged.get(component, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return
        self._logged[component] = now
        logger.error(
            "otel-limits: %s; the agent goes on. Further failures of it are counted in "
            "otel_limits_internal_errors_total and logged at most once a minute.",
            sentence or f"{component} failed with {type(error).__name__} and was skipped",
            # A traceback of ours in the log of the application reads like a crash of its agent.
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )


INTERNAL_ERRORS = ErrorReporter()


def suppress_errors(component: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Keep every failure of a function away from its caller, who gets `None` instead."""

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the agent must not feel any of them
                report_suppressed(component, error)
                return None

        return guarded

    return decorate


def suppress_errors_async(
    component: str,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R | None]]]:
    """Do the same for a coroutine function; being cancelled is not a failure."""

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | None]]:
        @functools.wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                # CancelledError is a BaseException, so that it passes through here, as it must.
                return await function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the agent must not feel any of them
                report_suppressed(component, error)
                return None

        return guarded

    return decorate


def report_suppressed(component: str, error: Exception) -> None:
    """Report a failure that was kept away from the agent, however deep down it was."""
    try:
        INTERNAL_ERRORS.report(component, error)
    except RecursionError:  # a runaway, deep down: no frame is left even to call `report`
        INTERNAL_ERRORS.unreported.append(component)
