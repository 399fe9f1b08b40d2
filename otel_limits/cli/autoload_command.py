"""The commands `otel-limits autoload …`: load otel-limits in every Python of an environment."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any, Final

from otel_limits.bindings.entry_points import installed_entry_points
from otel_limits.cli.command import add_command, add_group, refuse
from otel_limits.core.limits import PREFIX
from otel_limits.core.secrets import redact_url
from otel_limits.runtime.autoload import (
    RENEW,
    AutoloadError,
    autoload_file,
    install_autoload,
    installed_autoload,
    kept_settings,
    outdated_autoload,
    remove_autoload,
)
from otel_limits.settings.policy.file import PolicyFile, policy_mistakes
from otel_limits.settings.settings_reader import VARIABLES, read_settings
from otel_limits.settings.variables import environment

HELP: Final = """\
Load otel-limits automatically in every Python process in this environment.

After `install`, setting OTEL_LIMITS_* variables is enough: no launcher and no change to the
command. It also works with python -I, opentelemetry-instrument, gunicorn and celery. Use it in
container images, after the installation of otel-limits:

  RUN otel-limits autoload install

Without OTEL_LIMITS_* variables it does nothing, unless `install` keeps settings. It has no effect
with python -S or in a hermetic PEX.
"""

INSTALL: Final = """\
Install autoload in this environment.

Writes one line to otel_limits_autoload.pth in site-packages and prints it, and the module that it
imports. Read-only environments, those managed by the operating system and per-user installations
are not supported.

The module lists the frameworks that other packages limit. Install autoload again after you have
installed such a package.

Programs that cron or systemd starts may have no OTEL_LIMITS_* variables. Keep their settings in the
Python environment:

  otel-limits autoload install --policy /etc/limits.yaml --set max_turns=30

Paths are kept as absolute ones. Variables of a program override settings. Installing again without
settings keeps them.
"""

STATUS: Final = """\
Show whether autoload is installed, and the settings that it keeps.

The exit status is 1 if it is not installed, or if another version or other frameworks were
installed since.
"""

REMOVE: Final = """\
Remove autoload from this environment.

Run this before uninstalling otel-limits.
"""

NOT_INSTALLED: Final = 1


def add(commands: Any) -> None:
    """Add `autoload` and its subcommands."""
    group = add_group(commands, "autoload", HELP)
    command = add_command(group, "install", INSTALL, install)
    command.add_argument("--policy", metavar="FILE", help="policy file to keep as a setting")
    command.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="setting to keep, e.g. max_turns=30; can be repeated",
    )
    add_command(group, "status", STATUS, show_status)
    add_command(group, "remove", REMOVE, remove)


def install(options: Namespace) -> int:
    """Install autoload and print the file."""
    given = [*options.set, *(() if options.policy is None else (f"POLICY={options.policy}",))]
    written = dict(map(_variable, given))
    settings = _absolute(written)
    mistakes = _mistakes(settings)
    if mistakes:
        return refuse(mistakes)
    try:
        path = install_autoload(environment(), settings)
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write(f"Wrote {path}:\n{path.read_text(encoding='utf-8')}")
    _show_kept()
    moved = [name for name, value in settings.items() if value != written[name]]
    if moved:
        sys.stdout.write(f"Kept as absolute paths: {', '.join(moved)}.\n")
    installed = installed_entry_points()
    refuse([*installed.broken, *installed.unused])
    return 0


def _variable(text: str) -> tuple[str, str]:
    """Return the variable and the value of NAME=VALUE, with or without our prefix."""
    name, _, value = text.partition("=")
    variable = PREFIX + name.strip().upper().replace("-", "_").removeprefix(PREFIX)
    return variable, value.strip()


def _absolute(settings: dict[str, str]) -> dict[str, str]:
    """Return settings with absolute paths, because a program may start in another directory."""
    return {
        name: VARIABLES[name].kind.absolute(value) if name in VARIABLES and value else value
        for name, value in settings.items()
    }


def _mistakes(settings: dict[str, str]) -> list[str]:
    """Return why settings cannot be kept."""
    mistakes = [
        f"{name} contains a secret, which all users of this environment could read. Set it in the "
        "program's environment."
        for name, value in settings.items()
        if name in VARIABLES
        if VARIABLES[name].is_secret or redact_url(value) != value
    ]
    mistakes += [f"{name} has no value." for name, value in settings.items() if not value]
    mistakes += [
        f"{name} must be one line." for name, value in settings.items() if not value.isprintable()
    ]
    if mistakes:
        return mistakes
    reading = read_settings(settings)
    return [
        *reading.mistakes,
        *policy_mistakes(reading.settings.policy, PolicyFile(reading.settings.policy_path)),
    ]


def show_status(_options: Namespace) -> int:
    """Show whether autoload is installed."""
    path = installed_autoload()
    if path is None:
        sys.stdout.write(f"Not installed: {autoload_file()} does not exist.\n")
        return NOT_INSTALLED
    # After an upgrade, the previous version's files may not work with this one.
    outdated = outdated_autoload()
    found = f"Outdated: {path}: {outdated}. {RENEW}" if outdated else f"Installed: {path}"
    sys.stdout.write(f"{found}\n")
    _show_kept()
    return NOT_INSTALLED if outdated else 0


def _show_kept() -> None:
    for name, value in kept_settings().items():
        sys.stdout.write(f"{name}={value}\n")


def remove(_options: Namespace) -> int:
    """Remove autoload if it is installed."""
    try:
        path = remove_autoload()
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write("Not installed.\n" if path is None else f"Removed: {path}\n")
    return 0
