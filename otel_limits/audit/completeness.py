"""The one line under every answer: that its numbers are complete, and why, or what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.audit.formatting import written
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import dollars

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
    calls = (total.calls, total.input, total.output, total.pico, total.unpriced_tokens)
    found = balance(inquiry.connection, calls)
    # Halves of a sum are asked on two connections: between the two a call may have been recorded.
    return completeness(inquiry, found) if found.is_even else ""


def completeness(inquiry: Inquiry, found: Balance | None = None, unlike: int | None = None) -> str:
    """Say how complete the ledger is that an answer comes from, in one line.

    Args:
        inquiry: Which ledger.
        found: Its calls added up, where somebody did so already.
        unlike: How many rows are not as they should be, where somebody has looked at each.
    """
    from otel_limits.ledger.proof import balance
    from otel_limits.ledger.spill import orphans

    # Added up once for all: `verify` has the sums already, and they take seconds in a large ledger.
    found = found or balance(inquiry.connection)
    parts = [_verdict(found, unlike)]
    waiting = inquiry.waiting
    if waiting.rows:
        rows = pluralize(waiting.rows, "row waits", "rows wait")
        files = pluralize(len(waiting.files), "spill file")
        are = "is" if waiting.rows == 1 else "are"
        seen = f"{are} not in it ({waiting.unseen})" if waiting.unseen else f"{are} counted"
        parts.append(f"{rows} in {files} and {seen}")
    left = orphans(inquiry.address)
    if left:
        files = pluralize(len(left), "spill file belongs", "spill files belong")
        parts.append(f"{files} to no ledger that is there")
    if found.open_invocations:
        parts.append(
            pluralize(found.open_invocations, "invocation has no end", "invocations have no end")
        )
    parts += _unknown(found)
    return "; ".join(parts) + "."


def _verdict(found: Balance, unlike: int | None) -> str:
    if unlike:
        are = pluralize(unlike, "row is not as it", "rows are not as they")
        return f"NOT complete: {are} should be"
    if not found.is_even:
        return (
            f"NOT complete: calls and the totals of invocations differ by {_amounts(found)}; "
            f"otel-limits audit verify names the rows"
        )
    add = pluralize(found.calls.calls, "call of the ledger adds", "calls of the ledger add")
    sums = f"the {add} up to the totals of its {pluralize(found.invocations, 'invocation')}"
    if unlike is not None:
        return f"Complete: {sums}, one by one"
    # No more than is known: what one has too much, another may have too little.
    return f"Complete in sum: {sums}, all together; otel-limits audit verify compares each"


def _amounts(found: Balance) -> str:
    """By how much calls and totals differ."""
    missing = found.missing
    amounts = (
        (missing.calls, pluralize(abs(missing.calls), "call")),
        (missing.input, pluralize(abs(missing.input), "input token")),
        (missing.output, pluralize(abs(missing.output), "output token")),
        (missing.pico, f"${dollars(abs(missing.pico))}"),
    )
    return ", ".join(text for amount, text in amounts if amount)


def _unknown(found: Balance) -> list[str]:
    parts = []
    if found.unmeasured_calls:
        share = written(found.unmeasured_calls / found.calls.calls, "share")
        parts.append(f"{share} of the calls are unmeasured")
    if found.unpriced_tokens:
        share = written(found.unpriced_tokens / found.calls.tokens, "share")
        parts.append(f"{share} of the tokens are unpriced")
    return parts
