"""Disasters, in small: `python -m tests.drills` holds them in full."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.postgresql import PROGRAMS

IN_A_FILE = (
    "kills", "full-disk", "slow", "read-only", "vanished", "clock", "power-spill", "power-log",
)  # fmt: skip
ON_A_SERVER = ("postgresql",)
"""Left out is `locked`: it takes as long as the product waits for a lock, and
`test_shipped_times.py` does so already."""


@pytest.mark.parametrize(
    "names",
    [
        IN_A_FILE,
        pytest.param(
            ON_A_SERVER, marks=pytest.mark.skipif(not PROGRAMS, reason="PostgreSQL is missing.")
        ),
    ],
    ids=["SQLite", "PostgreSQL"],
)
def test_durable_rows_survive_every_drill(names: tuple[str, ...]) -> None:
    """Durable rows survive, and verification reports the truth."""
    command = [sys.executable, "-m", "tests.drills", "--small", *names]
    held = subprocess.run(command, capture_output=True, text=True, check=False)
    assert held.returncode == 0, held.stdout + held.stderr
    assert [line.partition(":")[0] for line in held.stdout.splitlines()] == list(names)
