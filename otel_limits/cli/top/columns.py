"""The table of agents, and the formatting of numbers and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.text import Text

from otel_limits.audit.answer import UNKNOWN
from otel_limits.cli.show.layout import printable, shortened
from otel_limits.core.wording import abbreviated
from otel_limits.top.fleet import NEAR_END

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, CapShare

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
PERCENT: Final = 4
"""Width of `100%`."""
IDLE: Final = "idle"
"""Shown if no invocation is in progress, e.g. between short ones."""
LEAST_NAME: Final = 16
"""Width of an agent's name before the table takes a shorter form."""


def name_of(row: AgentRow) -> str:
    """Return the agent's printable name."""
    return printable(row.agent) or "(no name)"


def money_of(row: AgentRow) -> str:
    """Format the spend of an agent; `no price` if no call has one."""
    rates = row.rates
    if rates.usd_per_hour is None and rates.unpriced_tokens_per_minute:
        return "no price"
    return usd(rates.usd_per_hour, at_least=bool(rates.unpriced_tokens_per_minute))


def bound_text(cap: CapShare) -> str:
    """Format the upper bound of a p95 utilization."""
    return ">100%" if cap.share > 1 else f"≤{percent(cap.share)}"


def halts_text(row: AgentRow) -> str:
    """Format the number of halts and their reasons."""
    reasons = ", ".join(f"{reason} {count(n)}" for reason, n in row.halts.items())
    return f"{count(row.halt_count)}: {printable(reasons)}" if row.halts else "0"


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
    drawn = f"{bar(cap.share, form.bar)} {percent(cap.share):>{PERCENT}}"
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
    number("USD/h", "USD/h", money_of),
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
