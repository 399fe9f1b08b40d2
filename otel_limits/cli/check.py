"""The command `otel-limits check`: settings with their values and sources."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.installed import importable_frameworks, missing_framework
from otel_limits.bindings.known import know_installed
from otel_limits.bindings.probing import outside_supported, release
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.effects import unpriced_halts
from otel_limits.cli.terminal import console, in_columns
from otel_limits.core.list_date import list_in_use, old_list
from otel_limits.core.secrets import redact_url
from otel_limits.core.wording import pluralize
from otel_limits.observers.first_calls import UNLIMITED
from otel_limits.quotas.quota import too_small, waits_in_vain
from otel_limits.runtime.autoload import OUTDATED, RENEW, installed_autoload, outdated_autoload
from otel_limits.settings import environment as config
from otel_limits.settings.policy import Document, PolicyFile
from otel_limits.settings.table import SETTINGS, Settings

if TYPE_CHECKING:
    from otel_limits.core.policy import Policy
    from otel_limits.quotas.store import SharedStore

HELP: Final = """\
Show configured settings with value and source, and validate them.

--all also shows settings with defaults. --agent shows what applies to one agent, with the line of
the policy file. Limits set in code, such as those of a LimitsPlugin, are not included.

If quotas are kept in a shared store, the permissions of the store's user are tested.

The installed agent frameworks are not imported: their code is read, and what it lacks is reported.
They are probed when a program imports them. --probe does so now, which takes some seconds.

The exit status is 1 if a setting is invalid, or if limits cannot be enforced on the installed agent
framework. Each problem is one line on standard error.
"""

PROBED_LATER: Final = (
    "Frameworks are probed when a program imports them; otel-limits doctor probes now."
)

FOUND_MISTAKES: Final = 1
DEFAULT: Final = "default"
NARROW: Final = 64
"""Terminal width below which the longest name of a setting would be folded."""

VARIABLES: Final = {setting.name: setting.variable for setting in SETTINGS}


def add(commands: Any) -> None:
    """Add `check`."""
    command = add_command(commands, "check", HELP, check)
    command.add_argument("--all", action="store_true", help="also show settings with defaults")
    command.add_argument("--agent", metavar="NAME", help="show what applies to this agent")
    command.add_argument(
        "--probe", action="store_true", help="import the agent frameworks and probe them now"
    )


def check(options: Namespace) -> int:
    """Print the settings; return 1 if one is invalid."""
    from otel_limits.runtime.guard import probed, read_only
    from otel_limits.settings.policy.file import access_warning, policy_mistakes, unlisted_models

    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    is_limited = has_limit(reading, policy_file.document, options.agent)
    rows = policy_file.document.rows(reading.values, reading.sources, options.agent)
    # What happens at a limit is of interest even if it is the default.
    shown_rows = [
        (
            VARIABLES.get(row.name, row.name),
            shown(row.value or "none" if row.name == "metrics" else row.value),
            row.source,
        )
        for row in rows
        if options.all or row.source != DEFAULT or (row.name == "action" and is_limited)
    ]
    hidden = len(rows) - len(shown_rows)
    autoload = installed_autoload()
    if autoload is not None:
        shown_rows.append(("autoload", "installed", str(autoload)))
    if (prices := list_in_use()) is not None:
        shown_rows.append(("price_list", prices, "installed"))
    installed = know_installed()
    frameworks = importable_frameworks()
    state = "probed" if options.probe else "not probed"
    shown_rows += [(each.name, release(each), state) for each in frameworks]
    if shown_rows:
        print_rows(shown_rows)
    if hidden:
        print(f"{pluralize(hidden, 'other setting')} with defaults: otel-limits check --all")  # noqa: T201
    if frameworks and not options.probe:
        print(PROBED_LATER)  # noqa: T201
    # If both streams go to one file, problems come after the settings.
    sys.stdout.flush()
    quotas = [entry.value for entry in policy_file.document.quotas.values()]
    doubts = [doubt(quota) for quota in quotas for doubt in (too_small, waits_in_vain)]
    refuse([sentence for sentence in doubts if sentence is not None])
    guarded = (probed if options.probe else read_only)(frameworks)
    mistakes = [
        *reading.mistakes,
        *reading.warnings,
        *policy_mistakes(reading, policy_file),
        *(
            f"Limits cannot be enforced: {sentence}"
            for sentence in (*installed.broken, *guarded.obstacles)
        ),
    ]
    refuse([f"{sentence} Limits are still enforced." for sentence in guarded.fallbacks])
    halted = unpriced_halts(effective_policies(reading, policy_file.document, options.agent))
    outdated = outdated_autoload()
    doubts = [
        halted,
        access_warning(policy_file),
        *unlisted_models(policy_file.document),
        old_list(),
        *installed.unused,
        *installed.absent,
        None if outdated is None else f"{OUTDATED.format(path=autoload, reason=outdated)} {RENEW}",
        *(outside_supported(each) for each in frameworks),
    ]
    refuse([each for each in doubts if each is not None])
    if quotas and not reading.mistakes:
        warnings, wrong = store_mistakes(reading.settings)
        refuse(warnings)
        mistakes += wrong
    status = refuse(mistakes, FOUND_MISTAKES) if mistakes else 0
    # Only a warning: the programs may have their own environment.
    if (missing := missing_framework()) is not None:
        refuse([missing])
    # Only a warning, because metrics and a ledger are useful without limits. Last, because one of
    # the mistakes may be the reason.
    if not is_limited:
        refuse([UNLIMITED.format(who=f"agent {options.agent!r}" if options.agent else "agents")])
    return status


def store_mistakes(settings: Settings) -> tuple[list[str], list[str]]:
    """Test the quota store's version and its user's permissions; return warnings and mistakes."""
    from otel_limits.quotas.store import (
        Diagnoses,
        StoreAuthenticationError,
        StoreError,
        StorePlace,
    )
    from otel_limits.quotas.stores import is_shared, open_shared_store, version_problem

    if not is_shared(settings.quota_store):
        return [], []
    place = StorePlace(settings.quota_store, settings.quota_store_timeout, settings.quota_namespace)
    store = open_shared_store(place)
    try:
        missing = store.missing_rights() if isinstance(store, Diagnoses) else []
        problem = version_problem(store)
    except StoreAuthenticationError as error:
        sentence = f"authentication failed ({redact_url(str(error))})"
        return [], [f"OTEL_LIMITS_QUOTA_STORE: {sentence}. Check its user and password."]
    except StoreError as error:
        return [f"Quota store unavailable ({error}); permissions not tested."], []
    else:
        wrong = [f"OTEL_LIMITS_QUOTA_STORE: {problem}"] if problem else []
        if not missing:
            return cannot_write(store), wrong
    finally:
        store.close()
    rule = f"Run on the server: ACL SETUSER <user> {' '.join(missing)}"
    # Quotas work without these.
    if all(each == "+subscribe" or each.startswith("&") for each in missing):
        sentence = "cannot subscribe; polling once a second for kills and freed quota"
        return [f"OTEL_LIMITS_QUOTA_STORE: {sentence}. {rule}"], wrong
    return [], [*wrong, f"OTEL_LIMITS_QUOTA_STORE: its user lacks permissions. {rule}"]


def cannot_write(store: SharedStore) -> list[str]:
    """Return a warning if a store is full or a read-only replica."""
    from otel_limits.quotas.store import StoreError

    try:
        store.check()
    except StoreError as error:
        sentence = "Until it is writable, each quota follows its on_store_error"
        return [f"Cannot write to the quota store ({error}). {sentence}."]
    return []


def has_limit(reading: config.Reading, document: Document, agent: str | None) -> bool:
    """Return whether an agent has a limit; without a name, whether any agent has one."""
    policies = effective_policies(reading, document, agent)
    return any(each.is_capped for each in policies.values()) or bool(document.quotas)


def effective_policies(
    reading: config.Reading, document: Document, agent: str | None
) -> dict[str, Policy]:
    """Return the policy of an agent; without a name, of each entry and of all other agents."""
    base = reading.settings.policy
    return document.policies(base) if agent is None else {agent: document.effective(agent, base)}


def shown(value: object) -> str:
    """Format a value as in its variable; `unset` if there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, Collection) and not isinstance(value, str):
        value = ",".join(sorted(str(each) for each in value))
    text = str(value)
    return "unset" if value in (None, "") else redact_url(text)


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
    for title in ("Setting", "Value", "From"):
        table.add_column(title, overflow="fold")
    for variable, value, source in rows:
        style = "dim" if source == DEFAULT else "bold"
        table.add_row(variable, Text(value), Text(source), style=style)
    screen.print(table)
