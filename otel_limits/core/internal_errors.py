"""Errors inside otel-limits: counted, logged at most once a minute, never raised into the agent."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("otel_limits")

LOG_INTERVAL_SECONDS = 60.0
"""An error at every token of a stream would flood the application's log."""


class ErrorReporter:
    """Counts and logs suppressed errors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a reporter with nothing counted."""
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.unreported: list[str] = []
        """Components whose errors could not be published yet."""
        self.publish: Callable[[str], None] = lambda component: None  # noqa: ARG005
        self.publish_lapse: Callable[[str], None] = lambda sentence: None  # noqa: ARG005
        """Reports a call without limits, and why."""

    def report(self, component: str, error: BaseException, sentence: str | None = None) -> None:
        """Count an error of `component`, and log it unless one was logged within the last minute.

        This is the last line of defense: it never raises.

        Args:
            component: The component that failed.
            error: The error.
            sentence: The consequence, if it is not just that the component was skipped.
        """
        try:
            # Counted before it is logged, because the application's log handlers may raise.
            self.publish(component)
            self.report_deferred()
            self._log(component, error, sentence)
        except RecursionError:  # deep in a runaway, no stack frames are left to publish it
            self.unreported.append(component)
        except Exception:  # noqa: BLE001, S110  nothing is left to report it to
            pass

    def report_lapse(self, component: str, error: BaseException) -> None:
        """Report that limits were not enforced on a call, because of an error of `component`."""
        with contextlib.suppress(Exception):  # as above
            self.publish_lapse(
                f"{component} failed with {_kind_and_line(error)}, so a call was not limited. "
                "Correct the binding, or upgrade otel-limits."
            )

    def forget_logged(self) -> None:
        """Log the next error of each component, however recent its last one was.

        A person who disables and enables again may have corrected something in between.
        """
        self._logged.clear()

    def report_deferred(self) -> None:
        """Count the errors that could not be published at the time."""
        # Popped before it is published: an error in publishing would otherwise repeat forever.
        while self.unreported:
            self.publish(self.unreported.pop())

    def _log(self, component: str, error: BaseException, sentence: str | None) -> None:
        # Without a lock: at worst, two threads log the same error once each.
        now = self._clock()
        if now - self._logged.get(component, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return
        self._logged[component] = now
        logger.error(
            "otel-limits: %s; the agent continues. Further errors are counted in "
            "otel_limits_internal_errors_total and logged at most once a minute.",
            sentence or f"{component} failed with {_kind_and_line(error)} and was skipped",
            # Log the traceback at DEBUG only: in the application's log it looks like a crash of its
            # agent.
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )


def _kind_and_line(error: BaseException) -> str:
    """Return the class of an error and where it was raised, without its text: it may be secret."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return type(error).__name__
    code = traceback.tb_frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{type(error).__name__} in {code.co_name} ({file}:{traceback.tb_lineno})"


INTERNAL_ERRORS = ErrorReporter()


def suppress_errors(
    component: str, is_lapse: Callable[[], object] = lambda: False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Suppress and report errors; return `None` on failure.

    Args:
        component: The component.
        is_lapse: Whether what follows an error has no limits, although it should.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  errors must not reach the agent
                report_suppressed(component, error)
                if is_lapse():
                    INTERNAL_ERRORS.report_lapse(component, error)
                return None

        return guarded

    return decorate


def suppress_lapses(
    component: str, is_limited: Callable[[], object] = lambda: True
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Do the same for a function that begins what is limited: after an error, nothing limits it.

    Args:
        component: The component.
        is_limited: Whether anything would have limited it.
    """
    return suppress_errors(component, is_limited)


def suppress_errors_async(
    component: str,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R | None]]]:
    """Do the same for a coroutine function; cancellation is not an error."""

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | None]]:
        @functools.wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                # CancelledError is a BaseException, so it passes through, as it must.
                return await function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  errors must not reach the agent
                report_suppressed(component, error)
                return None

        return guarded

    return decorate


def report_suppressed(component: str, error: Exception) -> None:
    """Report a suppressed error, however deep in the stack."""
    try:
        INTERNAL_ERRORS.report(component, error)
    except RecursionError:  # deep in a runaway, no stack frame is left even to call `report`
        INTERNAL_ERRORS.unreported.append(component)
