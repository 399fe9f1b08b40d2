"""Answers on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, chop_cells
from rich.text import Text
from rich.tree import Tree

from otel_limits.audit.answer import NUMBERS, column_texts, written
from otel_limits.cli.terminal import console

if TYPE_CHECKING:
    from rich.console import Console

    from otel_limits.audit.answer import Answer, CellKind, Column, Table


# --- the answer -----------------------------------------------------------------------------------

FILE_WIDTH: Final = 500
"""Width without a terminal, so that nothing is folded in a file."""
GUIDE: Final = 4
"""Indentation per level of a tree."""
HARD_SPACE: Final = "\N{NO-BREAK SPACE}"


def show(answer: Answer, *, wide: bool = False) -> None:
    """Print an answer; `wide` prints tables at full width, which the terminal wraps."""
    screen = console()
    is_whole = wide or not screen.is_terminal
    if not screen.is_terminal:
        screen.width = FILE_WIDTH
    if answer.text:
        screen.out(answer.text, end="")
        return
    if answer.summary:
        screen.print(Text(answer.summary, style="bold"))
        screen.print()
    for table in answer.tables:
        screen.print(Text(table.title, style="bold"))
        shown = table.columns
        if not table.rows:
            screen.print(Text(table.empty))
        elif table.levels:
            screen.print(_tree(table, screen.width))
        else:
            shown = _print_table(screen, table, None if is_whole else screen.width)
        if note := table.note_with(shown):
            screen.print(Text(note, style="dim italic"))
        screen.print()
    screen.print(Text(answer.about, style="dim"))
    if answer.forecast is not None:
        screen.print(Text(answer.forecast.sentence))
    if answer.complete:
        screen.print(Text(answer.complete, style="dim"))


def _print_table(screen: Console, table: Table, width: int | None) -> Sequence[Column]:
    """Print a table, and return the columns that are shown."""
    commands = [] if width is None else _commands(table)
    layout = fit(table if width is None else _without_commands(table), width)
    for part, style in ((layout.head, "bold"), (layout.body, ""), (layout.total, "bold")):
        for line in part:
            # `rich` takes milliseconds per line, so only few lines use styles.
            if style and screen.is_terminal:
                screen.print(Text(line, style=style), soft_wrap=True)
            else:
                screen.file.write(f"{line}\n")
    for title, command in commands:
        # Whole, to be copied: the terminal wraps it.
        screen.print(Text(title, style="dim"), Text(command), sep=": ", soft_wrap=True)
    if layout.left_out:
        columns = ", ".join(layout.left_out)
        them = "them" if len(layout.left_out) > 1 else "it"
        screen.print(Text(f"Hidden: {columns} (--wide shows {them}).", style="dim italic"))
    return layout.columns


def _commands(table: Table) -> list[tuple[str, str]]:
    """Return the commands of a table, each after the first value of its row."""
    at = [index for index, column in enumerate(table.columns) if column.kind == "command"]
    return [(str(row[0]), row[index]) for row in table.rows for index in at if row[index]]


def _without_commands(table: Table) -> Table:
    kept = [index for index, column in enumerate(table.columns) if column.kind != "command"]

    def only(cells: Sequence[Any]) -> list[Any]:
        return [cells[index] for index in kept]

    total = None if table.total is None else only(table.total)
    return replace(
        table, columns=only(table.columns), rows=list(map(only, table.rows)), total=total
    )


def _tree(table: Table, width: int) -> Tree:
    """Draw rows with levels: a line per row, with its first value in bold."""
    root = Tree("", hide_root=True)
    path: list[Tree] = [root]
    # Guides take at most half of the width; deeper rows show their level as a number.
    deepest = width // 2 // GUIDE
    for level, row in zip(table.levels, table.rows, strict=True):
        place = min(level, deepest)
        del path[place + 1 :]
        path.append(path[-1].add(_line(table, row, level if level > place else None)))
    return root


def _line(table: Table, row: Sequence[Any], level: int | None) -> Text:
    line = Text() if level is None else Text(f"[{level}] ", style="dim")
    line.append(printable(str(row[0])), style="bold")
    for column, value in list(zip(table.columns, row, strict=True))[1:]:
        if value in (None, ""):
            continue
        style = "red" if column.name == "halt" else ""
        # Sentences need no title.
        title = "" if column.kind == "sentence" else f"{column.title.lower()} "
        line.append(f"  {title}", style="dim not bold")
        text = printable(written(value, column.kind))
        # Lines break between values, never within a number or a time.
        text = text if column.kind in ("text", "sentence") else text.replace(" ", HARD_SPACE)
        line.append(text, style=style or "not bold")
    return line


# --- tables that fit the terminal -----------------------------------------------------------------
# Numbers are never cut. If there is too little room, empty columns are hidden, headings folded,
# sentences wrapped, names shortened in the middle, and then columns hidden: keys that are 0 in each
# row, which is said instead, then details, then others, each time the widest first. If the other
# keys do not fit, headings are folded after hyphens; then each value has its own line.
#
# `rich.table` hides no column, cuts numbers, does not keep the minimum width of several columns,
# and takes 0.5 ms for a row of twelve values, where this takes 0.03 ms.

COMPACT: Final = 100
"""Terminal width below which columns are separated by one space instead of two."""
ELLIPSIS: Final = "…"
LEAST: Final[Mapping[CellKind, int]] = {"text": 12, "id": 9, "sentence": 24}
"""Minimum characters kept of a value. An ID keeps its first ones: `show` accepts eight."""
RULE: Final = "─"
HYPHEN: Final = ("-", "- ")
"""A heading may be folded after it."""
UNKNOWN: Final = (None, "")
NOTHING: Final = (*UNKNOWN, 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as lines of text."""

    head: Sequence[str]
    body: Sequence[str]
    total: Sequence[str]
    columns: Sequence[Column]
    """Those that are shown."""
    left_out: Sequence[str] = ()
    """Titles of hidden columns, without those that are empty."""


@dataclass(slots=True)
class ColumnWidth:
    """A column and its width, while it is determined."""

    column: Column
    cells: list[str]
    is_empty: bool = False
    """Whether it contains only unknown values, and zeros unless it is a main result."""
    is_zero: bool = False
    """Whether it is a main result that is 0 in each row."""
    natural: int = 0
    least: int = 0
    folded: int = 0
    """The least width if the heading is folded after hyphens, too."""
    width: int = 0

    def __post_init__(self) -> None:
        """Measure the values and the heading."""
        longest = max(map(cell_len, self.cells), default=0)
        self.natural = self.width = max(cell_len(self.column.title), longest)
        cell = min(longest, LEAST.get(self.column.kind, longest))
        self.least = max([cell, *map(cell_len, self.column.title.split())])
        self.folded = max([cell, *map(cell_len, self.column.title.replace(*HYPHEN).split())])


def fit(table: Table, width: int | None) -> Layout:
    """Lay out a table for a width, or as wide as it needs."""
    rows = [*table.rows, *([] if table.total is None else [table.total])]
    columns = list(zip(*rows, strict=True)) or [()] * len(table.columns)
    lanes = [
        ColumnWidth(
            column,
            [printable(text) for text in column_texts(values, column.kind)],
            # A main result of 0 is one.
            all(value in (UNKNOWN if column.is_key else NOTHING) for value in values),
            column.is_key and column.kind in NUMBERS and all(value == 0 for value in values),
        )
        for column, values in zip(table.columns, columns, strict=True)
    ]
    texts = list(zip(*(lane.cells for lane in lanes), strict=True))
    gap = 1 if width is not None and width < COMPACT else 2
    left_out: list[str] = []
    if width is not None and _needed([lane.natural for lane in lanes], gap) > width:
        lanes, left_out = _narrowed(lanes, gap, width)
        if _needed([lane.width for lane in lanes], gap) > width:
            return _one_by_one(table, texts, width)
    lines = [
        list(_row([_part(*cell) for cell in zip(cells, lanes, strict=True)], lanes, gap))
        for cells in zip(*(lane.cells for lane in lanes), strict=True)
    ]
    head = [*_row([_heading(lane.column.title, lane.width) for lane in lanes], lanes, gap)]
    rule = RULE * _needed([lane.width for lane in lanes], gap)
    has_total = table.total is not None
    body = lines[: len(lines) - 1] if has_total else lines
    return Layout(
        head=[*head, rule],
        body=[line for row in body for line in row],
        total=[rule, *lines[-1]] if has_total else [],
        columns=[lane.column for lane in lanes],
        left_out=left_out,
    )


def printable(text: str) -> str:
    """Remove characters that would move the cursor."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else "" for each in text)


def _needed(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _narrowed(
    lanes: list[ColumnWidth], gap: int, width: int
) -> tuple[list[ColumnWidth], list[str]]:
    """Hide columns until the others fit, and distribute the remaining space."""
    left_out: list[ColumnWidth] = []

    def hide(lane: ColumnWidth) -> None:
        left_out.append(lane)
        lanes.remove(lane)

    # An empty column says nothing, so it is not named either.
    lanes = [lane for lane in lanes if not lane.is_empty] or lanes
    for lane in lanes:
        lane.width = lane.least
    while _needed([lane.width for lane in lanes], gap) > width:
        others = [lane for lane in lanes if not lane.column.is_key]
        details = [lane for lane in others if lane.column.is_detail]
        next_ones = [lane for lane in lanes if lane.is_zero] or details or others
        if not next_ones:
            for lane in lanes:
                lane.width = lane.folded
            break
        hide(max(reversed(next_ones), key=lambda lane: lane.width))  # equally wide: the last
    spare = width - _needed([lane.width for lane in lanes], gap)
    while spare > 0 and (growing := [lane for lane in lanes if lane.width < lane.natural]):
        # The narrowest first, so that all end equally wide, or as wide as they need.
        narrowest = min(growing, key=lambda lane: (lane.column.kind in NUMBERS, lane.width))
        narrowest.width += 1
        spare -= 1
    return lanes, [
        f"{lane.column.title} (each 0)" if lane.is_zero else lane.column.title for lane in left_out
    ]


def _heading(title: str, width: int) -> list[str]:
    """Fold a heading between words, and a longer word after its hyphen."""
    words = title.split()
    return wrapped(
        " ".join(word.replace(*HYPHEN) if cell_len(word) > width else word for word in words), width
    )


def _part(text: str, lane: ColumnWidth) -> list[str]:
    if cell_len(text) <= lane.width:
        return [text]
    if lane.column.kind == "sentence":
        return wrapped(text, lane.width)
    return [shortened(text, lane.width, keep_beginning=lane.column.kind == "id")]


def _row(parts: Sequence[Sequence[str]], lanes: Sequence[ColumnWidth], gap: int) -> Iterator[str]:
    """Yield the lines of one row: as many as its tallest cell."""
    for number in range(max(map(len, parts), default=0)):
        cells = []
        for part, lane in zip(parts, lanes, strict=True):
            text = part[number] if number < len(part) else ""
            blank = " " * (lane.width - cell_len(text))
            cells.append(blank + text if lane.column.kind in NUMBERS else text + blank)
        yield (" " * gap).join(cells).rstrip()


def _one_by_one(table: Table, texts: Iterable[Sequence[str]], width: int) -> Layout:
    """Put each value on its own line after its title, without hiding any."""
    titles = [column.title for column in table.columns]
    body: list[str] = []
    for row in texts:
        for title, text in zip(titles, row, strict=True):
            if text:
                body += wrapped(f"{title}: {text}", width)
        body.append("")
    return Layout(head=[], body=body, total=[], columns=table.columns)


def shortened(text: str, width: int, *, keep_beginning: bool = False) -> str:
    """Shorten a name in the middle, or at the end, marking the cut."""
    if cell_len(text) <= width:
        return text
    behind = 0 if keep_beginning else (width - 1) // 2
    before = width - 1 - behind
    end = _beginning(text[::-1], behind)[::-1]
    return f"{_beginning(text, before)}{ELLIPSIS}{end}"


def _beginning(text: str, width: int) -> str:
    return chop_cells(text, width)[0] if width > 0 else ""


def wrapped(text: str, width: int) -> list[str]:
    """Break a text between words, and words longer than a line at its end."""
    lines = [""]
    for word in text.split(" "):
        separate = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(separate) <= width:
            lines[-1] = separate
            continue
        pieces = chop_cells(word, width) or [""]
        lines += pieces if lines[-1] else []
        if not lines[-1]:
            lines[-1:] = pieces
    return lines
