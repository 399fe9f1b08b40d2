"""Which rights of a Redis or Valkey user quotas need, and which of them a user lacks."""

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
    "time": (),
    "script|load": ("return 1",),
    "evalsha": (sha_of("reserve"), 0),
    "set": ("KEY", "1", "PX", 1),
    "hget": ("HASH", "f"),
    "hmget": ("HASH", "f"),
    "hset": ("HASH", "f", "1"),
    "hdel": ("HASH", "f"),
    "zadd": ("SET", "XX", 0, "m"),
    "zrem": ("SET", "m"),
    "zcard": ("SET",),
    "zscan": ("SET", 0),
    "zrange": ("SET", 0, 0),
    "zrangebyscore": ("SET", 0, 0),
    "zrevrangebyscore": ("SET", 0, 0),
    "zremrangebyscore": ("SET", 0, 0),
    "pttl": ("SET",),
    "pexpire": ("HASH", 1),
    "pexpireat": ("HASH", 1),
    "publish": ("CHANNEL", ""),
}
"""What quotas send, each with arguments that leave nothing behind."""

REFUSED_COMMAND: Final = re.compile(r"'([\w|]+)' command")
"""What a server says that a user may not do."""

LISTENING: Final = ("subscribe", "unsubscribe")
"""What a process needs to hear at once of kills, and of what became free."""


def needed(names: KeyNames) -> str:
    """Return all that a user of quotas needs, as a rule of the server's ACL."""
    commands = (f"+{each}" for each in (*COMMANDS, *LISTENING))
    return " ".join((f"~{names.tag}*", f"&{names.tag}*", *commands))


def missing(server: RedisExecutor, names: KeyNames) -> list[str]:
    """Return the rules that the user of a server lacks, such as `+hset`.

    Raises:
        StoreAuthenticationError: It accepts no user or password of ours.
        StoreError: It does not answer.
    """
    try:
        found: list[str] = server.ask(lambda client: _missing(client, names))
    except StoreError as error:
        # Clusters and Sentinels are asked for the server before it can be asked anything.
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
    """Return the rule without which the server that has our keys cannot be found.

    Args:
        error: Why it was not; `None` is returned where that is not about rights.

    Raises:
        StoreAuthenticationError: It was about the user or the password.
    """
    # The client of a cluster says that there is none, when it may not ask for it.
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
    """Return what a user lacks to listen."""
    with client.pubsub() as subscription:
        try:
            subscription.subscribe(names.kill_channel, names.freed_channel)
            subscription.get_message(timeout=1.0)
        except NoPermissionError as error:
            return {_rule("subscribe", str(error), names)}
        return set()


def _rule(command: str, error: str, names: KeyNames) -> str:
    """Return what permits a command that was refused."""
    # The words of Redis 6 and 7, and of Valkey, differ beyond these.
    if "channel" in error:
        return f"&{names.tag}*"
    return f"~{names.tag}*" if "key" in error.rsplit("'", maxsplit=1)[-1] else f"+{command}"
