"""The variables of this process, of which this is the only reader, and those about OTLP."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final


def environment() -> dict[str, str]:
    """Copy the variables, to be read or to be given to a program."""
    return dict(os.environ)


def variable(name: str) -> str | None:
    """Return what one variable says by now; `None` where it is not set."""
    return os.environ.get(name)


def data_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep their data, by the custom of the platform."""
    environ = environment() if environ is None else environ
    # Known Folders, Apple's File System Programming Guide and the XDG Base Directory Specification.
    # `Path.home()` raises where a user has no home; it is asked only where no variable says better.
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "otel-limits"


# --- what OpenTelemetry's own variables say about OTLP -------------------------------------------

OTLP_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
DEFAULT_TIMEOUT_SECONDS: Final = 10.0


def otlp_protocol(environ: Mapping[str, str] | None = None, signal: str = "traces") -> str | None:
    """Return the OTLP protocol for a signal, or `None` when it is not to be exported.

    Args:
        environ: Variables; those of the process unless given.
        signal: `traces`, `metrics` or `logs`. It is exported when OTEL_EXPORTER_OTLP_* is set,
            for all signals or for this one, and OTEL_<SIGNAL>_EXPORTER is not something else.
    """
    environ = environment() if environ is None else environ
    # What is set for another signal alone says nothing about this one.
    others = tuple(
        f"{OTLP_PREFIX}{other.upper()}_"
        for other in ("traces", "metrics", "logs")
        if other != signal
    )
    # An empty variable counts as unset, as the specification of OpenTelemetry has it.
    wanted = any(
        name.startswith(OTLP_PREFIX) and not name.startswith(others) and environ[name]
        for name in environ
    )
    exporters = environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    if not wanted or not any(each.strip().startswith("otlp") for each in exporters.split(",")):
        return None
    return (
        # The variable of the signal wins over that of all signals, as the specification has it.
        environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


def otlp_timeout_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return how long the slowest exporter may take; like the exporters, in seconds."""
    environ = environment() if environ is None else environ
    texts = [
        environ.get(f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
        or environ.get("OTEL_EXPORTER_OTLP_TIMEOUT")
        for signal in ("TRACES", "METRICS", "LOGS")
    ]
    # The slowest of the three: what is flushed at the end is flushed side by side, in one wait.
    return max(_seconds(text) for text in texts)


def _seconds(text: str | None) -> float:
    try:
        # The exporters themselves say what is wrong with it; a wait needs some number.
        return float(text or DEFAULT_TIMEOUT_SECONDS)
    except ValueError:
        return DEFAULT_TIMEOUT_SECONDS
