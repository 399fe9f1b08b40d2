"""Redis scripts, key names and reply parsing.

All keys of a namespace share one hash tag: scripts need them on one node of a cluster.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat
from typing import Final, NamedTuple, cast
from urllib.parse import quote, unquote

from otel_limits.quotas.keys import digest
from otel_limits.quotas.store import (
    REMEMBERED_SECONDS,
    RETENTION_SECONDS,
    WORKER_SECONDS,
    Block,
    Change,
    ConversationRecord,
    Count,
    CountConversation,
    CountState,
    Freed,
    Grant,
    Kill,
    KnownCount,
    Operation,
    ReadConversation,
    ReadCounts,
    Renew,
    Reply,
    Reserve,
    Reset,
    SetLimit,
    Settle,
    Status,
    Withdraw,
)

UNMET: Final = re.compile(r"(\d+)([=@]?)([^,]*)")
"""Unmet demands: the position of each, and the reason."""

REMEMBERED_TOGETHER: Final = 100
"""Operations of one process per hash: a server stores hashes of up to 128 fields compactly
(https://redis.io/docs/latest/operate/oss_and_stack/management/optimization/memory-optimization/)."""

MEMBERS: Final[Mapping[type, str]] = {Grant: "^%d+:", SetLimit: "^set:", Block: "^block:"}
"""Kind of change → Lua pattern of its members of the grants, as `member_of` encodes them."""

LOADED: Final = ("reserve", "settle", "renew", "look", "restore", "join", "conversation")
"""Scripts that are loaded in advance: those of a model call, of regular reads and of a start."""


class ScriptCall(NamedTuple):
    """One call of a script."""

    script: str
    keys: list[str]
    arguments: list[str]

    @property
    def command(self) -> list[str]:
        """The Redis command."""
        name = sha_of(self.script)
        return ["EVALSHA", name, str(len(self.keys)), *self.keys, *self.arguments]


@functools.cache
def source_of(script: str) -> str:
    """Return the text of a script."""
    folder = importlib.resources.files("otel_limits.quotas") / "scripts"
    return "\n".join((folder / f"{each}.lua").read_text() for each in ("common", script))


@functools.cache
def sha_of(script: str) -> str:
    """Return the SHA-1 that identifies a script on the server."""
    # EVALSHA requires SHA-1; `usedforsecurity=False` allows it on FIPS systems.
    return hashlib.sha1(source_of(script).encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Names of keys and channels, and the script calls that use them.

    Namespaces on one server are isolated from each other.
    """

    namespace: str = ""
    database: str = "0"
    """Databases of one server share their channels."""
    run: str = ""
    """The run of the server that operations are meant for; empty for any."""

    @property
    def tag(self) -> str:
        """Prefix of every name."""
        # Braces make it a hash tag: all keys are in one slot of a cluster, as scripts require
        # (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags).
        return f"{{otel_limits:{self.namespace}}}" if self.namespace else "{otel_limits}"

    @property
    def kills(self) -> str:
        """Kills of the last hour."""
        return self.tag + ":kills"

    @property
    def check(self) -> str:
        """The key that checks write to."""
        return self.tag + ":check"

    @property
    def expired(self) -> str:
        """Reservations that expired unsettled."""
        return self.tag + ":expired"

    @property
    def marker(self) -> str:
        """The current run of the server."""
        return self.tag + ":run"

    @property
    def restored(self) -> str:
        """Workers that restored what they know, in this run."""
        return self.tag + ":restored"

    def rebuilt(self, source: str, run: str) -> str:
        """Key that exists once counts of a run are rebuilt from a ledger."""
        return f"{self.tag}:rebuilt:{run}:{digest(source)}"

    @property
    def living(self) -> str:
        """The processes of the fleet."""
        return self.tag + ":living"

    @property
    def sharing(self) -> str:
        """Processes that may use local shares."""
        return self.tag + ":sharing"

    @property
    def kill_channel(self) -> str:
        """The channel for kills."""
        return f"{self.tag}:kill:{self.database}"

    @property
    def freed_channel(self) -> str:
        """The channel for releases that waiters need."""
        return f"{self.tag}:freed:{self.database}"

    def bucket(self, count: Count) -> tuple[str, str]:
        """Keys of a count and its leases."""
        # With the unit: after a change of unit, 15 USD must not be read as 15,000,000,000 tokens.
        name = f"{self.tag}:{count.quota}:{count.key}:{count.window.start}:{count.unit}"
        return name, f"{name}:leases"

    def grants(self, count: Count) -> str:
        """Key of the grants and blocks of one quota key."""
        return f"{self.tag}:{count.quota}:{count.key}:grants"

    def history(self, count: Count) -> str:
        """Key of the last calls of a quota, by model."""
        return f"{self.tag}:{count.quota}:{count.unit}:history"

    def index(self, quota: str) -> str:
        """Key of the recently used keys of a quota."""
        return f"{self.tag}:{quota}:index"

    @property
    def conversations(self) -> str:
        """Key of the hashes of conversations, by the expiry of their records."""
        return f"{self.tag}:conversations"

    def conversation(self, identity: str) -> str:
        """Key of the record of a conversation."""
        return f"{self.tag}:conversation:{identity}"

    def call_of(self, operation: Operation) -> ScriptCall:
        """Return the script call for an operation."""
        if isinstance(operation, CountConversation):
            return self._addition(operation)
        if isinstance(operation, ReadConversation):
            return ScriptCall("conversation", [self.conversation(operation.conversation)], [])
        if isinstance(operation, Reserve):
            return self._reservation(operation)
        if isinstance(operation, Settle):
            return self._settlement(operation)
        if isinstance(operation, Renew):
            return self._renewal(operation)
        return self._question(operation)

    def beginning(self) -> ScriptCall:
        """Return the script call for a new connection."""
        keys = [self.marker, self.restored, self.living, self.sharing, self.expired]
        return ScriptCall("begin", keys, [str(RETENTION_SECONDS * 1000)])

    def _reservation(self, operation: Reserve) -> ScriptCall:
        # Clusters require every key to be passed as an argument.
        done, place = self._done(operation.id)
        keys = [self.marker, done, self.expired, self.kills]
        arguments = [operation.id, str(place), str(REMEMBERED_SECONDS * 1000), self.run]
        arguments.append(str(int(operation.waited * 1000)))
        for demand in operation.demands:
            count, window = demand.count, demand.count.window
            keys += [*self.bucket(count), self.grants(count), self.index(count.quota)]
            keys.append(self.history(count))
            numbers = (
                f"{demand.amount} {demand.limit} "
                f"{window.start * 1000} {window.end * 1000} {expires(count)} "
                f"{demand.enforced:d} {demand.certain:d} {demand.alone:d} {demand.known} "
                f"{int(demand.waits * 1000)} {int(operation.lease_of(demand) * 1000)} "
                f"{demand.planned:d} {refill_of(count)} {model_field(demand.model)}"
            )
            arguments += [numbers, count.unit, f"{count.key} {count.shown}"]
        return ScriptCall("reserve", keys, arguments)

    def _settlement(self, operation: Settle) -> ScriptCall:
        done, place = self._done(operation.id)
        keys = [self.marker, done, self.expired]
        remembered = str(REMEMBERED_SECONDS * 1000)
        arguments = [operation.id, str(place), remembered, self.run, self.freed_channel]
        arguments.append(f"{operation.is_earlier:d}")
        for charge in operation.charges:
            count = charge.count
            keys += [*self.bucket(count), self.history(count), self.grants(count)]
            model = model_field(charge.model)
            numbers = f"{charge.amount} {expires(count)} {charge.known} {model}"
            arguments += [numbers, encode_freed(count)]
        return ScriptCall("settle", keys, arguments)

    def _renewal(self, operation: Renew) -> ScriptCall:
        keys = [self.marker]
        lease = str(int(operation.lease_seconds * 1000))
        arguments = [operation.id, lease, self.run, f"{operation.again:d}"]
        for demand in operation.demands:
            keys += self.bucket(demand.count)
            arguments.append(
                f"{demand.amount} {demand.certain:d} {bool(demand.model):d} {expires(demand.count)}"
            )
        return ScriptCall("renew", keys, arguments)

    def _addition(self, operation: CountConversation) -> ScriptCall:
        done, place = self._done(operation.id)
        keys = [self.conversation(operation.conversation), self.conversations, done]
        idle = str(int(operation.idle_seconds * 1000))
        arguments = [operation.conversation, operation.agent, idle]
        arguments += [str(place), str(REMEMBERED_SECONDS * 1000)]
        for name, part in operation.parts.items():
            arguments += [name, str(part)]
        return ScriptCall("conversation", keys, arguments)

    def restoration(self, counts: Iterable[KnownCount]) -> ScriptCall:
        """Return the script call that restores counts."""
        keys: list[str] = [self.marker]
        arguments: list[str] = []
        for known in counts:
            count, ends = known.count, known.count.window.end * 1000
            seen = "-" if known.seen is None else known.seen
            keys += [*self.bucket(count), self.index(count.quota)]
            numbers = f"{known.used} {known.reset or '-'} {expires(count)} {seen} {ends}"
            numbers += f" {count.refill is not None:d}"
            arguments += [numbers, f"{count.key} {count.shown}"]
        return ScriptCall("restore", keys, arguments)

    def rebuilding(self, operations: Iterable[str]) -> ScriptCall:
        """Return the script call that marks calls as settled, because a ledger has their usage."""
        places = [self._done(operation) for operation in operations]
        keys = [self.marker, *(done for done, _ in places)]
        arguments = [str(REMEMBERED_SECONDS * 1000), *(str(place) for _, place in places)]
        return ScriptCall("rebuild", keys, arguments)

    def probe(self, counts: Iterable[Count]) -> ScriptCall:
        """Return the script call that names the damaged key of each count."""
        keys = chain.from_iterable((*self.bucket(each), self.grants(each)) for each in counts)
        return ScriptCall("probe", [self.marker, *keys], [])

    def change(self, count: Count, change: Change) -> ScriptCall:
        """Return the script call that changes a count or its key."""
        if isinstance(change, Reset):
            keys = [self.marker, *self.bucket(count)]
            return ScriptCall("reset", keys, [str(expires(count)), uuid.uuid4().hex])
        if isinstance(change, Withdraw):
            return ScriptCall("revoke", [self.grants(count)], [MEMBERS[change.kind]])
        keys = [self.grants(count), self.index(count.quota)]
        until, kept = str(int(change.until * 1000)), str(RETENTION_SECONDS * 1000)
        arguments = [member_of(change, count.unit), until, kept, f"{count.key} {count.shown}"]
        return ScriptCall("grant", keys, arguments)

    def _question(self, operation: ReadCounts) -> ScriptCall:
        keys = [self.marker, self.expired, self.living, self.sharing]
        kept = str(RETENTION_SECONDS * 1000)
        arguments = [operation.worker, str(WORKER_SECONDS * 1000), self.run, kept]
        buckets = [self.bucket(count) for count, _ in operation.counts]
        keys += [bucket for bucket, _ in buckets] + [leases for _, leases in buckets]
        keys += [self.grants(count) for count, _ in operation.counts]
        terms = (f"{count.unit} {amount} {refill_of(count)}" for count, amount in operation.counts)
        arguments += [f"{len(list(same))} {each}" for each, same in groupby(terms)]
        return ScriptCall("look", keys, arguments)

    def _done(self, identity: str) -> tuple[str, int]:
        """Return the hash and field that remember the result of an operation."""
        owner, _, number = identity.rpartition("-")
        if not owner or not number.isdecimal():
            return f"{self.tag}:done:{identity}", 0
        block, place = divmod(int(number), REMEMBERED_TOGETHER)
        return f"{self.tag}:done:{owner}-{block}", place


def expires(count: Count) -> int:
    """Return when a count may be forgotten, in milliseconds since the epoch."""
    return (count.window.end + RETENTION_SECONDS) * 1000


def model_field(model: str) -> str:
    """Encode the model of a demand or charge without spaces; "-" if there is none."""
    return f"={quote(model, safe='')}" if model else "-"


def refill_of(count: Count) -> str:
    """Encode how a count refills."""
    refill = count.refill
    return "0 0" if refill is None else f"{refill.seconds * 1000} {refill.burst}"


def encode_freed(count: Count) -> str:
    """Encode a released count, without its window: waiters wait across windows."""
    return f"{count.quota} {count.key}"


def freed_of(text: str) -> Freed:
    """Decode a released count."""
    quota, _, key = text.partition(" ")
    return Freed((quota, key))


def kill_of(order: str) -> Kill:
    """Decode a kill."""
    identity, _, pattern = order.partition(" ")
    _, _, given = identity.partition("@")
    # A malformed message matches no invocation.
    return Kill(identity, pattern, int(given) / 1e6 if given.isdecimal() else -math.inf)


def member_of(change: Grant | SetLimit | Block, unit: str) -> str:
    """Encode a change as a member of the grants."""
    # With an ID, because two grants of the same amount add up.
    identity = uuid.uuid4().hex
    if isinstance(change, Block):
        # Quote separators in its reason.
        return f"block:{identity}:{quote(change.reason, safe='')}"
    kind = "set:" if isinstance(change, SetLimit) else ""
    return f"{kind}{change.amount}:{identity}:{unit}"


def reply_of(operation: Operation, text: str | Sequence[str]) -> Reply:
    """Decode the reply to an operation."""
    if isinstance(operation, CountConversation | ReadConversation):
        return record_of(operation, text)
    assert isinstance(text, str)
    # The meaning of the fourth depends on the script; "0" if unused.
    status, now, lacking, more, *numbers = text.split()
    amounts = [each for _, each in operation.counts] if isinstance(operation, ReadCounts) else []
    states, positions, ends = states_of(numbers, amounts), list[int](), [math.inf]
    for position, sign, why in UNMET.findall(lacking):
        positions.append(int(position))
        if sign == "=":
            until, _, reason = why.partition(":")
            block = Block(float(until) / 1000, unquote(reason))
            states[positions[-1]] = replace(states[positions[-1]], block=block)
        elif sign == "@" and status == "refused":
            ends.append(int(why) / 1000)
    workers, _, living = more.partition("/")
    return Reply(
        cast("Status", status),
        int(now) / 1000,
        tuple(states),
        tuple(positions),
        min(ends),
        workers=int(workers) if living else 0,
        living=int(living or 0),
        last_kill=0.0 if living else int(more) / 1000,
    )


def record_of(operation: CountConversation | ReadConversation, reply: Sequence[str]) -> Reply:
    """Decode the reply to an operation on a conversation."""
    now, *fields = reply
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    if not found:
        return Reply("looked", int(now) / 1000)
    try:
        agent, changed = found.pop("agent"), int(found.pop("changed"))
        sums = {name: int(total) for name, total in found.items()}
    except (KeyError, ValueError):
        return Reply("failed", int(now) / 1000, error="the record of a conversation is not ours")
    record = ConversationRecord(operation.conversation, agent, sums, changed / 1000)
    return Reply("looked", int(now) / 1000, conversation=record)


def states_of(numbers: list[str], amounts: Iterable[int]) -> list[CountState]:
    """Decode the states of counts."""
    states = zip(*[iter(numbers)] * 5, strict=True)
    return [
        CountState(
            int(used),
            int(reserved),
            # Complete with "=", and otherwise added to the amount of the quota.
            int(limit[1:]) if limit.startswith("=") else amount + int(limit),
            reset=reset.strip("-"),
            full_at=int(full_at) / 1000,
        )
        for (used, reserved, limit, reset, full_at), amount in zip(
            states, chain(amounts, repeat(0)), strict=False
        )
    ]
