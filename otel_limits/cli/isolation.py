"""Finds out, before a program starts, that its Python would not load otel-limits from outside.

`otel-limits run` reaches a Python through PYTHONPATH. -E and -I ignore that, -S imports no
`sitecustomize`, and a PEX starts its Python with -E. Such a command is refused: it would run
without any limit, and nobody would know.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from otel_limits.runtime.autoload import autoloads

PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")

PREFIXES: Final = frozenset(
    [
        "chrt",
        "doas",
        "exec",
        "hatch",
        "ionice",
        "nice",
        "nohup",
        "pdm",
        "pipenv",
        "poetry",
        "rye",
        "setsid",
        "stdbuf",
        "sudo",
        "taskset",
        "time",
        "timeout",
        "uv",
        "xvfb-run",
    ]
)
"""Commands that run the command among their arguments."""

MAX_LAYERS: Final = 10
"""Programs within programs that are looked through; a script may name itself."""


class _Layer(NamedTuple):
    """A command, and why a Python that it turns out to be would not load otel-limits."""

    command: Sequence[str]
    problem: str | None = None


def isolation_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Say in a sentence why the limits would not reach a command; `None` where they do.

    Args:
        command: What is to be started, and its arguments.
        environ: The environment that it will have.
    """
    layer: _Layer | None = _Layer(command)
    for _ in range(MAX_LAYERS):
        if layer is None or not layer.command:
            return None
        program = PurePath(layer.command[0]).name
        if PYTHON.fullmatch(program):
            # What was lost on the way here comes first: no option of Python's would bring it back.
            return layer.problem or _python_problem(layer.command, environ)
        layer = _inner(program, layer, environ)
        if layer is not None and layer.command and _is_pex(Path(layer.command[0])):
            return _pex_problem(layer.command[0])
    return None


def _inner(program: str, layer: _Layer, environ: Mapping[str, str]) -> _Layer | None:
    """Return what a program runs in its turn, by its arguments or by its first line."""
    if program == "env":
        return _inner_of_env(layer)
    path = environ.get("PATH")
    if program in PREFIXES:
        # Whatever stands between: none of their options has the name of a program as its value.
        rest = iter(range(1, len(layer.command)))
        found = next((at for at in rest if shutil.which(layer.command[at], path=path)), None)
        return None if found is None else _Layer(layer.command[found:], layer.problem)
    script = shutil.which(layer.command[0], path=path)
    if script is None:
        return None
    if _is_pex(Path(script)):
        return _Layer([script], layer.problem)
    words = _first_line(script)
    return _Layer([*words, script, *layer.command[1:]], layer.problem) if words else None


def _inner_of_env(layer: _Layer) -> _Layer | None:
    """Read the arguments of `env`, which may take our variables away."""
    lost = layer.problem
    # In the order in which `env` reads them, as -S puts further words in its own place.
    words = list(layer.command[1:])
    while words:
        word = words.pop(0)
        if word in ("-i", "-", "--ignore-environment"):
            lost = "env -i would take every limit away. Start the program without it."
        elif word in ("-u", "--unset", "-C", "--chdir"):
            word += "=" + (words.pop(0) if words else "")
        elif word in ("-S", "--split-string"):
            words = [*(words.pop(0).split() if words else ()), *words]
        elif word.startswith("-S"):
            words = [*word[2:].split(), *words]
        elif not word.startswith("-") and "=" not in word:
            return _Layer([word, *words], lost)
        if re.fullmatch(r"(-u=?|--unset=)?PYTHONPATH(=.*)?", word):
            lost = (
                "env would replace PYTHONPATH, and every limit with it. Set PYTHONPATH in front "
                "of otel-limits instead."
            )
    return None


def _first_line(script: str) -> list[str]:
    """Return the words of the line with which a script names its interpreter."""
    try:
        with Path(script).open("rb") as file:
            line = file.readline(4096)
    except OSError:
        return []
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


# --- Python ---------------------------------------------------------------------------------------


def _python_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    options, script = _split(command[1:])
    option = _isolating_option(options)
    if option is not None:
        # -E and -I only ignore the environment, and a .pth file in the Python itself is none of it.
        # With -S not even that is read.
        if option != "-S" and autoloads([command[0], *options], environ):
            return None
        advice = (
            "."
            if option == "-S"
            else ", or run `otel-limits autoload install` with that Python once."
        )
        return f"{command[0]} {option} would ignore every limit. Start it without {option}{advice}"
    if script is not None and _is_pex(Path(script)):
        return _pex_problem(script)
    return None


def _isolating_option(options: Sequence[str]) -> str | None:
    """Find the option with which Python would not load us; one without any remedy comes first."""
    letters = "".join(_letters(options))
    return next((f"-{letter}" for letter in "SIE" if letter in letters), None)


def _split(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Tell the options of the interpreter from the rest; return them and the script, if any."""
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--check-hash-based-pycs":
            options += [argument, next(rest, "")]
        elif argument == "-" or not argument.startswith("-"):
            return options, argument
        elif argument.startswith("--"):
            options.append(argument)
        # -c and -m end the options: what comes after them is the program's own.
        elif (program := re.fullmatch(r"(-[^cmWX]*)[cm].*", argument)) is not None:
            return [*options, program[1]] if len(program[1]) > 1 else options, None
        else:
            options.append(argument)
            if re.fullmatch(r"-[^WX]*[WX]", argument):  # their value is the next word
                options.append(next(rest, ""))
    return options, None


def _letters(options: Sequence[str]) -> Iterator[str]:
    """Letters of the options, without the values of -W and -X."""
    rest = iter(options)
    for option in rest:
        if option.startswith("--"):
            next(rest, None)
            continue
        letters, taking, value = re.fullmatch(r"-([^WX]*)([WX]?)(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]
        yield from letters
        if taking and not value:
            next(rest, None)


# --- PEX ------------------------------------------------------------------------------------------


def _is_pex(path: Path) -> bool:
    """Tell whether a path is a PEX: a zip file or a directory with PEX-INFO in it.

    <https://docs.pex-tool.org/>
    """
    if path.is_dir():
        return (path / "PEX-INFO").is_file()
    try:
        # A script of a PEX has a first line before its zip file, which a zip file may have.
        with zipfile.ZipFile(path) as archive:
            return "PEX-INFO" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _pex_problem(path: str) -> str:
    return (
        f"{path} is a PEX, whose Python ignores its environment's packages, and would ignore every "
        "limit. Add otel-limits to its requirements and call otel_limits.enable() in its code; "
        "then start it without otel-limits run."
    )
