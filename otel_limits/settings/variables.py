"""Environment variables, read only here, and the credentials among them."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from otel_limits.core.secrets import Secret, redact_value
from otel_limits.core.values import TextKind

ANYWHERE: Final = ("0.0.0.0", "::", "")  # noqa: S104  not bound here


def environment() -> dict[str, str]:
    """Return a copy of all environment variables."""
    return dict(os.environ)


def variable(name: str) -> str | None:
    """Return the current value of a variable, or `None`."""
    return os.environ.get(name)


def set_variable(name: str, text: str | None) -> None:
    """Set a variable of this process, which its children inherit; `None` removes it."""
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def reachable(host: str) -> str:
    """Return the host to connect to, on this machine, for a listen address."""
    # Clients cannot connect to a wildcard address.
    return "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host


def data_directory() -> Path:
    """Return the data directory of this user, by the conventions of the platform."""
    environ = environment()
    # Known Folders, Apple's File System Programming Guide and the XDG Base Directory Specification.
    # `Path.home()` raises if the user has no home directory, so variables come first.
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "otel-limits"


# --- OpenTelemetry's variables for OTLP -----------------------------------------------------------

OTLP_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
CONFIGURATION_FILES: Final = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""Variables with the path of an OpenTelemetry configuration file; the second is the old name."""
DEFAULT_TIMEOUT_SECONDS: Final = 10.0
TIMEOUTS: Final = (
    f"{OTLP_PREFIX}TIMEOUT",
    *(f"{OTLP_PREFIX}{signal}_TIMEOUT" for signal in ("TRACES", "METRICS", "LOGS")),
)
PROBABLY_MILLISECONDS: Final = 1_000
"""A timeout from which on milliseconds were probably meant."""


def otlp_protocol(environ: Mapping[str, str] | None = None, signal: str = "traces") -> str | None:
    """Return the OTLP protocol for a signal, or `None` if it is not exported.

    Args:
        environ: Variables; those of the process by default.
        signal: `traces`, `metrics` or `logs`. It is exported if OTEL_EXPORTER_OTLP_* is set, for
            all signals or for this one, and OTEL_<SIGNAL>_EXPORTER does not name another exporter.
    """
    environ = environment() if environ is None else environ
    # Variables of other signals do not count.
    others = tuple(
        f"{OTLP_PREFIX}{other.upper()}_"
        for other in ("traces", "metrics", "logs")
        if other != signal
    )
    # By the specification, an empty variable counts as unset.
    wanted = any(
        name.startswith(OTLP_PREFIX) and not name.startswith(others) and environ[name]
        for name in environ
    )
    exporters = environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    if not wanted or not any(each.strip().startswith("otlp") for each in exporters.split(",")):
        return None
    return (
        # By the specification, the variable of the signal has precedence.
        environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


def otlp_timeout_seconds() -> float:
    """Return the timeout of the slowest exporter, in seconds."""
    environ = environment()
    texts = [
        environ.get(f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
        or environ.get("OTEL_EXPORTER_OTLP_TIMEOUT")
        for signal in ("TRACES", "METRICS", "LOGS")
    ]
    # The slowest of the three, because they are flushed concurrently.
    return max(_seconds(text) for text in texts)


def long_timeouts(environ: Mapping[str, str]) -> list[str]:
    """Report timeouts that are probably in milliseconds, as the specification has them.

    https://opentelemetry.io/docs/specs/otel/protocol/exporter/#configuration-options; the exporters
    of Python read seconds: https://github.com/open-telemetry/opentelemetry-python/issues/4044.
    """
    long = {name: _seconds(environ.get(name)) for name in TIMEOUTS}
    return [
        f"{name} is {seconds:,.0f} seconds: the exporters of Python read seconds, although the "
        "specification of OpenTelemetry says milliseconds. For "
        f"{seconds / 1000:g} seconds, set it to {seconds / 1000:g}."
        for name, seconds in long.items()
        if seconds >= PROBABLY_MILLISECONDS
    ]


def _seconds(text: str | None) -> float:
    try:
        # The exporters report an invalid value themselves.
        return float(text or DEFAULT_TIMEOUT_SECONDS)
    except ValueError:
        return DEFAULT_TIMEOUT_SECONDS


# --- credentials for Prometheus queries -----------------------------------------------------------

logger = logging.getLogger("otel_limits")

AUTHORIZATION_VARIABLE: Final = "OTEL_LIMITS_PROMETHEUS_AUTHORIZATION"

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
        # The header itself may have been given instead of a file with it.
        raise ValueError(f"{redact_value(str(file))} cannot be read: {reason}.") from None
    # Only a warning, because all users of a container can read a mounted Kubernetes Secret.
    if mode & READABLE_BY_OTHERS:
        logger.warning("otel-limits: other users can read %s. Run: chmod 600 %s", file, file)
    return authorization(str(file), text)


def inherited_authorization() -> Secret | None:
    """Return the value in the environment, or `None`.

    Raises:
        ValueError: It is invalid.
    """
    text = environment().get(AUTHORIZATION_VARIABLE, "")
    return authorization(AUTHORIZATION_VARIABLE, text) if text.strip() else None
