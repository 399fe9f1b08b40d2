"""Problems in a ledger that `verify` finds, row by row, with examples."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from otel_limits.audit.answer import ranges
from otel_limits.core.secrets import redact_url
from otel_limits.core.wording import pluralize, shortest
from otel_limits.ledger.rows import dollars

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from otel_limits.audit.answer import Answer
    from otel_limits.audit.question import AuditQuery
    from otel_limits.ledger.proof import Balance

MAX_EXAMPLES: Final = 20
"""Examples per kind of problem."""

Trouble = tuple[str, str, str, str]
"""Kind of problem, the invocation or file, details, and the command that looks at it."""

DIFFERS: Final = "totals differ"
GAP: Final = "gap in the numbers"
TWICE: Final = "counted twice"
TOOLS: Final = "tool calls differ"
AGENT: Final = "agent differs"
METRICS: Final = "metrics differ"
KINDS: Final = (DIFFERS, GAP, TWICE, TOOLS, AGENT, METRICS)

SHOW: Final = "audit show {}"
EXPORT: Final = "ledger export --format csv --where invocation={}"
"""For rows without an invocation, which `show` does not find."""


def command_on(inquiry: AuditQuery, command: str, option: str = "--ledger") -> str:
    """Complete a command with the ledger, unless its address has a password."""
    address = inquiry.address
    if address.file is not None:
        name = str(address)
    elif urlsplit(address.url).password is None:
        name = address.name
    else:
        return f"otel-limits {command}"
    return f"otel-limits {command} {option} {shlex.quote(name)}"


class Findings:
    """Problems by kind, with examples.

    Attributes:
        found: Number of problems, by kind.
        named: The first of them, in full.
    """

    def __init__(self, inquiry: AuditQuery) -> None:
        """Start without problems."""
        self._inquiry = inquiry
        self.found: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.named: dict[str, list[Trouble]] = {kind: [] for kind in KINDS}

    def add(
        self, kind: str, name: str, describe: Callable[..., str], *of: Any, command: str = SHOW
    ) -> None:
        """Count a problem; only the first ones are described in full."""
        self.found[kind] += 1
        # A description queries the ledger again, up to a million times for a damaged one.
        if len(self.named[kind]) < MAX_EXAMPLES:
            command = command_on(self._inquiry, command.format(name))
            self.named[kind].append((kind, name, describe(*of), command))

    def command_for(self, kind: str) -> str:
        """Return the command that looks at the first problem of a kind; empty without any."""
        return self.named[kind][0][-1] if self.named[kind] else ""


def find_all(inquiry: AuditQuery, balance: Balance, suspects: int, findings: Findings) -> None:
    """Find inconsistent rows; `suspects` is the number of inconsistent invocations."""
    from otel_limits.ledger import proof

    connection = inquiry.connection
    # Only if the sums indicate any: listing them reads every call.
    for row in proof.suspects(connection) if suspects else ():
        _suspect(connection, row, findings)
    # Only then: finding invocations without calls reads all of them.
    if findings.found[DIFFERS] or not balance.is_balanced:
        for row in proof.without_calls(connection):
            detail = f"0 of {pluralize(row.model_calls, 'call')} found".format
            findings.add(DIFFERS, row.id, detail)
    for row in proof.counted_twice(connection):
        detail = "imported row {} is the same as row {}".format
        findings.add(TWICE, row.invocation_id, detail, row.id, row.live_id)
    for row in proof.tool_suspects(connection):
        _suspect_tools(row, findings)


def _suspect(connection: Connection, row: Any, findings: Findings) -> None:
    """Find the problems of an invocation and its calls."""
    name, is_live = str(row.invocation_id), row.source == "live"
    if row.id is None:
        detail = f"{pluralize(row.calls, 'call has', 'calls have')} no invocation".format
        findings.add(DIFFERS, name, detail, command=EXPORT)
        return
    if not row.first_agent == row.last_agent == row.agent:
        of_calls = sorted({row.first_agent, row.last_agent} - {row.agent})
        detail = "calls of {}, invocation of {}".format
        findings.add(AGENT, name, detail, " and ".join(of_calls), row.agent)
    if is_live and row.numbered != row.calls:
        findings.add(TWICE, name, _doubles, connection, name)
    # An invocation in progress may have gaps and differing sums.
    if row.ended_us is None:
        return
    if is_live and row.last != row.numbered:
        findings.add(GAP, name, _gaps, connection, name)
    expected = [getattr(row, column) or 0 for column in RECORDED_TOTALS]
    actual = [int(getattr(row, column)) for column in SUMS_OF_CALLS]
    *counts, cost = (a - b for a, b in zip(actual, expected, strict=True))
    # The sum of rounded prices may differ from the rounded sum by one picodollar for each call.
    if any(counts) or abs(cost) > row.calls:
        detail = "recorded totals {}; sums of its calls {}".format
        findings.add(DIFFERS, name, detail, _amounts(expected), _amounts(actual))


RECORDED_TOTALS: Final = (
    "model_calls", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens",
    "recorded_unpriced", "price_pico",
)  # fmt: skip
SUMS_OF_CALLS: Final = (
    "calls", "input", "output", "cache_read", "cache_write", "unpriced_calls", "pico"
)  # fmt: skip


def _suspect_tools(row: Any, findings: Findings) -> None:
    """Find the problem of an invocation and its tool calls."""
    name = str(row.invocation_id)
    if row.id is None:
        detail = pluralize(row.rows, "tool call has", "tool calls have")
        findings.add(TOOLS, name, f"{detail} no invocation".format, command=EXPORT)
    elif row.rows is not None and row.last != row.numbered:
        findings.add(TOOLS, name, f"{row.numbered} of {row.last} found".format)
    else:
        ran = pluralize(row.ran or 0, "tool call", "tool calls")
        findings.add(TOOLS, name, f"{row.tool_calls} recorded; {ran} found".format)


def _amounts(totals: Sequence[int]) -> str:
    calls, sent, received, read, written_to_cache, unpriced, pico = totals
    tokens = pluralize(sent + received, "token")
    cached = f", {read:,} cached, {written_to_cache:,} written" if read or written_to_cache else ""
    without = f", {unpriced:,} unpriced" if unpriced else ""
    return (
        f"{pluralize(calls, 'call')}{without}, {tokens} ({sent:,} of input{cached}), "
        f"${shortest(dollars(pico) or 0)}"
    )


def _doubles(connection: Connection, name: str) -> str:
    from otel_limits.ledger.proof import unnumbered

    found = unnumbered(connection, name)
    rows = ", ".join(map(str, found))
    have = "row {} has" if len(found) == 1 else "rows {} have"
    return f"{have.format(rows)} the number of another call"


def _gaps(connection: Connection, name: str) -> str:
    from otel_limits.ledger.proof import numbers

    return f"existing: {ranges(numbers(connection, name))}"


def add_differences(compared: Answer, prometheus: str, findings: Findings) -> str:
    """Add differences between ledger and metrics; returns what was compared."""
    detail = "{}: {} in the ledger, {} to {} in Prometheus".format
    figures = 0
    for table in compared.tables:
        names = [column.name for column in table.columns]
        for values in table.rows:
            figures += 1
            row = dict(zip(names, values, strict=True))
            if row["accepted"] == "no":
                of = f"{row['agent']}, {row.get('model', row.get('reason'))}"
                both = (row["ledger"], row["prometheus"], row["prometheus_most"])
                command = f"audit reconcile --prometheus {shlex.quote(redact_url(prometheus))}"
                findings.add(
                    METRICS, of, detail, row.get("measure", table.name), *both, command=command
                )
    return f"Prometheus agrees for the last day: {pluralize(figures, 'figure')}"
