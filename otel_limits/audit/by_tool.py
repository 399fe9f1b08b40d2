"""Costs of model calls by the tools whose results they received, and the tools' own calls.

A request with the results of several tools is split among them, by how often each was called in the
turn before. Whole tokens and picodollars are split, so the parts add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Column
from otel_limits.audit.sums import property_of
from otel_limits.ledger.options import AFTER_TOOLS
from otel_limits.ledger.rows import MICROSECONDS, tools_in

if TYPE_CHECKING:
    from otel_limits.audit.question import AuditQuery
    from otel_limits.audit.sums import SummedCalls

TOOL: Final = "tool"
NO_TOOL: Final = "(no tool)"
NOT_RECORDED: Final = "(not recorded)"

TOOL_FIGURES: Final = (
    Column("tool_calls", "Tool calls", "count"),
    Column("tool_errors", "Tool errors", "count"),
    Column("tool_seconds", "Tool time", "seconds"),
)
NOTE: Final = (
    "Each tool has the cost of the model calls that received its results. A call with results of "
    f"several tools is split by how often each was called. {NO_TOOL} is the first call of an "
    f"invocation and side calls; {NOT_RECORDED} is imported calls."
)


@dataclass(slots=True)
class ToolUse:
    """Sums over calls of a tool."""

    calls: int = 0
    errors: int = 0
    micros: int = 0

    @property
    def figures(self) -> tuple[int, int, float]:
        """The values of `TOOL_FIGURES`."""
        return self.calls, self.errors, self.micros / MICROSECONDS

    def add(self, calls: int, errors: int, micros: int) -> None:
        """Add sums over further calls."""
        self.calls += calls
        self.errors += errors
        self.micros += micros


UseByGroup = Mapping[tuple[Any, ...], ToolUse]


def shared(rows: SummedCalls) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    """Split sums of model calls among the tools whose results they received."""
    for keys, sums in rows:
        text = keys[AFTER_TOOLS]
        # Weighted by how often each was called.
        tools = tools_in(text or "")
        if not tools:
            # Empty means none; null means unknown, as in imported calls.
            yield {**keys, TOOL: NOT_RECORDED if text is None else NO_TOOL}, sums
            continue
        parts = zip(*(shares(each, list(tools.values())) for each in sums), strict=True)
        for tool, part in zip(tools, parts, strict=True):
            yield {**keys, TOOL: tool}, part


def shares(amount: int | None, weights: Sequence[int]) -> Sequence[int | None]:
    """Split an amount by weights into whole parts that add up to it."""
    if amount is None:
        return [None] * len(weights)
    whole, parts, sofar, done = sum(weights), [], 0, 0
    # Cumulative sums, so that rounding remainders carry over.
    for weight in weights:
        sofar += weight
        upto = int(amount) * sofar // whole
        parts.append(upto - done)
        done = upto
    return parts


def uses_of(inquiry: AuditQuery, by: Sequence[str]) -> UseByGroup | None:
    """Add up calls of tools; `None` if grouped or selected by a property of model calls."""
    from otel_limits.ledger import queries

    found = queries.tool_uses(inquiry.connection, by, inquiry.selection)
    # A selection by model does not apply to tools, and no number is better than a wrong one.
    if found is None:
        return None
    uses: dict[tuple[Any, ...], ToolUse] = {}
    for keys, (calls, errors, micros) in found:
        key = tuple(property_of(keys, name, inquiry.selection.zone) for name in by)
        uses.setdefault(key, ToolUse()).add(calls, errors, int(micros))
    return uses
