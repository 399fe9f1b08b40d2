"""Reads a dashboard: its panels, their queries, and how Grafana would fill in the variables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, cast

PanelKind = Literal["timeseries", "stat", "bargauge", "table", "text"]

SCRAPES_PER_RATE: Final = 4
"""Grafana's `$__rate_interval` never covers fewer scrapes."""


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    expr: str
    legend: str
    instant: bool
    exemplars: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, at its place in a grid of 24 columns."""

    title: str
    kind: PanelKind
    unit: str
    decimals: int | None
    """Digits after the point, where that is set."""
    stacked: bool
    min_step: float
    """Seconds between two points, at least."""
    targets: tuple[Target, ...]
    steps: tuple[tuple[float, str], ...]
    """From which value on there is which colour."""
    colours: tuple[tuple[str, str], ...]
    """Pattern of series names, and the color of matching series."""
    shaded: bool
    """Whether each series of such a color has its own shade of it."""
    axis: str
    """Label of the axis of values."""
    shown: Mapping[str, str]
    """Text of a table, and the text that is shown instead."""
    nothing: str
    """Text shown without data."""
    content: str
    """Of a text panel."""
    value_name: str
    """Header of the values in a table."""
    left: int
    top: int
    width: int
    height: int

    def colour_of(self, name: str) -> str | None:
        """Return the color configured for a series, if any."""
        return next((colour for fits, colour in self.colours if re.search(fits, name)), None)

    def colour_at(self, value: float) -> str:
        """Colour of a value, by the thresholds."""
        # From the highest: the last threshold that is reached is the one that holds.
        return next(colour for start, colour in reversed(self.steps) if value >= start)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard as far as it can be drawn."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    rows: tuple[tuple[str, int], ...]
    """Title and top of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """The time that is looked at, in seconds."""

    start: float
    end: float
    step: float
    scrape_interval: float

    @property
    def range(self) -> float:
        """Its length."""
        return self.end - self.start

    @property
    def rate_interval(self) -> float:
        """Value that Grafana substitutes for `$__rate_interval`."""
        # As Grafana has it: a rate over fewer than four scrapes has holes whenever one is missed.
        return max(self.step + self.scrape_interval, SCRAPES_PER_RATE * self.scrape_interval)

    def for_panel(self, panel: Panel) -> TimeRange:
        """Take steps as long as a panel wants them, those that count at full multiples."""
        step = max(self.step, panel.min_step)
        if self.range < step:  # as in tests, where no full multiple may be within the range
            return replace(self, start=self.end - step, step=step)
        # Grafana aligns both ends, so that bars stay the same over time
        # (pkg/promlib/models/query.go, AlignTimeRange).
        start, end = (math.floor(time / step) * step for time in (self.start, self.end))
        return replace(self, start=start, end=end, step=step)

    def fill(self, expr: str, variables: Mapping[str, str] | None = None) -> str:
        """Substitute Grafana's variables; a variable without a value matches everything."""
        values = {
            "__interval": f"{self.step * 1000:.0f}ms",
            "__interval_ms": f"{self.step * 1000:.0f}",
            "__rate_interval": f"{self.rate_interval * 1000:.0f}ms",
            "__range": f"{self.range * 1000:.0f}ms",
            "__range_s": f"{self.range:.0f}",
            **(variables or {}),
        }
        # What a process may not have, such as a cluster, is meant by "all" as well.
        return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".*"), expr)


def seconds(text: str) -> float:
    """Parse `30s`, `15m`, `6h` or `7d`.

    Raises:
        ValueError: It is something else.
    """
    lengths = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    # `isdecimal` alone takes the digits of every script.
    if number.isascii() and number.isdecimal() and int(number) > 0 and unit in lengths:
        return float(int(number) * lengths[unit])
    raise ValueError(f"{text!r} is not a duration such as 30s, 15m, 6h or 7d")


def read(path: Path) -> Dashboard:
    """Read one dashboard file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    # Rows are headings here, as they have no queries.
    panels = [each for each in content["panels"] if each["type"] != "row"]
    return Dashboard(
        name=path.stem,
        title=content["title"],
        panels=tuple(_panel(each) for each in panels),
        rows=tuple(
            (each["title"], each["gridPos"]["y"])
            for each in content["panels"]
            if each["type"] == "row"
        ),
    )


def read_all(directory: Path) -> tuple[Dashboard, ...]:
    """Read every dashboard that the package brings."""
    return tuple(read(path) for path in sorted((directory / "grafana/dashboards").glob("*.json")))


def _panel(content: Mapping[str, Any]) -> Panel:
    place = content["gridPos"]
    defaults = content.get("fieldConfig", {}).get("defaults", {})
    options = content["options"]
    kind = cast("PanelKind", content["type"])
    return Panel(
        title=content["title"],
        kind=kind,
        unit=defaults.get("unit", ""),
        decimals=defaults.get("decimals"),
        min_step=seconds(content.get("interval", "1s")),
        stacked=defaults.get("custom", {}).get("drawStyle") == "bars",
        targets=tuple(_target(each) for each in content.get("targets", ())),
        steps=_steps(defaults),
        colours=tuple(_colours(content)),
        shaded='"shades"' in json.dumps(content),
        axis=defaults.get("custom", {}).get("axisLabel", ""),
        shown={
            text: other["text"]
            for each in defaults.get("mappings", ())
            for text, other in each["options"].items()
        },
        nothing=defaults.get("noValue", ""),
        content=options.get("content", ""),
        value_name=_value_name(content),
        left=place["x"],
        top=place["y"],
        width=place["w"],
        height=place["h"],
    )


def _steps(defaults: Mapping[str, Any]) -> tuple[tuple[float, str], ...]:
    """Read thresholds; the first has no value in Grafana, as it begins below all."""
    steps = defaults.get("thresholds", {}).get("steps") or [{"value": None, "color": "blue"}]
    return tuple(
        (-math.inf if each["value"] is None else float(each["value"]), each["color"])
        for each in steps
    )


def _value_name(content: Mapping[str, Any]) -> str:
    """Return what a transformation renames the values of a table to."""
    for each in content.get("transformations", ()):
        if name := each["options"].get("renameByName", {}).get("Value"):
            return str(name)
    return "value"


def _colours(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Read the colors configured for individual series."""
    for override in content.get("fieldConfig", {}).get("overrides", ()):
        for each in override["properties"]:
            if override["matcher"]["id"] == "byRegexp" and each["id"] == "color":
                yield override["matcher"]["options"].strip("/"), each["value"]["fixedColor"]


def _target(content: Mapping[str, Any]) -> Target:
    return Target(
        expr=content["expr"],
        legend=content["legendFormat"],
        instant=bool(content.get("instant")),
        exemplars=bool(content.get("exemplar")),
    )
