"""The line about completeness below an answer, and the table of tokens that are not counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.audit.answer import Column, Table, written
from otel_limits.audit.findings import command_on
from otel_limits.core.wording import pluralize
from otel_limits.ledger.options import OF_CALLS
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa

    from otel_limits.audit.question import AuditQuery
    from otel_limits.audit.sums import Sums
    from otel_limits.ledger.proof import Balance


# --- the line under an answer ---------------------------------------------------------------------

NOT_PROVEN: Final = "changes are only ruled out by comparing with a close (--against)"
UNRECORDED: Final = "rows that a process lost on a full disk are only in its log"


def of_everything(inquiry: AuditQuery, total: Sums) -> str:
    """Describe completeness if `total` covers all calls of the ledger; otherwise return nothing."""
    from otel_limits.ledger.proof import balance

    selection = inquiry.selection
    if selection.where or (selection.since_us, selection.until_us) != (None, None):
        return ""
    calls = (total.calls, total.input, total.output, total.pico, total.unpriced_tokens)
    found = balance(inquiry.connection, calls)
    # Halves of a sum come from two connections: a call may have been recorded in between.
    return completeness(inquiry, found) if found.is_balanced else ""


def completeness(
    inquiry: AuditQuery,
    found: Balance | None = None,
    failed: Sequence[str] | None = None,
    proven: str = "",
) -> str:
    """Describe in one line how complete the ledger is.

    Args:
        inquiry: The query.
        found: Sums of its calls, if already known.
        failed: The checks that failed, if each row was checked.
        proven: Which days are as in closes, if the rows were compared with some.
    """
    from otel_limits.ledger.maintenance import damages
    from otel_limits.ledger.proof import balance
    from otel_limits.ledger.spill import find_orphans

    # Added up once: `verify` has the sums already, and they take seconds in a large ledger.
    found = found or balance(inquiry.connection)
    damaged = sum(each.lines for each in damages(inquiry.connection) if each.accepted is None)
    gaps = list(filter(None, (pruned_clause(inquiry), uncounted_clause(inquiry.connection))))
    parts = [_verdict(found, failed, damaged, proven or NOT_PROVEN, gaps)]
    if inquiry.waiting.is_partial:
        parts.append(str(inquiry.waiting))
    left = find_orphans(inquiry.address)
    if left:
        files = pluralize(len(left), "spill file has no ledger", "spill files have no ledger")
        parts.append(files)
    if found.open_invocations:
        parts.append(
            pluralize(found.open_invocations, "invocation has no end", "invocations have no end")
        )
    parts += _unknown(inquiry, found)
    return ". ".join(parts) + "."


def _verdict(
    found: Balance,
    failed: Sequence[str] | None,
    damaged: int,
    proven: str,
    gaps: Sequence[str],
) -> str:
    rest = "".join(f". {gap[0].upper()}{gap[1:]}" for gap in gaps)
    if failed:
        checks = pluralize(len(failed), "check")
        return f"NOT complete: {checks} failed ({'; '.join(failed)}){rest}"
    if not found.is_balanced:
        return (
            f"NOT complete: calls and invocation totals differ by {_amounts(found)}; "
            f"`otel-limits audit verify` lists the rows{rest}"
        )
    if damaged:
        lines = pluralize(damaged, "damaged line")
        return (
            f"NOT complete: {lines} of spill files lost; `otel-limits audit verify` lists them"
            f"{rest}"
        )
    add = pluralize(found.calls.calls, "call adds", "calls add")
    sums = f"{add} up to the totals of {pluralize(found.invocations, 'invocation')}"
    if failed is not None:
        verdict = f"Incomplete: {' and '.join(gaps)};" if gaps else "Complete:"
        return f"{verdict} {sums}, each verified; consistent; {proven}; {UNRECORDED}"
    # Only in sum: an excess in one may hide a shortfall in another.
    verdict = f"Incomplete: {' and '.join(gaps)};" if gaps else "Totals of the whole ledger match:"
    return f"{verdict} {sums}. `otel-limits audit verify` checks each row"


def _amounts(found: Balance) -> str:
    """Describe by how much calls and totals differ."""
    missing = found.missing
    amounts = (
        (missing.calls, pluralize(abs(missing.calls), "call")),
        (missing.input, pluralize(abs(missing.input), "input token")),
        (missing.output, pluralize(abs(missing.output), "output token")),
        (missing.pico, f"${dollars(abs(missing.pico))}"),
    )
    return ", ".join(text for amount, text in amounts if amount)


def _unknown(inquiry: AuditQuery, found: Balance) -> list[str]:
    parts = []
    unknown = {"estimated": found.estimated_calls, "unmeasured": found.unmeasured_calls}
    for word, calls in unknown.items():
        if calls:
            parts.append(f"{written(calls / found.calls.calls, 'share')} of calls are {word}")
    if found.unpriced_tokens:
        share = written(found.unpriced_tokens / found.calls.tokens, "share")
        parts.append(f"{share} of tokens are unpriced: {_how_to_price(inquiry)}")
    return parts


def _how_to_price(inquiry: AuditQuery) -> str:
    """Return the command that prices the calls, or what it needs first."""
    from otel_limits.core.price_lookup import Prices, missing_prices
    from otel_limits.settings.policy.file import usable_document

    command = command_on(inquiry, "ledger reprice")
    if not Prices(usable_document()[0].price_list()).available:
        return f"`{command}` {missing_prices().removesuffix('.')}"
    return f"run `{command}`, which lists the models that need a price in the policy file"


# --- rows that were pruned ------------------------------------------------------------------------


def pruned_us(inquiry: AuditQuery) -> int | None:
    """Return the time before which rows were pruned, if the query covers an earlier time."""
    from otel_limits.ledger.maintenance import pruned_before

    before = pruned_before(inquiry.connection)
    is_reached = before is not None and inquiry.selection.reaches_before(before)
    return before if is_reached else None


def pruned_clause(inquiry: AuditQuery) -> str:
    """Describe which rows of the queried time were pruned; empty if none were."""
    before = pruned_us(inquiry)
    return "" if before is None else f"rows before {written(before, 'time')} UTC were pruned"


# --- tokens that are not counted ------------------------------------------------------------------

UNCOUNTED: Final = (
    Column("agent", "Agent"),
    Column("span", "Span", is_key=True),
    Column("cause", "Cause", "sentence", is_key=True),
    Column("spans", "Spans", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
)
MOST_ROWS: Final = 10
MOST_CAUSES: Final = 3
"""Causes that the clause names."""


def uncounted_table(inquiry: AuditQuery) -> Table | None:
    """Build a table of the spans with the most tokens, and one row for the rest.

    Returns `None` if there is none, or if the selection is by a property of calls.
    """
    from otel_limits.ledger.queries import uncounted, uncounted_sums

    if any(each.name in OF_CALLS for each in inquiry.selection.where):
        return None
    spans, tokens = uncounted_sums(inquiry.connection, inquiry.selection)
    if not spans:
        return None
    found = uncounted(inquiry.connection, inquiry.selection, MOST_ROWS)
    rows = [(*keys, count, int(each)) for *keys, count, each in found]  # a Decimal in PostgreSQL
    shown, shown_tokens = (sum(row[place] for row in rows) for place in (-2, -1))
    if shown < spans:
        rows.append(("(others)", "", "", spans - shown, tokens - shown_tokens))
    return Table(
        name="uncounted",
        title="Tokens that are not counted",
        columns=UNCOUNTED,
        rows=rows,
        total=("total", "", "", spans, tokens),
        note="Imported spans report these tokens, and none of the model calls has them.",
    )


def uncounted_clause(connection: sa.Connection) -> str:
    """Describe how many tokens are not counted in a ledger, and why; empty if there are none."""
    from otel_limits.ledger.queries import uncounted_by_cause, uncounted_sums
    from otel_limits.ledger.selection import Selection

    spans, tokens = uncounted_sums(connection, Selection())
    if not spans:
        return ""
    causes = [each.cause for each in uncounted_by_cause(connection, MOST_CAUSES + 1)]
    why = "; ".join(causes[:MOST_CAUSES]) + ("; …" if len(causes) > MOST_CAUSES else "")
    told = pluralize(tokens, "token")
    spans_were = pluralize(spans, f"span with {told} was", f"spans with {told} were")
    return f"{spans_were} not counted ({why})"
