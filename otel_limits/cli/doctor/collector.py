"""Whether the OTLP endpoints that the environment names take what would be exported to them."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from otel_limits.cli.doctor.finding import Finding, fail, nothing, ok
from otel_limits.core.secrets import masked
from otel_limits.settings.variables import OTLP_PREFIX, otlp_protocol

PATIENCE_SECONDS: Final = 3.0

SIGNALS: Final = ("traces", "metrics", "logs")

PORTS: Final[Mapping[str, int]] = {"grpc": 4317, "http/protobuf": 4318}
"""By protocol, where no endpoint is named.
<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>"""


def examine_collectors(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Connect to each endpoint that something would be exported to, once."""
    protocols = {signal: otlp_protocol(environ, signal) for signal in SIGNALS}
    wanted = {signal: protocol for signal, protocol in protocols.items() if protocol}
    if not wanted:
        yield nothing("otlp", "OTEL_EXPORTER_OTLP_* is not set.")
    for package in sorted({_package(protocol) for protocol in wanted.values()}):
        if not _is_installed(package):
            yield fail("otlp", f"{package} is not installed.", "pip install 'otel-limits[otlp]'")
    places: dict[tuple[str, int], list[str]] = {}
    for signal, protocol in wanted.items():
        places.setdefault(_place(environ, signal, protocol), []).append(signal)
    for place, signals in places.items():
        yield _connect(place, ", ".join(signals))


def _package(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _place(environ: Mapping[str, str], signal: str, protocol: str) -> tuple[str, int]:
    """Return host and port of the endpoint for a signal."""
    named = environ.get(f"{OTLP_PREFIX}{signal.upper()}_ENDPOINT") or environ.get(
        f"{OTLP_PREFIX}ENDPOINT"
    )
    default = PORTS.get(protocol, PORTS["http/protobuf"])
    if not named:
        return "localhost", default
    try:
        parts = urlsplit(named if "://" in named else f"//{named}")
        port = parts.port
    except ValueError:
        return "", 0
    if port is None and protocol != "grpc":
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.hostname or "", port or default


def _connect(place: tuple[str, int], signals: str) -> Finding:
    host, port = place
    advice = "Start the collector, or set OTEL_EXPORTER_OTLP_ENDPOINT."
    shown = f"{masked(host)} port {port} ({signals})"
    if not host:
        return fail("otlp", f"The endpoint for {signals} is not a URL.", advice)
    try:
        socket.create_connection(place, PATIENCE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return fail("otlp", f"{shown} does not answer: {reason}.", advice)
    return ok("otlp", f"{shown} answers.")
