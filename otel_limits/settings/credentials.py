"""Credentials for Prometheus queries, which are never shown."""

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
"""A scheme and its credentials (RFC 9110, 11.4) on one line: more would be further headers."""

READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


def authorization(name: str, text: str) -> Secret:
    """Parse the value of the header `Authorization`.

    Raises:
        ValueError: It is invalid. The message does not quote it.
    """
    value = text.strip()
    # The message has only the length, because a rejected value is often a secret in another form.
    if not CREDENTIALS.fullmatch(value):
        raise ValueError(
            f"{name} must be the value of an Authorization header on one line, e.g. Bearer TOKEN. "
            f"Its {len(value)} characters are not shown here."
        )
    return Secret(value)


AUTHORIZATION: Final = TextKind(read=authorization)


def authorization_in(file: Path) -> Secret:
    """Read the value from a file, and warn if other users can read it.

    Raises:
        ValueError: It cannot be read, or its content is invalid.
    """
    try:
        # ASCII, as in a header. The decoder's exception, which quotes the bytes, is not shown.
        with file.open(encoding="ascii") as opened:
            text = opened.read()
            mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ValueError(f"{file} cannot be read: {reason}.") from None
    # Only a warning, because all users of a container can read a mounted Kubernetes Secret.
    if mode & READABLE_BY_OTHERS:
        logger.warning("otel-limits: other users can read %s. Run: chmod 600 %s", file, file)
    return authorization(str(file), text)


def inherited_authorization() -> Secret | None:
    """Return the value in the environment, or `None`.

    Raises:
        ValueError: It is invalid.
    """
    text = environment().get(VARIABLE, "")
    return authorization(VARIABLE, text) if text.strip() else None
