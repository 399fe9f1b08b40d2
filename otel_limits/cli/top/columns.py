"""The table of agents, and the formatting of numbers and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from otel_limits.audit.formatting import UNKNOWN
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
NAMED_BAR: Final = 6
"""Minimum length of a bar next to the name of its limit."""
PERCENT: Final = 4
"""Width of `100%`."""
ROOMY: Final = 120
"""Terminal width for full headings and wider gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumn:
    """A column of the table."""

    title: str
    brief: str
    """Title on narrow terminals."""
    write: Callable[[AgentRow, int], Text]
    """Formats its value within a width."""
    least: int
    """Minimum width."""
    natural: Callable[[AgentRow], int]
    """Width of a value in full."""
    modest: int = 0
    """Width it gets before other columns get more than theirs."""
    whole: Callable[[AgentRow], int] = lambda _: 0
    """Width of the part of a value that is never truncated."""
    is_number: bool = False
    from_width: int = 0
    """Minimum terminal width to show it."""


def number(
    title: str, brief: str, least: int, write: Callable[[AgentRow], str], from_width: int = 0
) -> TopColumn:
    """Create a column of numbers, which are never truncated."""
    return TopColumn(
        title=title,
        brief=brief,
        write=lambda row, _: Text(write(row)),
        least=least,
        natural=lambda row: len(write(row)),
        whole=lambda row: len(write(row)),
        is_number=True,
        from_width=from_width,
    )


def name_of(row: AgentRow) -> str:
    """Return the agent's printable name."""
    return printable(row.agent) or "(no name)"


def money_of(row: AgentRow) -> str:
    """Format the spend of an agent; `no price` if no call has one."""
    rates = row.rates
    if rates.usd_per_hour is None and rates.unpriced_tokens_per_minute:
        return "no price"
    return usd(rates.usd_per_hour, at_least=bool(rates.unpriced_tokens_per_minute))


def write_cap(row: AgentRow, width: int) -> Text:
    """Draw the highest cap utilization by invocations in progress, with its limit if it fits."""
    if not row.now:
        return Text(UNKNOWN.rjust(width))
    cap = row.now[0]
    room = width - PERCENT - 1
    name = cap.limit
    # The bar has priority, as the details below the table contain the name.
    has_name = room >= len(name) + 1 + NAMED_BAR
    length = min(LONGEST_BAR, room - len(name) - 1 if has_name else room)
    drawn = Text(f"{name} " if has_name else "")
    drawn.append(bar(cap.share, length), style=warning_style(cap.share))
    drawn.append(f" {percent(cap.share):>{PERCENT}}", style=warning_style(cap.share))
    return drawn


def bound_text(cap: CapShare) -> str:
    """Format the upper bound of a p95 utilization."""
    return ">100%" if cap.share > 1 else f"≤{percent(cap.share)}"


def write_hour(row: AgentRow, width: int) -> Text:
    """Format the highest p95 cap utilization by finished invocations."""
    if not row.hour:
        return Text(UNKNOWN)
    cap = row.hour[0]
    text = f"{cap.limit} {bound_text(cap)}"
    text = text if len(text) <= width else bound_text(cap)
    return Text(text, style=warning_style(cap.share))


def halts_text(row: AgentRow) -> str:
    """Format the number of halts and their reasons."""
    reasons = ", ".join(f"{reason} {count(n)}" for reason, n in row.halts.items())
    return f"{count(row.halt_count)}: {printable(reasons)}" if row.halts else "0"


def write_halts(row: AgentRow, width: int) -> Text:
    """Format halts, without reasons if there is no room for at least one."""
    text = halts_text(row)
    if len(text) > width:
        alone = count(row.halt_count)
        # A few letters of a reason are useless.
        text = shortened(text, width, keep_beginning=True) if width > len(alone) + 12 else alone
    return Text(text, style="bold" if row.halts else "")


COLUMNS: Final = (
    TopColumn(
        title="Agent",
        brief="Agent",
        write=lambda row, width: Text(shortened(name_of(row), width)),
        least=12,
        natural=lambda row: cell_len(name_of(row)),
        modest=28,
    ),
    number("Running", "Run", 3, lambda row: count(row.in_progress)),
    number("Turns/min", "T/m", 4, lambda row: count(row.rates.turns_per_minute)),
    number("Tokens/min", "Tok/m", 5, lambda row: count(row.rates.tokens_per_minute)),
    number("USD/h", "USD/h", 6, money_of),
    number("Share", "%", 4, lambda row: percent(row.usd_share)),
    TopColumn(
        title="Cap now",
        brief="Cap",
        write=write_cap,
        least=SHORTEST_BAR + 1 + PERCENT,
        modest=LONGEST_BAR + 1 + PERCENT,
        natural=lambda row: LONGEST_BAR + 2 + PERCENT + len(row.now[0].limit) if row.now else 8,
    ),
    TopColumn(
        title="Cap 1 h",
        brief="Hour",
        write=write_hour,
        least=5,
        natural=lambda row: len(row.hour[0].limit) + 6 if row.hour else 1,
        from_width=80,
    ),
    TopColumn(
        title="Halts",
        brief="Hlt",
        write=write_halts,
        least=3,
        natural=lambda row: len(halts_text(row)),
        whole=lambda row: len(count(row.halt_count)),
    ),
    number("Refusals", "Ref", 3, lambda row: count(row.refusal_count), from_width=100),
    number("Errors", "Err", 3, lambda row: count(row.error_count)),
)


class AgentTable:
    """The table of agents, laid out for a width."""

    def __init__(self, rows: Sequence[AgentRow], width: int) -> None:
        """Compute the column widths."""
        is_roomy = width >= ROOMY
        self._gap = 2 if is_roomy else 1
        self._columns = [each for each in COLUMNS if width >= each.from_width]
        self._titles = [each.title if is_roomy else each.brief for each in self._columns]
        needs = [
            max([cell_len(title), *map(column.natural, rows)])
            for column, title in zip(self._columns, self._titles, strict=True)
        ]
        self._widths = [
            max([column.least, len(title), *map(column.whole, rows)])
            for column, title in zip(self._columns, self._titles, strict=True)
        ]
        spare = width - sum(self._widths) - self._gap * (len(self._columns) - 1)
        # First up to each modest width, then in full, from right to left: reasons of halts matter
        # more than names of limits.
        modest = [min(n, c.modest) for n, c in zip(needs, self._columns, strict=True)]
        for wishes, order in ((modest, 1), (needs, -1)):
            for n in range(len(wishes))[::order]:
                more = max(0, min(spare, wishes[n] - self._widths[n]))
                self._widths[n] += more
                spare -= more
        # On a narrow terminal, large numbers shorten the name.
        self._widths[0] = max(4, self._widths[0] + min(spare, 0))

    @property
    def name_width(self) -> int:
        """Width of the agent's name."""
        return self._widths[0]

    def head(self) -> Text:
        """Return the line of titles."""
        titles = (
            title.rjust(width) if column.is_number else set_cell_size(title, width)
            for column, title, width in zip(self._columns, self._titles, self._widths, strict=True)
        )
        return Text((" " * self._gap).join(titles).rstrip(), style="bold")

    def line(self, row: AgentRow) -> Text:
        """Return the line of an agent."""
        line = Text()
        for n, (column, width) in enumerate(zip(self._columns, self._widths, strict=True)):
            cell = column.write(row, width)
            blank = " " * (width - cell.cell_len)
            line.append(" " * self._gap if n else "")
            line.append_text(Text(blank) + cell if column.is_number else cell + Text(blank))
        return line
