"""Fleet commands: show and change quotas, kill agents in every process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
import uuid
from argparse import SUPPRESS
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from otel_limits.cli.command import add_command, file_name, refuse
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.events import QuotaGrant
from otel_limits.core.limits import CONVERSATION, CONVERSATION_PREFIX, SHARED_LIMITS
from otel_limits.core.secrets import quote_value
from otel_limits.core.values import END, WHOLE_NUMBER
from otel_limits.core.wording import pluralize, suggestion
from otel_limits.ledger.files import user_and_host
from otel_limits.quotas.quota import Quota, in_unit, in_words, unit_name
from otel_limits.quotas.recovery import settle_expired
from otel_limits.quotas.remaining import (
    ConversationUse,
    KeyUse,
    Uses,
    find_key,
    read_conversations,
    read_use,
)
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Change,
    Grant,
    KeepsConversations,
    NotesExpired,
    PermanentStoreError,
    Publishes,
    Reset,
    SendsKills,
    SetLimit,
    SharedStore,
    StoreError,
    StorePlace,
    Withdraw,
)
from otel_limits.quotas.stores import is_shared, open_shared_store, version_problem
from otel_limits.quotas.windows import shown_time
from otel_limits.settings.ledgers import recorded_ledger
from otel_limits.settings.policy.file import valid_document
from otel_limits.settings.settings_reader import settings_with

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from otel_limits.core.limits import Limits
    from otel_limits.ledger.address import Address
    from otel_limits.quotas.keys import Key


# --- the quota store and the quotas of a fleet ----------------------------------------------------

NO_ANSWER: Final = 1
"""Exit status if the store is unavailable, or if no process received a kill."""
TIMEOUT_SECONDS: Final = 2.0
SET_A_STORE: Final = "Set OTEL_LIMITS_QUOTA_STORE, e.g. redis://localhost:6379/0."
IN_MEMORY: Final = f"Quotas are kept in process memory and cannot be read from here. {SET_A_STORE}"


def exit_status(command: Callable[[Namespace], int | None]) -> Callable[[Namespace], int]:
    """Make a command print user errors (`ValueError`) and return its exit status."""

    def call(options: Namespace) -> int:
        try:
            return command(options) or 0
        except ConfigurationError as error:
            return refuse(error.mistakes)
        except ValueError as error:
            return refuse([str(error)])
        except PermanentStoreError as error:
            return refuse([f"{error}."], NO_ANSWER)
        except StoreError as error:
            return refuse([f"quota store unavailable ({error})"], NO_ANSWER)

    return call


def known_quotas(policy: str | None, *, is_required: bool = True) -> list[Quota]:
    """Return the quotas of a policy file, by default of that of the environment.

    Raises:
        ConfigurationError: It contains mistakes.
        ValueError: It has none although it must.
    """
    quotas = [entry.value for entry in valid_document(policy).quotas.values()]
    if not quotas and is_required:
        raise ValueError(
            "No quotas found. Set OTEL_LIMITS_POLICY, or --policy, to a policy file with quotas."
        )
    return quotas


def caps_of_conversations(path: str | None) -> Callable[[str], Limits] | None:
    """Return a function that returns the caps of an agent's conversations; `None` without any.

    Raises:
        ConfigurationError: The policy file contains mistakes.
    """
    names = [f"{CONVERSATION_PREFIX}{name}" for name in SHARED_LIMITS[CONVERSATION]]
    document, policy = valid_document(path), settings_with(*names).policy
    if not any(each.conversation.active for each in document.policies(policy).values()):
        return None
    return functools.cache(lambda agent: document.effective(agent, policy).conversation)


def shared_store() -> SharedStore:
    """Open the shared store of the fleet, to read or change quotas.

    Raises:
        ValueError: Quotas are kept in memory, the URL is invalid, or the server is too old.
        StoreError: It is unavailable.
    """
    store = fleet_store(IN_MEMORY)
    # It might show keys as unused.
    if problem := version_problem(store):
        raise ValueError(f"OTEL_LIMITS_QUOTA_STORE: {problem}")
    return store


def fleet_store(unset: str) -> SharedStore:
    """Open the shared store of the fleet.

    Args:
        unset: The error if quotas are kept in memory.

    Raises:
        ValueError: Quotas are kept in memory, or the URL is invalid.
    """
    settings = settings_with("quota_store", "quota_namespace")
    if not is_shared(settings.quota_store):
        raise ValueError(unset)
    return open_shared_store(
        StorePlace(settings.quota_store, TIMEOUT_SECONDS, settings.quota_namespace)
    )


# --- show quotas, kill agents ---------------------------------------------------------------------

WATCH_SECONDS: Final = 1.0
NO_WAY_TO_AGENTS: Final = (
    f"Kills are sent through the quota store, but none is set. {SET_A_STORE} "
    "Use the same value as the agents."
)
NO_SUBSCRIBERS: Final = (
    "No process is subscribed to this store; at most, processes that poll it receive the kill. "
    "Check that OTEL_LIMITS_QUOTA_STORE and OTEL_LIMITS_QUOTA_NAMESPACE match those of the agents."
)

QUOTAS_HELP: Final = """\
Show quota usage, reservations and reset times.

Reads the quotas in the policy file from OTEL_LIMITS_QUOTA_STORE. Keys from external input, e.g. a
tenant in the baggage, are shown as the first characters of a hash. Calls of killed workers that the
ledger recorded are settled first.

Conversations that have used 80% of a cap are listed by their hash. The caps are those of the policy
file and the environment of this command, e.g. OTEL_LIMITS_CONVERSATION_MAX_TURNS.
"""

KILL_HELP: Final = """\
Kill active invocations in all processes that share the quota store.

Streaming responses are cut off; running tools finish. The stop reason is "killed". Later
invocations are not affected. Needs OTEL_LIMITS_QUOTA_STORE, the same as that of the agents.
Exit status 1 means that no process received the kill.

  otel-limits kill --agent 'research-*'
"""


def add(commands: Any) -> None:
    """Add `quotas` and `kill`."""
    quotas = add_command(commands, "quotas", QUOTAS_HELP, exit_status(show))
    add_policy(quotas)
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
        metavar="KEY",
        dest="key_glob",
        default="*",
        help="show only this key, e.g. acme, or keys that are shown like a pattern, e.g. 'team-*'",
    )
    add_changes(quotas.add_subparsers(title="commands", metavar="COMMAND"))
    kill = add_command(commands, "kill", KILL_HELP, exit_status(kill_agents))
    kill.add_argument(
        "--agent", metavar="GLOB", required=True, help="agent name or pattern, e.g. 'research-*'"
    )


def add_policy(command: ArgumentParser, **more: Any) -> None:
    """Add `--policy`."""
    text = "policy file with the quotas (default: OTEL_LIMITS_POLICY)"
    command.add_argument("--policy", type=file_name, metavar="FILE", help=text, **more)


def show(options: Namespace) -> int:
    """Show every quota that can be read, once or repeatedly; name the other ones."""
    from otel_limits.top.fleet import NEAR_END

    # Before anything else, to report missing variables first.
    caps_of = caps_of_conversations(options.policy)
    quotas = known_quotas(options.policy, is_required=caps_of is None)
    store = shared_store()
    top = None if options.top is None else WHOLE_NUMBER.of_text("--top", options.top)

    def read() -> Uses:
        chosen: Any = {"glob": options.key_glob, "top": top}
        uses = read_use(store, quotas, **chosen)
        if caps_of is None:
            return uses
        try:
            near = read_conversations(store, caps_of, NEAR_END, **chosen)
        except PermanentStoreError as error:
            return uses._replace(damaged=[*uses.damaged, f"conversations: {error}."])
        return uses._replace(conversations=near)

    uses, unsettled = read(), list[str]()
    # The store notices expired reservations when their count is read.
    try:
        if settle_for_killed_workers(store):
            uses = read()
    except PermanentStoreError as error:
        unsettled = [f"calls of killed workers: {error}."]
    damaged = [*uses.damaged, *unsettled]
    if not options.watch:
        print_use(uses, options.format)
        return refuse(damaged, NO_ANSWER) if damaged else 0
    refuse(damaged)
    # Ctrl+C is how users leave `--watch`.
    with contextlib.suppress(KeyboardInterrupt):
        watch(read, options.format)
    return 0


def settle_for_killed_workers(store: SharedStore) -> int:
    """Settle calls recorded by killed workers; return their number."""
    ledger = recorded_ledger()
    if ledger is None or not isinstance(store, NotesExpired):
        return 0
    from otel_limits.ledger.quota_usage import charges_in

    return settle_expired(store, functools.partial(charges_in, ledger))


def kill_agents(options: Namespace) -> int:
    """Kill agents in every process."""
    sentence, is_received = send_kill(options.agent)
    if not is_received:
        return refuse([sentence], NO_ANSWER)
    sys.stdout.write(f"{sentence}\n")
    return 0


def kill_named(pattern: str) -> str:
    """Kill agents whose name matches a pattern, in every process; return a confirmation."""
    return send_kill(pattern)[0]


def send_kill(pattern: str) -> tuple[str, bool]:
    """Kill agents by a pattern of names; return a confirmation, and whether a process received it.

    Raises:
        ValueError: No shared store is configured, or it cannot send kills.
        StoreError: The store is unavailable.
    """
    store = fleet_store(NO_WAY_TO_AGENTS)
    if isinstance(store, SendsKills):
        received = store.kill(pattern)
        sent = f"Sent kill for {quote_value(pattern)} to"
        if not isinstance(store, Publishes):  # which processes poll is unknown
            return f"{sent} each process that polls.", True
        sent += f" {pluralize(received, 'process', 'processes')}."
        # The store answered, so most likely the namespace is another.
        return sent if received else f"{sent} {NO_SUBSCRIBERS}", received > 0
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


# --- commands that change one key of a quota ------------------------------------------------------

Name: TypeAlias = Literal["reset", "grant", "revoke", "set", "unset", "block", "unblock"]

RESET_HELP: Final = """\
Reset one quota key for the current window.

Write KEY as in the quota (acme, or researcher/acme) or as shown by `otel-limits quotas`. Omit it
for a quota without keys. Reservations of in-flight calls are kept.

With --conversation, reset a conversation instead. Give its hash, or at least its first eight
characters. Its next invocation begins with nothing used.

  otel-limits quotas reset --conversation 3f2a91c0
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

WHEN: Final = "end, e.g. 12h or 1d from now, or in ISO 8601 (default time zone: UTC)"


@dataclass(frozen=True, slots=True)
class ChangeCommand:
    """A command that changes one key of a quota."""

    name: Name
    help: str
    change: Callable[[int, float, str], Change]
    """Amount, end and reason → the change; `FOREVER` without an end."""
    done: str
    """Confirmation."""
    nothing: str = ""
    """The error if a withdrawal finds nothing to withdraw."""
    amount: str = ""
    """Help of AMOUNT; empty if there is none."""
    until: str = ""
    """Help of --until; empty if there is none."""
    has_end: bool = False
    """Whether --until is required."""
    reason: str = ""
    """Help of --reason; empty if there is none."""


CHANGES: Final = (
    ChangeCommand("reset", RESET_HELP, lambda *_: Reset(), done="Reset {key} of quota {quota!r}."),
    ChangeCommand(
        "grant",
        GRANT_HELP,
        lambda amount, until, _: Grant(amount, until),
        done="Raised the limit of {key} in quota {quota!r} by {amount}{until}.",
        amount="increase, in the quota's unit",
        until=WHEN,
        has_end=True,
    ),
    ChangeCommand(
        "revoke",
        REVOKE_HELP,
        lambda *_: Withdraw(Grant),
        done="Revoked {grants} of {key} in quota {quota!r}.",
        nothing="has no active grants",
    ),
    ChangeCommand(
        "set",
        SET_HELP,
        lambda amount, until, _: SetLimit(amount, until),
        done="Set {key} of quota {quota!r} to {amount}{until}.",
        amount="amount, in the quota's unit",
        until=f"{WHEN}; unset: until changed",
    ),
    ChangeCommand(
        "unset",
        UNSET_HELP,
        lambda *_: Withdraw(SetLimit),
        done="Unset {key} of quota {quota!r}.",
        nothing="has no set amount",
    ),
    ChangeCommand(
        "block",
        BLOCK_HELP,
        lambda _, until, reason: Block(until, reason),
        done="Blocked {key} of quota {quota!r}{until}.",
        until=f"{WHEN}; unset: until unblocked",
        reason="reason shown to halted agents",
    ),
    ChangeCommand(
        "unblock",
        UNBLOCK_HELP,
        lambda *_: Withdraw(Block),
        done="Unblocked {key} of quota {quota!r}.",
        nothing="is not blocked",
    ),
)
"""The commands, in the order of `--help`."""


RESET: Final = next(row for row in CHANGES if row.name == "reset")

CONVERSATION_LABEL: Final = "(conversation)"
"""Takes the place of a quota's name in the record of a conversation's reset."""

LEAST_OF_HASH: Final = 8


def add_changes(below: Any) -> None:
    """Add the commands to those of `quotas`."""
    for row in CHANGES:
        run = reset if row.name == "reset" else functools.partial(change_key, row)
        command = add_command(below, row.name, row.help, exit_status(run))
        # Without a default, which would replace a file given before the command.
        add_policy(command, default=SUPPRESS)
        names: Any = {"nargs": "?"} if row.name == "reset" else {}
        command.add_argument("name", metavar="NAME", help="the quota", **names)
        command.add_argument(
            "key", metavar="KEY", nargs="?", default="", help="key of the quota, e.g. acme"
        )
        if row.name == "reset":
            command.add_argument("--conversation", metavar="HASH", help="a conversation")
        if row.amount:
            command.add_argument("amount", metavar="AMOUNT", help=row.amount)
        if row.until:
            command.add_argument("--until", metavar="WHEN", required=row.has_end, help=row.until)
        if row.reason:
            command.add_argument("--reason", metavar="TEXT", default="", help=row.reason)


def reset(options: Namespace) -> None:
    """Reset a key of a quota, or a conversation.

    Raises:
        ValueError: Neither or both are given, or there is no such quota, key or conversation.
        StoreError: The store is unavailable.
    """
    if (options.name is None) == (options.conversation is None):
        raise ValueError("Give the name of a quota, or a conversation with --conversation HASH.")
    if options.conversation is None:
        change_key(RESET, options)
        return
    store, ledger = shared_store(), recorded_ledger()
    key = conversation_in(store, options.conversation)
    event = changed(CONVERSATION_LABEL, key, "reset")
    if not isinstance(store, KeepsConversations) or not store.forget_conversation(key):
        raise ValueError(f"Conversation {key} has just expired.")
    recorded = record(ledger, event)
    sys.stdout.write(f"Reset conversation {key}.\n{recorded}\n")


def conversation_in(store: SharedStore, text: str) -> str:
    """Return the hash of the conversation of which the beginning is given.

    Raises:
        ValueError: There is none or more than one, or too little is given.
    """
    if len(text) < LEAST_OF_HASH:
        raise ValueError(f"--conversation must have at least {LEAST_OF_HASH} characters of a hash.")
    records = store.conversations() if isinstance(store, KeepsConversations) else ()
    found = [each.conversation for each in records if each.conversation.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"--conversation {quote_value(text)} is the beginning of several: {', '.join(found)}."
        )
    raise ValueError(
        f"No conversation {quote_value(text)} in the store: it has made no call with a limit, has "
        "been idle for too long, or was reset."
    )


def change_key(row: ChangeCommand, options: Namespace) -> None:
    """Change a key, record who did it, and print a confirmation.

    Raises:
        ValueError: An argument is wrong, or there is nothing to withdraw.
        StoreError: The store is unavailable.
    """
    # The ledger's address first: an invalid one must not leave a change unrecorded.
    store, ledger = shared_store(), recorded_ledger()
    quota, key = named(store, known_quotas(options.policy), options)
    amount = amount_in(quota, options.amount) if row.amount else 0
    until = end_of(store, options.until) if row.until and options.until is not None else None
    reason = options.reason if row.reason else ""
    change = row.change(amount, FOREVER if until is None else until, reason)
    figures: Any = {"amount": in_unit(quota.unit, amount), "unit": unit_name(quota.unit)}
    # Also before the change, so that an error here leaves none unrecorded.
    event = changed(quota.name, key.shown, row.name, **figures, until=until, reason=reason)
    # In the current window by the store's clock, which all processes use.
    withdrawn = store.change(quota.count(key, store.now()), change)
    if row.nothing and not withdrawn:
        raise ValueError(f"{key.shown} of quota {quota.name!r} {row.nothing}.")
    recorded = record(ledger, event)
    sentence = row.done.format(
        key=key.shown,
        quota=quota.name,
        amount=in_words(quota.unit, amount),
        until="" if until is None else f" until {shown_time(until)}",
        grants=pluralize(withdrawn, "grant", "grants"),
    )
    sys.stdout.write(f"{sentence}\n{recorded}\n")


def named(store: SharedStore, known: list[Quota], options: Namespace) -> tuple[Quota, Key]:
    """Return the quota and the key named on the command line.

    Raises:
        ValueError: There is no such quota, or its keys have another form.
    """
    quotas = {quota.name: quota for quota in known}
    quota = quotas.get(options.name)
    if quota is None:
        hint = suggestion(options.name, quotas, f"Known quotas: {', '.join(quotas)}.")
        raise ValueError(f"No quota named {quote_value(options.name)}. {hint}")
    return quota, find_key(store, quota, options.key)


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
    until = END.of_text("--until", text).timestamp()
    if until <= store.now():
        raise ValueError(f"--until must be in the future, got {quote_value(text)}.")
    return until


def changed(quota: str, key: str, change: Name, **more: Any) -> QuotaGrant:
    """Return the event of a change, with the operator and the time."""
    return QuotaGrant(
        quota=quota,
        key=key,
        change=change,
        by=user_and_host(),
        at=time.time(),
        id=uuid.uuid4().hex,
        **{"amount": 0, "unit": "", "until": None, **more},
    )


def record(address: Address | None, event: QuotaGrant) -> str:
    """Publish the event and record it in the ledger; return where it is recorded."""
    from otel_limits.runs.registry import LIVE

    # For observers of this process; other processes learn of the change from the store.
    LIVE.observers.publish(event)
    if address is None:
        return "Not recorded: OTEL_LIMITS_LEDGER is none."
    from otel_limits.observers.ledger import LedgerObserver

    ledger = LedgerObserver(address)
    # Through the observer, so there is one way to write the row.
    ledger(event)
    ledger.close()
    if ledger.writer.dropped_rows:
        return f"Not recorded: neither the ledger {address} nor a spill file is writable."
    if ledger.writer.has_spilled:
        return (
            "Recorded in a spill file, which the next process that writes to the ledger "
            f"{address} imports."
        )
    return f"Recorded in the ledger {address}."
