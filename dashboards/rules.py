"""Writes rules and alerts: the templates, with the growth of every counter spelled out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from dashboards import queries

HERE: Final = Path(__file__).parent

WRITTEN: Final = {
    "rules.yaml": "prometheus/rules.yaml",
    "alerting.yaml": "grafana/provisioning/alerting/otel-limits.yaml",
}
"""Where each template is written to, below the directory of the dashboards."""

GROWTH: Final = re.compile(r"^( *)<<(\S+) (\w+)>>$", re.MULTILINE)
"""A line that stands for how much a counter went up: its selector, and over how long."""


def write(directory: Path) -> None:
    """Write what Prometheus and Grafana load."""
    for template, target in WRITTEN.items():
        text = (HERE / "templates" / template).read_text(encoding="utf-8")
        path = directory / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GROWTH.sub(_spelled_out, text), encoding="utf-8")


def _spelled_out(found: re.Match[str]) -> str:
    """Put each branch of an expression on a line of its own, as deep as what it stands for."""
    indent, selector, over = found.groups()
    branches = queries.branches_of_growth(selector, over)
    return f"\n{indent}or\n".join(f"{indent}  {branch}" for branch in branches)
