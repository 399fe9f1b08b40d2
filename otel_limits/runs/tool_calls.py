"""The tool calls of an invocation: admitted or refused by its limits, counted, published."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_limits.core.events import ToolCall
from otel_limits.core.halt_texts import refused_turns_note
from otel_limits.core.limits import MAX_TOOL_CALLS_STOP_REASON, Breach

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_limits.core.events import ToolStatus
    from otel_limits.runs.account import Account
    from otel_limits.runs.budget import Budget

REFUSED_TURNS: Final = 3
"""Consecutive turns with nothing but refused requests that halt the agent."""


class ToolAdmission(NamedTuple):
    """The decision about a requested tool call."""

    refusal: Breach | None = None
    """The limit that refuses it."""
    limit: str | None = None
    """The name of the limit that refuses it, or would refuse it if it were not only observed."""


ADMITTED: Final = ToolAdmission()


class ToolCalls:
    """The tool calls of one invocation."""

    def __init__(self, account: Account) -> None:
        """Create an empty record."""
        self._account = account
        self.by_tool = account.task.calls_by_tool
        self._of_turn: tuple[int, dict[str, int]] = (0, {})
        """The last turn with tool calls, and its calls by tool."""
        self._published = self._logged = 0

    @property
    def of_turn(self) -> dict[str, int]:
        """Calls by tool in the last turn, whose results are in the next request."""
        turn, called = self._of_turn
        # Only of this very turn: after a response without tools there are no results.
        return called if turn == self._account.tally.turns else {}

    def admit_tool(self, tool: str) -> ToolAdmission:
        """Count a requested call of `tool`, unless a limit refuses it."""
        account, observed = self._account, None
        with account.services.lock:
            # Checked and counted in one step: parallel agents of a tree share the rest.
            for breach, budget in self._spent(tool):
                # Also when only observed: the check after the turn reports it.
                if breach.subject is None or not account.policy.refuses_only(tool):
                    account.refusals[breach.limit] = breach, budget
                if budget.policy.action != "observe":
                    account.tally.refused_tool_calls += 1
                    return ToolAdmission(breach, breach.limit)
                observed = observed or breach.limit
            self._count(tool, 1)
        return ToolAdmission(None, observed) if observed else ADMITTED

    def end_turn(self, admitted: Sequence[ToolAdmission]) -> None:
        """Halt the agent after turns in which every request was refused by the cap of a tool.

        Args:
            admitted: The decisions about the requests of a turn.
        """
        if not admitted:  # a turn that requests no tool is neither
            return
        refusals = [each.refusal for each in admitted if each.refusal is not None]
        task, is_refused = self._account.task, len(refusals) == len(admitted)
        task.refused_turns = task.refused_turns + 1 if is_refused else 0
        if task.refused_turns >= REFUSED_TURNS:
            breach = refusals[-1]
            self.halt_by(replace(breach, note=refused_turns_note(breach, task.refused_turns)))

    def halt_by(self, breach: Breach) -> None:
        """Halt the agent by a limit that has refused a tool call."""
        with self._account.services.lock:
            self._account.refusals[breach.limit] = breach, self._account.budget

    def release(self, tool: str) -> None:
        """Uncount an admitted call that did not run."""
        with self._account.services.lock:
            self._count(tool, -1)

    def record(
        self,
        tool: str,
        status: ToolStatus,
        seconds: float | None,
        fingerprint: str | None,
        limit: str | None = None,
        *,
        is_handoff: bool = False,
    ) -> None:
        """Publish the final attempt of a call."""
        self._published += 1
        self._account.handoffs.count = self._account.handoffs.count + 1 if is_handoff else 0
        called = self.of_turn
        called[tool] = called.get(tool, 0) + 1
        self._of_turn = (self._account.tally.turns, called)
        self._account.services.observers.publish(
            ToolCall(
                invocation=self._account.invocation,
                number=self._published,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
                turn=self._account.part.turns,
                limit=limit,
            )
        )

    def log(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Write an answered call with its contents to the tool log, if there is one."""
        log = self._account.services.tool_log
        if log is not None:
            # Numbered separately: refused calls are published but not logged.
            self._logged += 1
            log.write(
                self._account.invocation, self._logged, tool, arguments, result, trigger=trigger
            )

    def _spent(self, tool: str) -> Iterator[tuple[Breach, Budget]]:
        """Yield every limit that allows no further call of `tool`, with its budget."""
        account = self._account
        per_tool = (account.policy.limits.max_calls_per_tool or {}).get(tool)
        caps: list[tuple[str, int | None, int, str | None, Budget]] = [
            ("max_calls_per_tool", per_tool, self.by_tool.get(tool, 0), tool, account.budget)
        ]
        for budget in account.budgets:
            limit = budget.prefix + "max_tool_calls"
            cap = budget.policy.limits.max_tool_calls
            caps.append((limit, cap, budget.tally.tool_calls, None, budget))
        for limit, cap, used, subject, budget in caps:
            if cap is not None and used >= cap:
                reason = MAX_TOOL_CALLS_STOP_REASON
                origin = budget.policy.origin_of(limit, subject)
                # One more than used, because the refused call would have exceeded the cap.
                breach = Breach(limit, cap, used + 1, reason, "tool calls", subject, origin=origin)
                yield budget.over_resumes(breach), budget

    def _count(self, tool: str, change: int) -> None:
        self.by_tool[tool] = self.by_tool.get(tool, 0) + change
        for budget in self._account.budgets:
            budget.tally.tool_calls += change
