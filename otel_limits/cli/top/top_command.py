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
from otel_limits.settings import environment as config
from otel_limits.settings.credentials import inherited_authorization

if TYPE_CHECKING:
    from otel_limits.top.fleet import Fleet
    from otel_limits.top.scrapes import Feed, Scrape

HELP: Final = """\
Show every agent of the fleet live: what runs, what it spends, how near it is to its caps.

Read each second from /metrics endpoints, or from a Prometheus; nothing is added to the agents.
Without an address it is the endpoint of OTEL_LIMITS_PROMETHEUS_PORT on this machine, or port 9464.
Keys sort, filter, choose and kill: ? shows them.

  otel-limits top --scrape worker-1:9464 worker-2:9464
  otel-limits top --prometheus http://localhost:9090
  otel-limits top --once --json
"""

DEFAULT_PORT: Final = 9464
"""That of OpenTelemetry's own Prometheus exporter, which every example of ours uses
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/)."""

ANYWHERE: Final = ("0.0.0.0", "::", "")  # noqa: S104  nothing is bound to them here
NO_ANSWER: Final = 1
FILE_WIDTH: Final = 200
"""Columns where there is no terminal."""
ONCE_SECONDS: Final = 5.0
"""How long `--once` counts what has no history of its own: rates need that much."""


def add(commands: Any) -> None:
    """Add `top`."""
    command = add_command(commands, "top", HELP, top)
    feeds = command.add_mutually_exclusive_group()
    feeds.add_argument(
        "--scrape",
        metavar="URL",
        nargs="+",
        help="endpoints to read, such as http://localhost:9464/metrics or worker-1:9464",
    )
    feeds.add_argument(
        "--prometheus",
        metavar="URL",
        help="a Prometheus that scrapes the fleet, such as http://localhost:9090 "
        "(credentials: OTEL_LIMITS_PROMETHEUS_AUTHORIZATION)",
    )
    command.add_argument("--once", action="store_true", help="print it once, and end")
    command.add_argument("--json", action="store_true", help="with --once: print it as JSON")


def top(options: Namespace) -> int:
    """Show the fleet."""
    # A live view for a program has no end and no document.
    if options.json and not options.once:
        return refuse(["--json needs --once: otel-limits top --once --json"])
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
    """Return who is to be asked.

    Raises:
        ValueError: An address is not one.
    """
    # Here, as every other command does without the parsers.
    from otel_limits.top.endpoints import Endpoint
    from otel_limits.top.prometheus_feed import PrometheusFeed

    if options.prometheus:
        credentials = inherited_authorization()
        return [PrometheusFeed(options.prometheus, credentials.value if credentials else None)]
    # Each once: the same process under the same address is not two.
    return [Endpoint(each) for each in dict.fromkeys(options.scrape or [local_endpoint()])]


def local_endpoint() -> str:
    """Return where the processes of this machine that have our settings are scraped."""
    settings = config.read().settings
    # What is bound to all addresses is asked on one that a client can name.
    host = settings.prometheus_host
    host = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{host}:{settings.prometheus_port or DEFAULT_PORT}/metrics"


def show_live(feeds: Sequence[Feed]) -> int:
    """Show it until somebody leaves."""
    # Windows has no termios, without which keys would need Enter.
    has_keys = find_spec("termios") is not None
    if not (has_keys and sys.stdin.isatty() and sys.stdout.isatty()):
        sentence = "A live view needs a terminal. Run: otel-limits top --once"
        return refuse([sentence])
    from otel_limits.cli.quotas import kill_named
    from otel_limits.cli.top.live import run_live

    run_live(feeds, kill_named)
    return 0


def print_once(feeds: Sequence[Feed], *, is_json: bool) -> int:
    """Print it; 1 where nobody answers."""
    from otel_limits.top.fleet import as_json

    fleet = read_once(feeds)
    if is_json:
        sys.stdout.write(json.dumps(as_json(fleet), indent=2) + "\n")
    else:
        from otel_limits.cli.terminal import console
        from otel_limits.cli.top.screen import page

        screen = console()
        # A file has room for everything.
        for line in page(fleet, screen.width if screen.is_terminal else FILE_WIDTH):
            screen.print(line, soft_wrap=True)
    # One that answers is enough: the others are sentences in the answer.
    return NO_ANSWER if all(fleet.feeds.values()) else 0


def read_once(feeds: Sequence[Feed]) -> Fleet:
    """Ask everybody, and again as late as it takes to know how fast things go."""
    from otel_limits.top.fleet_state import track
    from otel_limits.top.scrapes import ScrapeError, scrape

    watch = track(feeds, time.time())

    def asked(feed: Feed) -> list[Scrape]:
        try:
            return [*feed.history(time.time()), scrape(feed, time.time())]
        except ScrapeError:
            return [scrape(feed, time.time())]  # which says why

    # At once, as each may take its timeout.
    with ThreadPoolExecutor(len(feeds)) as pool:
        for told in pool.map(asked, feeds):
            for each in told:
                watch.add(each)
        fleet = watch.fleet()
        # A Prometheus has told of the past already; only endpoints have to be asked twice.
        if fleet.rate_seconds is None and not all(fleet.feeds.values()):
            time.sleep(ONCE_SECONDS)
            for each in pool.map(lambda feed: scrape(feed, time.time()), feeds):
                watch.add(each)
    return watch.fleet()
