"""Writes rules and alerts from their template.

Grafana-managed alerts are made from the same rules. They run without the recording rules, so each
recorded series is replaced with its expression.
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
"""The address in `compose.yaml`; `export --grafana` replaces it."""

TOTAL: Final = re.compile(r"^( *)<<(\S+) (\w+)>>$", re.MULTILINE)
"""A line of the template that is replaced with a total: selector and window."""

ALERT: Final = "      - alert: "
PANEL: Final = re.compile(r"^( *)panel: (.+)$", re.MULTILINE)
RECORDED: Final = re.compile(r"\w+:otel_limits\w*:\w+|otel_limits:\w+:\w+")
MATCHED: Final = re.compile(rf"({RECORDED.pattern})(?:{{([^}}]*)}})?( offset \w+)?")

FILTERS: Final = ("job", "agent", "reason", "model", "quota")
"""Labels of alerts that are variables of dashboards."""

Boards = Mapping[str, Mapping[str, Any]]


def write(directory: Path, boards: Boards) -> None:
    """Write the rules for Prometheus and Grafana, with links to the panels of `boards`."""
    template = (HERE / "templates/rules.yaml").read_text(encoding="utf-8")
    rules = _linked(TOTAL.sub(_expanded, template), boards)
    thresholds = (HERE / THRESHOLDS).read_text(encoding="utf-8")
    head = (HERE / "templates/alerting.yaml").read_text(encoding="utf-8")
    managed = "".join(_managed(yaml.safe_load(rules), yaml.safe_load(thresholds), boards))
    for name, text in ((RULES, rules), (MANAGED, head + managed)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _expanded(found: re.Match[str]) -> str:
    """Write a total on three lines, one for each kind of series."""
    indent, selector, window = found.groups()
    total = queries.total(selector, window)
    return indent + total.replace(" or ", f"\n{indent}or ")


def _linked(text: str, boards: Boards) -> str:
    """Add the address of its panel to each alert, filtered by the labels of the alert."""
    linked = []
    for alert in text.split(ALERT):
        found = PANEL.search(alert)
        linked.append(alert.replace(found[0], _link(found, alert, boards)) if found else alert)
    return ALERT.join(linked)


def _link(found: re.Match[str], alert: str, boards: Boards) -> str:
    indent, panel = found.groups()
    uid, number = _find(panel, boards)
    # A label that may be missing is used within `with`, and would select nothing.
    named = [label for label in FILTERS if f"{{{{ $labels.{label} }}}}" in alert]
    chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in named)
    return (
        f"{indent}dashboard_url: {GRAFANA}/d/{uid}?viewPanel={number}{chosen}\n"
        f"{indent}panel: {panel}"
    )


def _find(panel: str, boards: Boards) -> tuple[str, int]:
    """Return the dashboard UID and the number of a panel, named "dashboard / panel"."""
    ((uid, number),) = (
        (board["uid"], each["id"])
        for board in boards.values()
        for each in board["panels"]
        if f"{board['title']} / {each['title']}" == panel
    )
    return uid, number


def _managed(
    rules: Mapping[str, Any], thresholds: Mapping[str, Any], boards: Boards
) -> Iterator[str]:
    """Yield each alert as a Grafana-managed alert."""
    every = [rule for each in (rules, thresholds) for rule in each["groups"][0]["rules"]]
    records = {rule["record"]: rule["expr"] for rule in every if "record" in rule}
    template = (HERE / "templates/managed.yaml").read_text(encoding="utf-8")
    for rule in every:
        if "alert" not in rule:
            continue
        name, annotations = rule["alert"], rule["annotations"]
        uid, number = _find(annotations["panel"], boards)
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
                for each in ("summary", "description", "runbook")
            },
        }
        text = template
        for each, value in values.items():
            text = text.replace(f"<<{each}>>", str(value))
        yield text


def inlined(expr: str, records: Mapping[str, str]) -> str:
    """Replace recorded series with their expressions."""

    def expression(found: re.Match[str]) -> str:
        name, matchers, offset = found.groups()
        whole = inlined(records[name], records)
        if matchers:
            whole = re.sub(r"(otel_limits_\w+){", rf"\1{{{matchers},", whole)
        # Only selectors and subqueries take an offset: this subquery has one step.
        return f"last_over_time(({whole})[1m:1m]{offset})" if offset else f"({whole})"

    return MATCHED.sub(expression, expr)


def _for_grafana(text: str) -> str:
    """Remove dollar signs, which Grafana takes for environment variables."""
    return text.replace("$labels.", ".Labels.").replace("$value", ".Values.A.Value")
