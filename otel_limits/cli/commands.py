"""The command line: run a program with limits, check the settings, watch a demonstration."""

from __future__ import annotations

import io
import os
import sys
from argparse import (
    REMAINDER,
    ArgumentParser,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from otel_limits.cli import audit, dashboards, ledger
from otel_limits.cli.launch import environment_for, option_that_hides_us, replace_process
from otel_limits.cli.quotas import add_commands as add_fleet_commands
from otel_limits.core.values import BOOLEAN
from otel_limits.settings import environment as config
from otel_limits.settings.ledgers import default_ledger
from otel_limits.settings.policy import PolicyFile
from otel_limits.settings.table import PREFIX, SETTINGS, Setting
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from rich.table import Table

LEDGER: Final = PREFIX + "LEDGER"

BROKEN_PIPE: Final = 141
MISTAKE: Final = 2
"""Exit status when the program was not even started."""

VARIABLES: Final = {setting.name: setting.variable for setting in SETTINGS}

RUN_HELP: Final = """\
Run a program with limits on every agent in it.

The program itself is not changed:

  otel-limits run --max-turns 30 -- python app.py
  otel-limits run --max-token-budget 100000 --prometheus-port 9464 -- uvicorn app:app

Settings come from the environment (OTEL_LIMITS_*), and an option wins over it. A mistake in either
is told before the program starts, with exit status 2. After that the program has the process to
itself: its exit status and its signals are its own. Python programs that it starts are limited
as well.

A program that sets no OpenTelemetry tracer provider gets one when it first calls an agent, with an
OTLP exporter when OTEL_EXPORTER_OTLP_* is set.
"""

CHECK_HELP: Final = """\
Print every setting, its value and where it came from.

With --agent it is what applies to one agent, by the line of the policy file that says so. What a
LimitsPlugin sets in code wins over it and is not known here.

Exit status 1 if any is wrong, with one sentence per mistake on standard error.
"""

DEMO_HELP: Final = """\
Watch a real agent run away, and be stopped.

The same Strands agent runs without limits, with max_turns, with max_token_budget, and observed
only. It talks over HTTP to a model server that is built in, so it needs no network and no
credentials; --base-url points it at a real one.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say, those of the process unless given.

    Returns:
        The exit status.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no text must end us with a traceback
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.call is None:
        parser.print_help(sys.stderr)
        return MISTAKE
    try:
        status: int = options.call(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def make_parser() -> ArgumentParser:
    """Describe every command and option."""
    parser = ArgumentParser(
        prog="otel-limits",
        description="Stops LLM agents that go over budget, and tells exactly what happened.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"otel-limits {_version()}")
    parser.set_defaults(call=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_check(commands)
    _add_demo(commands)
    audit.add_commands(commands)
    ledger.add_commands(commands)
    dashboards.add_commands(commands)
    add_fleet_commands(commands, _add_command)
    return parser


def _version() -> str:
    return version("otel-limits")


def _add_command(commands: Any, name: str, text: str, call: Any) -> ArgumentParser:
    command: ArgumentParser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=text,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(call=call)
    return command


# --- run --------------------------------------------------------------------------------------


def _add_run(commands: Any) -> None:
    command = _add_command(commands, "run", RUN_HELP, run)
    command.usage = "otel-limits run [options] [--] PROGRAM [ARGUMENT ...]"
    settings = command.add_argument_group("settings")
    for setting in SETTINGS:
        text = setting.help.replace("%", "%%")
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
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    inherited = environment()
    given = given_flags(options)
    variables = {setting.variable: text for setting, text in given}
    mistakes = [
        *setting_mistakes(inherited, given),
        *_policy_mistakes(inherited | variables),
        *command_mistakes(command),
    ]
    if mistakes:
        return _refuse(mistakes, MISTAKE)
    if not inherited.get(LEDGER, "").strip():
        variables.setdefault(LEDGER, default_ledger())
    status, sentence = replace_process(command, environment_for(inherited, variables))
    return _refuse([sentence], status)


def given_flags(options: Namespace) -> list[tuple[Setting, str]]:
    """Collect the settings that are given as options, with the text of their variables."""
    values = [(setting, getattr(options, setting.name)) for setting in SETTINGS]
    return [
        (setting, str(value).lower() if isinstance(value, bool) else value)
        for setting, value in values
        if value is not None
    ]


def setting_mistakes(
    inherited: Mapping[str, str], given: Sequence[tuple[Setting, str]]
) -> list[str]:
    """Say what is wrong with the options, by the names that were typed, and with the rest.

    A variable that an option stands in for is not looked at.
    """
    mistakes = []
    for setting, text in given:
        try:
            setting.kind.of_text(setting.flag, text)
        except ValueError as error:  # noqa: PERF203  every mistake is told, not only the first
            mistakes.append(str(error))
    replaced = {setting.variable for setting, _ in given}
    rest = {name: text for name, text in inherited.items() if name not in replaced}
    return [*mistakes, *config.read(rest).mistakes]


def _policy_mistakes(environ: Mapping[str, str]) -> list[str]:
    from otel_limits.runtime.mistakes import policy_mistakes

    reading = config.read(environ)
    return policy_mistakes(reading, PolicyFile(reading.settings.policy_path))


def command_mistakes(command: Sequence[str]) -> list[str]:
    """Say what is wrong with the program to run, as far as that can be known beforehand."""
    if not command:
        return ["There is no program to run. Try: otel-limits run -- python app.py"]
    option = option_that_hides_us(command)
    if option is None:
        return []
    return [f"{command[0]} {option} would ignore every limit. Start it without {option}."]


def _refuse(sentences: Sequence[str], status: int) -> int:
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    return status


# --- check ------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    command = _add_command(commands, "check", CHECK_HELP, check)
    command.add_argument(
        "--agent", metavar="NAME", help="what applies to this agent by the policy file"
    )


def check(options: Namespace) -> int:
    """Print every setting; 1 when one is wrong."""
    from otel_limits.runtime.mistakes import policy_mistakes

    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    rows = [
        (VARIABLES.get(row.name, row.name), shown(row.value), row.source)
        for row in policy_file.document.rows(reading.values, reading.sources, options.agent)
    ]
    if sys.stdout.isatty():
        from otel_limits.cli.terminal import console

        console().print(settings_table(rows))
    else:
        sys.stdout.write(settings_text(rows))
        sys.stdout.flush()
    mistakes = [*reading.mistakes, *policy_mistakes(reading, policy_file)]
    return _refuse(mistakes, 1) if mistakes else 0


def shown(value: object) -> str:
    """Write a value as its variable would have it; `unset` for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, Collection) and not isinstance(value, str):
        value = ",".join(sorted(str(each) for each in value))
    return str(value) if value not in (None, "") else "unset"


def settings_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Lay the settings out for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("Setting", "Value", "From"):
        table.add_column(title, overflow="fold")
    for variable, value, source in rows:
        style = "dim" if source == "default" else "bold"
        table.add_row(variable, Text(value), Text(source), style=style)
    return table


def settings_text(rows: Sequence[tuple[str, str, str]]) -> str:
    """Lay the settings out for a file or a pipe: in columns, nothing cut off."""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(
        f"{variable:<{widths[0]}}  {value:<{widths[1]}}  {source}\n"
        for variable, value, source in rows
    )


# --- demo -------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    command = _add_command(commands, "demo", DEMO_HELP, demo)
    command.add_argument(
        "--base-url",
        metavar="URL",
        help="a real OpenAI-compatible model server instead, such as http://localhost:11434/v1",
    )
    command.add_argument("--model", metavar="NAME", help="the model to ask it for")
    command.add_argument(
        "--json", action="store_true", help="print the same facts as JSON and nothing else"
    )


def demo(options: Namespace) -> int:
    """Play the demonstration."""
    from otel_limits.demo.main import main as play

    return play(base_url=options.base_url, model=options.model, as_json=options.json)
