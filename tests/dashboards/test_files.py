"""The files that are shipped fit together, and arrive where they are wanted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_limits.cli import main
from otel_limits.dashboards import files, panels
from tests.dashboards.servers import RELEASES, ROOT, RULES, Find, program

DASHBOARDS = ROOT / "dashboards"
README = (DASHBOARDS / "README.md").read_text(encoding="utf-8")
PROVISIONING = DASHBOARDS / "grafana/provisioning"
RULE_TESTS = [DASHBOARDS / f"prometheus/{name}.yaml" for name in ("tests", "tests_of_days")]


def load(path: Path) -> Any:
    """Read a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


ALERTS = [rule for group in load(RULES)["groups"] for rule in group["rules"] if "alert" in rule]
MANAGED = load(PROVISIONING / "alerting/otel-limits.yaml")
MANAGED_RULES = [pytest.param(each, id=each["title"]) for each in MANAGED["groups"][0]["rules"]]
BOARDS = {
    board["uid"]: board
    for path in (DASHBOARDS / "grafana/dashboards").glob("*.json")
    for board in [json.loads(path.read_text(encoding="utf-8"))]
}


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_finds_nothing_wrong_with_the_rules(find: Find) -> None:
    """All lint checks on, each of them fatal."""
    run(find("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES))


@pytest.mark.parametrize("find", RELEASES)
def test_every_alert_fires_in_its_minute_and_not_before(find: Find) -> None:
    """Series in, alerts out, by the tests that are shipped with the rules."""
    run(find("promtool"), "test", "rules", str(RULE_TESTS[0]))


def test_what_takes_a_day_fires_in_its_five_minutes() -> None:
    """The same, evaluated every five minutes."""
    run(program("promtool"), "test", "rules", str(RULE_TESTS[1]))


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_finds_nothing_wrong_with_the_configuration(find: Find) -> None:
    """The Prometheus of the compose file starts."""
    run(find("promtool"), "check", "config", str(DASHBOARDS / "prometheus/prometheus.yaml"))


def run(*command: str) -> None:
    """Run a program that has to succeed."""
    done = subprocess.run(
        command,
        # Go collects garbage less often than it usually would: a quarter of what promtool does.
        env={**os.environ, "GOGC": "400"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_is_about(alert: dict[str, Any]) -> None:
    """It has a severity, and a description with a label and, where there is one, the value."""
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert "$labels." in alert["annotations"]["summary"]
    assert "$labels." in alert["annotations"]["description"]
    if "absent_over_time(" not in alert["expr"]:
        assert "$value" in alert["annotations"]["description"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_test_of_both_minutes(alert: dict[str, Any]) -> None:
    """One expects nothing, and one expects the alert."""
    tests = [
        each
        for path in RULE_TESTS
        for group in load(path)["tests"]
        for each in group.get("alert_rule_test", ())
        if each["alertname"] == alert["alert"]
    ]
    assert {bool(each["exp_alerts"]) for each in tests} == {True, False}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_its_place_in_the_runbook(alert: dict[str, Any]) -> None:
    """The anchor exists, and the section says what it means, how to look and what to do."""
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    section = sections()[anchor]

    assert page == files.RUNBOOK
    assert anchor == alert["alert"].lower()
    for heading in ("**What it means.**", "**How to look.**", "**What to do.**"):
        assert heading in section


def sections() -> dict[str, str]:
    """Sections of the README by their anchors."""
    parts = re.split(r"^#+ (.+)$", README, flags=re.MULTILINE)
    anchors = (re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in parts[1::2])
    return dict(zip(anchors, parts[2::2], strict=True))


def test_the_runbook_has_no_alert_that_does_not_exist() -> None:
    """What was renamed is renamed everywhere."""
    named = set(re.findall(r"^### (\w+)$", README, flags=re.MULTILINE))
    assert named == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\"]+)[)\"]", README))
def test_what_the_readme_shows_is_there(target: str) -> None:
    """Pictures and files that are linked exist."""
    assert (DASHBOARDS / target).is_file()


# --- provisioning ---------------------------------------------------------------------------------


def test_grafana_manages_every_alert() -> None:
    """Under the same names, each with a uid of its own that Grafana takes."""
    rules = MANAGED["groups"][0]["rules"]
    assert [each["title"] for each in rules] == [alert["alert"] for alert in ALERTS]
    assert len({each["uid"] for each in rules}) == len(rules)
    assert all(re.fullmatch(r"[a-z-]{1,40}", each["uid"]) for each in rules)


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_a_managed_alert_uses_the_provisioned_data_source(rule: dict[str, Any]) -> None:
    """Its uid is written in both files."""
    (source,) = load(PROVISIONING / "datasources/prometheus.yaml")["datasources"]
    query, condition = rule["data"]

    assert query["datasourceUid"] == source["uid"]
    assert condition["datasourceUid"] == "__expr__"
    assert rule["condition"] == condition["refId"]
    assert condition["model"]["expression"] == query["refId"]


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_a_managed_alert_reaches_the_provisioned_contact_point(rule: dict[str, Any]) -> None:
    """Nothing has to be changed in the tree of notification policies."""
    names = {point["name"] for point in MANAGED["contactPoints"]}
    assert rule["notification_settings"]["receiver"] in names


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_a_managed_alert_is_that_of_prometheus(rule: dict[str, Any]) -> None:
    """As long, as severe, with the same words; of no recorded series, which nobody may record."""
    (alert,) = (each for each in ALERTS if each["alert"] == rule["title"])
    assert rule["for"] == alert.get("for", "0s")
    assert rule["keepFiringFor"] == alert.get("keep_firing_for", "0s")
    assert rule["labels"] == alert["labels"]
    for name, text in rule["annotations"].items():
        told = alert["annotations"][name].replace("$labels.", ".Labels.")
        assert text == told.replace("$value", ".Values.A.Value")
    assert not re.search(r":otel_limits|otel_limits:", rule["data"][0]["model"]["expr"])


@pytest.mark.parametrize("rule", MANAGED_RULES)
def test_no_template_of_a_managed_alert_has_a_dollar_sign(rule: dict[str, Any]) -> None:
    """Grafana would put a variable of the environment in its place."""
    assert "$" not in str(rule)


# --- from an alert to its panel -------------------------------------------------------------------


def panel_at(uid: str, number: int) -> dict[str, Any]:
    """Find a panel by its dashboard and its number."""
    (panel,) = (each for each in BOARDS[uid]["panels"] if each["id"] == number)
    found: dict[str, Any] = panel
    return found


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_the_panel_that_shows_it(alert: dict[str, Any]) -> None:
    """By its number and with its title, to what the alert is about; Grafana's own to the same."""
    annotations = alert["annotations"]
    link = re.fullmatch(
        rf"{files.GRAFANA}/d/([\w-]+)\?viewPanel=(\d+)(.*)", annotations["dashboard_url"]
    )
    assert link is not None
    uid, number = link[1], int(link[2])
    assert panel_at(uid, number)["title"] == annotations["panel"]

    known = {each["name"] for each in BOARDS[uid]["templating"]["list"]}
    chosen = re.findall(r"&var-(\w+)=\{\{ \$labels\.(\w+) \| urlquery \}\}", link[3])
    assert all(name == label and name in known for name, label in chosen)

    (managed,) = (each for each in MANAGED["groups"][0]["rules"] if each["title"] == alert["alert"])
    assert (managed["dashboardUid"], managed["panelId"]) == (uid, number)


@pytest.mark.parametrize("name", ["MaxTurnsStops", "MaxIterationsStops", "LoopDetected"])
def test_a_halt_leads_to_the_panel_with_the_traces(name: str) -> None:
    """Whoever is woken by one wants to see what the agent did."""
    (alert,) = (each for each in ALERTS if each["alert"] == f"OtelLimits{name}")
    link = re.search(r"/d/([\w-]+)\?viewPanel=(\d+)", alert["annotations"]["dashboard_url"])
    assert link is not None
    assert any(each.get("exemplar") for each in panel_at(link[1], int(link[2]))["targets"])


def test_the_runbook_names_panels_that_exist() -> None:
    """Every title in quotes is that of a panel."""
    titles = {panel["title"] for board in BOARDS.values() for panel in board["panels"]}
    _, runbook = README.split("## Runbook\n")
    quoted = {re.sub(r"\s+", " ", each) for each in re.findall(r'"([^"]+)"', runbook)}
    assert {each for each in quoted if each != "max_iterations"} <= titles


def test_the_compose_file_mounts_what_is_provisioned() -> None:
    """The directory of the dashboards is the one that the provider reads."""
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


def test_the_compose_file_listens_on_loopback_only() -> None:
    """Grafana asks nobody for a password there."""
    services = load(DASHBOARDS / "compose.yaml")["services"]
    ports = {name: port for name, each in services.items() for port in each["ports"]}
    assert ports.keys() == services.keys() == {"prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in ports.values())


# --- export ---------------------------------------------------------------------------------------


def dashboards(directory: Path = DASHBOARDS) -> list[Path]:
    """Every dashboard file below `directory`."""
    return sorted((directory / "grafana/dashboards").glob("*.json"))


def test_export_writes_everything_but_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written is what lies here."""
    assert main(["dashboards", "export", str(tmp_path)]) == 0

    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    here = {path.relative_to(DASHBOARDS) for path in DASHBOARDS.rglob("*") if path.is_file()}
    code = {"types", "templates"}
    left_out = {p for p in here if p.suffix in {".py", ".pyc"} or code & set(p.parts)}
    made = {Path("kubernetes/dashboards.yaml"), Path("kubernetes/prometheusrules.yaml")}
    assert written == (here - left_out) | made
    told = capsys.readouterr().out
    assert f"Wrote {len(written)} files to {tmp_path}." in told
    assert "--runbook URL says where dashboards/README.md really is, and --grafana URL" in told
    for path in written - made - {Path("README.md")}:
        assert (tmp_path / path).read_bytes() == (DASHBOARDS / path).read_bytes()


def test_every_link_of_the_exported_page_leads_somewhere(tmp_path: Path) -> None:
    """Pages of the package are named with the command that shows them."""
    main(["dashboards", "export", str(tmp_path)])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert "pictures/agent-limits-3.png" in links
    for link in links:
        assert link.startswith("https://") or (tmp_path / link).is_file(), link
    assert "`otel-limits docs quotas`" in text


def test_export_puts_in_where_the_runbook_is(tmp_path: Path) -> None:
    """Every alert then links to it."""
    runbook = "https://wiki.example/otel-limits"
    assert main(["dashboards", "export", str(tmp_path), "--runbook", runbook]) == 0

    for name in files.YAML:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert f"{runbook}#otellimitsmaxturnsstops" in text
        assert files.RUNBOOK not in text


EXPORT = "import sys; from otel_limits.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_wheel_brings_the_files(tmp_path: Path) -> None:
    """`export` and `preview` work from an installed package, without a checkout."""
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    exported = subprocess.run(
        [sys.executable, "-c", EXPORT, "dashboards", "export", str(tmp_path / "out")],
        cwd=tmp_path / "site",
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert exported.returncode == 0, exported.stderr
    assert [path.name for path in dashboards(tmp_path / "out")] == [
        path.name for path in dashboards()
    ]


def test_a_prometheus_that_does_not_answer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with its address, and status 1."""
    options = ("--prometheus", "http://127.0.0.1:1", "--out", str(tmp_path))
    assert main(["dashboards", "preview", *options]) == 1

    said = capsys.readouterr().err
    assert said.startswith("otel-limits: http://127.0.0.1:1 does not answer like a Prometheus (")


@pytest.mark.parametrize(
    "command",
    [("export",), ("preview", "--prometheus", "http://127.0.0.1:1", "--out")],
    ids=lambda command: command[0],
)
def test_a_directory_that_cannot_be_written_is_told(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sentence that names it, be it a file."""
    taken = tmp_path / "taken"
    taken.write_text("mine", encoding="utf-8")
    assert main(["dashboards", *command, str(taken)]) in (1, 2)

    said = capsys.readouterr().err
    assert said.startswith(f"otel-limits: Cannot write to {taken}: ")
    assert said.endswith(". Name another directory.\n")


@pytest.mark.parametrize("length", ["1", "h", "0m", "1.5h", "-1h", "1w", ""])
def test_a_length_of_time_that_is_none_is_refused(
    length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence says what would be one."""
    options = ("--prometheus", "http://127.0.0.1:1", "--out", "x", f"--range={length}")
    with pytest.raises(SystemExit) as refused:
        main(["dashboards", "preview", *options])

    assert refused.value.code == 2
    assert (
        f"{length!r} is not a length of time such as 30s, 15m, 6h or 7d" in capsys.readouterr().err
    )


def test_the_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It does nothing, and says what it could do."""
    assert main(["dashboards"]) == 2
    assert "export" in capsys.readouterr().err


def test_every_dashboard_can_be_read() -> None:
    """The preview knows every kind of panel that there is."""
    from otel_limits.dashboards.plots import DRAWINGS

    kinds = {panel.kind for each in panels.read_all(DASHBOARDS) for panel in each.panels}
    assert kinds == set(DRAWINGS)


@pytest.mark.parametrize(("is_bars", "asked"), [(False, (970, 1210)), (True, (960, 1320))])
def test_a_line_ends_now_and_a_bar_with_its_step(is_bars: bool, asked: tuple[int, int]) -> None:  # noqa: FBT001  a parameter
    """Nobody knows the values of the end of a step that is not over; bars stay where they are."""
    window = panels.TimeRange(start=1000, end=1210, step=1, scrape_interval=1)
    panel = next(
        panel
        for board in panels.read_all(files.directory())
        for panel in board.panels
        if panel.kind == "timeseries" and panel.stacked is is_bars
    )
    steps = window.for_panel(panel)
    assert (steps.step, (steps.start, steps.end)) == (120, asked)
