"""Required Redis or Valkey ACL rules, and a check for missing ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import AuthenticationError, NoPermissionError

from otel_limits.quotas.redis_scripts import sha_of
from otel_limits.quotas.store import StoreAuthenticationError, StoreError

if TYPE_CHECKING:
    from otel_limits.quotas.redis_executor import RedisExecutor
    from otel_limits.quotas.redis_scripts import KeyNames

# Scripts are checked command by command, too
# (https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/#command-categories).
COMMANDS: Final[Mapping[str, tuple[str | int, ...]]] = {
    "ping": (),
    "info": ("server",),
    "time": (),
    "script|load": ("return 1",),
    "evalsha": (sha_of("reserve"), 0),
    "set": ("KEY", "1", "PX", 1),
    "del": ("KEY",),
    "exists": ("KEY",),
    "hget": ("HASH", "f"),
    "hgetall": ("HASH",),
    "hincrby": ("HASH", "f", 1),
    "hlen": ("HASH",),
    "hmget": ("HASH", "f"),
    "hset": ("HASH", "f", "1"),
    "hdel": ("HASH", "f"),
    "zadd": ("SET", "XX", 0, "m"),
    "zrem": ("SET", "m"),
    "zcard": ("SET",),
    "zscan": ("SET", 0),
    "zscore": ("SET", "m"),
    "zrange": ("SET", 0, 0),
    "zrangebyscore": ("SET", 0, 0),
    "zrevrangebyscore": ("SET", 0, 0),
    "zremrangebyscore": ("SET", 0, 0),
    "pttl": ("SET",),
    "pexpire": ("HASH", 1),
    "pexpireat": ("HASH", 1),
    "publish": ("CHANNEL", ""),
}
"""Commands that quotas use, each with arguments that leave no data behind."""

REFUSED_COMMAND: Final = re.compile(r"'([\w|]+)' command")
"""Extracts the command from a permission error."""

LISTENING: Final = ("subscribe", "unsubscribe")
"""Commands for receiving kills and releases without polling."""


def needed(names: KeyNames) -> str:
    """Return all ACL rules that quotas need."""
    commands = (f"+{each}" for each in (*COMMANDS, *LISTENING))
    return " ".join((f"~{names.tag}*", f"&{names.tag}*", *commands))


def missing(server: RedisExecutor, names: KeyNames) -> list[str]:
    """Return the ACL rules that the user lacks, such as `+hset`.

    Raises:
        StoreAuthenticationError: Authentication failed.
        StoreError: The server is unavailable.
    """
    try:
        found: list[str] = server.ask(lambda client: _missing(client, names))
    except StoreError as error:
        # With a cluster or Sentinels, the server must be located first.
        rule = _missing_to_connect(error)
        if rule is None:
            raise
        return [rule]
    return found


def _missing(client: Any, names: KeyNames) -> list[str]:
    places = {each: f"{names.check}:{each.lower()}" for each in ("KEY", "HASH", "SET", "CHANNEL")}
    pipe = client.pipeline(transaction=False)
    for command, arguments in COMMANDS.items():
        filled = [places.get(str(each), each) for each in arguments]
        pipe.execute_command(*command.upper().split("|"), *filled)
    found = {
        _rule(command, str(reply), names)
        for command, reply in zip(COMMANDS, pipe.execute(raise_on_error=False), strict=True)
        if isinstance(reply, NoPermissionError)
    }
    return sorted(found | _missing_channels(client, names))


def _missing_to_connect(error: Exception) -> str | None:
    """Return the missing rule that prevented locating the server.

    Args:
        error: Why it was not located; the result is `None` if a rule was not the cause.

    Raises:
        StoreAuthenticationError: Authentication failed.
    """
    # Without permission, a cluster client reports that there is no cluster: check the causes.
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for each in causes:
        command = REFUSED_COMMAND.search(str(each))
        if isinstance(each, NoPermissionError) and command is not None:
            return f"+{command[1]}"
        if isinstance(each, AuthenticationError):
            raise StoreAuthenticationError(str(error)) from error
    return None


def _missing_channels(client: Any, names: KeyNames) -> set[str]:
    """Return the rules that a user lacks to subscribe."""
    with client.pubsub() as subscription:
        try:
            subscription.subscribe(names.kill_channel, names.freed_channel)
            subscription.get_message(timeout=1.0)
        except NoPermissionError as error:
            return {_rule("subscribe", str(error), names)}
        return set()


def _rule(command: str, error: str, names: KeyNames) -> str:
    """Return the rule that allows a denied command."""
    # Only these words are common to Redis 6 and 7 and Valkey.
    if "channel" in error:
        return f"&{names.tag}*"
    return f"~{names.tag}*" if "key" in error.rsplit("'", maxsplit=1)[-1] else f"+{command}"
