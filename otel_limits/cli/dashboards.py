"""The commands `otel-limits dashboards export` and `otel-limits dashboards preview`."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any, Final

from otel_limits.cli.command import add_command, add_group, refuse
from otel_limits.core.wording import pluralize
from otel_limits.dashboards import files, panels
from otel_limits.dashboards.api import Line, Prometheus, PrometheusError
from otel_limits.dashboards.panels import Dashboard, Target, TimeRange
from otel_limits.settings.credentials import inherited_authorization

HELP: Final = """\
Write out the Grafana dashboards and alerts, or look at them without Grafana.
"""

EXPORT_HELP: Final = """\
Write dashboards and alert rules to a directory, with what installs them.

That is provisioning files, objects for Kubernetes and a compose file. Begin with README.md there.
Files of the same names are replaced.
"""

PREVIEW_HELP: Final = """\
Draw every dashboard from a Prometheus: pictures of 1920 by 1080 pixels, light and dark.

Each panel asks its own queries, as Grafana would, with every job, agent and model. It needs
matplotlib: pip install 'otel-limits[preview]'
"""

NOT_DRAWN: Final = 1

POINTS: Final = 120
"""Points over time that are asked for, about what a panel of this size shows."""


def add(commands: Any) -> None:
    """Add `dashboards`, with its two commands."""
    dashboards = add_group(commands, "dashboards", HELP)
    command = add_command(dashboards, "export", EXPORT_HELP, export)
    command.add_argument("directory", type=Path, metavar="DIR", help="where to write them")
    command.add_argument(
        "--runbook", metavar="URL", help="where alerts find their runbook, dashboards/README.md"
    )
    command.add_argument("--grafana", metavar="URL", help="where alerts find their panels")
    command = add_command(dashboards, "preview", PREVIEW_HELP, preview)
    command.add_argument(
        "--prometheus", required=True, metavar="URL", help="such as http://localhost:9090"
    )
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where to write the pictures"
    )
    command.add_argument(
        "--range",
        type=seconds,
        default=3600.0,
        metavar="TIME",
        help="how far to look back, such as 30m, 6h or 7d (default: 1h)",
    )
    command.add_argument(
        "--scrape-interval",
        type=seconds,
        default=15.0,
        metavar="TIME",
        help="how often that Prometheus scrapes (default: 15s)",
    )


def export(options: Namespace) -> int:
    """Write the files out and say where to begin."""
    try:
        written = files.export(options.directory, options.runbook, options.grafana)
    except OSError as error:
        return refuse([unwritten(options.directory, error)])
    sys.stdout.write(
        f"Wrote {pluralize(len(written), 'file')} to {options.directory}. Begin with README.md there.\n"
    )
    # Links that lead nowhere would be found out about when an alert fires.
    missing = [
        f"{option} URL says where {what} really is"
        for option, what, url in (
            ("--runbook", files.RUNBOOK, options.runbook),
            ("--grafana", files.GRAFANA, options.grafana),
        )
        if url is None
    ]
    if missing:
        sys.stdout.write(f"Alerts need addresses to link to: {', and '.join(missing)}.\n")
    return 0


def preview(options: Namespace) -> int:
    """Draw every dashboard; 1 when Prometheus does not answer or matplotlib is missing."""
    try:
        from otel_limits.dashboards import draw
    except ImportError:
        sentence = "Pictures need matplotlib. Run: pip install 'otel-limits[preview]'"
        return refuse([sentence], NOT_DRAWN)
    window = shown_by(options)
    try:
        # Before Prometheus is asked: what cannot be kept need not be drawn.
        options.out.mkdir(parents=True, exist_ok=True)
        dashboards = panels.read_all(files.directory())
    except OSError as error:
        return refuse([unwritten(options.out, error)], NOT_DRAWN)
    try:
        credentials = inherited_authorization()
    except ValueError as error:
        return refuse([str(error)], NOT_DRAWN)
    prometheus = Prometheus(options.prometheus, credentials.value if credentials else None)
    for dashboard in dashboards:
        try:
            answers = ask(prometheus, dashboard, window)
        except PrometheusError as error:
            return refuse([str(error)], NOT_DRAWN)
        try:
            drawn = draw.draw(dashboard, answers, window, options.out)
        except OSError as error:
            return refuse([unwritten(options.out, error)], NOT_DRAWN)
        nothing = draw.empty(dashboard, answers)
        note = f"; no data for: {', '.join(nothing)}" if nothing else ""
        sys.stdout.write(
            f"{options.out / dashboard.name}-*.png: {len(dashboard.panels)} panels in "
            f"{len(drawn)} pictures{note}\n"
        )
    return 0


def shown_by(options: Namespace) -> TimeRange:
    """Return the time that the pictures show: the last hours, up to now."""
    now = time.time()
    return TimeRange(
        start=now - options.range,
        end=now,
        # No more often than there is a scrape.
        step=max(options.range / POINTS, options.scrape_interval),
        scrape_interval=options.scrape_interval,
    )


def unwritten(directory: Path, error: OSError) -> str:
    """Say why files were not written."""
    # Without a number it is a sentence of ours: the files are missing from the installation.
    if error.errno is None:
        return str(error)
    return f"{directory} cannot be written: {error.strerror}. Name another directory."


def ask(
    prometheus: Prometheus, dashboard: Dashboard, window: TimeRange
) -> dict[Target, tuple[Line, ...]]:
    """Ask every query of a dashboard.

    Raises:
        PrometheusError: It did not answer.
    """
    return {
        # A single number is asked for over just the range; steps only matter to what is drawn
        # over time.
        target: prometheus.answer(target, window if target.instant else window.for_panel(panel))
        for panel in dashboard.panels
        for target in panel.targets
    }


def seconds(text: str) -> float:
    """Parse a length of time.

    Raises:
        ArgumentTypeError: It is not one; argparse would not show the message of a `ValueError`.
    """
    try:
        return panels.seconds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
