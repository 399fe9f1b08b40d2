"""Detects programs that would run without otel-limits, before they start.

`otel-limits run` uses PYTHONPATH. Python ignores it with -E and -I, skips `sitecustomize` with -S,
and a PEX runs Python with -E. A frozen program has its own Python, which ignores it, too.
The Python of another environment may have agents, but not otel-limits. Such commands are rejected.
"""

from __future__ import annotations

import mmap
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.runtime.autoload import ASK_SECONDS, autoloads

PYTHON: Final = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")

PREFIXES: Final = frozenset(
    [
        "catatonit",
        "chrt",
        "ddtrace-run",
        "doas",
        "dumb-init",
        "exec",
        "flock",
        "gosu",
        "ionice",
        "nice",
        "nohup",
        "numactl",
        "opentelemetry-instrument",
        "setpriv",
        "setsid",
        "stdbuf",
        "strace",
        "su-exec",
        "sudo",
        "taskset",
        "time",
        "timeout",
        "tini",
        "unshare",
        "xargs",
        "xvfb-run",
    ]
)
"""Commands that run another command, given as arguments."""

RUNNERS: Final = frozenset(["hatch", "pdm", "pipenv", "poetry", "rye", "uv"])
"""The same, but the environment of the command is not the one on our PATH."""

MAX_LAYERS: Final = 10
"""Maximum nesting of commands; a script may refer to itself."""


class _Layer(NamedTuple):
    """A command, and why Python would not load otel-limits there."""

    command: Sequence[str]
    problem: str | None = None
    is_on_path: bool = True
    """Whether its program is the one on our PATH."""


def isolation_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return why limits would not apply to a command, or `None` if they would.

    Args:
        command: The command to start.
        environ: Its environment.
    """
    layer: _Layer | None = _Layer(command)
    for _ in range(MAX_LAYERS):
        if layer is None or not layer.command:
            return None
        program = PurePath(layer.command[0]).name
        if PYTHON.fullmatch(program):
            # A problem of an outer command takes precedence.
            problem = layer.problem or _python_problem(layer.command, environ)
            if problem is None and layer.is_on_path:
                problem = _environment_problem(layer.command, environ)
            return problem
        layer = _inner(program, layer, environ)
        if layer is not None and layer.command:
            problem = bundle_problem(Path(layer.command[0]))
            if problem is not None:
                return problem
    return None


def _inner(program: str, layer: _Layer, environ: Mapping[str, str]) -> _Layer | None:
    """Return the command that a program runs, from its arguments or its shebang line."""
    if program == "env":
        return _inner_of_env(layer)
    path = environ.get("PATH")
    if program in PREFIXES or program in RUNNERS:
        # Skip options: none of their values is the name of a program.
        rest = iter(range(1, len(layer.command)))
        found = next((at for at in rest if shutil.which(layer.command[at], path=path)), None)
        if found is None:
            return None
        return _Layer(layer.command[found:], layer.problem, is_on_path=program not in RUNNERS)
    script = shutil.which(layer.command[0], path=path)
    if script is None:
        return None
    if bundle_problem(Path(script)) is not None:
        return _Layer([script], layer.problem)
    words = first_line(script)
    return layer._replace(command=[*words, script, *layer.command[1:]] if words else [])


def _inner_of_env(layer: _Layer) -> _Layer | None:
    """Parse the arguments of `env`, which may remove our variables."""
    problem = layer.problem
    # In order, as -S is replaced by further words.
    words = list(layer.command[1:])
    while words:
        word = words.pop(0)
        if word in ("-i", "-", "--ignore-environment"):
            problem = "env -i would remove all limits. Start the program without it."
        elif word in ("-u", "--unset", "-C", "--chdir"):
            word += "=" + (words.pop(0) if words else "")
        elif word in ("-S", "--split-string"):
            words = [*(words.pop(0).split() if words else ()), *words]
        elif word.startswith("-S"):
            words = [*word[2:].split(), *words]
        elif not word.startswith("-") and "=" not in word:
            return layer._replace(command=[word, *words], problem=problem)
        if re.fullmatch(r"(-u=?|--unset=)?PYTHONPATH(=.*)?", word):
            problem = (
                "env would replace PYTHONPATH and so remove all limits. Set PYTHONPATH before "
                "otel-limits instead."
            )
    return None


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


# --- Python ---------------------------------------------------------------------------------------


def _python_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    options, script = split_python(command[1:])
    option = _isolating_option(options)
    if option is not None:
        # -E and -I ignore the environment but load .pth files; -S loads neither.
        if option != "-S" and autoloads([command[0], *options], environ):
            return None
        advice = (
            "."
            if option == "-S"
            else ", or run `otel-limits autoload install` with that Python once."
        )
        return f"{command[0]} {option} would ignore all limits. Start it without {option}{advice}"
    return None if script is None else bundle_problem(Path(script))


def _isolating_option(options: Sequence[str]) -> str | None:
    """Return the option that keeps Python from loading otel-limits, most severe first."""
    letters = "".join(_letters(options))
    return next((f"-{letter}" for letter in "SIE" if letter in letters), None)


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


def _letters(options: Sequence[str]) -> Iterator[str]:
    """Yield the letters of the options, without the values of -W and -X."""
    rest = iter(options)
    for option in rest:
        if option.startswith("--"):
            next(rest, None)
            continue
        letters, has_value, value = re.fullmatch(
            r"-([^WX]*)([WX]?)(.*)", option, re.DOTALL
        ).groups()  # type: ignore[union-attr]
        yield from letters
        if has_value and not value:
            next(rest, None)


PROBE: Final = """\
import sys
sys.path[0:1] = sys.argv[1:2]
try:
    from importlib import metadata, util
except ImportError:  # before Python 3.8
    sys.exit()
for name in sys.argv[2:]:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    if util.find_spec("otel_limits") is None:
        sys.exit(name)
"""
"""Prints a framework that is installed without otel-limits."""


def _environment_problem(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return why agents of another environment would not be limited."""
    python = shutil.which(command[0], path=environ.get("PATH"))
    if python is None or Path(python).parent == Path(sys.executable).parent:
        return None
    options, script = split_python(command[1:])
    names = [framework.distribution for framework in FRAMEWORKS]
    # As Python will look for modules: next to a script, otherwise in the current directory.
    directory = "" if script is None else str(Path(script).parent)
    try:
        done = subprocess.run(  # noqa: S603  the user's own Python
            [python, *options, "-c", PROBE, directory, *names],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # starting the program will show the same problem
    found = os.fsdecode(done.stderr).strip().splitlines()[-1:]
    if done.returncode != 1 or found[0] not in names:
        return None
    return (
        f"{python} has {found[0]} but not otel-limits, so it would ignore all limits. Install it "
        f"there: {python} -m pip install otel-limits"
    )


# --- programs that bring their own Python ---------------------------------------------------------

EXECUTABLES: Final = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""First bytes of executable files: Linux, Windows and macOS."""

FREEZERS: Final = {
    # Begins the end of the archive (`PyInstaller/archive/writers.py`).
    "PyInstaller": (b"MEI\014\013\012\013\016",),
    # In a directory (`nuitka/build/static_src/CompiledCodeHelpers.c`) and in one file
    # (`OnefileBootstrap.c`). Its other programs use an installed Python, and are limited.
    "Nuitka": (b"__nuitka_binary_dir", b"NUITKA_ONEFILE_PARENT"),
}
"""Bytes that each of these tools leaves in its executables."""


def bundle_problem(path: Path) -> str | None:
    """Return why a program that brings its own Python cannot be limited from outside."""
    if _is_pex(path):
        kind, then = "a PEX", "Add otel-limits to its requirements"
    elif (freezer := _freezer(path)) is not None:
        kind, then = f"a {freezer} program", "Install otel-limits where it is built"
    else:
        return None
    return (
        f"{path} is {kind}, which ignores PYTHONPATH and so all limits. {then} and call "
        "otel_limits.enable() in its code; then start it without otel-limits run."
    )


def _freezer(path: Path) -> str | None:
    """Return the tool that has made an executable from a Python program."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if not content[:4].startswith(EXECUTABLES):
                return None
            for name, signs in FREEZERS.items():
                if any(content.find(sign) >= 0 for sign in signs):
                    return name
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    return "cx_Freeze" if _is_of_cx_freeze(path) else None


def _is_of_cx_freeze(path: Path) -> bool:
    """Return whether the program of an executable is in an archive next to it.

    <https://cx-freeze.readthedocs.io/en/stable/setup_script.html>
    """
    try:
        with zipfile.ZipFile(path.resolve().parent / "lib" / "library.zip") as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any(re.fullmatch(r"__main__\w+\.pyc", name) for name in names)


def _is_pex(path: Path) -> bool:
    """Return whether a path is a PEX: a zip file or a directory that contains PEX-INFO.

    <https://docs.pex-tool.org/>
    """
    if path.is_dir():
        return (path / "PEX-INFO").is_file()
    try:
        # A shebang line may precede the zip data.
        with zipfile.ZipFile(path) as archive:
            return "PEX-INFO" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
