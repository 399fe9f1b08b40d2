"""The commands about a fleet: show quotas, reset or extend them, end agents in every process."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import json
import socket
import sys
import time
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.cli.command import add_command, refuse
from otel_limits.core.events import QuotaGrant
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import DATE_TIME, WHOLE_NUMBER
from otel_limits.core.wording import closest_match, pluralize
from otel_limits.quotas.key_use import KeyUse, Uses, find_key, read_use
from otel_limits.quotas.quota import Quota, in_unit, unit_name
from otel_limits.quotas.recovery import settle_expired
from otel_limits.quotas.section import FIELDS, parts_in
from otel_limits.quotas.store import FOREVER, Block, Count, SharedStore, StoreError, StorePlace
from otel_limits.quotas.stores import is_shared, open_shared_store
from otel_limits.quotas.windows import shown_time
from otel_limits.runs.registry import LIVE
from otel_limits.settings import environment as config
from otel_limits.settings.ledgers import recorded_ledger
from otel_limits.settings.policy import PolicyFile

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from otel_limits.ledger.address import Address
    from otel_limits.quotas.keys import Key


NO_ANSWER: Final = 1
TIMEOUT_SECONDS: Final = 2.0
WATCH_SECONDS: Final = 1.0
SET_A_STORE: Final = "Set OTEL_LIMITS_QUOTA_STORE, such as redis://localhost:6379/0."
IN_MEMORY: Final = (
    "Quotas are counted in the memory of each process, where nobody else can see them. "
    f"{SET_A_STORE}"
)
NO_WAY_TO_AGENTS: Final = (
    "Processes hear of a kill from the store that counts their quotas, and none is set. "
    f"{SET_A_STORE} The agents need the same value."
)
NOBODY_LISTENS: Final = (
    "No process listens to this store. Check that OTEL_LIMITS_QUOTA_STORE and "
    "OTEL_LIMITS_QUOTA_NAMESPACE have the values here that they have where the agents run."
)

QUOTAS_HELP: Final = """\
Show every quota: how much is used, reserved and left, and when it begins again.

Quotas are those of the policy file (OTEL_LIMITS_POLICY), counted on OTEL_LIMITS_QUOTA_STORE. Keys
that came from outside, such as a tenant in the baggage, are shown as the beginning of a hash.
Calls that killed workers did not settle, but that the ledger has, are counted first.
"""

RESET_HELP: Final = """\
Set the count of one key of a quota back to 0, in the present window.

Write KEY as the quota has it (acme, or researcher/acme), or as the table shows it. A quota without
keys needs none. What is reserved for calls under way stays reserved.
"""

GRANT_HELP: Final = """\
Permit one key of a quota more, for a time.

Until then every window permits AMOUNT more. The ledger keeps who granted it and when: see
otel-limits audit grants.

  otel-limits quotas grant tenants acme 100000 --until 2026-12-01
  otel-limits quotas grant nightly 5.50 --until 2026-12-01T06:00+01:00
"""

REVOKE_HELP: Final = """\
Take back what was granted to one key of a quota.

What has been used stays counted.
"""

BLOCK_HELP: Final = """\
Permit one key of a quota nothing, whatever is left.

Agents stop before their next model call with quota_exceeded and the reason's text. The ledger keeps
who blocked it and why: see otel-limits audit grants.

  otel-limits quotas block tenants acme --until 2026-12-01 --reason 'unpaid since October'
"""

UNBLOCK_HELP: Final = """\
Remove the block of one key of a quota.
"""

KILL_HELP: Final = """\
End live invocations of agents in every process that shares the quota store.

A response that is being streamed is cut off, and running tools are waited for. The stop reason is
"killed". Invocations that begin afterwards are not affected.

  otel-limits kill --agent 'research-*'
"""


def add(commands: Any) -> None:
    """Add `quotas` and `kill`."""
    quotas = add_command(commands, "quotas", QUOTAS_HELP, exit_status(show))
    quotas.add_argument("--watch", action="store_true", help="show it again every second")
    quotas.add_argument(
        "--format", choices=("table", "json"), default="table", help="table or json"
    )
    quotas.add_argument(
        "--top", metavar="N", help="show the N keys of each quota that are nearest their end"
    )
    quotas.add_argument(
        "--key",
        metavar="GLOB",
        dest="key_glob",
        default="*",
        help="show the keys that are shown like this, such as 'team-*'",
    )
    add_changes(quotas.add_subparsers(title="commands", metavar="COMMAND"))
    kill = add_command(commands, "kill", KILL_HELP, exit_status(kill_agents))
    kill.add_argument(
        "--agent", metavar="GLOB", required=True, help="name of the agents, such as 'research-*'"
    )


def add_changes(below: Any) -> None:
    """Add what changes one key of a quota."""
    reset = add_command(below, "reset", RESET_HELP, exit_status(reset_key))
    grant = add_command(below, "grant", GRANT_HELP, exit_status(grant_more))
    revoke = add_command(below, "revoke", REVOKE_HELP, exit_status(revoke_grants))
    block = add_command(below, "block", BLOCK_HELP, exit_status(block_key))
    unblock = add_command(below, "unblock", UNBLOCK_HELP, exit_status(unblock_key))
    for command in (reset, grant, revoke, block, unblock):
        command.add_argument("name", metavar="NAME", help="the quota")
        command.add_argument("key", metavar="KEY", nargs="?", default="", help="whose share of it")
    grant.add_argument("amount", metavar="AMOUNT", help="how much more, in the quota's unit")
    when = "date and time (ISO 8601; UTC unless it says)"
    grant.add_argument("--until", metavar="WHEN", required=True, help=when)
    block.add_argument("--until", metavar="WHEN", help=f"{when}; unset, until it is unblocked")
    block.add_argument("--reason", metavar="TEXT", default="", help="what stopped agents say")


def exit_status(command: Callable[[Namespace], None]) -> Callable[[Namespace], int]:
    """Make a command return its exit status, and print errors as sentences.

    Whatever reads what a user wrote raises a `ValueError` that is one.
    """

    def call(options: Namespace) -> int:
        try:
            command(options)
        except ValueError as error:
            return refuse([str(error)])
        except StoreError as error:
            return refuse([f"The quota store does not answer ({error})."], NO_ANSWER)
        return 0

    return call


# --- what they do -----------------------------------------------------------------------------


def show(options: Namespace) -> None:
    """Show every quota, once or again and again."""
    # Both are looked for before anything else: whoever forgot a variable is told at once.
    quotas, store = known_quotas(), shared_store()
    top = None if options.top is None else WHOLE_NUMBER.of_text("--top", options.top)

    def read() -> Uses:
        return read_use(store, quotas, glob=options.key_glob, top=top)

    uses = read()
    # The store notes which reservations have expired when somebody looks at their count.
    if settle_for_killed_workers(store):
        uses = read()
    if not options.watch:
        print_use(uses, options.format)
        return
    try:
        watch(read, options.format)
    # How `--watch` is left, which is not an error.
    except KeyboardInterrupt:
        return


def settle_for_killed_workers(store: SharedStore) -> int:
    """Count what killed workers have in the ledger and did not settle; returns how many calls."""
    ledger = recorded_ledger()
    # A worker that was killed left what it used only there.
    if ledger is None:
        return 0
    from otel_limits.ledger.queries import charges_in

    return settle_expired(store, functools.partial(charges_in, ledger))


def reset_key(options: Namespace) -> None:
    """Begin to count from 0."""
    # The address of the ledger first: a wrong one must not leave a change unrecorded.
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    store.reset(count_of(store, quota, key))
    record(ledger, changed(quota, key, "reset", 0, None))
    sys.stdout.write(f"Quota {quota.name!r} counts {key.shown} from 0 again.\n")


def grant_more(options: Namespace) -> None:
    """Permit more for a time."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    unit = unit_name(quota.unit)
    # Read as the policy file has it, so that 5.50 are dollars and 5.5 tokens are refused.
    given = FIELDS[quota.unit].kind.of_text(f"AMOUNT (in {unit})", options.amount)
    amount = parts_in(quota.unit, given)
    until = end_of(store, options.until)
    store.grant(count_of(store, quota, key), amount, until)
    record(ledger, changed(quota, key, "grant", amount, until))
    sys.stdout.write(
        f"Quota {quota.name!r} permits {key.shown} {in_unit(quota.unit, amount)} "
        f"{unit} more until {shown_time(until)}.\n"
    )


def revoke_grants(options: Namespace) -> None:
    """Take back what was granted."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    found = store.revoke(count_of(store, quota, key))
    if not found:
        raise ValueError(f"Nothing is granted to {key.shown} of quota {quota.name!r} now.")
    record(ledger, changed(quota, key, "revoke", 0, None))
    grants = pluralize(found, "grant is", "grants are")
    sys.stdout.write(f"Quota {quota.name!r}: {grants} taken back from {key.shown}.\n")


def block_key(options: Namespace) -> None:
    """Permit nothing."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    until = FOREVER if options.until is None else end_of(store, options.until)
    # Without an end it is a time that no clock reaches, so that stores need only one kind of block.
    store.block(count_of(store, quota, key), Block(until, options.reason))
    told = None if options.until is None else until
    record(ledger, changed(quota, key, "block", 0, told, options.reason))
    end = "it is unblocked" if told is None else shown_time(until)
    sys.stdout.write(f"Quota {quota.name!r} permits {key.shown} nothing until {end}.\n")


def unblock_key(options: Namespace) -> None:
    """Permit again what the quota permits."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    if not store.unblock(count_of(store, quota, key)):
        raise ValueError(f"Quota {quota.name!r} is not blocked for {key.shown}.")
    record(ledger, changed(quota, key, "unblock", 0, None))
    sys.stdout.write(f"Quota {quota.name!r} is not blocked for {key.shown} any more.\n")


def kill_agents(options: Namespace) -> None:
    """End agents in every process."""
    sys.stdout.write(f"{kill_named(options.agent)}\n")


def kill_named(pattern: str) -> str:
    """End the agents whose name fits a glob, in every process; returns who was told, in words.

    Raises:
        ValueError: There is no store that processes share.
        StoreError: It does not answer.
    """
    heard = shared_store(NO_WAY_TO_AGENTS).kill(pattern)
    told = f"Told {pluralize(heard, 'process', 'processes')} to end agents named {pattern!r}."
    # The store answered, so that it is the right one for nobody: most likely another namespace.
    return told if heard else f"{told} {NOBODY_LISTENS}"


def count_of(store: SharedStore, quota: Quota, key: Key) -> Count:
    """Name what is counted of a key now."""
    # By the clock of the store, which all processes go by: that of this machine may be another.
    return quota.count(key, store.now())


def end_of(store: SharedStore, text: str) -> float:
    """Read `--until`.

    Raises:
        ValueError: It is not a time in the future.
    """
    until = DATE_TIME.of_text("--until", text).timestamp()
    if until <= store.now():
        raise ValueError(f"--until must be in the future, got {text}.")
    return until


def changed(
    quota: Quota, key: Key, change: Any, amount: int, until: float | None, reason: str = ""
) -> QuotaGrant:
    """Make the event that a person changed what a quota permits."""
    return QuotaGrant(
        quota=quota.name,
        key=key.shown,
        change=change,
        amount=in_unit(quota.unit, amount),
        unit=unit_name(quota.unit),
        until=until,
        by=f"{getpass.getuser()}@{socket.gethostname()}",
        at=time.time(),
        id=uuid.uuid4().hex,
        reason=reason,
    )


def record(address: Address | None, event: QuotaGrant) -> None:
    """Publish the event, and write it to the ledger."""
    # Here as well, where whoever listens is in this process; the others learn of it from the store.
    LIVE.observers.publish(event)
    if address is not None:
        from otel_limits.observers.ledger import LedgerObserver

        ledger = LedgerObserver(address)
        # Through the observer that every process has, so that there is one way to write the row.
        ledger(event)
        ledger.close()


# --- what they need ---------------------------------------------------------------------------


def known_quotas() -> list[Quota]:
    """Read the quotas of the policy file.

    Raises:
        ValueError: It has none, or something is wrong with it.
    """
    settings = config.read().settings
    policy = PolicyFile(settings.policy_path)
    if policy.mistakes:
        # Each mistake is a line of its own, and begins like all that is told on standard error.
        raise ValueError("\notel-limits: ".join(policy.mistakes))
    quotas = [entry.value for entry in policy.document.quotas.values()]
    if not quotas:
        raise ValueError("There are no quotas. Set OTEL_LIMITS_POLICY to a file that has some.")
    return quotas


def shared_store(unset: str = IN_MEMORY) -> SharedStore:
    """Open the store that the fleet shares.

    Args:
        unset: What to say where quotas are counted in memory.

    Raises:
        ValueError: They are, or the URL is not valid.
    """
    reading = config.read()
    # The setting has its default then, and the message below would be about memory.
    wrong = [each for each in reading.mistakes if "OTEL_LIMITS_QUOTA_STORE" in each]
    if wrong:
        raise ValueError(wrong[0])
    if not is_shared(reading.settings.quota_store):
        raise ValueError(unset)
    settings = reading.settings
    return open_shared_store(
        StorePlace(settings.quota_store, TIMEOUT_SECONDS, settings.quota_namespace)
    )


def named(store: SharedStore, options: Namespace) -> tuple[Quota, Key]:
    """Find the quota and the key that the command line names.

    Raises:
        ValueError: There is no such quota, or its keys look different.
    """
    quotas = {quota.name: quota for quota in known_quotas()}
    quota = quotas.get(options.name)
    if quota is None:
        near = closest_match(options.name, quotas)
        hint = f"Did you mean {near}?" if near else f"There are: {', '.join(quotas)}."
        raise ValueError(f"There is no quota {redact_url(options.name)!r}. {hint}")
    return quota, find_key(store, quota, options.key)


# --- how it looks -----------------------------------------------------------------------------


def print_use(uses: Uses, form: str) -> None:
    """Print once."""
    if form == "json":
        sys.stdout.write(json.dumps([as_json(row) for row in uses.rows], indent=2) + "\n")
        return
    from otel_limits.cli.quota_table import table_of
    from otel_limits.cli.terminal import console

    screen = console()
    # Only a terminal has an edge at which something would have to be left out.
    screen.print(table_of(uses, screen.width if screen.is_terminal else None), soft_wrap=True)


def watch(read: Callable[[], Uses], form: str) -> None:
    """Print every second: over itself on a terminal, one JSON document per line otherwise."""
    if form == "json":
        while True:
            # On one line each time: whoever reads a pipe can take it document by document.
            sys.stdout.write(json.dumps([as_json(row) for row in read().rows]) + "\n")
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


def as_json(row: KeyUse) -> dict[str, Any]:
    """Write a row as JSON values; money as text, so that it stays exact."""
    texts = {
        name: str(value) if isinstance(value, Decimal) else value
        for name, value in dataclasses.asdict(row).items()
    }
    return texts | {"resets": None if row.resets is None else shown_time(row.resets)}
