"""The commands `otel-limits dashboards export` and `otel-limits dashboards preview`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.dashboards import files, panels
from otel_limits.dashboards.api import Prometheus, PrometheusError

if TYPE_CHECKING:
    from otel_limits.dashboards.panels import Dashboard, Window

DASHBOARDS_HELP: Final = """\
Write out the Grafana dashboards and alerts, or look at them without Grafana.
"""

EXPORT_HELP: Final = """\
Write dashboards, alert rules, provisioning files and a compose file to a directory.

Begin with README.md there. What is in the directory under the same names is replaced.
"""

PREVIEW_HELP: Final = """\
Draw every dashboard from a Prometheus, one picture per dashboard.

Each panel asks its own queries, as Grafana would, with every job, agent and model. It needs
matplotlib: pip install 'otel-limits[preview]'
"""

POINTS: Final = 120
"""Points over time that are asked for, about what a panel of this size shows."""


def add_commands(commands: Any) -> None:
    """Add `dashboards`, with its two commands, to the commands of a command line."""
    dashboards = _add_command(commands, "dashboards", DASHBOARDS_HELP)
    dashboards.set_defaults(call=lambda _: _show_help(dashboards))
    inner = dashboards.add_subparsers(title="commands", metavar="COMMAND")
    _add_export(inner)
    _add_preview(inner)


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return command


def _add_export(commands: Any) -> None:
    parser = _add_command(commands, "export", EXPORT_HELP)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write them")
    parser.add_argument(
        "--runbook", metavar="URL", help="where alerts find their runbook, dashboards/README.md"
    )
    parser.set_defaults(call=export)


def _add_preview(commands: Any) -> None:
    parser = _add_command(commands, "preview", PREVIEW_HELP)
    parser.add_argument(
        "--prometheus", required=True, metavar="URL", help="such as http://localhost:9090"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where to write the pictures"
    )
    parser.add_argument(
        "--range",
        type=seconds,
        default=3600.0,
        metavar="TIME",
        help="how far to look back, such as 30m, 6h or 7d (default: 1h)",
    )
    parser.add_argument(
        "--scrape-interval",
        type=seconds,
        default=15.0,
        metavar="TIME",
        help="how often that Prometheus scrapes (default: 15s)",
    )
    parser.set_defaults(call=preview)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def export(arguments: argparse.Namespace) -> int:
    """Write the files out and say where to begin."""
    written = files.export(arguments.directory, arguments.runbook)
    _say(f"Wrote {len(written)} files to {arguments.directory}. Begin with README.md there.")
    return 0


def preview(arguments: argparse.Namespace) -> int:
    """Draw every dashboard; 1 when Prometheus does not answer or matplotlib is missing."""
    try:
        from otel_limits.dashboards import draw
    except ImportError:
        return _complain("Pictures need matplotlib. Run: pip install 'otel-limits[preview]'")
    window = window_of(arguments.range, arguments.scrape_interval)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dashboard in panels.read_all(files.directory()):
        path = arguments.out / f"{dashboard.name}.png"
        try:
            answers = ask(Prometheus(arguments.prometheus), dashboard, window)
        except PrometheusError as error:
            return _complain(str(error))
        empty = draw.draw(dashboard, answers, window, path)
        note = f"; no data for: {', '.join(empty)}" if empty else ""
        _say(f"{path}: {len(dashboard.panels)} panels{note}")
    return 0


def window_of(length: float, scrape_interval: float) -> Window:
    """Look back from now, with a point no more often than there is a scrape."""
    now = time.time()
    step = max(length / POINTS, scrape_interval)
    return panels.Window(start=now - length, end=now, step=step, scrape_interval=scrape_interval)


def ask(prometheus: Prometheus, dashboard: Dashboard, window: Window) -> dict[Any, Any]:
    """Ask every query of a dashboard.

    Raises:
        PrometheusError: There was no answer.
    """
    return {
        target: prometheus.answer(target, window if target.instant else window.for_panel(panel))
        for panel in dashboard.panels
        for target in panel.targets
    }


def seconds(text: str) -> float:
    """Parse a length of time.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return panels.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _complain(text: str) -> int:
    sys.stderr.write(f"otel-limits: {text}\n")
    return 1
