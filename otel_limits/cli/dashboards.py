"""The command `otel-limits dashboards export`."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

from otel_limits.cli.command import add_command, add_group, refuse
from otel_limits.core.wording import pluralize
from otel_limits.dashboards import exported_files

HELP: Final = """\
Export Grafana dashboards and alert rules.
"""

EXPORT_HELP: Final = """\
Export dashboards and alert rules to a directory.

Includes Grafana provisioning files, Kubernetes manifests and a compose file; see README.md in the
directory. Files of an earlier export are replaced, except those that you edited.
"""


def add(commands: Any) -> None:
    """Add `dashboards` and its subcommands."""
    dashboards = add_group(commands, "dashboards", HELP)
    command = add_command(dashboards, "export", EXPORT_HELP, export)
    command.add_argument("directory", type=Path, metavar="DIR", help="output directory")
    command.add_argument(
        "--runbook",
        metavar="URL",
        help="runbook that alerts link to, e.g. your copy of dashboards/README.md",
    )
    command.add_argument("--grafana", metavar="URL", help="Grafana that alerts link to")


def export(options: Namespace) -> int:
    """Export the files."""
    try:
        written, kept = exported_files.export(options.directory, options.runbook, options.grafana)
    except OSError as error:
        return refuse([write_error(options.directory, error)])
    except exported_files.InvalidFileError as error:
        return refuse([str(error)])
    sys.stdout.write(
        f"Wrote {pluralize(len(written), 'file')} to {options.directory}. "
        "Start with README.md there.\n"
    )
    if kept:
        names = ", ".join(path.as_posix() for path in kept)
        differ = pluralize(len(kept), "file that differs", "files that differ")
        sys.stdout.write(
            f"Kept {differ}, edited or of another version: {names}. To get the new version, move "
            f"{'it' if len(kept) == 1 else 'them'} away and export again.\n"
        )
    # Otherwise missing and broken links would be noticed only when an alert fires.
    if options.runbook is None:
        sys.stdout.write("Alerts name a section of that file; --runbook URL makes it a link.\n")
    if options.grafana is None:
        sys.stdout.write(f"Alerts link to {exported_files.GRAFANA}; change with --grafana URL.\n")
    return 0


def write_error(directory: Path, error: OSError) -> str:
    """Return the message for files that could not be written."""
    # Without errno, it is our own error: the dashboards are missing from the installation.
    if error.errno is None:
        return str(error)
    return f"Cannot write to {directory}: {error.strerror}."
