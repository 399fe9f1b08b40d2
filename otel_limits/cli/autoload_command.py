"""The commands `otel-limits autoload …`: load otel-limits in every Python of an environment."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any, Final

from otel_limits.cli.command import add_command, add_group, refuse
from otel_limits.runtime.autoload import (
    AutoloadError,
    autoload_file,
    install_autoload,
    installed_autoload,
    is_current,
    remove_autoload,
)
from otel_limits.settings.variables import environment

HELP: Final = """\
Load otel-limits automatically in every Python process in this environment.

After `install`, setting OTEL_LIMITS_* variables is enough: no launcher and no change to the
command. It also works with python -I, opentelemetry-instrument, gunicorn and celery. Use it in
container images:

  RUN pip install otel-limits && otel-limits autoload install

Without OTEL_LIMITS_* variables it does nothing. It has no effect with python -S or in a hermetic
PEX.
"""

INSTALL: Final = """\
Install autoload in this environment.

Writes one line to otel_limits_autoload.pth in site-packages and prints it. Read-only environments,
those managed by the operating system and per-user installations are not supported.
"""

STATUS: Final = """\
Show whether autoload is installed.

The exit status is 1 if it is not installed, or if another version installed it.
"""

REMOVE: Final = """\
Remove autoload from this environment.

Run this before uninstalling otel-limits.
"""

NOT_INSTALLED: Final = 1


def add(commands: Any) -> None:
    """Add `autoload` and its subcommands."""
    group = add_group(commands, "autoload", HELP)
    add_command(group, "install", INSTALL, install)
    add_command(group, "status", STATUS, show_status)
    add_command(group, "remove", REMOVE, remove)


def install(_options: Namespace) -> int:
    """Install autoload and print the file."""
    try:
        path = install_autoload(environment())
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write(f"Wrote {path}:\n{path.read_text(encoding='utf-8')}")
    return 0


def show_status(_options: Namespace) -> int:
    """Show whether autoload is installed."""
    path = installed_autoload()
    if path is None:
        sys.stdout.write(f"Not installed: {autoload_file()} does not exist.\n")
        return NOT_INSTALLED
    # After an upgrade, the previous version's line may import a module that no longer exists.
    if not is_current(path):
        sys.stdout.write(f"Outdated: {path}. Run: otel-limits autoload install\n")
        return NOT_INSTALLED
    sys.stdout.write(f"Installed: {path}\n")
    return 0


def remove(_options: Namespace) -> int:
    """Remove autoload if it is installed."""
    try:
        path = remove_autoload()
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write("Not installed.\n" if path is None else f"Removed: {path}\n")
    return 0
