"""Checks that the configured OTLP endpoints accept exports."""

from __future__ import annotations

import importlib.util
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.installing import install_command
from otel_limits.core.secrets import redact_url
from otel_limits.settings.variables import CONFIGURATION_FILES, OTLP_PREFIX, otlp_protocol

if TYPE_CHECKING:
    from otel_limits.cli.doctor.check_context import Context

PATIENCE_SECONDS: Final = 3.0

SIGNALS: Final = ("traces", "metrics", "logs")

PORTS: Final[Mapping[str, int]] = {"grpc": 4317, "http/protobuf": 4318}
"""Default ports.
<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>"""


def examine_collectors(context: Context) -> Iterator[Finding]:
    """Send one empty request to each endpoint in the variables, which the exporters also read."""
    environ = context.environ
    # Each signal can have its own protocol and endpoint.
    protocols = {signal: otlp_protocol(environ, signal) for signal in SIGNALS}
    wanted = {signal: protocol for signal, protocol in protocols.items() if protocol}
    files = [name for name in CONFIGURATION_FILES if environ.get(name)]
    for name in files:
        yield skipped("otlp", f"The exporters in the file of {name} are not tested.")
    if not wanted and not files:
        yield skipped("otlp", "OTEL_EXPORTER_OTLP_* is not set.")
    for package in sorted(set(map(_package, wanted.values()))):
        if not _is_installed(package):
            yield fail("otlp", f"{package} is not installed.", install_command("otlp"))
    endpoints: dict[tuple[str, int], list[str]] = {}
    for signal, protocol in wanted.items():
        endpoints.setdefault(_endpoint(environ, signal, protocol), []).append(signal)
    for endpoint, signals in endpoints.items():
        yield _check(endpoint, signals, wanted)


def _package(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        # `find_spec` imports the parent packages.
        return False


def _endpoint(environ: Mapping[str, str], signal: str, protocol: str) -> tuple[str, int]:
    """Return the host and port of an exporter."""
    named = environ.get(f"{OTLP_PREFIX}{signal.upper()}_ENDPOINT") or environ.get(
        f"{OTLP_PREFIX}ENDPOINT"
    )
    default = PORTS.get(protocol, PORTS["http/protobuf"])
    # The exporters' default is a collector on this machine.
    if not named:
        return "localhost", default
    try:
        parts = urlsplit(named if "://" in named else f"//{named}")
        port = parts.port
    except ValueError:
        # `_check` reports it.
        return "", 0
    if port is None and protocol != "grpc":
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.hostname or "", port or default


def _check(
    endpoint: tuple[str, int], signals: Sequence[str], protocols: Mapping[str, str]
) -> Finding:
    host, port = endpoint
    named = ", ".join(signals)
    shown = f"{redact_url(host)} port {port} ({named})"
    advice = "Start the collector, or set OTEL_EXPORTER_OTLP_ENDPOINT."
    if not host:
        return fail("otlp", f"The endpoint for {named} is not a valid URL.", advice)
    try:
        # Without the exporters, which retry and don't report why a connection failed.
        socket.create_connection(endpoint, PATIENCE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return fail("otlp", f"{shown} is unavailable: {reason}.", advice)
    for signal in signals:
        if _is_installed(_package(protocols[signal])) and not _accepts(signal, protocols[signal]):
            advice = "Check protocol, path, headers and certificates of OTEL_EXPORTER_OTLP_*."
            return fail("otlp", f"{shown} rejects {signal}.", advice)
    return ok("otlp", f"{shown} accepts exports.")


def _accepts(signal: str, protocol: str) -> bool:
    """Send an empty request with an exporter; return whether it was accepted.

    Collectors accept such a request: <https://opentelemetry.io/docs/specs/otlp/>, "the server
    SHOULD respond with success".
    """
    from otel_limits.otel.export import probe_endpoint

    logging.disable()  # exporters log answers, which may quote a header
    # Another client would not have the exporters' headers, certificates and bugs.
    try:
        return probe_endpoint(signal, protocol, timeout=PATIENCE_SECONDS)
    except Exception:  # noqa: BLE001  settings may cause any exception
        return False
    finally:
        logging.disable(logging.NOTSET)
