"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SCRIPTS: Final = ROOT / "tests/scripts"
"""Programs that tests start."""
