"""The table of agents: what each column shows, and how wide it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from otel_limits.audit.formatting import UNKNOWN
from otel_limits.cli.show.layout import printable, shortened
from otel_limits.top.fleet import NEAR_END

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, CapShare

STEPS: Final = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
EMPTY: Final = "░"
CENT: Final = 0.01


def count(number: float | None) -> str:
    """Write a number in at most five characters; a dash where it is not known."""
    if number is None:
        return UNKNOWN
    for size, suffix in STEPS:
        # As it is rounded: 999.7 thousand is a million, not 1000 thousand.
        if number >= size * 0.9995:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def usd(amount: float | None, *, at_least: bool = False) -> str:
    """Write US dollars in at most eight characters."""
    if amount is None:
        return UNKNOWN
    sign = "≥$" if at_least else "$"
    if amount >= STEPS[-1][0]:
        return f"{sign}{count(amount)}"
    if 0 < amount < CENT:
        return f"<{sign}0.01" if not at_least else f"{sign}0.00"
    return f"{sign}{amount:.2f}"


def percent(share: float | None) -> str:
    """Write a share; one that is almost reached is not shown as reached."""
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
    """Return the colour of a share; the number beside it says the same."""
    return "bold red" if share >= 1 else "yellow" if share >= NEAR_END else ""


def clock(at: float, *, seconds: bool = False) -> str:
    """Write a time of the day, as the clock on the wall has it."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S" if seconds else "%H:%M")


LONGEST_BAR: Final = 12
SHORTEST_BAR: Final = 2
NAMED_BAR: Final = 6
"""How long a bar is at least that leaves room for the name of its limit."""
PERCENT: Final = 4
"""Characters of `100%`."""
ROOMY: Final = 120
"""Columns of a terminal from which on headings are words and two spaces are between columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumn:
    """One column."""

    title: str
    brief: str
    """Its title where there is little room."""
    write: Callable[[AgentRow, int], Text]
    """Writes its value into so many columns, or fewer."""
    least: int
    """Characters that it has at least."""
    natural: Callable[[AgentRow], int]
    """How many the value would like to have."""
    modest: int = 0
    """How many it is given before another one has more than that."""
    whole: Callable[[AgentRow], int] = lambda _: 0
    """How many characters of its value are never cut."""
    is_number: bool = False
    from_width: int = 0
    """How wide a terminal must be for it."""


def number(
    title: str, brief: str, least: int, write: Callable[[AgentRow], str], from_width: int = 0
) -> TopColumn:
    """Make a column of numbers, which are never cut."""
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
    """Return the agent's name as it may be shown."""
    # A name of characters that cannot be shown would be an empty row.
    return printable(row.agent) or "(no name)"


def money_of(row: AgentRow) -> str:
    """Write what an agent spends: `no price` where there is a price for nothing."""
    rates = row.rates
    if rates.usd_per_hour is None and rates.unpriced_tokens_per_minute:
        return "no price"
    return usd(rates.usd_per_hour, at_least=bool(rates.unpriced_tokens_per_minute))


def write_cap(row: AgentRow, width: int) -> Text:
    """Draw how near what is in progress is to the nearest cap, and name it where there is room."""
    if not row.now:
        return Text(UNKNOWN.rjust(width))
    cap = row.now[0]
    room = width - PERCENT - 1
    name = cap.limit
    # The bar comes first: it is what is looked at, and the line below has the name.
    has_name = room >= len(name) + 1 + NAMED_BAR
    length = min(LONGEST_BAR, room - len(name) - 1 if has_name else room)
    drawn = Text(f"{name} " if has_name else "")
    drawn.append(bar(cap.share, length), style=warning_style(cap.share))
    drawn.append(f" {percent(cap.share):>{PERCENT}}", style=warning_style(cap.share))
    return drawn


def bound_text(cap: CapShare) -> str:
    """Write what 95 % of the finished invocations used at most: a bucket has only an upper end."""
    return ">100%" if cap.share > 1 else f"≤{percent(cap.share)}"


def write_hour(row: AgentRow, width: int) -> Text:
    """Write how near the finished invocations came to the nearest cap."""
    if not row.hour:
        return Text(UNKNOWN)
    cap = row.hour[0]
    text = f"{cap.limit} {bound_text(cap)}"
    # Its number alone where there is no room for both.
    text = text if len(text) <= width else bound_text(cap)
    return Text(text, style=warning_style(cap.share))


def halts_text(row: AgentRow) -> str:
    """Write how often an agent was halted, and by what."""
    reasons = ", ".join(f"{reason} {count(n)}" for reason, n in row.halts.items())
    return f"{count(row.halt_count)}: {printable(reasons)}" if row.halts else "0"


def write_halts(row: AgentRow, width: int) -> Text:
    """Write halts, without the reasons where there is no room for one."""
    text = halts_text(row)
    if len(text) > width:
        alone = count(row.halt_count)
        # A list of reasons that is cut after three letters is worse than none.
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
    number("Errors", "Err", 3, lambda row: count(row.error_count)),
)


class AgentTable:
    """The rows of agents, laid out for a width."""

    def __init__(self, rows: Sequence[AgentRow], width: int) -> None:
        """Give every column what it needs, and share what is over."""
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
        # First what everybody wants to see of each, then the rest, reasons of halts before names
        # of limits.
        modest = [min(n, c.modest) for n, c in zip(needs, self._columns, strict=True)]
        for wishes, order in ((modest, 1), (needs, -1)):
            for n in range(len(wishes))[::order]:
                more = max(0, min(spare, wishes[n] - self._widths[n]))
                self._widths[n] += more
                spare -= more
        # Where big numbers meet a narrow terminal, the name gives way.
        self._widths[0] = max(4, self._widths[0] + min(spare, 0))

    @property
    def name_width(self) -> int:
        """Columns of the agent's name."""
        return self._widths[0]

    def head(self) -> Text:
        """Write the titles."""
        return Text(self._line(self._titles), style="bold")

    def line(self, row: AgentRow) -> Text:
        """Write one row."""
        line = Text()
        for n, (column, width) in enumerate(zip(self._columns, self._widths, strict=True)):
            cell = column.write(row, width)
            blank = " " * (width - cell.cell_len)
            line.append(" " * self._gap if n else "")
            line.append_text(Text(blank) + cell if column.is_number else cell + Text(blank))
        return line

    def _line(self, titles: Sequence[str]) -> str:
        return (" " * self._gap).join(self._cells(titles)).rstrip()

    def _cells(self, titles: Sequence[str]) -> Iterator[str]:
        for column, title, width in zip(self._columns, titles, self._widths, strict=True):
            yield title.rjust(width) if column.is_number else set_cell_size(title, width)
