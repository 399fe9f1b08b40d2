"""The command `otel-limits check`: settings with their values and sources."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final

from otel_limits.bindings.recognition import release
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context, as_sentences, exit_status
from otel_limits.cli.run_command import add_settings, given_options
from otel_limits.cli.terminal import console, in_columns
from otel_limits.core.catalogue import list_in_use
from otel_limits.core.secrets import redact_value
from otel_limits.core.values import duration_text
from otel_limits.core.wording import pluralize
from otel_limits.quotas.stores import is_shared
from otel_limits.runtime.autoload import installed_autoload
from otel_limits.settings.run_options import with_options
from otel_limits.settings.settings_reader import DEFAULT, VARIABLES
from otel_limits.settings.table import variable_of
from otel_limits.settings.variables import environment

HELP: Final = """\
Show configured settings with value and source, and validate them.

--all also shows settings with defaults. --agent shows what applies to one agent, with the line of
the policy file. Options of `otel-limits run` are read as it reads them. Limits set in code, such as
those of a LimitsPlugin, are not included.

If quotas are kept in a shared store, the permissions of the store's user are tested.

The installed agent frameworks are not imported: their code is read, and what it lacks is reported.
They are probed when a program imports them. --probe does so now, which takes some seconds.

The exit status is 1 if a setting is invalid, or if limits cannot be enforced on the installed agent
framework. Each problem is one line on standard error.
"""

PROBED_LATER: Final = (
    "Frameworks are probed when a program imports them; otel-limits check --probe probes now."
)

IN_MEMORY: Final = ", counted in each process"
"""Added to a quota without a shared store."""

SOURCE: Final = 24
"""Width of the source of a setting, and at least of its value, before the other is folded."""

MARGINS: Final = 8
"""Width between the columns and at both sides."""

NARROW: Final = 64
"""Terminal width below which the longest name of a setting would be folded."""


def add(commands: Any) -> None:
    """Add `check`."""
    command = add_command(commands, "check", HELP, check)
    command.usage = "otel-limits check [options]"
    command.add_argument("--all", action="store_true", help="also show settings with defaults")
    command.add_argument("--agent", metavar="NAME", help="show what applies to this agent")
    command.add_argument(
        "--probe", action="store_true", help="import the agent frameworks and probe them now"
    )
    add_settings(command)


def check(options: Namespace) -> int:
    """Print the settings; return 1 if one is invalid."""
    environ = with_options(environment(), given_options(options))
    context = Context(environ, agent=options.agent, probe=options.probe)
    rows, hidden = rows_of(context, show_all=options.all)
    if rows:
        print_rows(rows)
    if hidden:
        print(f"{pluralize(hidden, 'setting')} with defaults: otel-limits check --all")  # noqa: T201
    if context.frameworks and not options.probe:
        print(PROBED_LATER)  # noqa: T201
    # If both streams go to one file, problems come after the settings.
    sys.stdout.flush()
    findings = findings_of("check", context)
    refuse(as_sentences(findings))
    return exit_status(findings)


def rows_of(context: Context, *, show_all: bool) -> tuple[list[tuple[str, str, str]], int]:
    """Return the settings to print with value and source, and how many others have defaults."""
    reading = context.reading
    every = context.document.rows(reading.values, reading.sources, context.agent)
    has_store = is_shared(reading.settings.quota_store)
    # What happens at a limit is of interest even if it is the default.
    rows = [
        (
            variable
            if (variable := variable_of(row.name)) in VARIABLES
            else redact_value(row.name),
            shown(row.value or "none" if row.name == "metrics" else row.value)
            + (IN_MEMORY if row.name.startswith("quotas[") and not has_store else ""),
            row.source,
        )
        for row in every
        if show_all or row.source != DEFAULT or (row.name == "action" and context.has_limit)
    ]
    hidden = len(every) - len(rows)
    if (autoload := installed_autoload()) is not None:
        rows.append(("autoload", "installed", str(autoload)))
    if (prices := list_in_use()) is not None:
        rows.append(("price_list", prices, "installed"))
    state = "probed" if context.probe else "not probed"
    rows += [(each.name, release(each), state) for each in context.frameworks]
    return rows, hidden


def shown(value: object) -> str:
    """Format a value as in its variable; `unset` if there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(sorted(_item(*each) for each in value.items())) or "unset"
    if isinstance(value, Collection) and not isinstance(value, str):
        value = ",".join(sorted(str(each) for each in value))
    text = duration_text(value) if isinstance(value, timedelta) else str(value)
    return "unset" if value in (None, "") else redact_value(text)


def _item(name: str, value: object) -> str:
    """Format a value with its name; numbers are not secret, also in `max_token_budget`."""
    text = f"{name}={_as_written(value)}"
    return text if isinstance(value, int | float | Decimal) else redact_value(text)


def _as_written(value: object) -> str:
    """Format a value within another one as in the policy file."""
    if isinstance(value, Mapping):
        parts = (f"{name}: {_as_written(each)}" for name, each in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_written, value))}]"
    return str(value)


def print_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the settings as a table on a terminal, else in plain columns."""
    if sys.stdout.isatty():
        print_table(rows)
    else:
        sys.stdout.write(in_columns(rows))


def print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the settings on a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    # Without margins, the longest name fits into 60 columns.
    is_narrow = screen.width < NARROW
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=not is_narrow,
        collapse_padding=is_narrow,
    )
    # Values are folded first: a variable and `policy limits.yaml:12` should stay in one line.
    setting, _, source = (max(map(len, column), default=0) for column in zip(*rows, strict=True))
    left = screen.width - setting - min(source, SOURCE) - MARGINS
    table.add_column("Setting", overflow="fold")
    width = max(left, SOURCE)
    table.add_column("Value", overflow="fold", max_width=width)
    table.add_column("From", overflow="fold")
    for variable, value, origin in rows:
        style = "dim" if origin == DEFAULT else "bold"
        table.add_row(variable, Text(folded(value, width)), Text(origin), style=style)
    screen.print(table)


def folded(value: str, width: int) -> str:
    """Break a value into lines behind its commas, so that no number or name is cut."""
    lines = [""]
    for part in re.findall(r"[^,]*,|[^,]+", value):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
