"""Numbers in few characters, and bars."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from otel_limits.audit.formatting import UNKNOWN
from otel_limits.top.fleet import NEAR_END

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
