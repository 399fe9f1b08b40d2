"""The variables of this process: the only reader of `os.environ`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def environment() -> dict[str, str]:
    """Copy the variables, to be read or to be given to a program."""
    return dict(os.environ)


def data_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep their data, by the custom of the platform."""
    environ = environment() if environ is None else environ
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "otel-limits"
