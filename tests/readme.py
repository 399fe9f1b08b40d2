"""Writes the generated tables of README and pages from the code: `python -m tests.readme`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import otel_limits
import otel_limits.testing
from otel_limits.cli.check import shown
from otel_limits.core.limits import LIMITS, STOP_REASONS
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.instruments import METRICS
from otel_limits.settings.table import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
README: Final = ROOT / "README.md"
PAGES: Final = tuple(sorted((ROOT / "otel_limits/docs").glob("*.md")))

LIMITS_OF: Final[Mapping[str, str]] = {
    **{
        reason: ", ".join(f"`{limit.name}`" for limit in LIMITS.values() if limit.reason == reason)
        for reason in STOP_REASONS
    },
    "quota_exceeded": "a quota, or a gateway that says that its budget is spent",
    "quota_unavailable": "a quota whose store did not answer in time, where it is to `deny` then",
    "killed": "`otel_limits.kill()`, `SIGUSR2`",
}
"""What leads to each stop reason, in Markdown."""


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [tuple(titles), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def settings() -> str:
    """Lay out every variable."""
    rows = ((f"`{setting.variable}`", shown(setting.default), setting.help) for setting in SETTINGS)
    return table(("variable", "default", "meaning"), rows)


def reasons() -> str:
    """Lay out every stop reason, in the order in which one is chosen."""
    rows = ((f"`{reason}`", LIMITS_OF[reason]) for reason in STOP_REASONS)
    return table(("stop reason", "because of"), rows)


def metrics() -> str:
    """Lay out every metric."""
    rows = (
        (f"`{spec.name}`", ", ".join(f"`{label}`" for label in spec.labels) or "none", spec.help)
        for spec in METRICS
    )
    return table(("metric", "labels", "meaning"), rows)


def conventions() -> str:
    """Lay out every metric of OpenTelemetry's conventions that is emitted where it is asked for."""
    rows = (
        (
            f"`{spec.convention}`",
            f"`{spec.name}`",
            ", ".join(f"`{label}`" for label in spec.labels),
            bounds(spec.buckets),
        )
        for spec in CONVENTIONAL
    )
    return table(("metric", "in Prometheus", "attributes", "buckets"), rows)


def bounds(buckets: Sequence[float]) -> str:
    """Say where a row of powers begins, how it goes on, and where it ends."""
    factor = round(buckets[1] / buckets[0])
    return f"{buckets[0]:g} to {buckets[-1]:.10g}, each {factor} times the one before"


def names() -> str:
    """Lay out every public name: what a constant is, and what anything else is for."""
    rows = []
    for module in (otel_limits, otel_limits.testing):
        for name in module.__all__:
            value = getattr(module, name)
            told = f'`"{value}"`' if isinstance(value, str) else ALIASES.get(name) or value.__doc__
            rows.append((f"`{module.__name__}.{name}`", told.partition("\n")[0]))
    return table(("name", "meaning"), rows)


ALIASES: Final[Mapping[str, str]] = {
    "Fact": "Any of the events: what happened, one record per event.",
    "Observer": "Anything that is called with every event.",
}
"""Names of types without a docstring of their own."""


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "settings": settings,
    "reasons": reasons,
    "metrics": metrics,
    "conventions": conventions,
    "names": names,
}
"""What is laid out from the code alone."""


def vendors() -> str:
    """Lay out what is counted of each vendor's usage: the vendors' formats are asked for that."""
    from tests.wire.run import results
    from tests.wire.table import vendors as laid_out

    return laid_out(results())


def written(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Put every table between its markers, where a page has them."""
    for name, make in tables.items():
        markers = rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- /{name} -->"
        found = re.search(markers, text, re.DOTALL)
        if found is not None:
            text = text[: found.start(1)] + make() + text[found.end(1) :]
    return text


if __name__ == "__main__":
    every = {**TABLES, "vendors": vendors}
    for page in (README, *PAGES):
        page.write_text(written(page.read_text(encoding="utf-8"), every), encoding="utf-8")
