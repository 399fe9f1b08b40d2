"""The guides for production work: workers, notebooks, images and Kubernetes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import jsonschema
import pytest
import yaml

from otel_limits import flush
from otel_limits.cli.parser import make_parser
from otel_limits.settings.table import SETTINGS
from otel_limits.testing import ScriptedModel, endless, uses
from tests.pages import BLOCK, files
from tests.paths import ROOT
from tests.readme import PAGES, README

if TYPE_CHECKING:
    from tests.conftest import MakeAgent

DOCS = ROOT / "otel_limits/docs"


def read(name: str) -> str:
    """Read a page."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_notebook_cell_limits_agents(
    make_agent: MakeAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An agent is called without `await` while the event loop of the kernel runs."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(read("jupyter"))
    cells = [body for language, body in blocks if language == "python"]

    async def cell() -> str:
        for each in cells:
            exec(each, {})  # noqa: S102  they are the page's
        agent = make_agent(ScriptedModel(endless(uses("search"))))
        return str(agent("go").stop_reason)

    with patch.dict(os.environ):
        assert asyncio.run(cell()) == "loop_detected"
        assert flush()  # rows are written in the background
    assert (tmp_path / "ledger.db").exists()
    assert [("text", capsys.readouterr().out)] == [each for each in blocks if each[0] == "text"]


# --- Kubernetes -----------------------------------------------------------------------------------

MANIFESTS = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all(files(DOCS / "kubernetes.md")["agents.yaml"])
}
SCHEMAS: dict[str, Any] = json.loads(
    (ROOT / "tests/kubernetes_schemas.json").read_text(encoding="utf-8")
)
"""The published schemas, reduced to the fields that the page uses."""


def schema_errors(manifest: dict[str, Any]) -> list[str]:
    """Return the violations of an object's schema."""
    checks = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]])
    return [error.message for error in checks.iter_errors(manifest)]


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "Deployment", "PodMonitor"])
def test_kubernetes_object_matches_its_schema(kind: str) -> None:
    """Unknown fields are errors, so a misspelled one is found."""
    assert schema_errors(MANIFESTS[kind]) == []
    misspelled = copy.deepcopy(MANIFESTS[kind])
    part = "spec" if "spec" in misspelled else "metadata"
    misspelled[part]["nmae"] = "agents"
    assert len(schema_errors(misspelled)) == 1


def container() -> dict[str, Any]:
    """Return the container of the Deployment."""
    (found,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    answer: dict[str, Any] = found
    return answer


def test_pod_monitor_scrapes_the_metrics_port() -> None:
    """A wrong port name or label would leave pods unscraped without an error."""
    (port,) = container()["ports"]
    (endpoint,) = MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    variables = {variable["name"]: variable["value"] for variable in container()["env"]}
    assert endpoint["port"] == port["name"]
    assert variables["OTEL_LIMITS_PROMETHEUS_PORT"] == str(port["containerPort"])
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels


# --- images and variables -------------------------------------------------------------------------

IMAGES = [
    (path.stem, body)
    for path in PAGES
    for language, body in BLOCK.findall(path.read_text(encoding="utf-8"))
    if language == "dockerfile"
]
EXTRAS = re.compile(r"'otel-limits\[([\w,]+)\]'")


@pytest.mark.parametrize("body", [body for _, body in IMAGES], ids=[name for name, _ in IMAGES])
def test_image_uses_existing_commands_and_extras(body: str) -> None:
    """Readers copy the file."""
    for command in re.findall(r"(otel-limits (?!\[)[a-z][^&\n]*)", body):
        make_parser().parse_args(shlex.split(command)[1:])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in ",".join(EXTRAS.findall(body)).split(","):
        assert not extra or f"\n{extra} = [" in project


def test_variables_in_pages_exist() -> None:
    """A name that ends in `…` or `*` is a prefix of others."""
    known = [setting.variable for setting in SETTINGS]
    known.append("OTEL_LIMITS_MAX_TRUNS")  # a page shows how a misspelt name is reported
    text = "".join(path.read_text(encoding="utf-8") for path in (README, *PAGES))
    named = set(re.findall(r"\bOTEL_LIMITS_[A-Z_]+(?![A-Z_])(?:…|\*)?", text))
    unknown = [
        name
        for name in named
        if not any(
            variable == name or (name[-1] in "…*_" and variable.startswith(name.rstrip("…*")))
            for variable in known
        )
    ]
    assert unknown == []
