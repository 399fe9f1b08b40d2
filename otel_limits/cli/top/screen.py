"""The whole screen: totals, agents, quotas near their end, the last halts, and what keys do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.text import Text

from otel_limits.audit.formatting import UNKNOWN
from otel_limits.cli.show.layout import printable, shortened, wrapped
from otel_limits.cli.top.columns import (
    AgentTable,
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
from otel_limits.top.follower import HOUR_SECONDS

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, Fleet, QuotaRow, RecentHalt

MOST_QUOTAS: Final = 3
MOST_HALTS: Final = 5
MOST_TROUBLES: Final = 4
FEWEST_ROWS: Final = 3
QUOTA_BAR: Final = 10

TERM: Final = 17
"""Columns of what is explained."""
EXPLAINED: Final = (
    ("Running", "invocations in progress"),
    ("Turns, tokens", "a minute, over the last minute, or 5 minutes from a Prometheus"),
    ("USD/h", "an hour, over the last 5 minutes; ≥: some tokens have no price; no price: none has"),
    ("Share, %", "of what the whole fleet spends"),
    ("Cap now", "how much of the nearest cap is used by what is running, on average, of:"),
    ("", "max_turns, max_iterations and max_token_budget"),
    ("Cap 1 h", "how much of the nearest cap 95% of the invocations used that ended, at most"),
    ("Halts, errors", "of the last hour, or since the time that stands above"),
    ("Errors", "model calls and tool calls that failed"),
    (UNKNOWN, "is not known, or not yet"),
    ("", ""),
    ("↑ ↓ PgUp PgDn", "choose an agent"),
    ("k", "end its invocations, after a question"),
    ("/", "show only agents with this in their name, or that fit a glob; Esc: all"),
    (" ".join(ORDERS), f"sort by {', '.join(each.title for each in ORDERS.values())}"),
    ("", "the same key again: the other way round"),
    ("q", "leave"),
)
"""The page of help."""


def draw(fleet: Fleet, view: View, width: int, height: int) -> list[Text]:
    """Write the screen, a line of text for each line of the terminal."""
    foot = footer(view, fleet, width)
    if view.mode == "help":
        return with_footer((), list(help_lines(width))[: height - len(foot)], foot, height)
    head = [*header(fleet, view, width), Text()]
    rows = view.rows(fleet)
    chosen = view.chosen_row(rows)
    below = [*detail(chosen, width), *quota_lines(fleet, width), *halt_lines(fleet, width)]
    room = max(height - len(head) - len(foot) - 1, 1)
    below = below[: max(0, room - min(len(rows), max(FEWEST_ROWS, room - len(below))))]
    body = [*agent_lines(rows, chosen, width, room - len(below)), *below]
    return with_footer(head, body[: height - len(head) - len(foot)], foot, height)


def with_footer(
    head: Sequence[Text], body: Sequence[Text], foot: Sequence[Text], height: int
) -> list[Text]:
    """Put the foot to the lower end."""
    blank = [Text()] * max(0, height - len(head) - len(body) - len(foot))
    return [*head, *body, *blank, *foot][:height]


def page(fleet: Fleet, width: int) -> list[Text]:
    """Write the same for a file or a pipe: everything, and nothing that keys could change."""
    view = View()
    rows = view.rows(fleet)
    agents = agent_lines(rows, None, width, len(rows))
    rest = [*quota_lines(fleet, width, MOST_QUOTAS * 10), *halt_lines(fleet, width)]
    # More of them than on a screen, and not without end: a fleet may have a thousand keys.
    return [*header(fleet, view, width), Text(), *agents, *rest]


def header(fleet: Fleet, view: View, width: int) -> list[Text]:
    """Write totals, since when halts are known, and every sentence that has to be read."""
    totals = fleet.totals
    answering = sum(1 for said in fleet.feeds.values() if not said)
    asked = f"{answering} of {len(fleet.feeds)} addresses answer" if fleet.feeds else "asking"
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
    # In the order of columns; each is whole, on a line of its own where there is no room.
    sentences = [
        f"otel-limits top · {clock(fleet.at, seconds=True)} · {asked}",
        sums,
        f"{count_of(totals.halts, 'halt')}, {count_of(totals.errors, 'error')} {since}",
    ]
    lines = [Text(line, style="bold") for line in pack_lines(sentences, width)]
    if view.filter and view.mode != "filter":
        lines.append(Text(shortened(f"Only agents that fit: {view.filter}", width)))
    # With a sign in front, as a terminal may have no yellow.
    told = [line for each in fleet.problems for line in wrapped(f"! {printable(each)}", width)]
    return [*lines, *(Text(line, style="yellow") for line in told[:MOST_TROUBLES])]


def count_of(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def pack_lines(sentences: Sequence[str], width: int) -> list[str]:
    """Put sentences on as few lines as they need."""
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
    """Write the table of agents, that part of it in which the chosen one is."""
    if not rows:
        yield Text("No agent to show.")
        return
    table = AgentTable(rows, width)
    yield table.head()
    # The chosen row in the middle, so that one sees what is above and below it.
    place = rows.index(chosen) if chosen is not None else 0
    first = max(0, min(place - room // 2, len(rows) - room))
    for row in rows[first : first + room]:
        line = table.line(row)
        if row is chosen:
            # The name alone: a bar whose colours are turned round says the opposite.
            line.stylize("reverse", 0, table.name_width)
        yield line


def detail(row: AgentRow | None, width: int) -> list[Text]:
    """Write everything about the chosen agent, also what has no room in its row."""
    if row is None:
        return []
    now = ", ".join(f"{each.limit} {percent(each.share)}" for each in row.now)
    hour = ", ".join(f"{each.limit} {bound_text(each)}" for each in row.hour)
    errors = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in row.errors.items())
    told = (
        f"{name_of(row)}: spend per hour {money_of(row)}, {percent(row.usd_share)} of the fleet · "
        f"caps now {now or UNKNOWN} · last hour {hour or UNKNOWN} · "
        f"halts {halts_text(row)} · errors {errors or 0}"
    )
    return [Text(), *(Text(line, style="cyan") for line in wrapped(told, width))]


def quota_lines(fleet: Fleet, width: int, most: int = MOST_QUOTAS) -> list[Text]:
    """Write the quotas that are nearly used up."""
    if not fleet.quotas:
        return []
    shown = [quota_line(row, width) for row in fleet.quotas[:most]]
    left = len(fleet.quotas) - len(shown)
    more = f" (and {left} more)" if left else ""
    return [Text(), Text(f"Quotas near their end{more}", style="bold"), *shown]


def quota_line(row: QuotaRow, width: int) -> Text:
    """Write how one key of a quota stands."""
    behind = f" {percent(row.share):>4} of {count(row.limit)}, begins again {clock(row.resets)}"
    name = printable(f"{row.quota} {row.key}".strip())
    room = max(8, width - len(behind) - QUOTA_BAR - 1)
    line = Text(f"{shortened(name, room)} ")
    line.append(bar(row.share, QUOTA_BAR), style=warning_style(row.share))
    return line.append(behind)


def halt_lines(fleet: Fleet, width: int) -> list[Text]:
    """Write the last halts, the newest first."""
    if not fleet.last_halts:
        return []
    shown = [Text(halt_line(each, width)) for each in fleet.last_halts[:MOST_HALTS]]
    return [Text(), Text("Last halts", style="bold"), *shown]


def halt_line(halt: RecentHalt, width: int) -> str:
    """Write one halt; the beginning of its trace is what `audit show` finds it by."""
    times = f" ({halt.count} times)" if halt.count > 1 else ""
    behind = f"  {halt.reason}, {halt.action.replace('_', ' ')}{times}"
    trace = f"  trace {halt.trace_id}" if halt.trace_id else ""
    at = f"{clock(halt.at, seconds=True)}  "
    room = width - len(at) - len(behind)
    if len(trace) > room - 16:
        trace = trace[:16]  # with eight characters of it
    trace = trace if len(trace) <= room - 12 else ""
    name = shortened(printable(halt.agent) or "(no name)", max(4, room - len(trace)))
    return shortened(at + name + printable(behind + trace), width, keep_beginning=True)


def footer(view: View, fleet: Fleet, width: int) -> list[Text]:
    """Write what is asked, or what the last key did, or what keys there are."""
    if view.mode == "filter":
        return [Text(shortened(f"/{view.typed}", width - 1)).append(" ", style="reverse")]
    if view.mode == "kill":
        row = view.chosen_row(view.rows(fleet))
        running = count(row.in_progress if row else None)
        asked = (
            f"End the invocations of agent {view.chosen!r} ({running} running) in every process "
            "that shares the quota store? y/n"
        )
        return [Text(line, style="bold") for line in wrapped(printable(asked), width)]
    if view.message:
        return [Text(line, style="bold") for line in wrapped(printable(view.message), width)]
    if view.mode == "help":
        return [Text("Any key goes back.", style="dim")]
    order = ORDERS[view.order].title + (", reversed" if view.is_reversed else "")
    keys = f"q quit  ? help  / filter  k kill  sorted by {order}: {' '.join(ORDERS)}"
    return [Text(shortened(keys, width, keep_beginning=True), style="dim")]


def help_lines(width: int) -> Iterator[Text]:
    """Write the page of help."""
    for term, meaning in EXPLAINED:
        for n, line in enumerate(wrapped(meaning, width - TERM)):
            yield Text((term if n == 0 else "").ljust(TERM), style="bold").append(
                line, style="not bold"
            )
