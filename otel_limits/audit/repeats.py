"""Tool calls of an invocation that are equal to an earlier one: same arguments, same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from otel_limits.audit.formatting import ranges
from otel_limits.ledger.rows import MICROSECONDS


@dataclass(slots=True)
class Alike:
    """Calls of one invocation that are equal to each other, or one that is not told apart."""

    tool: str
    fingerprint: str | None
    calls: int = 0
    errors: int = 0
    micros: int = 0
    repeated_micros: int = 0
    """Those of all calls but the first."""
    turns: list[int | None] = field(default_factory=list)
    """In which each was called."""

    @property
    def repeats(self) -> int:
        """Calls that a call before them made needless."""
        # Without a hash nobody knows whether two calls were equal.
        return self.calls - 1 if self.fingerprint is not None else 0

    @property
    def seconds(self) -> float:
        """How long all of them took."""
        return self.micros / MICROSECONDS

    def add(self, row: Any) -> None:
        """Add a call."""
        micros = int(row.duration_us or 0)
        # Of all but the first: that one was of use.
        self.repeated_micros += micros if self.calls else 0
        self.calls += 1
        self.errors += row.status == "error"
        self.micros += micros
        self.turns.append(row.turn)

    @property
    def in_turns(self) -> str | None:
        """The turns, such as `2-5, 9`; `None` where they were not recorded."""
        known = sorted({turn for turn in self.turns if turn is not None})
        return ranges(known) or None


def alike(rows: Iterable[Any]) -> list[Alike]:
    """Gather calls of one invocation that are equal; those without a hash by their tool."""
    found: dict[tuple[str, str | None], Alike] = {}
    for row in rows:
        key = (row.tool, row.fingerprint)
        found.setdefault(key, Alike(*key)).add(row)
    # What repeats itself most comes first, as that is what is looked for.
    return sorted(found.values(), key=lambda each: (-each.repeats, -each.calls, each.tool))


def calls_by_turn(groups: Iterable[Alike]) -> Mapping[int, int]:
    """How many tool calls each turn made."""
    counts: dict[int, int] = {}
    for group in groups:
        for turn in group.turns:
            if turn is not None:
                counts[turn] = counts.get(turn, 0) + 1
    return counts


def cost_after(
    group: Alike, counts: Mapping[int, int], turns: Mapping[int, Any]
) -> tuple[int, int, bool]:
    """What model calls used that got the results of repeated calls.

    A request with the results of several tool calls is shared among them.

    Args:
        group: Calls that are equal.
        counts: Tool calls of each turn of the invocation.
        turns: What the model calls of each turn used.

    Returns:
        Tokens, picodollars, and whether any price is known.
    """
    tokens = pico = 0
    is_known = False
    # The first call was of use, and what followed it is not the price of repeating.
    for turn in group.turns[1:] if group.repeats else ():
        # The next turn is the one that was sent the results.
        following = turns.get(turn + 1) if turn is not None else None
        if turn is not None and following is not None:
            tokens += int(following.tokens) // counts[turn]
            pico += int(following.price_pico or 0) // counts[turn]
            is_known |= following.price_pico is not None
    return tokens, pico, is_known
