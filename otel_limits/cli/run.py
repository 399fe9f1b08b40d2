"""The command `otel-limits run`: become a program, with limits on every agent in it."""

from __future__ import annotations

import contextlib
from argparse import REMAINDER, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final

from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.isolation import isolation_of
from otel_limits.cli.launch import environment_for, replace_process
from otel_limits.core.values import BOOLEAN
from otel_limits.settings import environment as config
from otel_limits.settings.ledgers import default_ledger
from otel_limits.settings.policy import PolicyFile
from otel_limits.settings.table import PREFIX, SETTINGS, Setting
from otel_limits.settings.variables import environment

HELP: Final = """\
Run a program with limits on every agent in it.

The program itself is not changed:

  otel-limits run --max-turns 30 -- python app.py
  otel-limits run --max-token-budget 100000 --prometheus-port 9464 -- uvicorn app:app

Settings come from the environment (OTEL_LIMITS_*), and an option wins over it. A mistake in either
is reported before the program starts, with exit status 2. After that the process is the program:
its exit status and its signals are its own. Python programs that it starts are limited as well.

A program that sets no OpenTelemetry tracer provider gets one when it first calls an agent, with an
OTLP exporter when OTEL_EXPORTER_OTLP_* is set.
"""

LEDGER: Final = PREFIX + "LEDGER"

OPTIONS: Final = tuple(setting for setting in SETTINGS if not setting.is_secret)


def add(commands: Any) -> None:
    """Add `run`, with one option for each setting."""
    command = add_command(commands, "run", HELP, run)
    command.usage = "otel-limits run [options] [--] PROGRAM [ARGUMENT ...]"
    settings = command.add_argument_group("settings")
    for setting in OPTIONS:
        text = setting.help.replace("%", "%%")  # argparse fills in what follows a single one
        if setting.kind is BOOLEAN:
            settings.add_argument(
                setting.flag, dest=setting.name, action=BooleanOptionalAction, help=text
            )
        else:
            settings.add_argument(setting.flag, dest=setting.name, metavar="VALUE", help=text)
    command.add_argument(
        "command", nargs=REMAINDER, metavar="PROGRAM", help="what to run, and its arguments"
    )


def run(options: Namespace) -> int:
    """Become the program, unless a setting is wrong or it cannot be started."""
    from otel_limits.settings.policy.file import policy_mistakes

    # argparse leaves the `--` in what it gives as the rest.
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    inherited = environment()
    given = given_options(options)
    variables = {setting.variable: text for setting, text in given}
    # What the program will read, so that a mistake stops it here and not in the middle of its work.
    reading = config.read(inherited | variables)
    mistakes = [
        *setting_mistakes(inherited, given),
        *policy_mistakes(reading, PolicyFile(reading.settings.policy_path)),
        *program_mistakes(command, environment_for(inherited, variables)),
    ]
    if mistakes:
        return refuse(mistakes)
    if not inherited.get(LEDGER, "").strip():
        # Who runs a program from a shell can ask afterwards what it cost, without any setting.
        with contextlib.suppress(ValueError):  # a user without a home directory has none
            variables.setdefault(LEDGER, default_ledger())
    # Does not return where the program starts: this process is the program from then on.
    status, sentence = replace_process(command, environment_for(inherited, variables))
    return refuse([sentence], status)


def given_options(options: Namespace) -> list[tuple[Setting, str]]:
    """Collect the settings that are given as options, with the text of their variables."""
    values = [(setting, getattr(options, setting.name)) for setting in OPTIONS]
    return [
        # As text, since the only way into the program is its environment, where true is a word.
        (setting, str(value).lower() if isinstance(value, bool) else value)
        for setting, value in values
        if value is not None
    ]


def setting_mistakes(
    inherited: Mapping[str, str], given: Sequence[tuple[Setting, str]]
) -> list[str]:
    """Say what is wrong with the options, by the names that were typed, and with the rest.

    A variable whose setting is given as an option is not looked at.
    """
    mistakes = []
    for setting, text in given:
        try:
            setting.kind.of_text(setting.flag, text)
        except ValueError as error:  # noqa: PERF203  every mistake is named, not only the first
            mistakes.append(str(error))
    replaced = {setting.variable for setting, _ in given}
    # An option replaces a variable that is wrong, which is then nobody's mistake any more.
    rest = {name: text for name, text in inherited.items() if name not in replaced}
    return [*mistakes, *config.read(rest).mistakes]


def program_mistakes(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Say what is wrong with the program to run, as far as that can be known beforehand."""
    if not command:
        return ["There is no program to run. Try: otel-limits run -- python app.py"]
    isolation = isolation_of(command, environ)
    return [] if isolation is None else [isolation]
