"""The exported Kubernetes objects are valid and match the other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from otel_limits.dashboards import exported_files

SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text("utf-8"))

MAX_CONFIG_MAP = 1_048_576
"""Bytes, by https://kubernetes.io/docs/concepts/configuration/configmap/."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export everything to a directory."""
    directory = tmp_path_factory.mktemp("exported")
    exported_files.export(directory, "https://wiki.example/otel-limits", "https://grafana.example")
    return directory


@pytest.fixture(scope="module")
def objects(exported: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return every object by kind and name."""
    return {
        (each["kind"], each["metadata"]["name"]): each
        for path in (exported / "kubernetes").iterdir()
        for each in yaml.safe_load_all(path.read_text("utf-8"))
    }


def test_all_objects_are_exported(objects: dict[tuple[str, str], Any]) -> None:
    """Rules, thresholds, both kinds of monitors, and dashboards."""
    assert set(objects) == {
        ("PrometheusRule", "otel-limits"),
        ("PrometheusRule", "otel-limits-thresholds"),
        ("PodMonitor", "otel-limits"),
        ("ServiceMonitor", "otel-limits"),
        ("ConfigMap", "otel-limits-agent-limits"),
        ("ConfigMap", "otel-limits-health"),
        ("ConfigMap", "otel-limits-token-spend"),
    }


def test_objects_match_the_published_schema(objects: dict[tuple[str, str], Any]) -> None:
    """No unknown or missing fields, and valid durations and labels."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for each in objects.values():
        validator.validate(each)


@pytest.mark.parametrize(
    "damage",
    [
        lambda each: each.pop("metadata"),
        lambda each: each["metadata"]["labels"].update(release="no label, this"),
        lambda each: each["spec"]["groups"][0]["rules"][0].pop("expr"),
        lambda each: each["spec"]["groups"][0]["rules"][-1].update({"for": "ten minutes"}),
        lambda each: each["spec"]["groups"][0].update(intervall="1m"),
    ],
    ids=["no metadata", "a sentence as label", "no expression", "no duration", "unknown field"],
)
def test_invalid_object_is_rejected(objects: dict[tuple[str, str], Any], damage: Any) -> None:
    """Otherwise the test above would check nothing."""
    rule = json.loads(json.dumps(objects["PrometheusRule", "otel-limits"]))
    damage(rule)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(rule, SCHEMA)


@pytest.mark.parametrize(
    ("name", "file"), [("otel-limits", "rules"), ("otel-limits-thresholds", "thresholds")]
)
def test_rules_match_the_files(
    exported: Path, objects: dict[tuple[str, str], Any], name: str, file: str
) -> None:
    """With the addresses passed to the export."""
    rules = (exported / f"prometheus/{file}.yaml").read_text("utf-8")
    assert objects["PrometheusRule", name]["spec"] == yaml.safe_load(rules)
    if file == "rules":
        assert rules.count("https://wiki.example/otel-limits#") == rules.count("- alert:")
        assert rules.count("https://grafana.example/d/otel-limits-") == rules.count("- alert:")


@pytest.mark.parametrize("name", ["agent-limits", "health", "token-spend"])
def test_dashboard_has_the_label_of_the_grafana_sidecar(
    exported: Path, objects: dict[tuple[str, str], Any], name: str
) -> None:
    """Its ConfigMap contains the whole dashboard, within the size limit."""
    board = objects["ConfigMap", f"otel-limits-{name}"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert list(board["data"]) == [f"{name}.json"]

    file = (exported / f"grafana/dashboards/{name}.json").read_text("utf-8")
    assert json.loads(board["data"][f"{name}.json"]) == json.loads(file)
    assert len(json.dumps(board).encode()) < MAX_CONFIG_MAP
