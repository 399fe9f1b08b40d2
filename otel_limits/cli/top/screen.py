"""The screen: totals, agents, quotas, recent halts and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.text import Text

from otel_limits.audit.answer import UNKNOWN
from otel_limits.cli.show.layout import printable, shortened, wrapped
from otel_limits.cli.top.columns import (
    agent_table,
    bar,
    bound_text,
    clock,
    count,
    halts_text,
    money_of,
    name_of,
    percent,
    usd,
    warning_style,
)
from otel_limits.cli.top.view import ORDERS, View
from otel_limits.top.fleet_state import HOUR_SECONDS

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, Fleet, QuotaRow, RecentHalt

MAX_QUOTAS: Final = 3
MAX_HALTS: Final = 5
MAX_MESSAGE_LINES: Final = 4
MIN_ROWS: Final = 3
QUOTA_BAR: Final = 10

TERM: Final = 17
"""Width of the terms in the help."""
EXPLAINED: Final = (
    ("Running", "invocations in progress"),
    ("Turns, tokens", "per minute, over the last minute (5 minutes with --prometheus)"),
    ("USD/h", "per hour, over the last 5 minutes; ≥: some tokens have no price"),
    ("Share, %", "share of the fleet's spend"),
    ("Cap now", "highest cap utilization by running invocations, mean, of:"),
    ("", "max_turns, max_iterations and max_token_budget; idle: none is running"),
    ("Cap 1 h", "highest cap utilization by finished invocations, p95, last hour"),
    ("Halts, refusals", "in the last hour, or since the time shown above"),
    ("Refusals", "tool calls that a limit refused; the agent may continue"),
    ("Errors", "failed model calls and tool calls, in the same time"),
    (UNKNOWN, "not known yet"),
    ("", ""),
    ("↑ ↓ PgUp PgDn", "select an agent"),
    ("k", "kill its invocations (asks first)"),
    ("/", "filter agents by text or glob; Esc shows all"),
    (" ".join(ORDERS), f"sort by {', '.join(each.title for each in ORDERS.values())}"),
    ("", "press again to reverse"),
    ("q", "quit"),
)
"""The help page."""


def draw(fleet: Fleet, view: View, width: int, height: int) -> list[Text]:
    """Return the lines of the screen."""
    foot = footer(view, fleet, width)
    if view.mode == "help":
        return with_footer((), list(help_lines(width))[: height - len(foot)], foot, height)
    head = [*header(fleet, view, width), Text()]
    rows = view.rows(fleet)
    chosen = view.chosen_row(rows)
    below = [*detail(chosen, width), *quota_lines(fleet, width), *halt_lines(fleet, width)]
    room = max(height - len(head) - len(foot) - 1, 1)
    below = below[: max(0, room - min(len(rows), max(MIN_ROWS, room - len(below))))]
    body = [*agent_lines(rows, chosen, width, room - len(below)), *below]
    return with_footer(head, body[: height - len(head) - len(foot)], foot, height)


def with_footer(
    head: Sequence[Text], body: Sequence[Text], foot: Sequence[Text], height: int
) -> list[Text]:
    """Add the footer at the bottom of the screen."""
    blank = [Text()] * max(0, height - len(head) - len(body) - len(foot))
    return [*head, *body, *blank, *foot][:height]


def page(fleet: Fleet, width: int) -> list[Text]:
    """Return the lines for a file or pipe, without keys."""
    view = View()
    rows = view.rows(fleet)
    agents = agent_lines(rows, None, width, len(rows))
    rest = [*quota_lines(fleet, width, MAX_QUOTAS * 10), *halt_lines(fleet, width)]
    return [*header(fleet, view, width), Text(), *agents, *rest]


def header(fleet: Fleet, view: View, width: int) -> list[Text]:
    """Return the totals and all messages."""
    totals = fleet.totals
    available = sum(not error for error in fleet.feeds.values())
    feeds = f"{available} of {len(fleet.feeds)} addresses up" if fleet.feeds else "connecting"
    since = (
        "in the last hour"
        if fleet.at - fleet.halts_since >= HOUR_SECONDS
        else f"since {clock(fleet.halts_since)}"
    )
    rates = totals.rates
    spent = usd(rates.usd_per_hour, at_least=bool(rates.unpriced_tokens_per_minute))
    sums = (
        f"{count_of(totals.agents, 'agent')}, {count(totals.in_progress)} running · "
        f"{count(rates.turns_per_minute)} turns/min · "
        f"{count(rates.tokens_per_minute)} tokens/min · {spent}/h"
    )
    ended = f"{count_of(totals.halts, 'halt')}, {count_of(totals.refusals, 'refusal')}"
    sentences = [
        f"otel-limits top · {clock(fleet.at, seconds=True)} · {feeds}",
        sums,
        f"{ended}, {count_of(totals.errors, 'error')} {since}",
    ]
    lines = [Text(line, style="bold") for line in pack_lines(sentences, width)]
    if view.filter and view.mode != "filter":
        lines.append(Text(shortened(f"Filter: {view.filter}", width)))
    # Marked with a sign, as a terminal may have no colors.
    messages = [line for each in fleet.problems for line in wrapped(f"! {printable(each)}", width)]
    return [*lines, *(Text(line, style="yellow") for line in messages[:MAX_MESSAGE_LINES])]


def count_of(number: int, noun: str) -> str:
    """Format a number of things."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def pack_lines(sentences: Sequence[str], width: int) -> list[str]:
    """Join sentences into as few lines as possible."""
    lines: list[str] = []
    for sentence in sentences:
        if lines and len(lines[-1]) + 3 + len(sentence) <= width:
            lines[-1] += f" · {sentence}"
        else:
            lines += wrapped(sentence, width)
    return lines


def agent_lines(
    rows: Sequence[AgentRow], chosen: AgentRow | None, width: int, room: int
) -> Iterator[Text]:
    """Yield the part of the table that contains the chosen agent."""
    if not rows:
        yield Text("No agents.")
        return
    # The chosen row is in the middle.
    index = rows.index(chosen) if chosen is not None else 0
    first = max(0, min(index - room // 2, len(rows) - room))
    yield from agent_table(rows[first : first + room], chosen, width)


def detail(row: AgentRow | None, width: int) -> list[Text]:
    """Return all details of the chosen agent."""
    if row is None:
        return []
    now = ", ".join(f"{each.limit} {percent(each.share)}" for each in row.now)
    hour = ", ".join(f"{each.limit} {bound_text(each)}" for each in row.hour)
    refusals = ", ".join(f"{tool} {count(n)}" for tool, n in row.refusals.items())
    errors = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in row.errors.items())
    text = (
        f"{name_of(row)}: spend per hour {money_of(row)}, {percent(row.usd_share)} of the fleet · "
        f"caps now {now or UNKNOWN} · last hour {hour or UNKNOWN} · "
        f"halts {halts_text(row)} · refused calls {printable(refusals) or 0} · errors {errors or 0}"
    )
    return [Text(), *(Text(line, style="cyan") for line in wrapped(text, width))]


def quota_lines(fleet: Fleet, width: int, most: int = MAX_QUOTAS) -> list[Text]:
    """Return the quotas close to their limit."""
    if not fleet.quotas:
        return []
    shown = [quota_line(row, width) for row in fleet.quotas[:most]]
    left = len(fleet.quotas) - len(shown)
    more = f" (and {left} more)" if left else ""
    return [Text(), Text(f"Quotas close to their limit{more}", style="bold"), *shown]


def quota_line(row: QuotaRow, width: int) -> Text:
    """Return the usage of one quota key."""
    suffix = f" {percent(row.share):>4} of {count(row.limit)}, resets {clock(row.resets)}"
    name = printable(f"{row.quota} {row.key}".strip())
    room = max(8, width - len(suffix) - QUOTA_BAR - 1)
    line = Text(f"{shortened(name, room)} ")
    line.append(bar(row.share, QUOTA_BAR), style=warning_style(row.share))
    return line.append(suffix)


def halt_lines(fleet: Fleet, width: int) -> list[Text]:
    """Return the latest halts, newest first."""
    if not fleet.last_halts:
        return []
    shown = [Text(halt_line(each, width)) for each in fleet.last_halts[:MAX_HALTS]]
    return [Text(), Text("Last halts", style="bold"), *shown]


def halt_line(halt: RecentHalt, width: int) -> str:
    """Format a halt, with the start of its trace ID for `audit show`."""
    times = f" ({halt.count} times)" if halt.count > 1 else ""
    suffix = f"  {halt.reason}, {halt.action.replace('_', ' ')}{times}"
    trace = f"  trace {halt.trace_id}" if halt.trace_id else ""
    at = f"{clock(halt.at, seconds=True)}  "
    room = width - len(at) - len(suffix)
    if len(trace) > room - 16:
        trace = trace[:16]  # eight characters of the ID
    trace = trace if len(trace) <= room - 12 else ""
    name = shortened(printable(halt.agent) or "(no name)", max(4, room - len(trace)))
    return shortened(at + name + printable(suffix + trace), width, keep_beginning=True)


def footer(view: View, fleet: Fleet, width: int) -> list[Text]:
    """Return the prompt, the message of the last key, or the keys."""
    if view.mode == "filter":
        return [Text(shortened(f"/{view.typed}", width - 1)).append(" ", style="reverse")]
    if view.mode == "kill":
        row = view.chosen_row(view.rows(fleet))
        running = count(row.in_progress if row else None)
        question = (
            f"Kill the invocations of agent {view.chosen!r} ({running} running) in all processes "
            "that share the quota store? y/n"
        )
        return [Text(line, style="bold") for line in wrapped(printable(question), width)]
    if view.message:
        return [Text(line, style="bold") for line in wrapped(printable(view.message), width)]
    if view.mode == "help":
        return [Text("Press any key to return.", style="dim")]
    order = ORDERS[view.order].title + (", reversed" if view.is_reversed else "")
    keys = f"q quit  ? help  / filter  k kill  sorted by {order}: {' '.join(ORDERS)}"
    return [Text(shortened(keys, width, keep_beginning=True), style="dim")]


def help_lines(width: int) -> Iterator[Text]:
    """Yield the lines of the help page."""
    for term, meaning in EXPLAINED:
        for n, line in enumerate(wrapped(meaning, width - TERM)):
            yield Text((term if n == 0 else "").ljust(TERM), style="bold").append(
                line, style="not bold"
            )
