"""Committed dashboards are the generated ones, and Prometheus parses their queries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dashboards.servers import RELEASES, Find
from tests.paths import ROOT
from tests.unit.dashboards.test_lint import BOARDS, MARKS, QUERIES


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
