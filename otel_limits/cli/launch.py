"""Starts a program with otel-limits switched on in it, without a change to the program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

STARTUP: Final = str(Path(__file__).with_name("startup"))
"""Directory of the `sitecustomize` that Python imports by itself."""

STARTED: Final = "_RUN_BY_OTEL_LIMITS"
"""Variable with the id of the process that `run` became; `sitecustomize` knows it as well."""

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def environment_for(base: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of the program: `base`, `variables` over it, and us on its path."""
    inherited = base["PYTHONPATH"].split(os.pathsep) if base.get("PYTHONPATH") else []
    # First, or another `sitecustomize` on the path would be the one that Python imports; ours runs
    # that one afterwards.
    path = [STARTUP, *(entry for entry in inherited if entry != STARTUP)]
    return {**base, **variables, "PYTHONPATH": os.pathsep.join(path)}


def replace_process(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Become the program, so that its signals and its exit status are its own.

    Returns:
        Exit status and a sentence, only when the program cannot be started.
    """
    # The program has our id; what it starts has another one, and does not say how it ended.
    environ = {**environ, STARTED: str(os.getpid())}
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  the user's own command
    except FileNotFoundError:
        return NOT_FOUND, f"{command[0]}: command not found."
    except OSError as error:
        return NOT_EXECUTABLE, f"{command[0]} cannot be started: {error.strerror}."
