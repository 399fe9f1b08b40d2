"""An answer on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich import box
from rich.cells import cell_len
from rich.control import strip_control_codes
from rich.table import Table as Grid
from rich.text import Text
from rich.tree import Tree

from otel_limits.audit.formatting import NUMBERS, written
from otel_limits.cli.terminal import console

if TYPE_CHECKING:
    from otel_limits.audit.answers import Answer, Table

MANY: Final = 200
"""Rows of a table above which it is written without ornaments."""
FILE_WIDTH: Final = 500
"""Columns where there is no terminal, so that nothing is folded in a file."""


def show(answer: Answer) -> None:
    """Print an answer."""
    screen = console()
    if not screen.is_terminal:
        screen.width = FILE_WIDTH
    if answer.text:
        screen.out(answer.text, end="")
        return
    for table in answer.tables:
        screen.print(Text(table.title, style="bold"))
        if table.levels:
            screen.print(_tree(table))
        elif len(table.rows) <= MANY:
            screen.print(_grid(table))
        else:
            screen.file.write("".join(f"{line}\n" for line in lines(table)))
        if table.note:
            screen.print(Text(table.note, style="dim italic"))
        screen.print()
    screen.print(Text(answer.about, style="dim"))


def lines(table: Table) -> Iterator[str]:
    """Write a table of many rows, aligned: `rich` takes milliseconds for each of them."""
    rows = [*table.rows, *([] if table.total is None else [table.total])]
    texts = [[column.title for column in table.columns]]
    kinds = [column.kind for column in table.columns]
    texts += [[printable(written(*cell)) for cell in zip(row, kinds, strict=True)] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    is_number = [column.kind in NUMBERS for column in table.columns]
    for row in texts:
        padded = (
            " " * (width - cell_len(text)) + text
            if number
            else text + " " * (width - cell_len(text))
            for text, width, number in zip(row, widths, is_number, strict=True)
        )
        yield "  ".join(padded).rstrip()


def printable(text: str) -> str:
    """Leave out what would move the cursor."""
    return text if text.isprintable() else strip_control_codes(text)


def _grid(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=table.total is not None)
    for index, column in enumerate(table.columns):
        is_number = column.kind in NUMBERS
        total = table.total[index] if table.total is not None else ""
        grid.add_column(
            column.title,
            footer=Text(written(total, column.kind) if total != "" else ""),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
        )
    for row in table.rows:
        # As text, no value can be taken for markup.
        values = zip(row, table.columns, strict=True)
        grid.add_row(*(Text(written(value, column.kind)) for value, column in values))
    return grid


def _tree(table: Table) -> Tree:
    """Draw rows with levels: a line per row, its first value in bold, the others after it."""
    root = Tree("", hide_root=True)
    path: list[Tree] = [root]
    for level, row in zip(table.levels, table.rows, strict=True):
        del path[level + 1 :]
        path.append(path[-1].add(_line(table, row)))
    return root


def _line(table: Table, row: Sequence[object]) -> Text:
    line = Text(str(row[0]), style="bold")
    for column, value in list(zip(table.columns, row, strict=True))[1:]:
        if value in (None, ""):
            continue
        style = "red" if column.name == "halt" else ""
        line.append(f"  {column.title.lower()} ", style="dim not bold")
        line.append(written(value, column.kind), style=style or "not bold")
    return line
