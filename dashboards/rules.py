"""Writes rules and alerts: the template, with the growth of every counter spelled out.

Grafana's own alerts are made of the same rules. It has no recorded series where no Prometheus loads
the rules, so that each of their names is replaced by what is recorded under it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from dashboards import queries

HERE: Final = Path(__file__).parent

RULES: Final = "prometheus/rules.yaml"
THRESHOLDS: Final = "prometheus/thresholds.yaml"
MANAGED: Final = "grafana/provisioning/alerting/otel-limits.yaml"

GRAFANA: Final = "http://localhost:3000"
"""Where `compose.yaml` has it; `export --grafana` puts the real address in its place."""

GROWTH: Final = re.compile(r"^( *)<<(\S+) (\w+)>>$", re.MULTILINE)
"""A line that stands for how much a counter went up: its selector, and over how long."""

ALERT: Final = "      - alert: "
PANEL: Final = re.compile(r"^( *)panel: (.+)$", re.MULTILINE)
RECORDED: Final = re.compile(r"\w+:otel_limits\w*:\w+|otel_limits:\w+:\w+")
MATCHED: Final = re.compile(rf"({RECORDED.pattern})(?:{{([^}}]*)}})?( offset \w+)?")

FILTERS: Final = ("job", "agent", "reason", "model", "quota")
"""Labels of alerts that dashboards have variables for."""

Boards = Mapping[str, Mapping[str, Any]]


def write(directory: Path, boards: Boards) -> None:
    """Write what Prometheus and Grafana load, with links to panels of `boards`."""
    template = (HERE / "templates/rules.yaml").read_text(encoding="utf-8")
    rules = _linked(GROWTH.sub(_spelled_out, template), boards)
    thresholds = (HERE / THRESHOLDS).read_text(encoding="utf-8")
    head = (HERE / "templates/alerting.yaml").read_text(encoding="utf-8")
    managed = "".join(_managed(yaml.safe_load(rules), yaml.safe_load(thresholds), boards))
    for name, text in ((RULES, rules), (MANAGED, head + managed)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _spelled_out(found: re.Match[str]) -> str:
    """Put each branch of an expression on a line of its own, as deep as what it stands for."""
    indent, selector, over = found.groups()
    branches = queries.branches_of_growth(selector, over)
    return f"\n{indent}or\n".join(f"{indent}  {branch}" for branch in branches)


def _linked(text: str, boards: Boards) -> str:
    """Put the address of its panel in front of the panel's name, of what the alert is about."""
    linked = []
    for alert in text.split(ALERT):
        found = PANEL.search(alert)
        linked.append(alert.replace(found[0], _link(found, alert, boards)) if found else alert)
    return ALERT.join(linked)


def _link(found: re.Match[str], alert: str, boards: Boards) -> str:
    indent, title = found.groups()
    uid, number = _place_of(title, boards)
    # A label that may be absent stands within `with`, and would select nothing.
    named = [label for label in FILTERS if f"{{{{ $labels.{label} }}}}" in alert]
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in named)
    return (
        f"{indent}dashboard_url: {GRAFANA}/d/{uid}?viewPanel={number}{chosen}\n"
        f"{indent}panel: {title}"
    )


def _place_of(title: str, boards: Boards) -> tuple[str, int]:
    """Find the dashboard and the number of a panel."""
    ((uid, number),) = (
        (board["uid"], panel["id"])
        for board in boards.values()
        for panel in board["panels"]
        if panel["title"] == title
    )
    return uid, number


def _managed(
    rules: Mapping[str, Any], thresholds: Mapping[str, Any], boards: Boards
) -> Iterator[str]:
    """Write each alert as one of Grafana's."""
    every = [rule for each in (rules, thresholds) for rule in each["groups"][0]["rules"]]
    records = {rule["record"]: rule["expr"] for rule in every if "record" in rule}
    template = (HERE / "templates/managed.yaml").read_text(encoding="utf-8")
    for rule in every:
        if "alert" not in rule:
            continue
        name, annotations = rule["alert"], rule["annotations"]
        uid, number = _place_of(annotations["panel"], boards)
        values = {
            "uid": "-".join(["otel", *re.findall("[A-Z][a-z]+", name)[1:]]).lower(),
            "title": name,
            "for": rule.get("for", "0s"),
            "keep": rule.get("keep_firing_for", "0s"),
            "dashboard": uid,
            "panel": number,
            "expr": inlined(rule["expr"], records).replace("\n", "\n" + " " * 16),
            "severity": rule["labels"]["severity"],
            **{
                each: json.dumps(_for_grafana(annotations[each]), ensure_ascii=False)
                for each in ("summary", "description", "runbook_url")
            },
        }
        text = template
        for each, value in values.items():
            text = text.replace(f"<<{each}>>", str(value))
        yield text


def inlined(expr: str, records: Mapping[str, str]) -> str:
    """Replace the names of recorded series by what is recorded under them."""

    def spelled_out(found: re.Match[str]) -> str:
        name, matchers, offset = found.groups()
        whole = inlined(records[name], records)
        if matchers:
            whole = re.sub(r"(otel_limits_\w+){", rf"\1{{{matchers},", whole)
        # An offset belongs to a selector; for an expression it takes a subquery of one step.
        return f"last_over_time(({whole})[1m:1m]{offset})" if offset else f"({whole})"

    return MATCHED.sub(spelled_out, expr)


def _for_grafana(text: str) -> str:
    """Write a template without dollar signs: Grafana would take variables of the environment."""
    return text.replace("$labels.", ".Labels.").replace("$value", ".Values.A.Value")
