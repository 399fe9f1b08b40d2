"""The table of `otel-limits quotas`: how much of each is used, and when it begins again."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from otel_limits.audit.answers import Column, Table
from otel_limits.cli.show.layout import fit
from otel_limits.core.wording import pluralize
from otel_limits.quotas.windows import shown_time
from otel_limits.top.fleet import NEAR_END

if TYPE_CHECKING:
    from otel_limits.quotas.key_use import KeyUse, Uses

COLUMNS: Final = (
    Column("quota", "Quota", is_key=True),
    Column("key", "Key", is_key=True),
    Column("used", "Used", "count", is_key=True),
    Column("reserved", "Reserved", "count"),
    Column("left", "Left", "count", is_key=True),
    Column("limit", "Limit", "count"),
    Column("unit", "Unit", "date"),
    Column("resets", "Begins again", "date"),
    Column("state", "State", "date", is_key=True),
)
"""Units, times and states are kept whole, as dates are: half of one says nothing."""
BLOCKED: Final = Column("blocked", "Blocked for", is_key=True)


def table_of(uses: Uses, width: int | None = None) -> Text:
    """Lay rows out as a table; one that is nearly used up is coloured, and says so.

    Args:
        uses: What is shown.
        width: Columns of the terminal; without one nothing is left out.
    """
    states = [_state(row) for row in uses.rows]
    rows = [_cells(row, state) for row, (state, _) in zip(uses.rows, states, strict=True)]
    columns: tuple[Column, ...] = COLUMNS
    # In a column of its own: at the end of a key that is shortened nobody could read either.
    if any(row.blocked for row in uses.rows):
        columns = (*COLUMNS, BLOCKED)
        rows = [[*cells, row.blocked or ""] for cells, row in zip(rows, uses.rows, strict=True)]
    layout = fit(Table(name="quotas", title="", columns=columns, rows=rows), width)
    shown = Text("\n").join(Text(line, style="bold") for line in layout.head)
    # Without a heading each value has a line of its own, and its state says what a colour would.
    styles = [style for _, style in states] if layout.head else [""] * len(layout.body)
    for line, style in zip(layout.body, styles, strict=True):
        shown.append("\n" if shown else "").append(line, style=style)
    if layout.left_out:
        titles = ", ".join(layout.left_out)
        shown.append(f"\nNo room for: {titles}. --format json has them.", style="dim italic")
    if uses.omitted:
        one, several = "key further from its end is", "keys further from their end are"
        shown.append(f"\n{pluralize(uses.omitted, one, several)} not shown (--top).")
    return shown


def _cells(row: KeyUse, state: str) -> list[Any]:
    numbers = [_plain(each) for each in (row.used, row.reserved, row.remaining, row.limit)]
    resets = "" if row.resets is None else shown_time(row.resets)
    return [row.quota, row.key, *numbers, row.unit, resets, state]


def _plain(number: Any) -> Any:
    # A Decimal would be shown as 1E+1 otherwise.
    return Decimal(f"{number:f}") if isinstance(number, Decimal) else number


def _state(row: KeyUse) -> tuple[str, str]:
    """Say what a key permits, or how near it is to its end, in words and in a colour."""
    if row.blocked is not None:
        return "blocked", "bold red"
    share = 1 - float(row.remaining) / float(row.limit)
    if share >= 1:
        return "used up", "bold red"
    return ("nearly used up", "yellow") if share >= NEAR_END else ("", "")
