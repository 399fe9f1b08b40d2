"""The shipped rules and dashboards as Prometheus reads them, and their pictures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from otel_limits.cli import main
from tests.dashboards import panels
from tests.dashboards.plots import DRAWINGS
from tests.dashboards.servers import RELEASES, RULES, Find, program
from tests.paths import ROOT
from tests.unit.dashboards.test_exported_files import DASHBOARDS, NAMES, RULE_TESTS, dashboards
from tests.unit.dashboards.test_panels import BOARDS, MARKS, QUERIES

# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_accepts_the_rules(find: Find) -> None:
    """With all lint checks, each fatal."""
    run(find("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES))


@pytest.mark.parametrize("find", RELEASES)
def test_alerts_fire_in_their_minute(find: Find) -> None:
    """By the tests that are shipped with the rules."""
    run(find("promtool"), "test", "rules", str(RULE_TESTS[0]))


@pytest.mark.parametrize("path", RULE_TESTS[1:], ids=NAMES[1:])
def test_alerts_fire_for_their_reason_only(path: Path) -> None:
    """Not for what is almost one. Ordinary days are in `test_alerts.py`."""
    run(program("promtool"), "test", "rules", str(path))


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_accepts_the_configuration(find: Find) -> None:
    """Otherwise the Prometheus of the compose file would not start."""
    run(find("promtool"), "check", "config", str(DASHBOARDS / "prometheus/prometheus.yaml"))


def run(*command: str) -> None:
    """Run a program that must succeed."""
    done = subprocess.run(
        command,
        # Garbage collection is a quarter of the work of promtool.
        env={**os.environ, "GOGC": "400"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


EXPORT = "import sys; from otel_limits.cli import main; sys.exit(main(sys.argv[1:]))"


def test_wheel_contains_the_files(tmp_path: Path) -> None:
    """`export` works from an installed package."""
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


def test_pictures_support_every_kind_of_panel() -> None:
    """And no other kind."""
    kinds = {panel.kind for each in panels.read_all(DASHBOARDS) for panel in each.panels}
    assert kinds == set(DRAWINGS)


def test_unwritable_directory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names it."""
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    assert main(["dashboards", "export", str(file)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"otel-limits: Cannot write to {file}: ")


# --- the committed dashboards ---------------------------------------------------------------------


def test_committed_dashboards_are_up_to_date(tmp_path: Path) -> None:
    """Run `python -m tests.generate dashboards` when this fails."""
    if sys.version_info < (3, 11):
        pytest.skip("grafana-foundation-sdk needs Python 3.11.")
    command = [sys.executable, "-m", "dashboards.build", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)

    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == len(BOARDS) + 2  # rules, and the alerts that Grafana manages
    for path in made:
        committed = (ROOT / "dashboards" / path).read_text("utf-8")
        assert (tmp_path / path).read_text("utf-8") == committed, path


@pytest.mark.parametrize("find", RELEASES)
def test_promtool_parses_every_query(tmp_path: Path, find: Find) -> None:
    """target-promql-rule, with Grafana's variables filled in."""
    rules = [
        {"record": f"query:{number}", "expr": filled(expr)}
        for number, expr in enumerate(
            [*(target["expr"] for target in QUERIES.values()), *MARKS.values()]
        )
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}), "utf-8")
    done = subprocess.run(
        [find("promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def filled(expr: str) -> str:
    """Fill in Grafana's variables."""
    values = {
        "__range_s": "3600",
        "__range": "1h",
        "__interval": "2m",
        "__rate_interval": "2m",
        "__interval_ms": "120000",
    }
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".*"), expr)
