"""Starts a program with otel-limits enabled, without code changes."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from otel_limits.settings.children import NOTE, RUN, path_with_hook

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def environment_for(base: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return `base` updated with `variables`, and with what enables otel-limits at startup."""
    # `run` replaces this process, whose ID the program keeps; its child processes have others and
    # print no notice at exit.
    by_run = {"PYTHONPATH": path_with_hook(base.get("PYTHONPATH")), RUN: str(os.getpid())}
    return {**base, **variables, **by_run}


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
