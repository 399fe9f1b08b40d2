"""Reads the command that starts a program, and leaves the words that start its Python.

The doctor adds its own program to these words, and runs nothing else: every word that is left is a
Python with its options, or a command of the tables below with its options. Any other command could
be the user's program, so it is refused.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from otel_limits.cli.command import without_separator
from otel_limits.cli.parser import make_parser
from otel_limits.cli.run_command import PYTHON, first_line, given_options, pex_problem, split_python
from otel_limits.core.limits import PREFIX
from otel_limits.core.secrets import redact_url
from otel_limits.settings.run_options import with_options

PROGRAMS: Final = frozenset(
    {
        *("celery", "chainlit", "daphne", "dramatiq", "fastapi", "flask", "granian", "gunicorn"),
        *("hypercorn", "pytest", "rq", "streamlit", "uvicorn", "uwsgi", "waitress-serve"),
    }
)
"""Programs in Python, by the names that they have in the environment of a runner."""


class Form(NamedTuple):
    """How a command names the command that it runs."""

    arguments: int = 0
    """Arguments before the other command, such as the seconds of `timeout`."""
    valued: str = ""
    """Options whose value is the next word; `*` for all."""
    assigns: bool = False
    """Whether words with `=` are variables."""

    def has_value(self, word: str) -> bool:
        """Return whether the word after an option belongs to it."""
        is_open = re.fullmatch(r"--[^=]+", word) is not None
        return word in self.valued.split() or (self.valued == "*" and is_open)


WRAPPERS: Final[Mapping[str, Form]] = {
    "catatonit": Form(),
    "chrt": Form(1, "-D -P -T"),
    "ddtrace-run": Form(),
    "doas": Form(valued="-C -u"),
    "dumb-init": Form(valued="-r --rewrite"),
    "env": Form(valued="-C -a -u --argv0 --chdir --unset", assigns=True),
    "flock": Form(1, "-E -w --conflict-exit-code --timeout"),
    "gosu": Form(1),
    "ionice": Form(valued="-c -n --class --classdata"),
    "newrelic-admin": Form(1),
    "nice": Form(valued="-n --adjustment"),
    "nohup": Form(),
    "numactl": Form(valued="-C -N -i -m --cpunodebind --interleave --membind --physcpubind"),
    "opentelemetry-instrument": Form(valued="*"),
    "setpriv": Form(valued="--groups --regid --reuid"),
    "setsid": Form(),
    "stdbuf": Form(valued="-e -i -o --error --input --output"),
    "strace": Form(valued="-E -e -o -s -u"),
    "su-exec": Form(1),
    "sudo": Form(valued="-C -D -R -T -g -h -p -r -t -u --group --user", assigns=True),
    "taskset": Form(1),
    "time": Form(valued="-f -o --format --output"),
    "timeout": Form(1, "-k -s --kill-after --signal"),
    "tini": Form(valued="-e -p"),
    "unshare": Form(valued="-G -R -S -w"),
    "xargs": Form(valued="-E -I -L -P -a -d -n -s"),
    "xvfb-run": Form(valued="-e -f -n -p -s -w"),
}
"""Commands that run the command in their arguments."""

PLAIN_OF_ENV: Final = re.compile(
    r"-|--|-[0Caiu]|--(argv0|chdir|ignore-environment|null|unset)(=.*)?", re.DOTALL
)
"""Options of `env`; any other may hold a command, as `-vSpython app.py` does."""

COMMAND_IN_ONE_WORD: Final = frozenset({"-c", "--command"})
"""Options of `flock` and others whose value is a command for a shell."""

RUNNERS: Final[Mapping[str, Form]] = {
    "hatch": Form(1, "-e -p --env --project"),
    "pdm": Form(1, "-p --project"),
    "pipenv": Form(1),
    "poetry": Form(1, "-C -P --directory --project"),
    "rye": Form(1),
    "uv": Form(
        1,
        "-p -w --config-file --directory --env-file --extra --group --index --index-strategy "
        "--index-url --no-group --only-group --package --project --python --python-preference "
        "--with --with-editable --with-requirements",
    ),
}
"""The same, after the word `run`, in their own environment."""

MOVES: Final = frozenset({"-C", "-D", "--chdir", "--directory"})
"""Options of these with the directory in which they start the other command."""

MAX_LAYERS: Final = 10
"""Maximum nesting of commands; a script may refer to itself."""

INSTRUMENT_OPTION: Final = re.compile(r"--(limits_\w+)(?:=(.*))?", re.DOTALL)
"""A setting as an option of `opentelemetry-instrument`: without OTEL_."""

ASSIGNMENT: Final = re.compile(rf"({PREFIX}\w+)=(.*)", re.DOTALL)
"""A setting as an argument of `env`."""


class UnknownLauncherError(ValueError):
    """A command that the doctor does not start, since it could be the user's program."""

    def __init__(self, text: str, advice: str) -> None:
        """Create the error from what is wrong and the line that tests the command."""
        super().__init__(text, advice)
        self.text = text
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher, separated from the settings in its arguments and from the user's program."""

    words: tuple[str, ...]
    """They run the Python program that is added to them."""
    settings: dict[str, str]
    """Variables it would set. They are checked, but not applied to the runaway agent."""
    replaced: str = ""
    """The command in whose place its Python is started, such as `gunicorn`."""
    program: tuple[str, ...] = ()
    """The words that were left out: the user's program with its arguments, if it was given."""
    is_given: bool = True
    """False for the Python of the doctor itself."""

    @property
    def shown(self) -> str:
        """Its name, without arguments, which may contain a secret."""
        return PurePath(redact_url(self.words[0])).name

    def missing_script(self) -> str:
        """Return the script of the user's program if there is no such file; else nothing."""
        script = self.program[0] if self.program else ""
        is_script = script.endswith(".py") if self.replaced else not script.startswith("-")
        moves = any(word.partition("=")[0] in MOVES for word in self.words)
        # `uv run` also takes an address.
        is_elsewhere = "://" in script or (moves and not Path(script).is_absolute())
        return "" if not is_script or is_elsewhere or Path(script).exists() else script

    def under_run(self) -> Launcher:
        """Return this launcher, started by `otel-limits run`."""
        if has_run(self.words):
            return self
        run = (sys.executable, "-m", "otel_limits.cli", "run", "--")
        return replace(self, words=(*run, *self.words), is_given=True)

    def has(self, program: str) -> bool:
        """Return whether one of its words is a program."""
        return any(PurePath(word).name == program for word in self.words)


def read_launcher(words: Sequence[str]) -> Launcher:
    """Separate a launcher from its settings and from the program that it would start.

    Raises:
        UnknownLauncherError: It is not known what the command starts.
    """
    if not words:
        return Launcher((sys.executable,), {}, is_given=False)
    reading = _LauncherWords(words)
    for _ in range(MAX_LAYERS):
        if not reading.rest:
            return reading.ended_by("python" if reading.runner else sys.executable)
        name = reading.name
        if PYTHON.fullmatch(name):
            python = reading.pop_python()
            if not words_of_run(reading.rest):
                reading.program += reading.rest
                return reading.ended_by(*python)
            reading.kept += python
        if count := words_of_run(reading.rest):
            reading.keep_run(count)
        elif name in WRAPPERS:
            reading.keep(WRAPPERS[name])
        elif name in RUNNERS:
            reading.keep_runner()
        elif reading.runner:
            reading.replace_program_of_runner()
        else:
            reading.replace_script()
    raise reading.refusal("starts too many other commands")


def words_of_run(words: Sequence[str]) -> int:
    """Return how many words begin `otel-limits run`, as a command or as a module; 0 if none."""
    if list(words[:3]) == ["-m", "otel_limits.cli", "run"]:
        return 3
    is_command = bool(words) and PurePath(words[0]).name == "otel-limits"
    return 2 if is_command and words[1:2] == ["run"] else 0


def has_run(words: Sequence[str]) -> bool:
    """Return whether `otel-limits run` is among the words of a launcher."""
    return any(words_of_run(words[at:]) for at in range(len(words)))


class _LauncherWords:
    """The words of a launcher: those that are kept, and those that are still to be read."""

    def __init__(self, words: Sequence[str]) -> None:
        self.kept: list[str] = []
        self.rest = list(words)
        self.settings: dict[str, str] = {}
        self.replaced = ""
        self.program: list[str] = []
        self.runner = ""
        """The runner in whose environment the next command is."""

    @property
    def name(self) -> str:
        """The name of the command that is read next, without the secrets of a URL."""
        return PurePath(redact_url(self.rest[0])).name

    def ended_by(self, *python: str) -> Launcher:
        """Return the launcher that ends in a Python."""
        words = (*self.kept, *python)
        return Launcher(words, self.settings, self.replaced, tuple(self.program))

    def keep(self, form: Form) -> list[str]:
        """Keep a command with its arguments, up to the command that it runs; return them."""
        begin, arguments, name = len(self.kept), form.arguments, self.name
        self.kept.append(self.rest.pop(0))
        while self.rest:
            word = self.rest[0]
            is_argument = not word.startswith("-") and not (form.assigns and "=" in word)
            if is_argument and not arguments:
                break
            if is_argument and word != "run" and shutil.which(word) is not None:
                raise self.refusal("is not an argument, but a command", PurePath(word).name)
            arguments -= is_argument
            self.rest.pop(0)
            if name == "env" and re.match("-S|--split-string(=|$)", word):
                self._split(re.sub("^(-S|--split-string)=?", "", word) or self._pop())
            elif word.startswith("-") and _may_hold_command(name, word):
                raise self.refusal("has an option that may be a command", name)
            elif not self._remove_setting(word):
                self.kept.append(word)
                if form.has_value(word):
                    self.kept.append(self._pop())
        return self.kept[begin:]

    def _split(self, text: str) -> None:
        try:
            self.rest = [*shlex.split(text), *self.rest]
        except ValueError:
            raise self.refusal("has a text that cannot be split", "env") from None

    def _remove_setting(self, word: str) -> bool:
        """Remove a setting from the words, or the launcher would override those of the runaway."""
        option, assignment = INSTRUMENT_OPTION.fullmatch(word), ASSIGNMENT.fullmatch(word)
        if option is not None:
            value = self._pop() if option[2] is None else option[2]
            self.settings["OTEL_" + option[1].upper()] = value
        elif assignment is not None:
            self.settings[assignment[1]] = assignment[2]
        return option is not None or assignment is not None

    def _pop(self) -> str:
        return self.rest.pop(0) if self.rest else ""

    def pop_python(self) -> list[str]:
        """Remove a Python with its options; return those that import nothing of the user's."""
        python, *arguments = self.rest
        options, _script = split_python(arguments)
        self.rest = list(_program_of(arguments, options))
        return [python, *_without_imports(options)]

    def keep_run(self, count: int) -> None:
        """Keep `otel-limits run`, the launcher under test, without its options.

        Raises:
            UnknownLauncherError: It starts no program.
        """
        self.kept += [*self.rest[:count], "--"]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                options = make_parser("run").parse_args(["run", *self.rest[count:]])
        except SystemExit as exited:
            if exited.code:
                raise
            raise UnknownLauncherError(
                "otel-limits run shows its help and starts no program.", "Remove --help."
            ) from None
        self.settings = with_options(self.settings, given_options(options))
        self.rest = without_separator(options.command)

    def keep_runner(self) -> None:
        """Keep a runner, which looks for the command in its own environment.

        Raises:
            UnknownLauncherError: It has another form than `RUNNER run COMMAND`.
        """
        self.runner = self.name
        # `-m` begins a command here, as in `python -m`.
        is_module = [re.match("-m$|--module(=|$)", word) is not None for word in self.rest]
        if True in is_module:
            at = is_module.index(True)
            module = self.rest[at].partition("=")[2]
            self.replaced = module or "".join(self.rest[at + 1 : at + 2])
            self.program = self.rest[at:]
            del self.rest[at:]
        kept = self.keep(RUNNERS[self.runner])
        if "run" not in kept:
            raise self.refusal(f"is known to the doctor only as `{self.runner} run`", self.runner)
        if not {"-s", "--script"}.isdisjoint(kept):
            raise self.refusal("makes an environment for the script with --script", self.runner)

    def replace_program_of_runner(self) -> None:
        """Put the runner's Python into the place of a program in its environment.

        Raises:
            UnknownLauncherError: The command may be any program of that environment.
        """
        if _has_own_environment(self.rest[0]):
            raise self.refusal("has its own environment (PEP 723)")
        if not self.name.endswith(".py") and self.name not in PROGRAMS:
            raise self.refusal(f"may be any program in the environment of {self.runner}")
        self.replaced = self.name
        self.program, self.rest = self.rest, []

    def replace_script(self) -> None:
        """Put the interpreter of a script into its place, as the system does to run it."""
        path = shutil.which(self.rest[0])
        if path is None:
            raise self.refusal("is not a command here")
        problem = pex_problem(Path(path))
        if problem is not None:
            raise UnknownLauncherError(problem, "Call otel_limits.enable() in its code.")
        interpreter = first_line(path)
        if not interpreter:
            raise self.refusal("is not a launcher that the doctor knows")
        self.replaced = self.replaced or self.name
        self.rest = [*interpreter, path, *self.rest[1:]]

    def refusal(self, problem: str, name: str = "") -> UnknownLauncherError:
        """Make the error of a command that is not known, without its arguments."""
        # A shell command in one word may contain anything.
        shown = re.split(r"[\s=]", self.replaced or name or self.name)[0]
        run = "otel-limits run -- " if has_run(self.kept) else ""
        return UnknownLauncherError(
            f"{shown} {problem}, so it was not started: it could be your program.",
            f"Run: otel-limits doctor -- {run}THE PYTHON IT ENDS IN",
        )


def _without_imports(options: Sequence[str]) -> list[str]:
    """Return the options of a Python without those that import a module when it starts."""
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        found = re.fullmatch(r"(-[^-WX]*)([WX])(.*)", option, re.DOTALL)
        if found is None:
            kept.append(option)
            continue
        others, letter, value = found.groups()
        words = [option] if value else [option, next(rest, "")]
        if _imports(letter, value or words[-1]):
            kept += [others] if len(others) > 1 else []
        else:
            kept += words
    return kept


def _imports(letter: str, value: str) -> bool:
    """Return whether -W has a category of a module, or -X a module of a Python that debugs."""
    if letter == "X":
        return value.startswith("presite=")
    return any("." in category for category in value.split(":")[2:3])


def _program_of(arguments: Sequence[str], options: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a Python that follow its options."""
    at = len(options)
    # `-um app` has an option before that of the module.
    is_joined = bool(options) and arguments[at - 1] != options[-1]
    return arguments[at - is_joined :]


def _may_hold_command(name: str, option: str) -> bool:
    """Return whether an option of a wrapper may hold a command as one word."""
    if name == "env":
        return PLAIN_OF_ENV.fullmatch(option) is None
    return name == "flock" and option in COMMAND_IN_ONE_WORD


def _has_own_environment(script: str) -> bool:
    """Return whether a script lists its dependencies, so that `uv run` leaves the project's alone.

    <https://packaging.python.org/en/latest/specifications/inline-script-metadata/>
    """
    try:
        return "# /// script" in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
