"""An answer on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text
from rich.tree import Tree

from otel_limits.audit.formatting import written
from otel_limits.cli.show.layout import fit, printable
from otel_limits.cli.terminal import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from otel_limits.audit.answers import Answer, Table

FILE_WIDTH: Final = 500
"""Columns where there is no terminal, so that nothing is folded in a file."""
GUIDE: Final = 4
"""Columns by which each level of a tree is indented."""
HARD_SPACE: Final = "\N{NO-BREAK SPACE}"


def show(answer: Answer, *, wide: bool = False) -> None:
    """Print an answer; `wide` prints tables as wide as they are, and the terminal wraps them."""
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
        if table.levels:
            screen.print(_tree(table, screen.width))
        else:
            _print_table(screen, table, None if is_whole else screen.width)
        if table.note:
            screen.print(Text(table.note, style="dim italic"))
        screen.print()
    screen.print(Text(answer.about, style="dim"))
    if answer.forecast is not None:
        screen.print(Text(answer.forecast.sentence))
    if answer.complete:
        screen.print(Text(answer.complete, style="dim"))


def _print_table(screen: Console, table: Table, width: int | None) -> None:
    # On a terminal, where headings over nothing look as if something were missing.
    if not table.rows and screen.is_terminal:
        screen.print("None.")
        return
    layout = fit(table, width)
    for part, style in ((layout.head, "bold"), (layout.body, ""), (layout.total, "bold")):
        for line in part:
            # `rich` takes milliseconds for each line; styles are for the few.
            if style and screen.is_terminal:
                screen.print(Text(line, style=style), soft_wrap=True)
            else:
                screen.file.write(f"{line}\n")
    if layout.left_out:
        columns = ", ".join(layout.left_out)
        screen.print(Text(f"No room for: {columns}. --wide shows them.", style="dim italic"))


def _tree(table: Table, width: int) -> Tree:
    """Draw rows with levels: a line per row, its first value in bold, the others after it."""
    root = Tree("", hide_root=True)
    path: list[Tree] = [root]
    # Guides take half of the width at most; from there on a number says how deep a row is.
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
        # A sentence says by itself what it is about.
        title = "" if column.kind == "sentence" else f"{column.title.lower()} "
        line.append(f"  {title}", style="dim not bold")
        text = printable(written(value, column.kind))
        # A line ends between values, never within a number or a time.
        text = text if column.kind in ("text", "sentence") else text.replace(" ", HARD_SPACE)
        line.append(text, style=style or "not bold")
    return line
