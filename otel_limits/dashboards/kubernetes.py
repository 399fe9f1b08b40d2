"""Puts rules and dashboards into the objects in which a Kubernetes cluster takes them.

Text within text: the comments of the rules stay, and no YAML has to be read and written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Final

RULE: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: otel-limits
    # By this label kube-prometheus-stack selects what it reads: the name of your release of it.
    release: kube-prometheus-stack
spec:
{spec}"""

DASHBOARD: Final = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: otel-limits-{name}
  labels:
    app.kubernetes.io/name: otel-limits
    # Default label that the sidecar of Grafana's Helm chart watches.
    grafana_dashboard: "1"
  annotations:
    # Where the chart has sidecar.dashboards.folderAnnotation: grafana_folder
    grafana_folder: otel-limits
data:
  {name}.json: |-
    {content}
"""


def write(directory: Path) -> list[Path]:
    """Write objects made of the rules and dashboards in `directory`; return their paths."""
    rules = {
        "otel-limits": directory / "prometheus/rules.yaml",
        # Apart, as a deployment replaces its numbers.
        "otel-limits-thresholds": directory / "prometheus/thresholds.yaml",
    }
    # Sorted, so that the same files come out in the same order everywhere.
    boards = sorted((directory / "grafana/dashboards").glob("*.json"))
    written = {
        "prometheusrules.yaml": [_rule(name, path) for name, path in rules.items()],
        "dashboards.yaml": [_dashboard(path) for path in boards],
    }
    paths = []
    for name, objects in written.items():
        path = directory / "kubernetes" / name
        path.write_text("---\n".join(objects), encoding="utf-8")
        paths.append(path)
    return paths


def _rule(name: str, path: Path) -> str:
    return RULE.format(name=name, spec=indent(path.read_text(encoding="utf-8"), "  "))


def _dashboard(path: Path) -> str:
    # On one line, without what only people need: a ConfigMap has room for 1 MiB.
    board = json.loads(path.read_text(encoding="utf-8"))
    content = json.dumps(board, separators=(",", ":"), ensure_ascii=False)
    return DASHBOARD.format(name=path.stem, content=content)
