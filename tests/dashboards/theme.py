"""The two looks of a picture: Grafana's light and dark themes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of what is not data."""

    suffix: str
    """Suffix of a picture's file name."""
    page: str
    panel: str
    text: str
    faint: str
    """Of what is read second: axes, legends, rows."""
    line: str


# The colours of Grafana itself, so that a picture is known again on the screen.
LIGHT: Final = Theme(
    suffix="",
    page="#f4f5f5",
    panel="#ffffff",
    text="#24292e",
    faint="#6a6f78",
    line="#e1e3e8",
)
DARK: Final = Theme(
    suffix="-dark",
    page="#111217",
    panel="#181b1f",
    text="#d8d9df",
    faint="#9a9ca6",
    line="#2c3036",
)
THEMES: Final = (LIGHT, DARK)

PALETTE: Final = (
    "#3274d9", "#f2a93b", "#19a2a8", "#b877d9", "#56a64b",
    "#e0649a", "#8ab8ff", "#a16f50", "#9fb04a", "#6e7687",
    "#86c98a", "#7a4fa3", "#c27e14", "#0f6b6f", "#f2b8d0",
)  # fmt: skip
"""For series without a configured color. No red: red signals a problem."""

NAMED: Final = {"green": "#56a64b", "orange": "#ff9830", "red": "#e02f44", "blue": "#3d84e0"}
"""Names that Grafana gives to colours, as far as thresholds use them."""

FRACTIONS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
SHADES: Final = ((1.0, 0), *((share, end) for share in FRACTIONS for end in (0, 255)))
"""Shares of a color and what they are mixed with, black or white."""


def shade(colour: str, index: int) -> str:
    """Return the shade that Grafana gives to a series of this index.

    As in packages/grafana-data/src/field/fieldColor.ts (read 2026-11-29).
    """
    share, end = SHADES[index % len(SHADES)]
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part * share + end * (1 - share)):02x}" for part in parts)


def style(theme: Theme) -> dict[Any, Any]:
    """Make what matplotlib draws by default look like `theme`."""
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.line,
        "axes.facecolor": theme.panel,
        "axes.labelcolor": theme.faint,
        "axes.prop_cycle": f"cycler(color={list(PALETTE)})",
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": theme.page,
        "font.size": 9,
        "grid.color": theme.line,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.labelcolor": theme.text,
        "legend.title_fontsize": 8,
        "text.color": theme.text,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "ytick.major.size": 0,
    }
