"""Tool calls of one invocation: admitted in request order, refused where a limit is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.core.events import ToolCall
from otel_limits.core.limits import MAX_TOOL_CALLS_STOP_REASON, Breach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.events import ToolStatus
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.scope import Scope


class ToolCalls:
    """The tool calls of one invocation."""

    def __init__(self, scope: Scope) -> None:
        """Create an empty record."""
        self._scope = scope
        self.by_tool: dict[str, int] = {}
        self._of_turn: tuple[int, dict[str, int]] = (0, {})
        """The last turn with tool calls, and its calls by tool."""
        self._published = self._logged = 0

    @property
    def of_turn(self) -> dict[str, int]:
        """Calls by tool in the last turn, whose results are in the next request."""
        turn, called = self._of_turn
        # Only of this very turn: after a response without tools there are no results.
        return called if turn == self._scope.tally.turns else {}

    def admit(self, tool: str) -> Breach | None:
        """Count a requested call of `tool`, or return the limit that refuses it."""
        scope = self._scope
        with scope.services.lock:
            # Checked and counted in one step: parallel agents of a tree share the rest.
            for breach, budget in self._spent(tool):
                # Also when only observed: the check after the turn reports it.
                scope.refusals[breach.limit] = breach, budget
                if budget.policy.action != "observe":
                    scope.tally.refused_tool_calls += 1
                    return breach
            self._count(tool, 1)
        return None

    def release(self, tool: str) -> None:
        """Uncount an admitted call that did not run."""
        with self._scope.services.lock:
            self._count(tool, -1)

    def record(
        self, tool: str, status: ToolStatus, seconds: float | None, fingerprint: str | None
    ) -> None:
        """Publish the final attempt of a call."""
        self._published += 1
        called = self.of_turn
        called[tool] = called.get(tool, 0) + 1
        self._of_turn = (self._scope.tally.turns, called)
        self._scope.services.observers.publish(
            ToolCall(
                invocation=self._scope.invocation,
                number=self._published,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
                turn=self._scope.tally.turns,
            )
        )

    def log(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Write an answered call with its contents to the tool log, if there is one."""
        log = self._scope.services.tool_log
        if log is not None:
            # Numbered separately: refused calls are published but not logged.
            self._logged += 1
            log.write(
                self._scope.invocation, self._logged, tool, arguments, result, trigger=trigger
            )

    def _spent(self, tool: str) -> Iterator[tuple[Breach, Budget]]:
        """Yield every limit that allows no further call of `tool`, with its budget."""
        scope = self._scope
        per_tool = (scope.policy.limits.max_calls_per_tool or {}).get(tool)
        caps: list[tuple[str, int | None, int, str | None, Budget]] = [
            ("max_calls_per_tool", per_tool, self.by_tool.get(tool, 0), tool, scope.budget)
        ]
        for budget in scope.budgets:
            limit = budget.prefix + "max_tool_calls"
            cap = budget.policy.limits.max_tool_calls
            caps.append((limit, cap, budget.tally.tool_calls, None, budget))
        for limit, cap, used, subject, budget in caps:
            if cap is not None and used >= cap:
                reason = MAX_TOOL_CALLS_STOP_REASON
                origin = budget.policy.origin_of(limit, subject)
                # One more than used, because the refused call would have exceeded the cap.
                breach = Breach(limit, cap, used + 1, reason, "calls", subject, origin=origin)
                yield breach, budget

    def _count(self, tool: str, change: int) -> None:
        self.by_tool[tool] = self.by_tool.get(tool, 0) + change
        for budget in self._scope.budgets:
            budget.tally.tool_calls += change
