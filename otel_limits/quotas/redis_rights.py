"""Which rights of a Redis or Valkey user quotas need, and which of them a user lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoPermissionError

from otel_limits.quotas.redis_scripts import sha_of

if TYPE_CHECKING:
    from otel_limits.quotas.redis_scripts import KeyNames

# Scripts are checked command by command, too
# (https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/#command-categories).
COMMANDS: Final[Mapping[str, tuple[str | int, ...]]] = {
    "ping": (),
    "time": (),
    "script|load": ("return 1",),
    "evalsha": (sha_of("reserve"), 0),
    "get": ("KEY",),
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

LISTENING: Final = ("subscribe", "unsubscribe")
"""What a process needs to hear at once of kills, and of what became free."""


def needed(names: KeyNames) -> str:
    """Return all that a user of quotas needs, as a rule of the server's ACL."""
    commands = (f"+{each}" for each in (*COMMANDS, *LISTENING))
    return " ".join((f"~{names.tag}*", f"&{names.tag}*", *commands))


def missing(client: Any, names: KeyNames) -> list[str]:
    """Return the rules that the user of a client lacks, such as `+hset`.

    Raises:
        redis.RedisError: The server does not answer.
    """
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
    return sorted(found | _deaf(client, names))


def _deaf(client: Any, names: KeyNames) -> set[str]:
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
