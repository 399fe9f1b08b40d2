"""What successful invocations cost, and what was spent on those that a limit halted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answers import Column, Table
from otel_limits.audit.backtest import SUCCESSES
from otel_limits.audit.sums import property_of
from otel_limits.ledger.rows import dollars
from otel_limits.ledger.words import OF_CALLS

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.audit.question import Inquiry

OUTCOMES: Final = (
    Column("invocations", "Invocations", "count"),
    Column("successful", "Successful", "count"),
    Column("cost_per_success_usd", "Cost of a successful one", "money", is_key=True),
    Column("halted", "Halted", "count", is_key=True),
    Column("wasted_usd", "Spent on halted ones", "money", is_key=True),
    Column("wasted_share", "Of all cost", "share"),
)


@dataclass(slots=True)
class Outcomes:
    """Invocations added up by how they ended, with their picodollars."""

    invocations: int = 0
    successful: int = 0
    halted: int = 0
    pico: int = 0
    success_pico: int = 0
    halted_pico: int = 0
    unpriced: int = 0
    """Model calls without a known price."""

    def add(self, sums: Sequence[Any]) -> None:
        """Add invocations that were summed elsewhere, in the order of the fields."""
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
        # Where nothing has a price, 0 would look as if it was free.
        return None if self.unpriced and not self.pico else dollars(pico)


def outcomes_table(inquiry: Inquiry, by: Sequence[str]) -> Table | None:
    """One row per group, the largest waste first; `None` where invocations cannot be selected so.

    They are not grouped by what they do not have, such as a model.
    """
    from otel_limits.ledger import outcomes

    names = [name for name in by if name not in OF_CALLS]
    if any(name in OF_CALLS for name, _ in inquiry.selection.where):
        return None
    zone, total = inquiry.selection.zone, Outcomes()
    groups: dict[tuple[Any, ...], Outcomes] = {}
    found = outcomes.outcomes(inquiry.connection, names, inquiry.selection, SUCCESSES)
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
        note="Invocations that began in the time that was asked for and have ended, with all "
        "that they cost themselves. A successful one came to its natural end; a halted one was "
        "ended by a limit.",
    )
