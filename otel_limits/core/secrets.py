"""Puts stars in the place of every secret in an address, however it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

STARS: Final = "***"

SECRET_VALUE: Final = re.compile(
    r"(?i)([\w.-]*(?:pass|pwd|secret|token|key|auth|cred|sig)[\w.-]*\s*=\s*)"
    r"('[^']*'?|\"[^\"]*\"?|[^&;\s'\"]+)"
)
"""A parameter of a URL, or of a connection string of PostgreSQL, whose value is not shown."""

USER: Final = re.compile(r"[\w.+%-]*")
"""A name that can be shown; anything else before an `@` may be a piece of a password."""

HOST: Final = re.compile(r"\[[0-9A-Fa-f:.%]*\](:\d*)?|[^:\[\]]*(:\d*)?")
"""A host with its port. What has another thing after the colon may be a user with a password."""

ACCOUNT: Final = re.compile(r"(?i)postgres|mysql")
"""In schemes whose user alone is a name; elsewhere it may be a token, or a password."""


def redact_url(text: str) -> str:
    """Return an address as it may be shown.

    Passwords have any characters here, also those that should have been escaped: everything up to
    the last `@` belongs to user and password. Rather too much is hidden than too little.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or "@" in scheme:
        separator = ""
        scheme, rest = "", text
    # Up to the last `@`: a password may have one in it, and a host never does.
    credentials, at, place = rest.rpartition("@")
    # Without a scheme, what stands before an `@` may be a name like any other; with a colon in it,
    # it is taken for a user with a password.
    if at and (separator or ":" in credentials):
        rest = _masked_user(credentials, scheme) + at + _masked_hosts(place)
    elif separator:
        rest = _masked_hosts(rest)
    return SECRET_VALUE.sub(rf"\1{STARS}", scheme + separator + rest)


def redact_text(sentence: str, words: Iterable[str]) -> str:
    """Return a sentence of somebody else, who may have quoted what was typed, as it may be shown.

    Args:
        sentence: What is to be shown.
        words: The words of a command line.
    """
    for word in words:
        # Parsers of command lines quote `--name=value` as a whole or its value alone, as it is or
        # as Python writes it.
        for piece in (word, word.partition("=")[2]):
            if piece != redact_url(piece):
                sentence = sentence.replace(piece, redact_url(piece))
                sentence = sentence.replace(repr(piece), repr(redact_url(piece)))
    return sentence


def _masked_user(credentials: str, scheme: str) -> str:
    """Keep the user's name where it is one."""
    user, colon, _ = credentials.partition(":")
    if not USER.fullmatch(user) or not (colon or ACCOUNT.search(scheme)):
        return STARS
    return f"{user}:{STARS}" if colon else user


def _masked_hosts(rest: str) -> str:
    """Hide what stands for a port, and all that follows, where the `@` was forgotten."""
    # Several hosts, as of a replica set or a cluster, have commas between them.
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if all(HOST.fullmatch(host) for host in hosts.split(",")):
        return rest
    return f"{hosts.partition(':')[0].strip('[]')}:{STARS}"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A value that is used and never shown, whoever prints it."""

    value: str

    def __str__(self) -> str:
        """Stars."""
        return STARS

    def __repr__(self) -> str:
        """The same, recognisable."""
        return f"Secret({STARS})"
