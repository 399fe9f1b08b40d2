"""The time limit of one invocation: its own, or that of a budget tree if that comes first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.core.policy import Verdict
    from otel_limits.runs.scope import Scope


class TimeLimit:
    """The next deadline of one invocation."""

    def __init__(self, scope: Scope, check_limits: Callable[[], Verdict | None]) -> None:
        """Create a time limit that is not running yet."""
        self._scope = scope
        self._check_limits = check_limits
        self._number: int | None = None
        self._observed_until = -math.inf
        """Deadlines until this moment have been published as would-be halts."""

    @suppress_errors("deadlines")
    def start(self) -> None:
        """Schedule the deadline; call again after a limit was extended."""
        self.cancel()
        scope, services = self._scope, self._scope.services
        # Without those already published as would-be halts, which would be published forever.
        ends = [
            end
            for budget in scope.budgets
            if (seconds := budget.policy.limits.max_duration_seconds) is not None
            and (end := _end(budget.started, seconds)) > self._observed_until
        ]
        if ends and scope.cancel is not None:
            self._number = services.clock.schedule(min(ends), self._time_is_up)

    def cancel(self) -> None:
        """Cancel the deadline."""
        # Reset first, because the deadline's own callback gets here as well.
        number, self._number = self._number, None
        if number is not None:
            self._scope.services.clock.cancel(number)

    @suppress_errors("deadlines")
    def _time_is_up(self) -> None:
        # Checked again: a person may have extended the limit since the callback was due.
        scope, verdict = self._scope, self._check_limits()
        if verdict is None or scope.cancel is None:
            return
        if verdict.action != "observe":
            scope.cancel(verdict)
            return
        scope.halt(verdict, "observed")  # halted now in enforcement, whatever it waits for
        self._observed_until = scope.services.now()
        self.start()  # an enclosing tree may have a deadline that acts


def _end(started: float, seconds: float) -> float:
    """Return the first moment at which the elapsed time is `seconds`, despite rounding."""
    end = started + seconds
    return end if end - started >= seconds else math.nextafter(end, math.inf)
