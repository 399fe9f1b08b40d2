"""Tests whether the Python that a command starts loads otel-limits.

`otel-limits run` uses PYTHONPATH. Python ignores it with -E and -I, skips `sitecustomize` with -S,
and a PEX runs Python with -E. The Python of another environment may have agents, but not
otel-limits. So `run` starts the interpreter first, with the same options and a question. Other
programs cannot answer: a shell script, `nice`, or a frozen program, which brings its own Python.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.installing import install_command
from otel_limits.runtime.autoload import ASK_SECONDS, MODULE

PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")


class Interpreter(NamedTuple):
    """A Python that a command starts."""

    words: list[str]
    """It and its options."""
    script: str | None
    """The file or directory that it runs."""


def interpreter_of(command: Sequence[str], path: str | None) -> Interpreter | None:
    """Return the Python that a command starts, also by a script's first line, if there is one.

    Args:
        command: The command to start.
        path: Where programs are looked up.
    """
    if PYTHON.fullmatch(PurePath(command[0]).name):
        options, script = split_python(command[1:])
        return Interpreter([command[0], *options], script)
    script = shutil.which(command[0], path=path)
    words = [] if script is None else first_line(script)
    named = list(dropwhile(_is_of_env, words))
    is_python = bool(named) and PYTHON.fullmatch(PurePath(named[0]).name) is not None
    return Interpreter(words, script) if is_python else None


def _is_of_env(word: str) -> bool:
    """Return whether a word of a first line is `env`, an option of it, or a variable."""
    return PurePath(word).name == "env" or word.startswith("-") or "=" in word


INSTALLED_SCRIPT: Final = re.compile(r"""'\'\'exec' (.*) "\$0" "\$@"\s*""")
"""How pip names a Python whose path is too long for a shebang line, or has a space: in a second
line, which is text for Python (`distlib/scripts.py`)."""


def first_line(script: str) -> list[str]:
    """Return the words of a script's shebang line, or of the line with which pip replaces it."""
    try:
        with Path(script).open("rb") as file:
            line, second = (os.fsdecode(file.readline(4096)) for _ in range(2))
    except OSError:
        return []
    words = line[2:].split() if line.startswith("#!") else []
    installed = INSTALLED_SCRIPT.fullmatch(second) if words == ["/bin/sh"] else None
    if installed is None:
        return words
    try:
        return [each for each in shlex.split(installed[1]) if "$" not in each] or words
    except ValueError:
        return words


def split_python(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the options of the interpreter, and the script if there is one."""
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--check-hash-based-pycs":
            options += [argument, next(rest, "")]
        elif argument == "-" or not argument.startswith("-"):
            return options, argument
        elif argument.startswith("--"):
            options.append(argument)
        # Arguments after -c and -m belong to the program.
        elif (program := re.fullmatch(r"(-[^cmWX]*)[cm].*", argument)) is not None:
            return [*options, program[1]] if len(program[1]) > 1 else options, None
        else:
            options.append(argument)
            if re.fullmatch(r"-[^WX]*[WX]", argument):  # the value is the next word
                options.append(next(rest, ""))
    return options, None


MARK: Final = "answer to otel-limits"

QUESTION: Final = f"""\
import os, sys
def obstacle():
    flags = sys.flags
    if {MODULE.stem!r} not in sys.modules:
        if flags.no_site:
            return "-S"
        return "-I" if flags.isolated else "-E" if flags.ignore_environment else "PYTHONPATH"
    if sys.path[:1] == [""]:
        sys.path[0] = sys.argv[1]
    from importlib import util
    if util.find_spec("otel_limits") is None:
        from importlib import metadata  # from Python 3.8 on
        for name in sys.argv[2:]:
            try:
                return metadata.version(name) and name
            except metadata.PackageNotFoundError:
                pass
    return ""
print("", {MARK!r}, sys.executable, obstacle(), sep="\\n", flush=True)
os._exit(0)  # also with -i
"""
"""Prints a mark, the path of the Python, and what would keep its agents from being limited: an
option, an ignored PYTHONPATH, or a framework that is installed without otel-limits."""


def is_other_program(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a command is neither a Python, nor a script of one, nor missing."""
    path = environ.get("PATH")
    is_missing = shutil.which(command[0], path=path) is None
    return not is_missing and interpreter_of(command, path) is None


def isolation_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return why agents of the Python that a command starts would not be limited, by its answer.

    Args:
        command: The command to start.
        environ: Its environment.
    """
    interpreter = interpreter_of(command, environ.get("PATH"))
    if interpreter is None:
        return None
    words, script = interpreter
    if script is not None and (problem := pex_problem(Path(script))) is not None:
        return problem
    # As Python will look for modules: next to a script, otherwise in the current directory.
    directory = "" if script is None else str(Path(script).parent)
    distributions = [framework.distribution for framework in FRAMEWORKS]
    try:
        done = subprocess.run(  # noqa: S603  the user's own Python
            [*words, "-c", QUESTION, directory, *distributions],
            # Autoload needs any variable; this value is the default.
            env={**environ, "OTEL_LIMITS_STRICT": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # starting the program will show the same problem
    mark, python, obstacle = ["", "", "", *os.fsdecode(done.stdout).split("\n")[:-1]][-3:]
    # A Python that ends before it answers does so with the program, too, e.g. with --version.
    return _problem(python, obstacle) if mark == MARK and obstacle else None


def _problem(python: str, obstacle: str) -> str:
    if obstacle == "PYTHONPATH":
        return (
            f"{python} would ignore PYTHONPATH, and so all limits. Start it without changes to "
            "PYTHONPATH, or run `otel-limits autoload install` with that Python once."
        )
    if not obstacle.startswith("-"):
        return (
            f"{python} has {obstacle} but not otel-limits, so it would ignore all limits. Install "
            f"it there: {python} -m {install_command()}"
        )
    # -E and -I ignore the environment but load .pth files; -S loads neither.
    installing = ", or run `otel-limits autoload install` with that Python once"
    return (
        f"{python} {obstacle} would ignore all limits. Start it without {obstacle}"
        f"{'' if obstacle == '-S' else installing}."
    )


def pex_problem(path: Path) -> str | None:
    """Return why a PEX, a zip file or directory with PEX-INFO, cannot be limited from outside.

    <https://docs.pex-tool.org/>
    """
    if path.is_dir():
        is_pex = (path / "PEX-INFO").is_file()
    else:
        try:
            # A shebang line may precede the zip data.
            with zipfile.ZipFile(path) as archive:
                is_pex = "PEX-INFO" in archive.namelist()
        except (OSError, zipfile.BadZipFile):
            is_pex = False
    if not is_pex:
        return None
    return (
        f"{path} is a PEX, which ignores PYTHONPATH and so all limits. Add otel-limits to its "
        "requirements and call otel_limits.enable() in its code; then start it without otel-limits "
        "run."
    )
