"""Answers on a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text
from rich.tree import Tree

from otel_limits.audit.answer import written
from otel_limits.cli.show.layout import fit, printable
from otel_limits.cli.terminal import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from otel_limits.audit.answer import Answer, Table

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
        if not table.rows:
            screen.print("None.")
        elif table.levels:
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
        screen.print(Text(f"Hidden: {columns}. Show them with --wide.", style="dim italic"))


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
