"""What is sent to Redis for an operation: the scripts, the names of keys, and how replies are read.

All keys share one hash tag: in a cluster they live on one node, as a script needs it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from dataclasses import replace
from typing import Final, NamedTuple, cast
from urllib.parse import quote, unquote

from otel_limits.quotas.store import (
    REMEMBERED_SECONDS,
    RETENTION_SECONDS,
    Block,
    Count,
    Kill,
    Look,
    Operation,
    Reply,
    Reserve,
    Settle,
    Standing,
    Status,
)

# In braces, which make it a hash tag: all keys are in one slot of a cluster, where a script can use
# them together
# (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags).
TAG: Final = "{otel_limits}"
OPERATION_KEY: Final = TAG + ":operation:"
KILLS_KEY: Final = TAG + ":kills"
CHECK_KEY: Final = TAG + ":check"
EXPIRED_KEY: Final = TAG + ":expired"


EVERY_CALL: Final = ("reserve", "settle")
"""The scripts that a model call needs."""


class ScriptCall(NamedTuple):
    """One call of a script."""

    script: str
    keys: list[str]
    arguments: list[str]


@functools.cache
def source_of(script: str) -> str:
    """Return the text of a script."""
    folder = importlib.resources.files("otel_limits.quotas") / "scripts"
    return "\n".join((folder / f"{each}.lua").read_text() for each in ("common", script))


@functools.cache
def sha_of(script: str) -> str:
    """Return the name under which a server knows a script."""
    # SHA-1 is what EVALSHA asks for; `usedforsecurity` lets it work where FIPS
    # forbids it otherwise.
    return hashlib.sha1(source_of(script).encode(), usedforsecurity=False).hexdigest()


def call_of(operation: Operation) -> ScriptCall:
    """Return the call that does an operation."""
    if isinstance(operation, Reserve):
        return _reservation(operation)
    return _settlement(operation) if isinstance(operation, Settle) else _question(operation)


def _reservation(operation: Reserve) -> ScriptCall:
    # Every key is passed: a script that makes up names of keys is not allowed in a cluster.
    keys = [OPERATION_KEY + operation.id, EXPIRED_KEY]
    lease = int(operation.lease_seconds * 1000)
    arguments: list[object] = [operation.id, lease, REMEMBERED_SECONDS * 1000]
    for demand in operation.demands:
        count = demand.count
        keys += [*bucket_keys(count), grants_key(count), index_key(count.quota)]
        arguments += [
            demand.amount,
            demand.limit,
            count.window.start * 1000,
            count.window.end * 1000,
            expires(count),
            int(demand.enforced),
            int(demand.certain),
            int(demand.alone),
            demand.known,
            f"{count.key} {count.shown}",
        ]
    # As text: redis-py writes floats in its own way, and refuses booleans.
    return ScriptCall("reserve", keys, [str(each) for each in arguments])


def _settlement(operation: Settle) -> ScriptCall:
    keys = [OPERATION_KEY + operation.id]
    arguments: list[object] = [operation.id, REMEMBERED_SECONDS * 1000]
    for charge in operation.charges:
        keys += bucket_keys(charge.count)
        arguments += [charge.amount, expires(charge.count), charge.known]
    return ScriptCall("settle", keys, [str(each) for each in arguments])


def _question(operation: Look) -> ScriptCall:
    keys = [
        key for count, _ in operation.counts for key in (*bucket_keys(count), grants_key(count))
    ]
    return ScriptCall("look", [EXPIRED_KEY, *keys], [str(amount) for _, amount in operation.counts])


def bucket_keys(count: Count) -> tuple[str, str]:
    """Return the keys of one count and of its leases."""
    name = f"{TAG}:{count.quota}:{count.key}:{count.window.start}"
    return name, f"{name}:leases"


def grants_key(count: Count) -> str:
    """Return the key of what was granted to one key of a quota."""
    return f"{TAG}:{count.quota}:{count.key}:grants"


def index_key(quota: str) -> str:
    """Return the key of the list of a quota's keys that were used lately."""
    return f"{TAG}:{quota}:index"


def expires(count: Count) -> int:
    """Return when a count may be forgotten, in milliseconds since the epoch."""
    return (count.window.end + RETENTION_SECONDS) * 1000


def kill_of(order: str) -> Kill:
    """Read the order to end agents."""
    identity, pattern = order.split(" ", 1)
    return Kill(identity, pattern, float(identity.partition("@")[2]) / 1000)


def block_member(identity: str, block: Block) -> str:
    """Write a block as a member of the set of grants; the reason without what separates replies."""
    return f"block:{identity}:{quote(block.reason, safe='')}"


def reply_of(text: str) -> Reply:
    """Read the reply to an operation."""
    status, now, lacking, *numbers = text.split()
    standings = standings_of(numbers)
    positions = [] if lacking == "-" else [each.partition("=") for each in lacking.split(",")]
    for position, is_blocked, block in positions:
        if is_blocked:
            until, _, reason = block.partition(":")
            standings[int(position)] = replace(
                standings[int(position)], block=Block(float(until) / 1000, unquote(reason))
            )
    return Reply(
        cast("Status", status),
        int(now) / 1000,
        tuple(standings),
        tuple(int(position) for position, _, _ in positions),
    )


def standings_of(numbers: list[str]) -> list[Standing]:
    """Read how counts stand."""
    values = [int(each) for each in numbers]
    return [Standing(*triple) for triple in zip(*[iter(values)] * 3, strict=True)]
