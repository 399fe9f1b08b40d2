"""Writes a value as Grafana does, about."""

from __future__ import annotations

from typing import Final

THOUSAND: Final = 1000.0
CENT: Final = 0.01
DURATIONS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """Write a value in the unit of its panel."""
    kind, _, name = unit.partition(":")
    if name:
        return f"{_counted(value, kind, decimals or 0)} {name}"
    if unit == "locale" or (unit == "short" and decimals is not None and abs(value) < THOUSAND):
        return f"{value:,.{decimals or 0}f}"
    if unit == "percentunit":
        return f"{_short(value * 100)} %"
    if unit == "currencyUSD":
        return _dollars(value)
    if unit == "s":
        return _duration(value)
    return _short(value)


def _counted(value: float, kind: str, decimals: int) -> str:
    """Write a number whose unit has a name: whole with `suffix`, abbreviated with `count`."""
    if kind == "suffix":
        return f"{value:.{decimals}f}"
    return _short(value).replace(" ", "").replace("Mil", "M").replace("Bil", "B")


def _dollars(value: float) -> str:
    if value == 0 or abs(value) >= THOUSAND:
        return f"${_short(value)}"
    return f"${value:.2f}" if abs(value) >= CENT else f"${value:.2g}"


def _short(value: float) -> str:
    # Rounded before a unit is chosen: 999.7 is shown as 1 K, not with four digits.
    value = float(f"{value:.3g}")
    for suffix in ("", "K", "Mil", "Bil"):
        if abs(value) < THOUSAND:
            return f"{value:.3g}{' ' if suffix else ''}{suffix}"
        value /= THOUSAND
    return f"{value:.3g} Tri"


def _duration(seconds: float) -> str:
    seconds = float(f"{seconds:.3g}")
    for length, name in DURATIONS:
        if abs(seconds) >= length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
