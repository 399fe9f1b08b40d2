"""The command `otel-limits top`."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from otel_limits.cli.command import add_command, refuse
from otel_limits.settings.settings_reader import settings_with
from otel_limits.settings.variables import inherited_authorization, reachable

if TYPE_CHECKING:
    from otel_limits.top.fleet import Fleet
    from otel_limits.top.scrapes import Feed

HELP: Final = """\
Show live activity, spend and limit utilization of all agents.

Reads /metrics endpoints or a Prometheus server every second. By default it reads port
OTEL_LIMITS_PROMETHEUS_PORT (or 9464) of this machine. Press ? for the keys that sort, filter and
kill. Agents need a port, too:

  otel-limits run --prometheus-port 9464 -- python app.py

  otel-limits top --scrape worker-1:9464 worker-2:9464
  otel-limits top --prometheus http://localhost:9090
  otel-limits top --once --json
"""

DEFAULT_PORT: Final = 9464
"""Default of OpenTelemetry's Prometheus exporter, used in all examples
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/)."""

NO_ANSWER: Final = 1
FILE_WIDTH: Final = 200
"""Width if there is no terminal."""
ONCE_SECONDS: Final = 5.0
"""Interval between two scrapes of `--once`, the minimum window of a rate."""


def add(commands: Any) -> None:
    """Add `top`."""
    command = add_command(commands, "top", HELP, top)
    feeds = command.add_mutually_exclusive_group()
    feeds.add_argument(
        "--scrape",
        metavar="URL",
        nargs="+",
        help="endpoints, e.g. http://localhost:9464/metrics or worker-1:9464",
    )
    feeds.add_argument(
        "--prometheus",
        metavar="URL",
        help="Prometheus server, e.g. http://localhost:9090 "
        "(credentials: OTEL_LIMITS_PROMETHEUS_AUTHORIZATION)",
    )
    command.add_argument("--once", action="store_true", help="print the current state and exit")
    command.add_argument("--json", action="store_true", help="with --once, print JSON")


def top(options: Namespace) -> int:
    """Show the fleet."""
    if options.json and not options.once:
        return refuse(["--json requires --once. Run: otel-limits top --once --json"])
    try:
        feeds = feeds_of(options)
    except ValueError as error:
        return refuse([str(error)])
    try:
        if options.once:
            return print_once(feeds, is_json=options.json)
        return show_live(feeds)
    except KeyboardInterrupt:
        return 0


def feeds_of(options: Namespace) -> list[Feed]:
    """Return the feeds to read.

    Raises:
        ValueError: An address is invalid.
    """
    # Imported here because the parsers are slow to import.
    from otel_limits.top.scrapes import Endpoint, PrometheusFeed

    if options.prometheus:
        credentials = inherited_authorization()
        return [PrometheusFeed(options.prometheus, credentials.value if credentials else None)]
    # Without duplicates, which would count twice.
    return [Endpoint(each) for each in dict.fromkeys(options.scrape or [local_endpoint()])]


def local_endpoint() -> str:
    """Return the endpoint of processes on this machine with the same settings."""
    settings = settings_with("prometheus_host", "prometheus_port")
    host = reachable(settings.prometheus_host)
    return f"http://{host}:{settings.prometheus_port or DEFAULT_PORT}/metrics"


def show_live(feeds: Sequence[Feed]) -> int:
    """Show the live view until the user quits."""
    # Windows has no termios, so keys would need Enter.
    has_keys = find_spec("termios") is not None
    if not (has_keys and sys.stdin.isatty() and sys.stdout.isatty()):
        sentence = "The live view requires a terminal. Run: otel-limits top --once"
        return refuse([sentence])
    from otel_limits.cli.quotas import NO_WAY_TO_AGENTS, kill_named
    from otel_limits.cli.top.live import run_live
    from otel_limits.quotas.stores import is_shared

    has_store = is_shared(settings_with("quota_store").quota_store)
    run_live(feeds, kill_named, "" if has_store else NO_WAY_TO_AGENTS)
    return 0


def print_once(feeds: Sequence[Feed], *, is_json: bool) -> int:
    """Print the fleet; return 1 if no feed is available."""
    from otel_limits.top.fleet import as_json

    fleet = read_once(feeds)
    if is_json:
        sys.stdout.write(json.dumps(as_json(fleet), indent=2) + "\n")
    else:
        from otel_limits.cli.terminal import console
        from otel_limits.cli.top.screen import page

        screen = console()
        for line in page(fleet, screen.width if screen.is_terminal else FILE_WIDTH):
            screen.print(line, soft_wrap=True)
    # The output includes the errors of other feeds.
    return NO_ANSWER if all(fleet.feeds.values()) else 0


def read_once(feeds: Sequence[Feed]) -> Fleet:
    """Scrape all feeds; twice if that is needed to compute rates."""
    from otel_limits.top.fleet_state import track
    from otel_limits.top.scrapes import first_scrapes, scrape

    tracker = track(feeds, time.time())
    # Concurrently, as each may take until its timeout.
    with ThreadPoolExecutor(len(feeds)) as pool:
        for scrapes in pool.map(lambda feed: list(first_scrapes(feed)), feeds):
            for each in scrapes:
                tracker.add(each)
        fleet = tracker.fleet()
        # Endpoints have no history. A Prometheus server has; new data of it takes longer.
        is_soon = all(feed.least_seconds <= ONCE_SECONDS for feed in feeds)
        if fleet.rate_seconds is None and is_soon and not all(fleet.feeds.values()):
            time.sleep(ONCE_SECONDS)
            for each in pool.map(lambda feed: scrape(feed, time.time()), feeds):
                tracker.add(each)
    return tracker.fleet()
