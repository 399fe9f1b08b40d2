"""The shipped files are consistent and valid, and are exported and installed."""

from __future__ import annotations

import errno
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from otel_limits.cli import main
from otel_limits.dashboards import exported_files
from tests.dashboards import panels
from tests.dashboards.servers import RULES
from tests.paths import ROOT

DASHBOARDS = ROOT / "dashboards"
README = (DASHBOARDS / "README.md").read_text(encoding="utf-8")
PROVISIONING = DASHBOARDS / "grafana/provisioning"
NAMES = ("tests", "tests_of_days", "tests_of_near_misses", "tests_of_weeks")
RULE_TESTS = [DASHBOARDS / f"prometheus/{name}.yaml" for name in NAMES]


@cache
def load(path: Path) -> Any:
    """Read a YAML file, once for all tests."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


ALERTS = [rule for group in load(RULES)["groups"] for rule in group["rules"] if "alert" in rule]
MANAGED = load(PROVISIONING / "alerting/otel-limits.yaml")
MANAGED_RULES = [pytest.param(each, id=each["title"]) for each in MANAGED["groups"][0]["rules"]]
BOARDS = {
    board["uid"]: board
    for path in (DASHBOARDS / "grafana/dashboards").glob("*.json")
    for board in [json.loads(path.read_text(encoding="utf-8"))]
}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_severity_and_description(alert: dict[str, Any]) -> None:
    """The description contains a label and, if there is one, the value."""
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert "$labels." in alert["annotations"]["summary"]
    assert "$labels." in alert["annotations"]["description"]
    if "absent_over_time(" not in alert["expr"]:
        assert "$value" in alert["annotations"]["description"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_rule_tests(alert: dict[str, Any]) -> None:
    """One expects the alert, and one expects none."""
    tests = [
        each
        for path in RULE_TESTS
        for group in load(path)["tests"]
        for each in group.get("alert_rule_test", ())
        if each["alertname"] == alert["alert"]
    ]
    assert {bool(each["exp_alerts"]) for each in tests} == {True, False}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_a_test_of_a_near_miss(alert: dict[str, Any]) -> None:
    """An alert that fires for nothing is soon ignored."""
    short = alert["alert"].removeprefix("OtelLimits")
    silent = [
        each["expr"]
        for path in RULE_TESTS
        for group in load(path)["tests"]
        for each in group.get("promql_expr_test", ())
        if not each["exp_samples"]
    ]
    assert [expr for expr in silent if re.search(rf"\b(OtelLimits)?{short}\b", expr)]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_a_runbook_section(alert: dict[str, Any]) -> None:
    """With its meaning, how to diagnose it and how to fix it."""
    named = exported_files.RUNBOOK.fullmatch(f"runbook: {alert['annotations']['runbook']}")
    assert named is not None
    assert named[2] == alert["alert"]
    section = sections()[alert["alert"].lower()]
    for heading in ("**Meaning.**", "**Diagnosis.**", "**Action.**"):
        assert heading in section


def sections() -> dict[str, str]:
    """Return the sections of the README by anchor."""
    parts = re.split(r"^#+ (.+)$", README, flags=re.MULTILINE)
    anchors = (re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in parts[1::2])
    return dict(zip(anchors, parts[2::2], strict=True))


def test_runbook_has_no_unknown_alerts() -> None:
    """A renamed alert is renamed everywhere."""
    named = set(re.findall(r"^### (\w+)$", README, flags=re.MULTILINE))
    assert named == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\"]+)[)\"]", README))
def test_readme_links_exist(target: str) -> None:
    """Linked pictures and files."""
    assert (DASHBOARDS / target).is_file()


# --- provisioning ---------------------------------------------------------------------------------


def test_grafana_has_every_alert() -> None:
    """Under the same names, with unique UIDs that Grafana accepts."""
    rules = MANAGED["groups"][0]["rules"]
    assert [each["title"] for each in rules] == [alert["alert"] for alert in ALERTS]
    assert len({each["uid"] for each in rules}) == len(rules)
    assert all(re.fullmatch(r"[a-z-]{1,40}", each["uid"]) for each in rules)


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_managed_alert_uses_the_provisioned_data_source(rule: dict[str, Any]) -> None:
    """Both files contain its UID."""
    (source,) = load(PROVISIONING / "datasources/prometheus.yaml")["datasources"]
    query, condition = rule["data"]

    assert query["datasourceUid"] == source["uid"]
    assert condition["datasourceUid"] == "__expr__"
    assert rule["condition"] == condition["refId"]
    assert condition["model"]["expression"] == query["refId"]


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_managed_alert_uses_the_provisioned_contact_point(rule: dict[str, Any]) -> None:
    """Notification policies need no change."""
    names = {point["name"] for point in MANAGED["contactPoints"]}
    assert rule["notification_settings"]["receiver"] in names


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_managed_alert_equals_prometheus_alert(rule: dict[str, Any]) -> None:
    """Same durations, severity and annotations, but without recorded series."""
    (alert,) = (each for each in ALERTS if each["alert"] == rule["title"])
    assert rule["for"] == alert.get("for", "0s")
    assert rule["keepFiringFor"] == alert.get("keep_firing_for", "0s")
    assert rule["labels"] == alert["labels"]
    for name, text in rule["annotations"].items():
        expected = alert["annotations"][name].replace("$labels.", ".Labels.")
        assert text == expected.replace("$value", ".Values.A.Value")
    assert not re.search(r":otel_limits|otel_limits:", rule["data"][0]["model"]["expr"])


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_managed_alert_has_no_dollar_sign(rule: dict[str, Any]) -> None:
    """Grafana would substitute an environment variable."""
    assert "$" not in str(rule)


# --- from an alert to its panel -------------------------------------------------------------------


def panel_at(uid: str, number: int) -> dict[str, Any]:
    """Return a panel by dashboard and number."""
    (panel,) = (each for each in BOARDS[uid]["panels"] if each["id"] == number)
    found: dict[str, Any] = panel
    return found


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_links_to_its_panel(alert: dict[str, Any]) -> None:
    """Filtered by the labels of the alert; Grafana-managed alerts link to the same panel."""
    annotations = alert["annotations"]
    link = re.fullmatch(
        rf"{exported_files.GRAFANA}/d/([\w-]+)\?viewPanel=(\d+)(.*)", annotations["dashboard_url"]
    )
    assert link is not None
    uid, number = link[1], int(link[2])
    title = f"{BOARDS[uid]['title']} / {panel_at(uid, number)['title']}"
    assert title == annotations["panel"]

    known = {each["name"] for each in BOARDS[uid]["templating"]["list"]}
    chosen = re.findall(r"&var-(\w+)=\{\{ \$labels\.(\w+) \| urlquery \}\}", link[3])
    assert all(name == label and name in known for name, label in chosen)

    (managed,) = (each for each in MANAGED["groups"][0]["rules"] if each["title"] == alert["alert"])
    assert (managed["dashboardUid"], managed["panelId"]) == (uid, number)


@pytest.mark.parametrize("name", ["Halted", "HaltedRepeatedly"])
def test_alert_on_halts_links_to_exemplars(name: str) -> None:
    """The trace shows the steps of the agent."""
    (alert,) = (each for each in ALERTS if each["alert"] == f"OtelLimits{name}")
    link = re.search(r"/d/([\w-]+)\?viewPanel=(\d+)", alert["annotations"]["dashboard_url"])
    assert link is not None
    assert any(each.get("exemplar") for each in panel_at(link[1], int(link[2]))["targets"])


def test_runbook_quotes_existing_panels() -> None:
    """Every quote is the title of a panel."""
    titles = {panel["title"] for board in BOARDS.values() for panel in board["panels"]}
    _, runbook = README.split("## Runbook\n")
    quoted = {re.sub(r"\s+", " ", each) for each in re.findall(r'"([^"]+)"', runbook)}
    assert quoted <= titles


def test_compose_file_mounts_provisioned_directories() -> None:
    """The provider reads the mounted directory of the dashboards."""
    compose = load(DASHBOARDS / "compose.yaml")
    (provider,) = load(PROVISIONING / "dashboards/otel-limits.yaml")["providers"]
    mounts = {
        inside: outside
        for service in compose["services"].values()
        for outside, inside, *_ in (volume.split(":") for volume in service["volumes"])
    }
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    for outside in mounts.values():
        assert not outside.startswith(".") or (DASHBOARDS / outside).is_dir()


def test_compose_file_listens_on_loopback_only() -> None:
    """Its Grafana requires no password."""
    services = load(DASHBOARDS / "compose.yaml")["services"]
    ports = {name: port for name, each in services.items() for port in each["ports"]}
    assert ports.keys() == services.keys() == {"prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in ports.values())


# --- export ---------------------------------------------------------------------------------------


def dashboards(directory: Path = DASHBOARDS) -> list[Path]:
    """Return the dashboard files below a directory."""
    return sorted((directory / "grafana/dashboards").glob("*.json"))


def test_export_writes_everything_but_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unchanged, except for the README."""
    assert main(["dashboards", "export", str(tmp_path)]) == 0

    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    here = {path.relative_to(DASHBOARDS) for path in DASHBOARDS.rglob("*") if path.is_file()}
    code = {"types", "templates"}
    left_out = {p for p in here if p.suffix in {".py", ".pyc"} or code & set(p.parts)}
    made = {Path("kubernetes/dashboards.yaml"), Path("kubernetes/prometheusrules.yaml")}
    assert written == (here - left_out) | made | {Path(exported_files.DIGESTS)}
    output = capsys.readouterr().out
    written -= {Path(exported_files.DIGESTS)}
    assert f"Wrote {len(written)} files to {tmp_path}." in output
    assert "--runbook URL makes it a link." in output
    assert "Alerts link to http://localhost:3000; change with --grafana URL." in output
    for path in written - made - {Path("README.md")}:
        assert (tmp_path / path).read_bytes() == (DASHBOARDS / path).read_bytes()


def test_export_replaces_no_edited_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a former version, e.g. of the package or with another runbook, all others are replaced."""
    runbook = "https://wiki.example/otel-limits"
    for words in ([], ["--runbook", runbook]):
        assert main(["dashboards", "export", str(tmp_path), *words]) == 0
        assert "Kept" not in capsys.readouterr().out
    edited = tmp_path / "prometheus/thresholds.yaml"
    edited.write_text(edited.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    for _ in range(2):
        assert main(["dashboards", "export", str(tmp_path)]) == 0
        assert (
            "Kept 1 file that differs, edited or of another version: prometheus/thresholds.yaml. "
            "To get the new version, move it away and export again."
        ) in capsys.readouterr().out
        assert edited.read_text(encoding="utf-8").endswith("# mine\n")
    assert runbook not in (tmp_path / exported_files.YAML[0]).read_text(encoding="utf-8")
    assert "# mine" in (tmp_path / "kubernetes/prometheusrules.yaml").read_text(encoding="utf-8")


RUNBOOK = ("--runbook", "https://wiki.example/otel-limits")
BOARD = "grafana/dashboards/health.json"


def export(directory: Path, *words: str, status: int = 0) -> None:
    """Export to a directory."""
    assert main(["dashboards", "export", str(directory), *words]) == status


def test_export_keeps_files_of_unknown_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the digests, e.g. of a checkout that ignores them, an older file may be edited."""
    export(tmp_path, *RUNBOOK)
    (tmp_path / exported_files.DIGESTS).unlink()
    export(tmp_path)
    managed = sorted(exported_files.YAML)
    assert (
        f"Kept 2 files that differ, edited or of another version: {', '.join(managed)}. "
        "To get the new version, move them away and export again."
    ) in capsys.readouterr().out


def test_export_replaces_files_with_line_ends_of_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout has them, which is no edit."""
    export(tmp_path, *RUNBOOK)
    for path in tmp_path.rglob("*.*ml"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    export(tmp_path)
    assert "Kept" not in capsys.readouterr().out
    assert b"\r" not in (tmp_path / "compose.yaml").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (BOARD, b"{,}", "is not valid JSON (Expecting property name enclosed in double quotes: "),
        (BOARD, b"\xff", "is not UTF-8"),
        ("grafana/dashboards/mine.json", b"", "is not valid JSON (Expecting value: "),
        ("prometheus/thresholds.yaml", b"\xff", "is not UTF-8"),
    ],
)
def test_export_refuses_an_invalid_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, why: str
) -> None:
    """By its name, as no object of Kubernetes can be made from it."""
    export(tmp_path)
    (tmp_path / name).write_bytes(content)
    export(tmp_path, status=2)
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"otel-limits: {tmp_path / name} {why}")
    assert refusal.endswith(" Correct it, or move it away, and export again.\n")


def test_export_replaces_its_files_after_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that it replaced before are not taken for edited ones."""
    export(tmp_path)
    (tmp_path / BOARD).write_bytes(b"{")
    export(tmp_path, *RUNBOOK, status=2)
    (tmp_path / BOARD).unlink()
    export(tmp_path)
    assert "Kept" not in capsys.readouterr().out


def test_export_replaces_its_files_after_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including the file that was half written."""
    write_bytes = Path.write_bytes

    def fill_the_disk(path: Path, content: bytes) -> int:
        if path.name != "compose.yaml":
            return write_bytes(path, content)
        write_bytes(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill_the_disk)
        export(tmp_path, *RUNBOOK, status=2)
    assert "No space left on device" in capsys.readouterr().err
    export(tmp_path)
    assert "Kept" not in capsys.readouterr().out


def test_links_of_exported_readme_exist(tmp_path: Path) -> None:
    """Pages of the package are replaced by the command that shows them."""
    main(["dashboards", "export", str(tmp_path)])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert "pictures/agent-limits-3.png" in links
    for link in links:
        assert link.startswith("https://") or (tmp_path / link).is_file(), link
    assert "`otel-limits docs quotas`" in text


def test_export_sets_the_runbook_url(tmp_path: Path) -> None:
    """In every alert, instead of the text that is there without an address."""
    runbook = "https://wiki.example/otel-limits"
    assert main(["dashboards", "export", str(tmp_path), "--runbook", runbook]) == 0

    for name in exported_files.YAML:
        text = (tmp_path / name).read_text(encoding="utf-8")
        links = re.findall(r'runbook_url: "?([^"\n]+)', text)
        assert links == [f"{runbook}#{each['alert'].lower()}" for each in ALERTS]
        assert "runbook:" not in text


def test_command_without_action_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2."""
    assert main(["dashboards"]) == 2
    assert "export" in capsys.readouterr().err


def test_steps_are_aligned_as_in_grafana() -> None:
    """Both ends are rounded down, and the last bar is incomplete."""
    window = panels.TimeRange(start=1000, end=1610, step=1, scrape_interval=1)
    panel = next(
        panel
        for board in panels.read_all(exported_files.directory())
        for panel in board.panels
        if panel.kind == "timeseries" and panel.min_step == 300
    )
    steps = window.for_panel(panel)
    assert (steps.step, (steps.start, steps.end)) == (300, (900, 1500))


# --- objects for Kubernetes -----------------------------------------------------------------------

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
