"""Writes the files that the package brings, also as objects of a Kubernetes cluster."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from textwrap import indent
from typing import Final

from otel_limits.core.installing import install_command

# --- files ----------------------------------------------------------------------------------------

BROUGHT: Final = (
    "grafana",
    "prometheus",
    "kubernetes",
    "compose.yaml",
    "README.md",
    "pictures",
)
"""Exported files: everything but the code that generates the JSON."""

RUNBOOK: Final = "dashboards/README.md"
"""Default start of every alert's `runbook_url`; --runbook sets the real address."""

GRAFANA: Final = "http://localhost:3000"
"""Default start of every alert's `dashboard_url`; --grafana sets the real address."""

PAGE: Final = re.compile(r"\[([^]]*)\]\(\.\./otel_limits/docs/([a-z-]+)\.md(?:#[a-z-]*)?\)")
PAGE_BY_NAME: Final = r"\1 (`otel-limits docs \2`)"

YAML: Final = ("prometheus/rules.yaml", "grafana/provisioning/alerting/otel-limits.yaml")
"""Files with a `runbook_url` or a `dashboard_url`."""


def directory() -> Path:
    """Where the files are: in the installed package, or in the checkout that it runs from.

    Raises:
        FileNotFoundError: They are in neither, so that the installation is broken.
    """
    # A wheel has them inside of the package, since only that is installed; see pyproject.toml.
    package = Path(__file__).parent.parent
    for candidate in (package / "_dashboards", package.parent / "dashboards"):
        if (candidate / "grafana").is_dir():
            return candidate
    raise FileNotFoundError(
        "The dashboards are missing from the installation of otel-limits. "
        f"Run: {install_command(option='--force-reinstall')}"
    )


def export(target: Path, runbook: str | None = None, grafana: str | None = None) -> list[Path]:
    """Write everything to `target`, also as objects of Kubernetes; return what was written.

    Args:
        target: A directory, created if missing; earlier exported files in it are replaced.
        runbook: Address of the runbook, which every alert then links to.
        grafana: Address of the Grafana whose panels every alert then links to.
    """
    source = directory()
    written = []
    # File by file: a directory of the user keeps what else is in it.
    for name in BROUGHT:
        for path in _files_below(source / name):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            written.append(copy)
    for name in YAML:
        text = (target / name).read_text(encoding="utf-8")
        # In the text, so that the comments of the files stay.
        text = text.replace(RUNBOOK, runbook or RUNBOOK)
        text = text.replace(GRAFANA, (grafana or GRAFANA).rstrip("/"))
        (target / name).write_text(text, encoding="utf-8")
    readme = target / "README.md"
    # The pages stay in the package, where no link from this directory leads.
    readme.write_text(PAGE.sub(PAGE_BY_NAME, readme.read_text(encoding="utf-8")), encoding="utf-8")
    return [*written, *write_objects(target)]


def _files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


# --- objects of Kubernetes ------------------------------------------------------------------------
# Text within text: the comments of the rules stay, and no YAML has to be read and written again.

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


def write_objects(directory: Path) -> list[Path]:
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
