"""Fleet commands: show and change quotas, kill agents in every process."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.cli.command import add_command
from otel_limits.cli.fleet_store import (
    SET_A_STORE,
    caps_of_conversations,
    exit_status,
    fleet_store,
    known_quotas,
    shared_store,
)
from otel_limits.cli.quota_changes import add_changes
from otel_limits.core.values import WHOLE_NUMBER
from otel_limits.core.wording import pluralize
from otel_limits.quotas.recovery import settle_expired
from otel_limits.quotas.remaining import ConversationUse, KeyUse, Uses, read_conversations, read_use
from otel_limits.quotas.store import NotesExpired, SendsKills
from otel_limits.quotas.windows import shown_time
from otel_limits.settings.ledgers import recorded_ledger

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from otel_limits.quotas.store import SharedStore

WATCH_SECONDS: Final = 1.0
NO_WAY_TO_AGENTS: Final = (
    f"Kills are sent through the quota store, but none is set. {SET_A_STORE} "
    "Use the same value as the agents."
)
NO_SUBSCRIBERS: Final = (
    "No process is subscribed to this store. Check that OTEL_LIMITS_QUOTA_STORE and "
    "OTEL_LIMITS_QUOTA_NAMESPACE match those of the agents."
)

QUOTAS_HELP: Final = """\
Show quota usage, reservations and reset times.

Reads the quotas in the policy file (OTEL_LIMITS_POLICY) from OTEL_LIMITS_QUOTA_STORE. Keys from
external input, e.g. a tenant in the baggage, are shown as the first characters of a hash. Calls
that the ledger recorded but killed workers did not settle are settled first.

Conversations that have used 80% of a cap are listed by their hash. The caps are those of the policy
file and the environment of this command, e.g. OTEL_LIMITS_CONVERSATION_MAX_TURNS.
"""

KILL_HELP: Final = """\
Kill active invocations in all processes that share the quota store.

Streaming responses are cut off; running tools finish. The stop reason is "killed". Later
invocations are not affected.

  otel-limits kill --agent 'research-*'
"""


def add(commands: Any) -> None:
    """Add `quotas` and `kill`."""
    quotas = add_command(commands, "quotas", QUOTAS_HELP, exit_status(show))
    quotas.add_argument("--watch", action="store_true", help="refresh every second")
    quotas.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="output format (default: table)",
    )
    quotas.add_argument(
        "--top", metavar="N", help="show the N keys of each quota closest to the limit"
    )
    quotas.add_argument(
        "--key",
        metavar="GLOB",
        dest="key_glob",
        default="*",
        help="show only keys matching this pattern, e.g. 'team-*'",
    )
    add_changes(quotas.add_subparsers(title="commands", metavar="COMMAND"))
    kill = add_command(commands, "kill", KILL_HELP, exit_status(kill_agents))
    kill.add_argument(
        "--agent", metavar="GLOB", required=True, help="agent name or pattern, e.g. 'research-*'"
    )


def show(options: Namespace) -> None:
    """Show every quota, once or repeatedly."""
    from otel_limits.top.fleet import NEAR_END

    # Before anything else, to report missing variables first.
    caps_of = caps_of_conversations()
    quotas, store = known_quotas(is_required=caps_of is None), shared_store()
    top = None if options.top is None else WHOLE_NUMBER.of_text("--top", options.top)

    def read() -> Uses:
        chosen: Any = {"glob": options.key_glob, "top": top}
        uses = read_use(store, quotas, **chosen)
        if caps_of is None:
            return uses
        near = read_conversations(store, caps_of, NEAR_END, **chosen)
        return uses._replace(conversations=near)

    uses = read()
    # The store notices expired reservations when their count is read.
    if settle_for_killed_workers(store):
        uses = read()
    if not options.watch:
        print_use(uses, options.format)
        return
    try:
        watch(read, options.format)
    # Ctrl+C is how users leave `--watch`.
    except KeyboardInterrupt:
        return


def settle_for_killed_workers(store: SharedStore) -> int:
    """Settle calls recorded by killed workers; return their number."""
    ledger = recorded_ledger()
    if ledger is None or not isinstance(store, NotesExpired):
        return 0
    from otel_limits.ledger.quota_usage import charges_in

    return settle_expired(store, functools.partial(charges_in, ledger))


def kill_agents(options: Namespace) -> None:
    """Kill agents in every process."""
    sys.stdout.write(f"{kill_named(options.agent)}\n")


def kill_named(pattern: str) -> str:
    """Kill agents whose name matches a pattern, in every process; return a confirmation.

    Raises:
        ValueError: No shared store is configured, or it cannot send kills.
        StoreError: The store is unavailable.
    """
    store = fleet_store(NO_WAY_TO_AGENTS)
    if isinstance(store, SendsKills):
        received = store.kill(pattern)
        sent = f"Sent kill for {pattern!r} to {pluralize(received, 'process', 'processes')}."
        # The store answered, so most likely the namespace is another.
        return sent if received else f"{sent} {NO_SUBSCRIBERS}"
    raise ValueError("OTEL_LIMITS_QUOTA_STORE cannot send kills. Use a Redis or Valkey server.")


def print_use(uses: Uses, form: str) -> None:
    """Print usage once."""
    if form == "json":
        sys.stdout.write(json.dumps(as_json(uses), indent=2) + "\n")
        return
    from otel_limits.cli.quota_table import table_of
    from otel_limits.cli.terminal import console

    screen = console()
    # Only a terminal limits the width.
    screen.print(table_of(uses, screen.width if screen.is_terminal else None), soft_wrap=True)


def watch(read: Callable[[], Uses], form: str) -> None:
    """Print usage every second: in place on a terminal, or as one JSON document per line."""
    if form == "json":
        while True:
            # One line each, so pipes can be read document by document.
            sys.stdout.write(json.dumps(as_json(read())) + "\n")
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)
    from rich.live import Live

    from otel_limits.cli.quota_table import table_of
    from otel_limits.cli.terminal import console

    screen = console()
    with Live(table_of(read(), screen.width), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(table_of(read(), screen.width), refresh=True)


def as_json(uses: Uses) -> dict[str, list[dict[str, Any]]]:
    """Return usage as JSON values."""
    quotas = [
        _texts(row) | {"resets": None if row.resets is None else shown_time(row.resets)}
        for row in uses.rows
    ]
    conversations = [
        _texts(use) | {"idle_since": shown_time(use.idle_since)} for use in uses.conversations
    ]
    return {"quotas": quotas, "conversations": conversations}


def _texts(row: KeyUse | ConversationUse) -> dict[str, Any]:
    """Return a row with money as text, to stay exact."""
    return {
        name: f"{value:f}" if isinstance(value, Decimal) else value
        for name, value in dataclasses.asdict(row).items()
    }
