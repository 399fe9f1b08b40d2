"""Tool calls of one invocation: admitted in request order, refused where a limit has none left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.core.events import ToolCall
from otel_limits.core.limits import MAX_TOOL_CALLS_STOP_REASON, Breach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.core.events import ToolStatus
    from otel_limits.core.policy import Reached
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.run import Run


class ToolCalls:
    """The tool calls of one invocation."""

    def __init__(self, run: Run) -> None:
        """Begin with none."""
        self._run = run
        self.by_tool: dict[str, int] = {}
        self.refusals: dict[str, tuple[Breach, Budget]] = {}
        """The last refusal of each limit that refused one: it halts the agent after its turn."""
        self._of_turn: tuple[int, dict[str, int]] = (0, {})
        """The last turn with calls, and how often it called each tool."""
        self._published = self._kept = 0

    @property
    def of_turn(self) -> dict[str, int]:
        """How often the last turn called each tool: the next request has the results."""
        turn, called = self._of_turn
        # Of this very turn: a response without tools has no results for the request after it.
        return called if turn == self._run.tally.turns else {}

    def admit(self, tool: str) -> Breach | None:
        """The model asks for a call of `tool`: count it, or say which limit refuses it."""
        run = self._run
        with run.services.lock:
            # Looked at and counted in one step: parallel agents of a tree share what is left.
            for breach, budget in self._spent(tool):
                # Also where it is only observed: the judgement after the turn tells of it there.
                self.refusals[breach.limit] = breach, budget
                if budget.policy.action != "observe":
                    run.tally.refused_tool_calls += 1
                    return breach
            self._count(tool, 1)
        return None

    def release(self, tool: str) -> None:
        """A call that was admitted did not run after all."""
        with self._run.services.lock:
            self._count(tool, -1)

    def record(
        self, tool: str, status: ToolStatus, seconds: float | None, fingerprint: str | None
    ) -> None:
        """A call is over, in its final attempt."""
        self._published += 1
        called = self.of_turn
        called[tool] = called.get(tool, 0) + 1
        self._of_turn = (self._run.tally.turns, called)
        self._run.services.observers.publish(
            ToolCall(
                invocation=self._run.invocation,
                number=self._published,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
                turn=self._run.tally.turns,
            )
        )

    def log(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Keep a call that was answered, with its contents, where there is a tool log."""
        log = self._run.services.tool_log
        if log is not None:
            # A number of its own, as a refused call is told and not kept.
            self._kept += 1
            log.write(self._run.invocation, self._kept, tool, arguments, result, trigger=trigger)

    def reached(self) -> list[Reached]:
        """Every limit that has refused a call, and what its owner does about that."""
        return [(breach, budget.policy.action) for breach, budget in self.refusals.values()]

    def _spent(self, tool: str) -> Iterator[tuple[Breach, Budget]]:
        """Every limit that has no call of `tool` left, and the budget that it is of."""
        run = self._run
        per_tool = (run.policy.limits.max_calls_per_tool or {}).get(tool)
        scopes: list[tuple[str, int | None, int, str | None, Budget]] = [
            ("max_calls_per_tool", per_tool, self.by_tool.get(tool, 0), tool, run.budget)
        ]
        for budget in run.budgets:
            limit = budget.prefix + "max_tool_calls"
            cap = budget.policy.limits.max_tool_calls
            scopes.append((limit, cap, budget.tally.tool_calls, None, budget))
        for limit, cap, used, subject, budget in scopes:
            if cap is not None and used >= cap:
                reason = MAX_TOOL_CALLS_STOP_REASON
                origin = budget.policy.origin_of(limit, subject)
                # One more than was used: it is the call that was refused that would have passed the
                # cap.
                breach = Breach(limit, cap, used + 1, reason, "calls", subject, origin=origin)
                yield breach, budget

    def _count(self, tool: str, change: int) -> None:
        self.by_tool[tool] = self.by_tool.get(tool, 0) + change
        for budget in self._run.budgets:
            budget.tally.tool_calls += change
