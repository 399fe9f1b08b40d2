"""The screen: totals, agents, quotas and halts, in the order and filter of its view."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.cells import cell_len
from rich.text import Text

from otel_limits.audit.answer import UNKNOWN
from otel_limits.cli.show.terminal_answer import printable, shortened, wrapped
from otel_limits.core.labels import MAX_LENGTH, OTHER, WILDCARDS
from otel_limits.core.wording import abbreviated, pluralize
from otel_limits.top.fleet import NEAR_END
from otel_limits.top.fleet_state import HOUR_SECONDS

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, CapShare, Fleet, QuotaRow, Rates, RecentHalt


# --- the view: order, filter and chosen agent, changed by keys ------------------------------------

Mode = Literal["rows", "filter", "kill", "help"]

PAGE_ROWS: Final = 10
"""Rows per page up or down."""


@dataclass(frozen=True, slots=True)
class Order:
    """A sort order."""

    title: str
    value: Callable[[AgentRow], Any]
    is_rising: bool = False
    """Whether the lowest value comes first."""


ORDERS: Final[Mapping[str, Order]] = {
    "c": Order("cost", lambda row: row.rates.usd_per_hour or 0),
    "t": Order("tokens", lambda row: row.rates.tokens_per_minute or 0),
    "u": Order("turns", lambda row: row.rates.turns_per_minute or 0),
    "r": Order("running", lambda row: row.in_progress or 0),
    "n": Order("nearest cap", lambda row: row.nearest),
    "h": Order("halts", lambda row: row.halt_count),
    "e": Order("errors", lambda row: row.error_count),
    "a": Order("agent", lambda row: row.agent.casefold(), is_rising=True),
}
"""Sort orders by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the live view."""

    order: str = "c"
    is_reversed: bool = False
    filter: str = ""
    chosen: str | None = None
    """The chosen agent. If it is not shown, the first row is chosen."""
    mode: Mode = "rows"
    typed: str = ""
    """The filter being typed."""
    message: str = ""
    """Result of the last key, until the next one."""
    cannot_kill: str = ""
    """Why no agent can be killed, if so."""

    def rows(self, fleet: Fleet) -> list[AgentRow]:
        """Return the rows that match the filter, sorted."""
        order = ORDERS[self.order]
        pattern = self.typed if self.mode == "filter" else self.filter
        rows = [row for row in fleet.agents if matches(pattern, row.agent)]
        # By name first, so rows with equal values keep their order.
        rows.sort(key=lambda row: row.agent.casefold())
        return sorted(rows, key=order.value, reverse=order.is_rising == self.is_reversed)

    def chosen_row(self, rows: Sequence[AgentRow]) -> AgentRow | None:
        """Return the chosen row."""
        found = [row for row in rows if row.agent == self.chosen]
        return found[0] if found else rows[0] if rows else None


def matches(pattern: str, agent: str) -> bool:
    """Return whether a name matches a glob or contains a text."""
    name, pattern = agent.casefold(), pattern.casefold()
    if any(wildcard in pattern for wildcard in WILDCARDS):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def press(view: View, key: str, fleet: Fleet) -> View | Literal["quit", "kill"]:
    """Return the view after a key, or another action."""
    view = dataclasses.replace(view, message="")
    if view.mode == "filter":
        return type_filter(view, key)
    if view.mode == "help":
        return dataclasses.replace(view, mode="rows")
    if view.mode == "kill":
        after = dataclasses.replace(view, mode="rows", message="Not killed.")
        # Any other key cancels.
        return "kill" if key in ("y", "Y") else after
    if key == "q":
        return "quit"
    return choose(view, key, fleet)


def type_filter(view: View, key: str) -> View:
    """Edit the filter."""
    if key == "enter":
        return dataclasses.replace(view, mode="rows", filter=view.typed)
    if key == "escape":
        return dataclasses.replace(view, mode="rows", filter="", typed="")
    if key == "backspace":
        return dataclasses.replace(view, typed=view.typed[:-1])
    if len(key) == 1 and key.isprintable() and len(view.typed) < MAX_LENGTH:
        return dataclasses.replace(view, typed=view.typed + key)
    return view


def choose(view: View, key: str, fleet: Fleet) -> View:
    """Handle a key that changes order, choice or mode."""
    rows = view.rows(fleet)
    row = view.chosen_row(rows)
    if key in ORDERS:
        # Pressing the same key again reverses the order.
        is_reversed = key == view.order and not view.is_reversed
        return dataclasses.replace(view, order=key, is_reversed=is_reversed)
    if key in STEPS and row is not None:
        index = min(max(rows.index(row) + STEPS[key], 0), len(rows) - 1)
        return dataclasses.replace(view, chosen=rows[index].agent)
    if key == "k" and row is not None:
        refusal = view.cannot_kill or kill_refusal(row.agent)
        # Choose the row explicitly, as rows may be reordered before the confirmation.
        change: dict[str, Any] = {"message": refusal} if refusal else {"mode": "kill"}
        return dataclasses.replace(view, chosen=row.agent, **change)
    changes: dict[str, dict[str, Any]] = {
        "/": {"mode": "filter", "typed": view.filter},
        "escape": {"filter": "", "typed": ""},
        "?": {"mode": "help"},
    }
    return dataclasses.replace(view, **changes.get(key, {}))


STEPS: Final = {
    "up": -1,
    "down": 1,
    "page up": -PAGE_ROWS,
    "page down": PAGE_ROWS,
    "home": -(10**6),
    "end": 10**6,
}


def kill_refusal(agent: str) -> str | None:
    """Return why an agent cannot be killed by its name in the metrics, if so."""
    if agent == OTHER:
        return f"{OTHER} groups several agents. Run: otel-limits kill --agent GLOB"
    # Metrics clean and truncate names; a kill is matched against the original name.
    if "\N{REPLACEMENT CHARACTER}" in agent or len(agent) >= MAX_LENGTH:
        return "The name of this agent is truncated in metrics. Run: otel-limits kill --agent GLOB"
    return None


# --- the screen -----------------------------------------------------------------------------------

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
    ("q", "quit; in this help and in a question, back"),
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
    addresses = pluralize(len(fleet.feeds), "address", "addresses")
    feeds = f"{available} of {addresses} up" if fleet.feeds else "connecting"
    since = (
        "in the last hour"
        if fleet.at - fleet.halts_since >= HOUR_SECONDS
        else f"since {clock(fleet.halts_since)}"
    )
    rates = totals.rates
    spent = NO_PRICE if is_unpriced(rates) else f"{money_of(rates)}/h"
    sums = (
        f"{count_of(totals.agents, 'agent')}, {count(totals.in_progress)} running · "
        f"{count(rates.turns_per_minute)} turns/min · "
        f"{count(rates.tokens_per_minute)} tokens/min · {spent}"
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
        f"{name_of(row)}: spend per hour {money_of(row.rates)}, "
        f"{percent(row.usd_share)} of the fleet · "
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
            "that share the quota store? y kills, any other key (also q) cancels."
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


# --- the table of agents: columns, numbers and bars -----------------------------------------------

EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
EMPTY: Final = "░"
CENT: Final = 0.01
THOUSAND: Final = 1_000
"""From here on, cents are left out."""


def count(number: float | None) -> str:
    """Format a number in at most five characters; a dash if unknown."""
    return UNKNOWN if number is None else abbreviated(number)


def usd(amount: float | None, *, at_least: bool = False) -> str:
    """Format USD in at most eight characters."""
    if amount is None:
        return UNKNOWN
    sign = "≥$" if at_least else "$"
    if amount >= THOUSAND:
        return f"{sign}{count(amount)}"
    if 0 < amount < CENT:
        return f"<{sign}0.01" if not at_least else f"{sign}0.00"
    return f"{sign}{amount:.2f}"


def percent(share: float | None) -> str:
    """Format a share; 100% only if it is reached."""
    if share is None:
        return UNKNOWN
    whole = round(share * 100)
    return f"{99 if whole == 100 and share < 1 else whole}%"  # noqa: PLR2004  per cent


def bar(share: float, width: int) -> str:
    """Draw a share in eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = FULL * full + (EIGHTHS[rest] if rest else "")
    return drawn + EMPTY * (width - len(drawn))


def warning_style(share: float) -> str:
    """Return the color of a share."""
    return "bold red" if share >= 1 else "yellow" if share >= NEAR_END else ""


def clock(at: float, *, seconds: bool = False) -> str:
    """Format a local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S" if seconds else "%H:%M")


LONGEST_BAR: Final = 12
SHORTEST_BAR: Final = 2
PERCENT_WIDTH: Final = 4
"""Width of `100%`."""
IDLE: Final = "idle"
"""Shown if no invocation is in progress, e.g. between short ones."""
NO_PRICE: Final = "no price"
LEAST_NAME: Final = 16
"""Width of an agent's name before the table takes a shorter form."""


def name_of(row: AgentRow) -> str:
    """Return the agent's printable name."""
    return printable(row.agent) or "(no name)"


def is_unpriced(rates: Rates) -> bool:
    """Return whether there are calls, but none with a price."""
    return rates.usd_per_hour is None and bool(rates.unpriced_tokens_per_minute)


def money_of(rates: Rates) -> str:
    """Format a spend; `no price` if no call has one."""
    if is_unpriced(rates):
        return NO_PRICE
    return usd(rates.usd_per_hour, at_least=bool(rates.unpriced_tokens_per_minute))


def bound_text(cap: CapShare) -> str:
    """Format the upper bound of a p95 utilization."""
    return ">100%" if cap.share > 1 else f"≤{percent(cap.share)}"


def halts_text(row: AgentRow) -> str:
    """Format the number of halts and their reasons."""
    # A number after the name of a limit would look like its cap.
    reasons = [printable(reason) for reason in row.halts]
    if len(reasons) > 1:
        reasons = [f"{count(row.halts[each])} {printable(each)}" for each in row.halts]
    return f"{count(row.halt_count)} ({', '.join(reasons)})" if row.halts else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
    """How much the table shows. The details below it have everything about the chosen agent."""

    has_titles: bool = False
    """Whether titles are written in full, and wider gaps."""
    has_names: bool = False
    """Whether the names of limits are shown."""
    has_reasons: bool = False
    """Whether the reasons of halts are shown."""
    bar: int = LONGEST_BAR
    """Length of a bar."""
    has_all: bool = True
    """Whether all columns are shown."""


FORMS: Final = (
    TableForm(has_titles=True, has_names=True, has_reasons=True),
    TableForm(has_titles=True, has_names=True),
    TableForm(has_names=True, has_reasons=True),
    TableForm(has_names=True),
    TableForm(has_names=True, bar=SHORTEST_BAR),
    TableForm(has_names=True, bar=SHORTEST_BAR, has_all=False),
    TableForm(bar=SHORTEST_BAR, has_all=False),
)
"""The forms of the table. The first one with room for the names of agents is shown; the names of
limits are the last to go.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumn:
    """A column of the table, apart from the name."""

    title: str
    brief: str
    """Title on narrow terminals."""
    write: Callable[[AgentRow, TableForm], Text]
    is_number: bool = False
    is_optional: bool = False


def number(
    title: str, brief: str, write: Callable[[AgentRow], str], *, is_optional: bool = False
) -> TopColumn:
    """Create a column of numbers."""
    return TopColumn(
        title=title,
        brief=brief,
        write=lambda row, _: Text(write(row)),
        is_number=True,
        is_optional=is_optional,
    )


def write_cap(row: AgentRow, form: TableForm) -> Text:
    """Draw the highest cap utilization by invocations in progress."""
    if not row.now and row.hour and not form.has_all:
        return write_hour(row, form)  # which has no column then
    if not row.now:
        return Text(IDLE if row.in_progress == 0 else UNKNOWN)
    cap = row.now[0]
    drawn = f"{bar(cap.share, form.bar)} {percent(cap.share):>{PERCENT_WIDTH}}"
    name = f"{cap.limit} " if form.has_names else ""
    return Text(name).append(drawn, style=warning_style(cap.share))


def write_hour(row: AgentRow, form: TableForm) -> Text:
    """Format the highest p95 cap utilization by finished invocations."""
    if not row.hour:
        return Text(UNKNOWN)
    cap = row.hour[0]
    name = f"{cap.limit} " if form.has_names else ""
    return Text(name + bound_text(cap), style=warning_style(cap.share))


def write_halts(row: AgentRow, form: TableForm) -> Text:
    """Format halts."""
    text = halts_text(row) if form.has_reasons else count(row.halt_count)
    return Text(text, style="bold" if row.halts else "")


COLUMNS: Final = (
    number("Running", "Run", lambda row: count(row.in_progress)),
    number("Turns/min", "T/m", lambda row: count(row.rates.turns_per_minute)),
    number("Tokens/min", "Tok/m", lambda row: count(row.rates.tokens_per_minute)),
    number("USD/h", "USD/h", lambda row: money_of(row.rates)),
    number("Share", "%", lambda row: percent(row.usd_share)),
    TopColumn(title="Cap now", brief="Cap", write=write_cap),
    TopColumn(title="Cap 1 h", brief="Hour", write=write_hour, is_optional=True),
    TopColumn(title="Halts", brief="Hlt", write=write_halts),
    number("Refusals", "Ref", lambda row: count(row.refusal_count), is_optional=True),
    number("Errors", "Err", lambda row: count(row.error_count)),
)


def agent_table(rows: Sequence[AgentRow], chosen: AgentRow | None, width: int) -> Iterator[Text]:
    """Yield the lines of the table, in its fullest form that fits a terminal."""
    longest = max(cell_len(name_of(row)) for row in rows)
    for form in FORMS:
        columns = [each for each in COLUMNS if form.has_all or not each.is_optional]
        titles = [Text(each.title if form.has_titles else each.brief) for each in columns]
        table = [titles, *([column.write(row, form) for column in columns] for row in rows)]
        widths = [max(cell.cell_len for cell in cells) for cells in zip(*table, strict=True)]
        gap = Text("  " if form.has_titles else " ")
        room = width - sum(widths) - len(gap) * len(widths)
        if room >= min(longest, LEAST_NAME):
            break
    # On a narrow terminal, large numbers shorten names further.
    room = max(len("Agent"), min(longest, room))
    names = [Text("Agent"), *(Text(shortened(name_of(row), room)) for row in rows)]
    for row, name, cells in zip((None, *rows), names, table, strict=True):
        name.align("left", room)
        for column, cell, cell_width in zip(columns, cells, widths, strict=True):
            cell.align("right" if column.is_number else "left", cell_width)
        if row is not None and row is chosen:
            # Only the name: a bar in reversed colors would mean the opposite.
            name.stylize("reverse")
        line = gap.join((name, *cells))
        line.stylize("bold" if row is None else "")
        yield line
