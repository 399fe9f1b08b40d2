"""Starts a program with otel-limits enabled, without code changes."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from otel_limits.settings.children import NOTE

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def replace_process(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Replace this process with the program, so signals and exit status are its own.

    Returns:
        Exit status and error message, only if the program cannot be started.
    """
    environ = {**environ, NOTE: _note()}
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  the user's own command
    except FileNotFoundError:
        return NOT_FOUND, f"{command[0]}: command not found."
    except OSError as error:
        return NOT_EXECUTABLE, f"Cannot start {command[0]}: {error.strerror}."


def _note() -> str:
    """Return the path of a file that does not exist, or nothing if none can be written."""
    try:
        return str(Path(tempfile.gettempdir(), f"otel-limits-run-{secrets.token_hex(8)}"))
    except OSError:
        return ""
