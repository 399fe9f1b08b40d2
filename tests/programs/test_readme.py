"""The built wheel contains every page."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.paths import ROOT
from tests.readme import PAGES


def test_wheel_contains_every_page(tmp_path: Path) -> None:
    """`otel-limits docs` works without a checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= {f"otel_limits/docs/{path.name}" for path in PAGES}
