"""The question `unmeasured`: calls whose tokens or rates the provider did not report."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import AuditQuery, Question
from otel_limits.core.terms import UNPLACED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COLUMNS: Final = (
    Column("agent", "Agent", is_key=True),
    Column("model", "Model", is_key=True),
    Column("reason", "Reason", "sentence", is_key=True),
    Column("calls", "Calls", "count", is_key=True),
    Column("tokens", "Tokens", "count"),
)
REASONS: Final = {
    "estimated": "the provider reported no usage, or only a part",
    "unmeasured": "the provider reported no usage",
    "interrupted": "the answer ended before its usage",
}
"""Why a call has no measured size, by its state."""


def unmeasured(inquiry: AuditQuery) -> Answer:
    """Answer which calls have estimated or unplaced tokens, and why."""
    from otel_limits.ledger.queries import unmeasured_calls

    inquiry.require_known()
    found = inquiry.work.through(unmeasured_calls(inquiry.connection, inquiry.selection))
    table = unmeasured_table(found)
    title = "Estimated and unmeasured calls"
    return Answer(question="unmeasured", title=title, about=inquiry.about, tables=[table])


def unmeasured_table(found: Iterable[Any]) -> Table:
    """Build a table by agent, model and reason, the most calls first."""
    calls, tokens = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for row in found:
        for reason in _reasons(row):
            key = (row.agent, row.model, reason)
            calls[key] += row.calls
            tokens[key] += int(row.tokens or 0)
    # By name for equal counts, so that the order is stable.
    in_order = sorted(calls, key=lambda key: (-calls[key], key))
    has_names = any(not reason.startswith(("estimated: ", "unmeasured: ")) for *_, reason in calls)
    names = " The reason contains the provider's names." if has_names else ""
    return Table(
        name="unmeasured",
        title="Calls without measured usage, or with tokens of unknown rates",
        columns=COLUMNS,
        rows=[(*key, calls[key], tokens[key]) for key in in_order],
        note="Estimated calls count an estimate, and unmeasured calls do not. Tokens of unknown "
        f"rates are counted, and their price is unknown.{names}",
    )


def _reasons(row: Any) -> Iterator[str]:
    if row.state in REASONS:
        yield f"{'estimated' if row.estimated else 'unmeasured'}: {REASONS[row.state]}"
    try:
        known = json.loads(row.price_basis or "{}")
    except (ValueError, RecursionError):  # a row that was edited by hand
        return
    reason = known.get(UNPLACED) if isinstance(known, dict) else None
    if isinstance(reason, str):
        yield reason


UNMEASURED: Final = Question(
    name="unmeasured",
    help="List calls without measured usage, or with tokens of unknown rates, and why.",
    answer=unmeasured,
    tables={"unmeasured": COLUMNS},
)
