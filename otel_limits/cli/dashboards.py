"""The commands `otel-limits dashboards export` and `otel-limits dashboards preview`."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any, Final

from otel_limits.cli.command import add_command, add_group, refuse
from otel_limits.core.wording import pluralize
from otel_limits.dashboards import exported_files, panels
from otel_limits.dashboards.api import Line, Prometheus, PrometheusError
from otel_limits.dashboards.panels import Dashboard, Target, TimeRange
from otel_limits.settings.credentials import inherited_authorization

HELP: Final = """\
Export Grafana dashboards and alert rules, or render them as images.
"""

EXPORT_HELP: Final = """\
Export dashboards and alert rules to a directory.

Includes Grafana provisioning files, Kubernetes manifests and a compose file; see README.md in the
directory. Existing files are overwritten.
"""

PREVIEW_HELP: Final = """\
Render each dashboard as 1920x1080 PNG images, light and dark.

Queries a Prometheus server as Grafana would, with all jobs, agents and models selected. Requires
matplotlib: pip install 'otel-limits[preview]'
"""

NOT_RENDERED: Final = 1

POINTS: Final = 120
"""Points per series, about as many as a panel can show."""


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
    command = add_command(dashboards, "preview", PREVIEW_HELP, preview)
    command.add_argument(
        "--prometheus",
        required=True,
        metavar="URL",
        help="Prometheus server, e.g. http://localhost:9090",
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="output directory")
    command.add_argument(
        "--range",
        type=seconds,
        default=3600.0,
        metavar="TIME",
        help="time range, e.g. 30m, 6h or 7d (default: 1h)",
    )
    command.add_argument(
        "--scrape-interval",
        type=seconds,
        default=15.0,
        metavar="TIME",
        help="scrape interval of the Prometheus server (default: 15s)",
    )


def export(options: Namespace) -> int:
    """Export the files."""
    try:
        written = exported_files.export(options.directory, options.runbook, options.grafana)
    except OSError as error:
        return refuse([write_error(options.directory, error)])
    sys.stdout.write(
        f"Wrote {pluralize(len(written), 'file')} to {options.directory}. "
        "Start with README.md there.\n"
    )
    # Otherwise broken links would be noticed only when an alert fires.
    missing = [
        f"{option} URL (now {default})"
        for option, default, url in (
            ("--runbook", exported_files.RUNBOOK, options.runbook),
            ("--grafana", exported_files.GRAFANA, options.grafana),
        )
        if url is None
    ]
    if missing:
        sys.stdout.write(f"Links in alerts need {' and '.join(missing)}.\n")
    return 0


def preview(options: Namespace) -> int:
    """Render all dashboards; return 1 if Prometheus or matplotlib is unavailable."""
    try:
        from otel_limits.dashboards import draw
    except ImportError:
        sentence = "matplotlib is not installed. Run: pip install 'otel-limits[preview]'"
        return refuse([sentence], NOT_RENDERED)
    now = time.time()
    window = TimeRange(
        start=now - options.range,
        end=now,
        # A step shorter than the scrape interval adds nothing.
        step=max(options.range / POINTS, options.scrape_interval),
        scrape_interval=options.scrape_interval,
    )
    try:
        # First, as queries take longer.
        options.out.mkdir(parents=True, exist_ok=True)
        dashboards = panels.read_all(exported_files.directory())
    except OSError as error:
        return refuse([write_error(options.out, error)], NOT_RENDERED)
    try:
        credentials = inherited_authorization()
    except ValueError as error:
        return refuse([str(error)], NOT_RENDERED)
    prometheus = Prometheus(options.prometheus, credentials.value if credentials else None)
    for dashboard in dashboards:
        try:
            answers = query_panels(prometheus, dashboard, window)
        except PrometheusError as error:
            return refuse([str(error)], NOT_RENDERED)
        try:
            drawn = draw.draw(dashboard, answers, window, options.out)
        except OSError as error:
            return refuse([write_error(options.out, error)], NOT_RENDERED)
        nothing = draw.empty(dashboard, answers)
        note = f"; no data for: {', '.join(nothing)}" if nothing else ""
        sys.stdout.write(
            f"{options.out / dashboard.name}-*.png: {len(dashboard.panels)} panels in "
            f"{len(drawn)} pictures{note}\n"
        )
    return 0


def write_error(directory: Path, error: OSError) -> str:
    """Return the message for files that could not be written."""
    # Without errno, it is our own error: the dashboards are missing from the installation.
    if error.errno is None:
        return str(error)
    return f"Cannot write to {directory}: {error.strerror}."


def query_panels(
    prometheus: Prometheus, dashboard: Dashboard, window: TimeRange
) -> dict[Target, tuple[Line, ...]]:
    """Run all queries of a dashboard.

    Raises:
        PrometheusError: A query failed.
    """
    return {
        # Only series over time need the panel's own range and step.
        target: prometheus.answer(target, window if target.instant else window.for_panel(panel))
        for panel in dashboard.panels
        for target in panel.targets
    }


def seconds(text: str) -> float:
    """Parse a duration.

    Raises:
        ArgumentTypeError: It is invalid. argparse doesn't show the message of a `ValueError`.
    """
    try:
        return panels.seconds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
