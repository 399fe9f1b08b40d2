"""The command `otel-limits check`: every setting, its value and where it came from."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console, in_columns
from otel_limits.core.secrets import redact_url
from otel_limits.observers.first_calls import UNLIMITED
from otel_limits.quotas.quota import too_small
from otel_limits.runtime.autoload import installed_autoload
from otel_limits.settings import environment as config
from otel_limits.settings.policy import Document, PolicyFile
from otel_limits.settings.table import SETTINGS, Settings

if TYPE_CHECKING:
    from otel_limits.quotas.store import SharedStore

HELP: Final = """\
Print every setting, its value and where it came from.

--agent shows what applies to one agent, with the line of the policy file that sets it. Limits that
code gives to a LimitsPlugin win over these, and are not known here.

If quotas are counted on a server, the rights of its user are tested, and missing access rules are
named.

The exit status is 1 if a setting is wrong, or if the agent framework that is installed cannot be
followed. Standard error has one sentence for each mistake.
"""

FOUND_MISTAKES: Final = 1
NARROW: Final = 64
"""Columns of a terminal below which the longest name of a setting would be folded."""

VARIABLES: Final = {setting.name: setting.variable for setting in SETTINGS}


def add(commands: Any) -> None:
    """Add `check`."""
    command = add_command(commands, "check", HELP, check)
    command.add_argument(
        "--agent", metavar="NAME", help="what applies to this agent by the policy file"
    )


def check(options: Namespace) -> int:
    """Print every setting; 1 when one is wrong."""
    from otel_limits.runtime.guard import probed
    from otel_limits.settings.policy.file import policy_mistakes

    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    rows = [
        (VARIABLES.get(row.name, row.name), shown(row.value), row.source)
        for row in policy_file.document.rows(reading.values, reading.sources, options.agent)
    ]
    autoload = installed_autoload()
    if autoload is not None:
        rows.append(("autoload", "installed", str(autoload)))
    print_rows(rows)
    quotas = [entry.value for entry in policy_file.document.quotas.values()]
    refuse([sentence for quota in quotas if (sentence := too_small(quota)) is not None])
    guarded = probed(FRAMEWORKS)
    mistakes = [
        *reading.mistakes,
        *reading.warnings,
        *policy_mistakes(reading, policy_file),
        *(f"No limit can be in force: {sentence}" for sentence in guarded.obstacles),
    ]
    refuse([f"{sentence} Every limit stays in force." for sentence in guarded.weakened])
    if quotas and not reading.mistakes:
        warnings, wrong = store_rights(reading.settings)
        refuse(warnings)
        mistakes += wrong
    status = refuse(mistakes, FOUND_MISTAKES) if mistakes else 0
    # A warning and not a mistake: metrics and a ledger are of use without any cap. Last, as one of
    # the mistakes may be why there is none.
    if not has_limit(reading, policy_file.document, options.agent):
        refuse([UNLIMITED.format(who=f"agent {options.agent!r}" if options.agent else "agents")])
    return status


def store_rights(settings: Settings) -> tuple[list[str], list[str]]:
    """Try what the user of the quota store may do; returns warnings and mistakes."""
    from otel_limits.quotas.store import NotLetInError, StoreError, StorePlace
    from otel_limits.quotas.stores import is_shared, open_shared_store

    if not is_shared(settings.quota_store):
        return [], []
    place = StorePlace(settings.quota_store, settings.quota_store_timeout, settings.quota_namespace)
    store = open_shared_store(place)
    try:
        missing = store.missing_rights()
    except NotLetInError as error:
        sentence = f"its server does not let the user in ({redact_url(str(error))})"
        return [], [
            f"OTEL_LIMITS_QUOTA_STORE: {sentence}. Look at the user and the password in it."
        ]
    except StoreError as error:
        sentence = f"The quota store does not answer ({error}): what its user may do was not tried."
        return [sentence], []
    else:
        if not missing:
            return cannot_write(store), []
    finally:
        store.close()
    rule = f"Add it with ACL SETUSER and the name of the user: {' '.join(missing)}"
    # Without these quotas are counted all the same.
    if all(each == "+subscribe" or each.startswith("&") for each in missing):
        sentence = "hear no kills and nothing that becomes free, and look for them once a second"
        return [f"OTEL_LIMITS_QUOTA_STORE: processes {sentence}. {rule}"], []
    return [], [f"OTEL_LIMITS_QUOTA_STORE: its user may not do all that quotas need. {rule}"]


def cannot_write(store: SharedStore) -> list[str]:
    """Say that a store takes nothing: it is a replica, or full."""
    from otel_limits.quotas.store import StoreError

    try:
        store.check()
    except StoreError as error:
        sentence = "until it can, every quota does what its on_store_error says"
        return [f"The quota store cannot be written to ({error}): {sentence}."]
    return []


def has_limit(reading: config.Reading, document: Document, agent: str | None) -> bool:
    """Tell whether anything can stop an agent, or, without a name, any agent."""
    # The empty name is what fits no entry of the file, so that only its defaults apply.
    globs = [agent] if agent is not None else ["", *document.agents]
    policies = [document.effective(glob, reading.settings.policy) for glob in globs]
    capped = any(
        any(cap for _, cap in (*each.limits.items(), *each.tree.items())) for each in policies
    )
    return capped or bool(document.quotas)


def shown(value: object) -> str:
    """Write a value as its variable would have it; `unset` where there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, Collection) and not isinstance(value, str):
        value = ",".join(sorted(str(each) for each in value))
    text = str(value)
    return "unset" if value in (None, "") else redact_url(text)


def print_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the settings: laid out for a terminal, in plain columns for a file."""
    if sys.stdout.isatty():
        print_table(rows)
        return
    sys.stdout.write(in_columns(rows))
    # Where both go into one file, the mistakes stand below the settings.
    sys.stdout.flush()


def print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the settings on a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    # Without its margins where it has to be: the longest name has room in 60 columns then.
    is_narrow = screen.width < NARROW
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=not is_narrow,
        collapse_padding=is_narrow,
    )
    for title in ("Setting", "Value", "From"):
        table.add_column(title, overflow="fold")
    for variable, value, source in rows:
        style = "dim" if source == "default" else "bold"
        table.add_row(variable, Text(value), Text(source), style=style)
    screen.print(table)
