"""The one line under every answer: that its numbers are complete, and why, or what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.audit.formatting import many, written

if TYPE_CHECKING:
    from otel_limits.audit.question import Inquiry
    from otel_limits.audit.sums import Sums
    from otel_limits.ledger.proof import Balance


def of_everything(inquiry: Inquiry, total: Sums) -> str:
    """Say how complete the ledger is, where `total` may be all of its calls; otherwise nothing."""
    from otel_limits.ledger.proof import balance

    selection = inquiry.selection
    if selection.where or (selection.since_us, selection.until_us) != (None, None):
        return ""
    calls = (total.calls, total.tokens, total.pico, total.unpriced_tokens)
    found = balance(inquiry.connection, calls)
    # Halves of a sum are asked on two connections: between the two a call may have been recorded.
    return completeness(inquiry, found) if found.is_even else ""


def completeness(inquiry: Inquiry, found: Balance | None = None) -> str:
    """Say how complete the ledger is that an answer comes from, in one line.

    Args:
        inquiry: Which ledger.
        found: Its calls added up, where somebody did so already.
    """
    from otel_limits.ledger.proof import balance
    from otel_limits.ledger.spill import orphans

    # Added up once for all: `verify` has the sums already, and they take seconds in a large ledger.
    found = found or balance(inquiry.connection)
    parts = [_verdict(found)]
    waiting = inquiry.waiting
    if waiting.rows:
        rows = many(waiting.rows, "row waits", "rows wait")
        files = many(len(waiting.files), "spill file", "spill files")
        are = "is" if waiting.rows == 1 else "are"
        seen = f"{are} not in it ({waiting.unseen})" if waiting.unseen else f"{are} counted"
        parts.append(f"{rows} in {files} and {seen}")
    left = orphans(inquiry.address)
    if left:
        files = many(len(left), "spill file belongs", "spill files belong")
        parts.append(f"{files} to no ledger that is there")
    if found.open_invocations:
        parts.append(
            many(found.open_invocations, "invocation has no end", "invocations have no end")
        )
    parts += _unknown(found)
    return "; ".join(parts) + "."


def _verdict(found: Balance) -> str:
    if found.is_even:
        add = many(found.calls.calls, "call of the ledger adds", "calls of the ledger add")
        invocations = many(found.invocations, "invocation", "invocations")
        return f"Complete: the {add} up to the totals of its {invocations}"
    tokens = found.calls.tokens - found.ended.tokens - found.open.tokens
    return (
        f"NOT complete: calls and the totals of invocations differ by {tokens:,} tokens; "
        f"otel-limits audit verify names the rows"
    )


def _unknown(found: Balance) -> list[str]:
    parts = []
    if found.unmeasured_calls:
        share = written(found.unmeasured_calls / found.calls.calls, "share")
        parts.append(f"{share} of the calls are unmeasured")
    if found.unpriced_tokens:
        share = written(found.unpriced_tokens / found.calls.tokens, "share")
        parts.append(f"{share} of the tokens are unpriced")
    return parts
