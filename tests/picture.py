"""Draws the image of the demo for the README."""

from __future__ import annotations

import html
import io
import re
from typing import Final

from rich.console import Console
from rich.text import Text

from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.demo.main import main
from tests.paths import ROOT

PICTURE: Final = ROOT / ".github/pictures/demo.svg"
FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
CLIPPING: Final = re.compile(r'<clipPath .*?</clipPath>\s*| clip-path="[^"]*"', re.DOTALL)
"""Cuts off the lower part of the last line, and so its underscores."""
ID: Final = "otel-limits-demo"


def recorded() -> Text:
    """Run the demo and return its output in color."""
    screen = Console(file=io.StringIO(), record=True, width=100, highlight=False, markup=False)
    assert main(STRANDS, screen) == 0
    return Text.from_ansi(screen.export_text(styles=True))


def drawn(shown: Text) -> str:
    """Draw it as an SVG that loads no external font."""
    screen = Console(file=io.StringIO(), record=True, width=100, highlight=False)
    screen.print(Text.from_markup("[bold green]$[/] otel-limits demo\n") + shown, end="")
    svg = screen.export_svg(title="otel-limits demo", unique_id=ID)
    svg = CLIPPING.sub("", FONT.sub("", svg)).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, monospace"
    )
    # The repository has no trailing whitespace.
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines())


def lines_of(svg: str) -> list[str]:
    """Return the text lines of a picture."""
    rows: dict[str, str] = {}
    for row, text in re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        rows[row] = rows.get(row, "") + html.unescape(text).replace("\xa0", " ")
    return list(rows.values())


def write() -> None:
    """Write the image."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(recorded()), encoding="utf-8")
