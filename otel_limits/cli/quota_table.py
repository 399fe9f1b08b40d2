"""The table of `otel-limits quotas`: usage and reset times."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from otel_limits.audit.answer import Column, Table
from otel_limits.cli.show.terminal_answer import fit
from otel_limits.core.wording import pluralize
from otel_limits.quotas.windows import shown_time
from otel_limits.top.fleet import NEAR_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.usage import Number
    from otel_limits.quotas.remaining import KeyUse, Uses

COLUMNS: Final = (
    Column("quota", "Quota", is_key=True),
    Column("key", "Key", is_key=True),
    Column("used", "Used", "count", is_key=True),
    Column("reserved", "Reserved", "count"),
    Column("left", "Left", "count", is_key=True),
    Column("limit", "Limit", "count"),
    Column("unit", "Unit", "date"),
    Column("resets", "Resets", "date"),
    Column("state", "State", "date", is_key=True),
)
"""Units, times and states are never truncated, like dates."""
CONVERSATIONS: Final = (
    Column("conversation", "Conversation", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("limit", "Limit", "date"),
    Column("used", "Used", "count", is_key=True),
    Column("cap", "Cap", "count", is_key=True),
    Column("unit", "Unit", "date"),
    Column("idle_since", "Idle since", "date"),
    Column("state", "State", "date", is_key=True),
)
NO_ROWS: Final = "No key of a quota matches, and no conversation is near a cap."
HASHES: Final = (
    "Values from baggage and attributes are shown as hashes, which a pattern for the values cannot "
    "match. Give the whole key, e.g. --key acme, or a pattern for its hash."
)
BLOCKED: Final = Column("blocked", "Block reason", is_key=True)
CHANGED: Final = Column("changed", "Limit changed by")


def table_of(uses: Uses, width: int | None = None) -> Text:
    """Render usage as tables; rows near their limit are highlighted.

    Args:
        uses: The rows.
        width: Columns of the terminal; `None` shows every column.
    """
    if not uses.rows and not uses.conversations:
        if uses.damaged:
            return Text("No other key can be shown.")
        return Text(f"{NO_ROWS} {HASHES}" if uses.is_pattern_of_hashes else NO_ROWS)
    shown = []
    if uses.rows:
        shown.append(_quotas(uses, width))
    if uses.conversations:
        shown.append(_conversations(uses, width))
    return Text("\n\n").join(shown)


def _quotas(uses: Uses, width: int | None) -> Text:
    states = [_state(row) for row in uses.rows]
    rows = [_cells(row, state) for row, (state, _) in zip(uses.rows, states, strict=True)]
    columns: tuple[Column, ...] = COLUMNS
    # A separate column: appended to a truncated key, neither would be readable.
    if any(row.blocked for row in uses.rows):
        columns = (*COLUMNS, BLOCKED)
        rows = [[*cells, row.blocked or ""] for cells, row in zip(rows, uses.rows, strict=True)]
    if any(row.has_changed_limit for row in uses.rows):
        columns = (*columns, CHANGED)
        by = ["operator" if row.has_changed_limit else "" for row in uses.rows]
        rows = [[*cells, each] for cells, each in zip(rows, by, strict=True)]
    shown = _rendered(columns, rows, [style for _, style in states], width)
    if uses.omitted:
        shown.append(f"\n{pluralize(uses.omitted, 'more key', 'more keys')} not shown (--top).")
    return shown


def _conversations(uses: Uses, width: int | None) -> Text:
    states = [_state_at(use.share) for use in uses.conversations]
    rows = [
        [
            *(use.conversation, use.agent, use.limit, _number(use.used), _number(use.cap)),
            *(use.unit, shown_time(use.idle_since), state),
        ]
        for use, (state, _) in zip(uses.conversations, states, strict=True)
    ]
    return _rendered(CONVERSATIONS, rows, [style for _, style in states], width)


def _rendered(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    styles: Sequence[str],
    width: int | None,
) -> Text:
    """Render a table with a style for each row."""
    layout = fit(Table(name="quotas", title="", columns=columns, rows=rows), width)
    shown = Text("\n").join(Text(line, style="bold") for line in layout.head)
    # Without a heading, each value has its own line, and the state is in the text.
    styles = styles if layout.head else [""] * len(layout.body)
    for line, style in zip(layout.body, styles, strict=True):
        shown.append("\n" if shown else "").append(line, style=style)
    if layout.left_out:
        titles = ", ".join(layout.left_out)
        hint = f"\nHidden columns: {titles}. Use --format json to see them."
        shown.append(hint, style="dim italic")
    return shown


def _cells(row: KeyUse, state: str) -> list[Any]:
    numbers = [_number(each) for each in (row.used, row.reserved, row.remaining, row.limit)]
    resets = "" if row.resets is None else shown_time(row.resets)
    return [row.quota, row.key, *numbers, row.unit, resets, state]


def _number(value: Number) -> Number:
    # Otherwise a Decimal could appear as 1E+1.
    return Decimal(f"{value:f}") if isinstance(value, Decimal) else value


def _state(row: KeyUse) -> tuple[str, str]:
    """Return the state of a key and its style."""
    if row.blocked is not None:
        return "blocked", "bold red"
    return _state_at(1 - float(row.remaining) / float(row.limit))


def _state_at(share: float) -> tuple[str, str]:
    """Return the state and style for a used share of a cap."""
    if share >= 1:
        return "used up", "bold red"
    return ("nearly used up", "yellow") if share >= NEAR_END else ("", "")
