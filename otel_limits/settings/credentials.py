"""Credentials for a Prometheus that is asked: read, used, and never shown."""

from __future__ import annotations

import logging
import re
import stat
from pathlib import Path
from typing import Final

from otel_limits.core.secrets import Secret
from otel_limits.core.values import TextKind
from otel_limits.settings.variables import environment

logger = logging.getLogger("otel_limits")

VARIABLE: Final = "OTEL_LIMITS_PROMETHEUS_AUTHORIZATION"

CREDENTIALS: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]* +[!-~][ -~]*")
"""A scheme and what it asks for (RFC 9110, 11.4), on one line: more would be further headers."""

READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


def authorization(name: str, text: str) -> Secret:
    """Read the value of the header `Authorization`.

    Raises:
        ValueError: It is not one. The sentence does not quote it.
    """
    value = text.strip()
    # The sentence has the length alone: where a value is refused, it is often a secret in another
    # form.
    if not CREDENTIALS.fullmatch(value):
        raise ValueError(
            f"{name} must be what follows Authorization: in a request, on one line, such as "
            f"Bearer TOKEN; its {len(value)} characters are not that, and are not shown here."
        )
    return Secret(value)


AUTHORIZATION: Final = TextKind(read=authorization)


def authorization_in(file: Path) -> Secret:
    """Read the same from a file, and warn if others can do so, too.

    Raises:
        ValueError: It cannot be read, or has something else in it.
    """
    try:
        # ASCII, as a header has nothing else; an exception of the decoder would quote the bytes.
        with file.open(encoding="ascii") as opened:
            text = opened.read()
            mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ValueError(f"{file} cannot be read: {reason}.") from None
    # Only warned: the mount of a Secret in Kubernetes is readable for all users of its container.
    if mode & READABLE_BY_OTHERS:
        logger.warning("otel-limits: others can read %s. Run: chmod 600 %s", file, file)
    return authorization(str(file), text)


def inherited_authorization() -> Secret | None:
    """What the environment has, if it has anything.

    Raises:
        ValueError: It is not the value of the header.
    """
    text = environment().get(VARIABLE, "")
    return authorization(VARIABLE, text) if text.strip() else None
