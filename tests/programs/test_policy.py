"""A bad policy file ends a strict process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the policy file that the environment names."""
    path = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def test_strict_ends_the_process(write: Callable[[str], Path]) -> None:
    """With OTEL_LIMITS_STRICT a bad file ends the process with status 2 and its sentences."""
    path = write("defaults: {action: stop}")
    program = "from otel_limits.runtime.enable import enable_leniently as e; e('run'); print('on')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OTEL_LIMITS_STRICT": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"otel-limits: {path}:1: defaults.action must be one of" in ended.stderr
