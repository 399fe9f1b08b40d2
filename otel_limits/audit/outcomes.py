"""Costs of successful invocations, and spend on halted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Column, Table
from otel_limits.audit.backtest import SUCCESSES
from otel_limits.audit.sums import property_of
from otel_limits.ledger.options import OF_CALLS
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.audit.question import AuditQuery

OUTCOMES: Final = (
    Column("invocations", "Invocations", "count"),
    Column("successful", "Successful", "count"),
    Column("cost_per_success_usd", "Cost per success", "money", is_key=True),
    Column("halted", "Halted", "count", is_key=True),
    Column("wasted_usd", "Halted cost", "money", is_key=True),
    Column("wasted_share", "Share of cost", "share"),
)


@dataclass(slots=True)
class Outcomes:
    """Invocations grouped by outcome, with their picodollars."""

    invocations: int = 0
    successful: int = 0
    halted: int = 0
    pico: int = 0
    success_pico: int = 0
    halted_pico: int = 0
    unpriced: int = 0
    """Model calls without a known price."""

    def add(self, sums: Sequence[Any]) -> None:
        """Add sums over further invocations, in the order of the fields."""
        for name, more in zip(self.__slots__, sums, strict=True):
            setattr(self, name, getattr(self, name) + int(more))

    @property
    def figures(self) -> tuple[Any, ...]:
        """The values of `OUTCOMES`."""
        # Whole picodollars: money is never a float.
        per_success = self.success_pico // self.successful if self.successful else None
        return (
            self.invocations,
            self.successful,
            self._usd(per_success),
            self.halted,
            self._usd(self.halted_pico),
            self.halted_pico / self.pico if self.pico else None,
        )

    def _usd(self, pico: int | None) -> Decimal | None:
        # If nothing has a price, 0 would look free.
        return None if self.unpriced and not self.pico else dollars(pico)


def outcomes_table(inquiry: AuditQuery, by: Sequence[str]) -> Table | None:
    """Build a table with one row per group, the highest halted cost first.

    Invocations are not grouped by what they lack, e.g. a model. Returns `None` if the selection is
    by such a property.
    """
    from otel_limits.ledger import queries

    names = [name for name in by if name not in OF_CALLS]
    if any(name in OF_CALLS for name, _ in inquiry.selection.where):
        return None
    zone, total = inquiry.selection.zone, Outcomes()
    groups: dict[tuple[Any, ...], Outcomes] = {}
    found = queries.outcomes(inquiry.connection, names, inquiry.selection, SUCCESSES)
    for keys, sums in found:
        key = tuple(property_of(keys, name, zone) for name in names)
        groups.setdefault(key, Outcomes()).add(sums)
        total.add(sums)
    ranked = sorted(
        groups.items(), key=lambda item: (-item[1].halted_pico, -item[1].pico, *map(str, item[0]))
    )
    return Table(
        name="outcomes",
        title="Invocations by " + ", ".join(names) if names else "Invocations",
        columns=(*inquiry.key_columns(names, OUTCOMES), *OUTCOMES),
        rows=[(*key, *each.figures) for key, each in ranked],
        total=("total", *("" for _ in names[1:]), *total.figures) if names else None,
        note="Finished invocations that started in the selected period, with their own cost. "
        "Successful ones ended naturally; halted ones were ended by a limit.",
    )
