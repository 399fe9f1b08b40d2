"""The commands `otel-limits autoload …`: switch on in every Python of an environment."""

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
Have every Python of this environment load otel-limits by itself.

After `install`, OTEL_LIMITS_* in the environment is enough: no launcher, no change of the command.
It also works under python -I, opentelemetry-instrument, gunicorn and celery. It is meant for the
build of an image:

  RUN pip install otel-limits && otel-limits autoload install

If no OTEL_LIMITS_* is set, the line does nothing. python -S and a hermetic PEX do not read it.
"""

INSTALL: Final = """\
Write the line into this environment.

It is one line in otel_limits_autoload.pth, and it is printed. An environment that cannot be
written or that the operating system manages is refused, and so is an installation for one user.
"""

STATUS: Final = """\
Say whether the line is there.

The exit status is 1 if it is not, or if it is the line of another version.
"""

REMOVE: Final = """\
Delete the line.

Do so before you uninstall otel-limits.
"""

NOT_THERE: Final = 1


def add(commands: Any) -> None:
    """Add `autoload` with its commands."""
    group = add_group(commands, "autoload", HELP)
    add_command(group, "install", INSTALL, install)
    add_command(group, "status", STATUS, show_status)
    add_command(group, "remove", REMOVE, remove)


def install(_options: Namespace) -> int:
    """Write the line, and show it."""
    try:
        path = install_autoload(environment())
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write(f"{path} holds this line now:\n{path.read_text(encoding='utf-8')}")
    return 0


def show_status(_options: Namespace) -> int:
    """Say whether the line is there."""
    path = installed_autoload()
    if path is None:
        sys.stdout.write(f"Not installed: there is no {autoload_file()}\n")
        return NOT_THERE
    # An upgrade leaves the line of the version before, which may load what is not there any more.
    if not is_current(path):
        sys.stdout.write(
            f"Of another version: {path}. Write it again: otel-limits autoload install\n"
        )
        return NOT_THERE
    sys.stdout.write(f"Installed: {path}\n")
    return 0


def remove(_options: Namespace) -> int:
    """Delete the line, if it is there."""
    try:
        path = remove_autoload()
    except AutoloadError as error:
        return refuse([str(error)])
    sys.stdout.write("There was nothing to remove.\n" if path is None else f"Removed: {path}\n")
    return 0
