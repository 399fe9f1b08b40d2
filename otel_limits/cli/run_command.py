"""The command `otel-limits run`: run a program with limits, in a Python that loads them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import zipfile
from argparse import REMAINDER, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.bindings.entry_points import OWN_PACKAGES, Installed, installed_entry_points
from otel_limits.cli.command import add_command, refuse, without_separator
from otel_limits.core.installing import install_command
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import BOOLEAN, CAP, SWITCHABLE_CAP, WHOLE_NUMBER
from otel_limits.runtime.autoload import ASK_SECONDS, MODULE
from otel_limits.settings.children import HANDED, OFFERED, environment_for_run
from otel_limits.settings.ledgers import LEDGER_VARIABLE, default_ledger
from otel_limits.settings.policy.file import PolicyFile, policy_mistakes
from otel_limits.settings.run_options import with_options
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.table import SETTINGS, Setting, Settings
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from otel_limits.settings.policy.document import Document

# --- the command ----------------------------------------------------------------------------------

HELP: Final = """\
Run a program with limits on all its agents.

  otel-limits run --max-turns 30 -- python app.py
  otel-limits run --max-token-budget 100000 --prometheus-port 9464 -- uvicorn app:app

Options override OTEL_LIMITS_* variables in the environment, and a policy file overrides both.
Invalid settings are reported before the program starts (exit status 2). The program then replaces
this process, so signals and exit status are its own. Limits also apply to Python programs it
starts. A budget tree is an invocation and all agents it starts. For details of each setting, run
`otel-limits docs settings`.
"""

NOTICE: Final = (
    "{} is not a Python program. Limits apply in the Python processes that it starts if they read "
    "PYTHONPATH, which a frozen program does not. To verify, run: otel-limits doctor -- "
    "otel-limits run -- THE PYTHON IT ENDS IN"
)
REFUSAL: Final = (
    "{} is not a Python program, so limits may not apply in the Python that it starts, and "
    "OTEL_LIMITS_STRICT is set. Start that Python with otel-limits run, or call "
    "otel_limits.enable() in its code."
)

MISPLACED: Final = (
    "{} after the program is passed to the program, and sets no limit. To set one, write it before "
    "the program: otel-limits run {} {} -- {} ..."
)

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
"""Exit statuses, as of a shell."""

LOOPS: Final = r"max_(consecutive|identical|repeated|no_progress)_\w+"

COMMON: Final = (
    "max_turns",
    "max_cost_usd",
    "max_duration_seconds",
    "tree_max_turns",
    "tree_max_cost_usd",
    "max_token_budget",
    "preset",
    "policy",
    "action",
    "prometheus_port",
    "ledger",
)
"""The settings that most programs need, in the order of the help."""

GROUPS: Final = {
    "common options": "|".join(COMMON),
    "limits": rf"(?!{LOOPS})max_\w+",
    "loops": rf"{LOOPS}|tool_failures|exempt_tools|nudge_disabled",
    "budget tree (an invocation and all agents it starts)": r"tree_\w+",
    "conversation (all invocations of a thread or session)": r"conversation_\w+",
    "actions": r"action|tool_action|on_resume|halt\w+|warn_at|budget_hints|unpriced|unmeasured",
    "metrics": r"metrics\w*|genai_metrics|prometheus_\w+",
    "ledger and tool log": r"ledger\w*|audit_keys|time_zone|\w+_account\w*|tool_log_\w+",
    "quotas": r"quota_\w+",
    "general": r"\w+",
}
"""Groups of options in the help, with a pattern of their settings; the first match counts."""

UNITS: Final = {
    "TOKENS": r"\w*max_(token_budget|input_tokens|output_tokens)",
    "USD": r"\w*_usd",
    "SECONDS": r"\w*_(seconds|timeout)",
    "AGE": r"conversation_idle|ledger_retention",
    "TOOL=N": r"max_\w+_per_tool",
    "PATH": r"policy|tool_log_dir",
    "PATH|URL": r"ledger",
    "URL": r"quota_store",
    "SHARES": r"warn_at",
    "WHEN": r"ledger_sync",
    "ACTION": r"unpriced|unmeasured|on_resume|conversation_on_store_error",
    "STATUS": r"halted_node",
}
"""Units of options in the help, with a pattern of their settings."""

NUMBERS: Final = (CAP, SWITCHABLE_CAP, WHOLE_NUMBER)

OPTIONS: Final = tuple(
    sorted(
        (setting for setting in SETTINGS if not setting.is_secret),
        key=lambda setting: COMMON.index(setting.name) if setting.name in COMMON else len(COMMON),
    )
)

LIMITING: Final = {"preset", "policy"}.union(
    setting.name for setting in OPTIONS if re.fullmatch(r"(\w+_)?max_\w+", setting.name)
)
"""Names of the settings that are a limit, or have several."""


def add(commands: Any) -> None:
    """Add `run` with an option for each setting."""
    command = add_command(commands, "run", HELP, run)
    command.usage = "otel-limits run [options] [--] PROGRAM [ARGUMENT ...]"
    command.add_argument(
        "command", nargs=REMAINDER, metavar="PROGRAM", help="program to run, with its arguments"
    )
    add_settings(command)


def add_settings(command: ArgumentParser) -> None:
    """Add an option for each setting, in groups."""
    groups = {title: command.add_argument_group(title) for title in GROUPS}
    for setting in OPTIONS:
        title = next(title for title, match in GROUPS.items() if re.fullmatch(match, setting.name))
        shape: dict[str, Any] = {"metavar": unit(setting)}
        if setting.kind is BOOLEAN:
            shape = {"action": BooleanOptionalAction}
        groups[title].add_argument(setting.flag, dest=setting.name, help=summary(setting), **shape)


def unit(setting: Setting) -> str:
    """Return the unit of a setting's value, or a word for what it names."""
    for name, match in UNITS.items():
        if re.fullmatch(match, setting.name):
            return name
    return "N" if setting.kind in NUMBERS else setting.name.upper().rpartition("_")[2]


def summary(setting: Setting) -> str:
    """Return the first sentence of a setting's help, as a phrase."""
    sentence = re.split(r"(?<!e\.g)[.;] ", setting.help, maxsplit=1)[0].rstrip(".")
    # argparse expands a single %.
    phrase = sentence if sentence[:2].isupper() else sentence[0].lower() + sentence[1:]
    return phrase.replace("%", "%%")


def run(options: Namespace) -> int:
    """Replace this process with the program, unless a setting or the command is invalid."""
    command = without_separator(options.command)
    inherited = environment()
    environ = environment_for_run(with_options(inherited, given_options(options)))
    # As the program will read them, so mistakes are found before it starts.
    reading = read_settings(environ)
    settings = reading.settings
    installed = installed_entry_points()
    policy_file = PolicyFile(settings.policy_path)
    mistakes = [
        *reading.mistakes,
        *(installed.broken if settings.strict else ()),
        *policy_mistakes(settings.policy, policy_file),
        *program_mistakes(
            command, environ, installed, is_strict=settings.strict and not settings.disabled
        ),
    ]
    if mistakes:
        return refuse(mistakes)
    refuse([*installed.broken, *installed.unused])
    if not settings.quiet and not settings.disabled:
        refuse(notices(command, environ, settings, policy_file.document))
    environ[HANDED] = installed.text
    if not environ.get(LEDGER_VARIABLE, "").strip():
        # So the cost of a program can be queried afterwards without configuring anything.
        with contextlib.suppress(ValueError):  # the user has no home directory
            environ[LEDGER_VARIABLE] = default_ledger()
    # Returns only if the program cannot be started.
    status, sentence = replace_process(command, environ)
    return refuse([sentence], status)


def notices(
    command: Sequence[str], environ: Mapping[str, str], settings: Settings, document: Document
) -> list[str]:
    """Return why a program that is going to be started may be less limited than intended."""
    sentences = [NOTICE.format(shown(command))] if is_other_program(command, environ) else []
    policies = document.policies(settings.policy).values()
    if not document.quotas and not any(policy.is_capped for policy in policies):
        sentences += misplaced_options(command)
    return sentences


def misplaced_options(command: Sequence[str]) -> list[str]:
    """Return that a program has an option that would have set a limit in front of it.

    The program may have an option of that name, so this is only a hint.
    """
    # Maybe `nice otel-limits run --max-turns 3 ...`, whose options are in the right place.
    if any(PurePath(word).name == "otel-limits" for word in command):
        return []
    given = [word.partition("=")[0] for word in command[1:]]
    found = [each for each in OPTIONS if each.flag in given and each.name in LIMITING]
    return [
        MISPLACED.format(each.flag, each.flag, unit(each), shown(command)) for each in found[:1]
    ]


def replace_process(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Replace this process with the program, so signals and exit status are its own.

    Returns:
        Exit status and error message, only if the program cannot be started.
    """
    note = ""  # if no file can be written
    with contextlib.suppress(OSError):
        note = str(Path(tempfile.gettempdir(), f"otel-limits-run-{secrets.token_hex(8)}"))
    try:
        os.execvpe(command[0], command, {**environ, OFFERED: note})  # noqa: S606  the user's own
    except FileNotFoundError:
        return NOT_FOUND, f"{command[0]}: command not found.{_script_hint(command[0])}"
    except OSError as error:
        sentence = f"Cannot start {command[0]}: {error.strerror}.{_script_hint(command[0])}"
        return NOT_EXECUTABLE, sentence


def _script_hint(name: str) -> str:
    """Return the fix if the program is a file that only Python can run."""
    return f" Did you mean: python {shlex.quote(name)}?" if name.endswith(".py") else ""


def given_options(options: Namespace) -> dict[str, str]:
    """Return the settings given as options, as variables."""
    values = {setting.variable: getattr(options, setting.name) for setting in OPTIONS}
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }


def program_mistakes(
    command: Sequence[str], environ: Mapping[str, str], installed: Installed, *, is_strict: bool
) -> list[str]:
    """Return why the program cannot run with limits, as far as can be known beforehand."""
    if not command or not command[0]:
        return ["No program given. Try: otel-limits run -- python app.py"]
    if is_strict and is_other_program(command, environ):
        return [REFUSAL.format(shown(command))]
    isolation = isolation_problem(command, environ, installed)
    return [] if isolation is None else [isolation]


def shown(command: Sequence[str]) -> str:
    """Return the name of a program, without its arguments and what may be a secret."""
    return PurePath(redact_url(command[0])).name


# --- whether the started Python loads otel-limits -------------------------------------------------
# `otel-limits run` uses PYTHONPATH. Python ignores it with -E and -I, skips `sitecustomize` with
# -S, and a PEX runs Python with -E. The Python of another environment may have agents, but not
# otel-limits. So `run` starts the interpreter first, with the same options and a question. Other
# programs cannot answer: a shell script, `nice`, or a frozen program, which brings its own Python.

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


def isolation_problem(
    command: Sequence[str], environ: Mapping[str, str], installed: Installed
) -> str | None:
    """Return why agents of the Python that a command starts would not be limited, by its answer.

    Args:
        command: The command to start.
        environ: Its environment.
        installed: The frameworks that other distributions limit.
    """
    interpreter = interpreter_of(command, environ.get("PATH"))
    if interpreter is None:
        return None
    words, script = interpreter
    if script is not None and (problem := pex_problem(Path(script))) is not None:
        return problem
    # As Python will look for modules: next to a script, otherwise in the current directory.
    directory = "" if script is None else str(Path(script).parent)
    others = (each.framework for each in installed.entry_points)
    distributions = dict.fromkeys((*OWN_PACKAGES.values(), *others))
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
