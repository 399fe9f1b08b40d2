"""Starts a program with otel-limits switched on in it, without a change to the program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

STARTUP: Final = str(Path(__file__).with_name("startup"))
"""Directory of the `sitecustomize` that Python imports by itself."""

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
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  the user's own command
    except FileNotFoundError:
        return NOT_FOUND, f"{command[0]}: command not found."
    except OSError as error:
        return NOT_EXECUTABLE, f"{command[0]} cannot be started: {error.strerror}."


def option_that_hides_us(command: Sequence[str]) -> str | None:
    """Find the option of Python with which it would not load otel-limits.

    -E and -I ignore PYTHONPATH, and -S does not import `sitecustomize`.
    """
    if not PurePath(command[0]).name.startswith("python"):
        return None
    return next((f"-{each}" for each in _flags_of_python(command[1:]) if each in "EIS"), None)


def _flags_of_python(arguments: Sequence[str]) -> Iterator[str]:
    """Letters of the options that the interpreter itself takes."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-" or not argument.startswith("-") or argument.startswith("--"):
            return
        for position, letter in enumerate(argument[1:], start=2):
            if letter in "cm":  # the program: what follows belongs to it
                return
            if letter in "WX":  # these take a value: the rest of the word, otherwise the next word
                if position == len(argument):
                    next(rest, None)
                break
            yield letter
