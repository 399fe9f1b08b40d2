"""Spend on successful, halted, killed, failed and lost invocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.audit.sums import property_of
from otel_limits.ledger.options import OF_CALLS
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.audit.question import AuditQuery

OUTCOMES: Final = (
    Column("invocations", "Invocations", "count"),
    Column("successful", "Successful", "count", is_key=True),
    Column("halted", "Halted", "count", is_key=True),
    Column("killed", "Killed", "count"),
    Column("failed", "Failed", "count"),
    Column("lost", "Lost", "count"),
    Column("interrupted", "Interrupted", "count"),
    Column("unknown", "Unknown", "count"),
    Column("spent_on_successful_usd", "Spent on successful", "money"),
    Column("spent_on_halted_usd", "Spent on halted", "money", is_key=True),
    Column("spent_on_killed_usd", "Spent on killed", "money"),
    Column("spent_on_failed_usd", "Spent on failed", "money", is_key=True),
    Column("spent_on_lost_usd", "Spent on lost", "money"),
    Column("spent_on_interrupted_usd", "Spent on interrupted", "money"),
    Column("spent_on_unknown_usd", "Spent on unknown", "money"),
    Column("own_cost_per_success_usd", "Own cost per success", "money"),
    Column("total_cost_per_success_usd", "Total cost per success", "money", is_key=True),
    Column("unsuccessful_share", "Unsuccessful share of cost", "share"),
)
KINDS: Final = ("successful", "halted", "killed", "failed", "lost", "interrupted", "unknown")
"""Each ended invocation is exactly one of these."""
UNDECIDED: Final = ("interrupted", "unknown")
"""Those that are neither successful nor unsuccessful."""


@dataclass(slots=True)
class Outcomes:
    """Ended invocations by outcome, with their cost in picodollars."""

    counts: Counter[str] = field(default_factory=Counter)
    pico: Counter[str] = field(default_factory=Counter)
    unpriced: int = 0
    """Model calls without a known price."""

    def add(self, outcome: str, invocations: int, pico: int, unpriced: int) -> None:
        """Add invocations of an outcome."""
        self.counts[outcome] += invocations
        self.pico[outcome] += pico
        self.unpriced += unpriced

    @property
    def unsuccessful(self) -> int:
        """Picodollars of those that had an end, and no natural one."""
        others = ("successful", *UNDECIDED)
        return self.pico.total() - sum(self.pico[kind] for kind in others)

    @property
    def figures(self) -> tuple[Any, ...]:
        """The values of `OUTCOMES`."""
        successful, of_successful, total = (
            self.counts["successful"],
            self.pico["successful"],
            self.pico.total(),
        )
        decided = of_successful + self.unsuccessful
        return (
            self.counts.total(),
            *(self.counts[kind] for kind in KINDS),
            *(self._usd(self.pico[kind]) for kind in KINDS),
            # Whole picodollars: money is never a float.
            self._usd(of_successful // successful if successful else None),
            self._usd(total // successful if successful else None),
            self.unsuccessful / decided if decided else None,
        )

    def _usd(self, pico: int | None) -> Decimal | None:
        # If nothing has a price, 0 would look free.
        return None if self.unpriced and not self.pico.total() else dollars(pico)


def outcomes_table(inquiry: AuditQuery, by: Sequence[str]) -> Table | None:
    """Build a table with one row per group, the highest unsuccessful cost first.

    Invocations are not grouped by what they lack, e.g. a model. Returns `None` if the selection is
    by such a property.
    """
    from otel_limits.bindings.known import successes
    from otel_limits.ledger import queries

    names = [name for name in by if name not in OF_CALLS]
    if any(each.name in OF_CALLS for each in inquiry.selection.where):
        return None
    zone, total = inquiry.selection.zone, Outcomes()
    groups: dict[tuple[Any, ...], Outcomes] = {}
    found = queries.outcomes(inquiry.connection, names, inquiry.selection, successes())
    for keys, (outcome, *sums) in found:
        key = tuple(property_of(keys, name, zone) for name in names)
        for each in (groups.setdefault(key, Outcomes()), total):
            each.add(outcome, *map(int, sums))

    def rank(item: tuple[tuple[Any, ...], Outcomes]) -> tuple[Any, ...]:
        return (-item[1].unsuccessful, -item[1].pico.total(), *map(str, item[0]))

    ranked = sorted(groups.items(), key=rank)
    return Table(
        name="outcomes",
        title="Invocations by " + ", ".join(names) if names else "Invocations",
        columns=(*inquiry.key_columns(names, OUTCOMES), *OUTCOMES),
        rows=[(*key, *each.figures) for key, each in ranked],
        total=("total", *("" for _ in names[1:]), *total.figures) if names else None,
        note="Finished invocations that started in the selected period, with their own cost. "
        "Successful ones ended naturally, halted ones were ended by a limit, killed ones on "
        "request, lost ones by `otel-limits ledger end-lost`; interrupted ones wait, e.g. for a "
        "person's answer, with which another invocation continues. The end of an import may be "
        "unknown. All others failed. The unsuccessful share is that of known ends.",
    )
