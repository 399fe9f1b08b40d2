"""Fleet commands: show and change quotas, kill agents in every process."""

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
from otel_limits.quotas.quota import Quota, in_unit, in_words, unit_name
from otel_limits.quotas.recovery import settle_expired
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Count,
    Grant,
    Reset,
    SetLimit,
    SharedStore,
    StoreError,
    StorePlace,
    Withdraw,
)
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
SET_A_STORE: Final = "Set OTEL_LIMITS_QUOTA_STORE, e.g. redis://localhost:6379/0."
IN_MEMORY: Final = f"Quotas are kept in process memory and cannot be read from here. {SET_A_STORE}"
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
"""

RESET_HELP: Final = """\
Reset one quota key for the current window.

Write KEY as in the quota (acme, or researcher/acme) or as shown by `otel-limits quotas`. Omit it
for a quota without keys. Reservations of in-flight calls are kept.
"""

GRANT_HELP: Final = """\
Raise the limit of one quota key temporarily.

Raises the limit of each window by AMOUNT until WHEN. The ledger records who granted it and when:
see otel-limits audit grants.

  otel-limits quotas grant tenants acme 100000 --until 2026-12-01
  otel-limits quotas grant nightly 5.50 --until 2026-12-01T06:00+01:00
"""

REVOKE_HELP: Final = """\
Revoke grants for one quota key.

Recorded usage is not reset.
"""

SET_HELP: Final = """\
Set the amount of one quota key.

Replaces the amount in the policy file for this key, in every process, until WHEN or until it is
unset. Grants add to it. The ledger records who set it and when: see otel-limits audit grants.

  otel-limits quotas set tenants acme 5000000
"""

UNSET_HELP: Final = """\
Restore the amount in the policy file for one quota key.
"""

BLOCK_HELP: Final = """\
Block one quota key.

Agents are halted before their next model call with quota_exceeded and the given reason. The ledger
records who blocked it and why: see otel-limits audit grants.

  otel-limits quotas block tenants acme --until 2026-12-01 --reason 'unpaid since October'
"""

UNBLOCK_HELP: Final = """\
Unblock one quota key.
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


def add_changes(below: Any) -> None:
    """Add the commands that change one key of a quota."""
    reset = add_command(below, "reset", RESET_HELP, exit_status(reset_key))
    grant = add_command(below, "grant", GRANT_HELP, exit_status(grant_more))
    revoke = add_command(below, "revoke", REVOKE_HELP, exit_status(revoke_grants))
    set_ = add_command(below, "set", SET_HELP, exit_status(set_amount))
    unset = add_command(below, "unset", UNSET_HELP, exit_status(unset_amount))
    block = add_command(below, "block", BLOCK_HELP, exit_status(block_key))
    unblock = add_command(below, "unblock", UNBLOCK_HELP, exit_status(unblock_key))
    for command in (reset, grant, revoke, set_, unset, block, unblock):
        command.add_argument("name", metavar="NAME", help="the quota")
        command.add_argument(
            "key", metavar="KEY", nargs="?", default="", help="key of the quota, e.g. acme"
        )
    grant.add_argument("amount", metavar="AMOUNT", help="increase, in the quota's unit")
    when = "end, in ISO 8601 (default time zone: UTC)"
    grant.add_argument("--until", metavar="WHEN", required=True, help=when)
    set_.add_argument("amount", metavar="AMOUNT", help="amount, in the quota's unit")
    set_.add_argument("--until", metavar="WHEN", help=f"{when}; unset: until changed")
    block.add_argument("--until", metavar="WHEN", help=f"{when}; unset: until unblocked")
    block.add_argument("--reason", metavar="TEXT", default="", help="reason shown to halted agents")


def exit_status(command: Callable[[Namespace], None]) -> Callable[[Namespace], int]:
    """Make a command print user errors (`ValueError`) and return its exit status."""

    def call(options: Namespace) -> int:
        try:
            command(options)
        except ValueError as error:
            return refuse([str(error)])
        except StoreError as error:
            return refuse([f"quota store unavailable ({error})"], NO_ANSWER)
        return 0

    return call


# --- commands ---------------------------------------------------------------------------------


def show(options: Namespace) -> None:
    """Show every quota, once or repeatedly."""
    # Before anything else, to report missing variables first.
    quotas, store = known_quotas(), shared_store()
    top = None if options.top is None else WHOLE_NUMBER.of_text("--top", options.top)

    def read() -> Uses:
        return read_use(store, quotas, glob=options.key_glob, top=top)

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
    if ledger is None:
        return 0
    from otel_limits.ledger.queries import charges_in

    return settle_expired(store, functools.partial(charges_in, ledger))


def reset_key(options: Namespace) -> None:
    """Reset the count of a key."""
    # The ledger's address first: an invalid one must not leave a change unrecorded.
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    store.change(count_of(store, quota, key), Reset())
    record(ledger, changed(quota, key, "reset", 0, None))
    sys.stdout.write(f"Reset {key.shown} of quota {quota.name!r}.\n")


def grant_more(options: Namespace) -> None:
    """Raise the limit of a key temporarily."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    amount = amount_in(quota, options.amount)
    until = end_of(store, options.until)
    store.change(count_of(store, quota, key), Grant(amount, until))
    record(ledger, changed(quota, key, "grant", amount, until))
    sys.stdout.write(
        f"Raised the limit of {key.shown} in quota {quota.name!r} by "
        f"{in_words(quota.unit, amount)} until {shown_time(until)}.\n"
    )


def revoke_grants(options: Namespace) -> None:
    """Revoke the grants of a key."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    found = store.change(count_of(store, quota, key), Withdraw(Grant))
    if not found:
        raise ValueError(f"{key.shown} of quota {quota.name!r} has no active grants.")
    record(ledger, changed(quota, key, "revoke", 0, None))
    grants = pluralize(found, "grant", "grants")
    sys.stdout.write(f"Revoked {grants} of {key.shown} in quota {quota.name!r}.\n")


def set_amount(options: Namespace) -> None:
    """Set the amount of a key."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    amount = amount_in(quota, options.amount)
    until = None if options.until is None else end_of(store, options.until)
    limit = SetLimit(amount, FOREVER if until is None else until)
    store.change(count_of(store, quota, key), limit)
    record(ledger, changed(quota, key, "set", amount, until))
    end = "" if until is None else f" until {shown_time(until)}"
    sys.stdout.write(
        f"Set {key.shown} of quota {quota.name!r} to {in_words(quota.unit, amount)}{end}.\n"
    )


def unset_amount(options: Namespace) -> None:
    """Restore the amount of a key."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    if not store.change(count_of(store, quota, key), Withdraw(SetLimit)):
        raise ValueError(f"{key.shown} of quota {quota.name!r} has no set amount.")
    record(ledger, changed(quota, key, "unset", 0, None))
    sys.stdout.write(f"Unset {key.shown} of quota {quota.name!r}.\n")


def block_key(options: Namespace) -> None:
    """Block a key."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    until = FOREVER if options.until is None else end_of(store, options.until)
    # Without an end, a time that no clock reaches: stores need only one kind of block.
    store.change(count_of(store, quota, key), Block(until, options.reason))
    recorded = None if options.until is None else until
    record(ledger, changed(quota, key, "block", 0, recorded, options.reason))
    end = "" if recorded is None else f" until {shown_time(until)}"
    sys.stdout.write(f"Blocked {key.shown} of quota {quota.name!r}{end}.\n")


def unblock_key(options: Namespace) -> None:
    """Unblock a key."""
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, options)
    if not store.change(count_of(store, quota, key), Withdraw(Block)):
        raise ValueError(f"{key.shown} of quota {quota.name!r} is not blocked.")
    record(ledger, changed(quota, key, "unblock", 0, None))
    sys.stdout.write(f"Unblocked {key.shown} of quota {quota.name!r}.\n")


def kill_agents(options: Namespace) -> None:
    """Kill agents in every process."""
    sys.stdout.write(f"{kill_named(options.agent)}\n")


def kill_named(pattern: str) -> str:
    """Kill agents whose name matches a pattern, in every process; return a confirmation.

    Raises:
        ValueError: No shared store is configured.
        StoreError: The store is unavailable.
    """
    received = fleet_store(NO_WAY_TO_AGENTS).kill(pattern)
    sent = f"Sent kill for {pattern!r} to {pluralize(received, 'process', 'processes')}."
    # The store answered, so most likely the namespace is another.
    return sent if received else f"{sent} {NO_SUBSCRIBERS}"


def count_of(store: SharedStore, quota: Quota, key: Key) -> Count:
    """Return the current count of a key."""
    # By the store's clock, which all processes use.
    return quota.count(key, store.now())


def amount_in(quota: Quota, text: str) -> int:
    """Parse AMOUNT as in the policy file: 5.50 is valid in USD, 5.5 is not in tokens.

    Raises:
        ValueError: It is not a valid amount.
    """
    # Imported here, because `otel-limits kill` does without pydantic.
    from otel_limits.quotas.section import AMOUNTS, parts_in

    given = AMOUNTS[quota.unit].of_text(f"AMOUNT (in {unit_name(quota.unit)})", text)
    return parts_in(quota.unit, given)


def end_of(store: SharedStore, text: str) -> float:
    """Parse `--until`.

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
    """Return the event for an operator's change of a quota."""
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
    """Publish the event and record it in the ledger."""
    # For observers of this process; other processes learn of the change from the store.
    LIVE.observers.publish(event)
    if address is not None:
        from otel_limits.observers.ledger import LedgerObserver

        ledger = LedgerObserver(address)
        # Through the observer, so there is one way to write the row.
        ledger(event)
        ledger.close()


# --- inputs ----------------------------------------------------------------------------------


def known_quotas() -> list[Quota]:
    """Return the quotas of the policy file.

    Raises:
        ValueError: It has none, or is invalid.
    """
    settings = config.read().settings
    policy = PolicyFile(settings.policy_path)
    if policy.mistakes:
        # One line per mistake, with the prefix of all lines on standard error.
        raise ValueError("\notel-limits: ".join(policy.mistakes))
    quotas = [entry.value for entry in policy.document.quotas.values()]
    if not quotas:
        raise ValueError("No quotas found. Set OTEL_LIMITS_POLICY to a policy file with quotas.")
    return quotas


def shared_store() -> SharedStore:
    """Open the shared store of the fleet, to read or change quotas.

    Raises:
        ValueError: Quotas are kept in memory, the URL is invalid, or the server is too old.
        StoreError: It is unavailable.
    """
    store = fleet_store(IN_MEMORY)
    # It might show keys as unused.
    if problem := store.outdated():
        raise ValueError(f"OTEL_LIMITS_QUOTA_STORE: {problem}")
    return store


def fleet_store(unset: str) -> SharedStore:
    """Open the shared store of the fleet.

    Args:
        unset: The error if quotas are kept in memory.

    Raises:
        ValueError: Quotas are kept in memory, or the URL is invalid.
    """
    reading = config.read()
    # An invalid setting falls back to memory, and the error below would mislead.
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
    """Return the quota and the key named on the command line.

    Raises:
        ValueError: There is no such quota, or its keys have another form.
    """
    quotas = {quota.name: quota for quota in known_quotas()}
    quota = quotas.get(options.name)
    if quota is None:
        near = closest_match(options.name, quotas)
        hint = f"Did you mean {near}?" if near else f"Known quotas: {', '.join(quotas)}."
        raise ValueError(f"No quota named {redact_url(options.name)!r}. {hint}")
    return quota, find_key(store, quota, options.key)


# --- output -----------------------------------------------------------------------------------


def print_use(uses: Uses, form: str) -> None:
    """Print usage once."""
    if form == "json":
        sys.stdout.write(json.dumps([as_json(row) for row in uses.rows], indent=2) + "\n")
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
    """Return a row as JSON values. Money is text, to stay exact."""
    texts = {
        name: str(value) if isinstance(value, Decimal) else value
        for name, value in dataclasses.asdict(row).items()
    }
    return texts | {"resets": None if row.resets is None else shown_time(row.resets)}
