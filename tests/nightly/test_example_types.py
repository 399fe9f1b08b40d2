"""The public types, as a second type checker sees them."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT


def test_example_programs_pass_pyright_in_strict_mode() -> None:
    """Mypy checks them with all other files."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].startswith("0 errors"), done.stdout + done.stderr
