"""Repeated tool calls of an invocation: same arguments, same result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from otel_limits.audit.formatting import ranges
from otel_limits.ledger.rows import MICROSECONDS


@dataclass(slots=True)
class RepeatGroup:
    """Identical tool calls of one invocation, or all calls of a tool without hashes."""

    tool: str
    fingerprint: str | None
    calls: int = 0
    errors: int = 0
    micros: int = 0
    repeated_micros: int = 0
    """Duration of all calls but the first."""
    turns: list[int | None] = field(default_factory=list)
    """Turn of each call."""

    @property
    def repeats(self) -> int:
        """Calls that repeated an earlier one."""
        # Without a hash it is unknown whether two calls were identical.
        return self.calls - 1 if self.fingerprint is not None else 0

    @property
    def seconds(self) -> float:
        """Total duration in seconds."""
        return self.micros / MICROSECONDS

    def add(self, row: Any) -> None:
        """Add a call."""
        micros = int(row.duration_us or 0)
        # The first call was useful.
        self.repeated_micros += micros if self.calls else 0
        self.calls += 1
        self.errors += row.status == "error"
        self.micros += micros
        self.turns.append(row.turn)

    @property
    def in_turns(self) -> str | None:
        """The turns, e.g. `2-5, 9`; `None` if they were not recorded."""
        known = sorted({turn for turn in self.turns if turn is not None})
        return ranges(known) or None


def group_repeats(rows: Iterable[Any]) -> list[RepeatGroup]:
    """Group identical calls of one invocation; those without a hash by tool."""
    found: dict[tuple[str, str | None], RepeatGroup] = {}
    for row in rows:
        key = (row.tool, row.fingerprint)
        found.setdefault(key, RepeatGroup(*key)).add(row)
    return sorted(found.values(), key=lambda each: (-each.repeats, -each.calls, each.tool))
