"""Tool calls of one invocation: admitted in request order, refused where a limit has none left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.core.facts import ToolCall
from otel_limits.core.limits import MAX_TOOL_CALLS_STOP_REASON, TREE_PREFIX, Breach

if TYPE_CHECKING:
    from otel_limits.core.facts import ToolStatus
    from otel_limits.runs.run import Run


class ToolCalls:
    """The tool calls of one invocation."""

    def __init__(self, run: Run) -> None:
        """Begin with none."""
        self._run = run
        self.by_tool: dict[str, int] = {}
        self.refusals: dict[str, Breach] = {}
        """The last refusal of each limit that refused one: it halts the agent after its turn."""
        self._published = self._kept = 0

    def admit(self, tool: str) -> Breach | None:
        """The model asks for a call of `tool`: count it, or say which limit refuses it."""
        run = self._run
        with run.runs.lock:
            # Looked at and counted in one step: parallel agents of a tree share what is left.
            breach = self._breach(tool)
            if breach is not None:
                self.refusals[breach.limit] = breach
                if run.policy.action != "observe":
                    run.tally.refused_tool_calls += 1
                    return breach
            self._count(tool, 1)
        return None

    def give_back(self, tool: str) -> None:
        """A call that was admitted did not run after all."""
        with self._run.runs.lock:
            self._count(tool, -1)

    def ended(
        self, tool: str, status: ToolStatus, seconds: float | None, fingerprint: str | None
    ) -> None:
        """A call is over, in its final attempt."""
        self._published += 1
        self._run.runs.observers.publish(
            ToolCall(
                invocation=self._run.invocation,
                number=self._published,
                tool=tool,
                status=status,
                seconds=seconds,
                fingerprint=fingerprint,
            )
        )

    def keep(self, tool: str, arguments: object, result: str, *, trigger: bool) -> None:
        """Keep a call that was answered, with its contents, where there is a tool log."""
        log = self._run.runs.tool_log
        if log is not None:
            self._kept += 1
            log.write(self._run.invocation, self._kept, tool, arguments, result, trigger=trigger)

    def _breach(self, tool: str) -> Breach | None:
        """Which limit has no call of `tool` left."""
        run = self._run
        limits, tree = run.policy.limits, run.tree
        per_tool = (limits.max_calls_per_tool or {}).get(tool)
        scopes = [
            ("max_calls_per_tool", per_tool, self.by_tool.get(tool, 0), tool),
            ("max_tool_calls", limits.max_tool_calls, run.tally.tool_calls, None),
        ]
        if tree is not None:
            cap = tree.limits.max_tool_calls
            scopes.append((TREE_PREFIX + "max_tool_calls", cap, tree.tally.tool_calls, None))
        for limit, cap, used, subject in scopes:
            if cap is not None and used >= cap:
                return Breach(limit, cap, used + 1, MAX_TOOL_CALLS_STOP_REASON, "calls", subject)
        return None

    def _count(self, tool: str, change: int) -> None:
        self.by_tool[tool] = self.by_tool.get(tool, 0) + change
        for tally in self._run.tallies:
            tally.tool_calls += change
