"""Whether the OTLP endpoints that are configured take what would be exported to them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.secrets import redact_url
from otel_limits.otel.export import probe_endpoint
from otel_limits.settings.declared import (
    DeclarationError,
    Declared,
    declared_exporters,
    named_file,
)
from otel_limits.settings.variables import OTLP_PREFIX, otlp_protocol

PATIENCE_SECONDS: Final = 3.0

SIGNALS: Final = ("traces", "metrics", "logs")

PORTS: Final[Mapping[str, int]] = {"grpc": 4317, "http/protobuf": 4318}
"""By protocol, where no endpoint is named.
<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>"""

ANSWER: Final = re.compile(
    r"code: (?:StatusCode\.)?(\w+), (?:reason|error details): (.*)", re.DOTALL
)
"""How the exporters log what they were answered: over HTTP, and over gRPC."""

LONGEST_REASON: Final = 200


def examine_collectors(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Send an empty request to each endpoint that something would be exported to, once.

    Args:
        environ: The variables of this process, which exporters read by themselves as well.
    """
    # Signal by signal, as each can have a protocol and a place of its own.
    protocols = {signal: otlp_protocol(environ, signal) for signal in SIGNALS}
    wanted = [Declared(signal, protocol) for signal, protocol in protocols.items() if protocol]
    try:
        wanted += declared_exporters(environ)
    except DeclarationError as error:
        yield fail("otlp", str(error), "OpenTelemetry does not start with it.")
    if not wanted and named_file(environ) is None:
        yield skipped("otlp", "OTEL_EXPORTER_OTLP_* is not set.")
    for package in sorted({_package(each.protocol) for each in wanted}):
        if not _is_installed(package):
            yield fail("otlp", f"{package} is not installed.", "pip install 'otel-limits[otlp]'")
    for place, exporters in _by_endpoint(environ, wanted).items():
        yield _check(place, exporters)


def _package(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        # `find_spec` imports the packages above, any of which may be missing.
        return False


def _by_endpoint(
    environ: Mapping[str, str], wanted: Sequence[Declared]
) -> dict[tuple[str, int], list[Declared]]:
    """Put together what goes to one host and port."""
    places: dict[tuple[str, int], list[Declared]] = {}
    for each in wanted:
        places.setdefault(_endpoint(environ, each), []).append(each)
    return places


def _endpoint(environ: Mapping[str, str], exporter: Declared) -> tuple[str, int]:
    """Return host and port of an exporter."""
    named = (
        exporter.endpoint
        or environ.get(f"{OTLP_PREFIX}{exporter.signal.upper()}_ENDPOINT")
        or environ.get(f"{OTLP_PREFIX}ENDPOINT")
    )
    default = PORTS.get(exporter.protocol, PORTS["http/protobuf"])
    # By the default of the exporters, so that a collector on this machine is found without any
    # variable.
    if not named:
        return "localhost", default
    try:
        parts = urlsplit(named if "://" in named else f"//{named}")
        port = parts.port
    except ValueError:
        # Where a URL is none there is no place; `_ask` says so in a sentence.
        return "", 0
    if port is None and exporter.protocol != "grpc":
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.hostname or "", port or default


def _check(place: tuple[str, int], exporters: Sequence[Declared]) -> Finding:
    host, port = place
    signals = ", ".join(dict.fromkeys(each.signal for each in exporters))
    shown = f"{redact_url(host)} port {port} ({signals})"
    advice = "Start the collector, or set OTEL_EXPORTER_OTLP_ENDPOINT."
    if not host:
        return fail("otlp", f"The endpoint for {signals} is not a URL.", advice)
    try:
        # First without the exporters: they don't say why nobody is there, and try again.
        socket.create_connection(place, PATIENCE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return fail("otlp", f"{shown} does not answer: {reason}.", advice)
    for each in exporters:
        refusal = _probe(each) if _is_installed(_package(each.protocol)) else None
        if refusal is not None:
            advice = "Check protocol, path, headers and certificates of OTEL_EXPORTER_OTLP_*."
            return fail("otlp", f"{shown} does not take {each.signal}: {refusal}.", advice)
    return ok("otlp", f"{shown} answers, and takes them.")


# --- one request ----------------------------------------------------------------------------------


def _probe(declared: Declared) -> str | None:
    """Let an exporter send a request without any telemetry; say why it failed, if it did.

    A collector takes such a request: <https://opentelemetry.io/docs/specs/otlp/>, "the server
    SHOULD respond with success".
    """
    with _captured_log() as said:
        # With the very exporters: another client would not have their headers, certificates and
        # bugs.
        try:
            taken = probe_endpoint(declared.signal, declared.protocol, **_options(declared))
        except Exception as error:  # noqa: BLE001  whatever a setting of OpenTelemetry leads to
            return f"its exporter cannot be used ({type(error).__name__})"
    return None if taken else _reason(said)


def _options(declared: Declared) -> dict[str, Any]:
    """Say what the exporter does not read in the environment by itself."""
    options: dict[str, Any] = {"timeout": PATIENCE_SECONDS}
    if declared.endpoint:
        options["endpoint"] = declared.endpoint
    if declared.headers:
        options["headers"] = dict(declared.headers)
    files = [declared.tls.get(name) for name in ("ca_file", "key_file", "cert_file")]
    if declared.protocol != "grpc":
        names = ("certificate_file", "client_key_file", "client_certificate_file")
        return options | {name: path for name, path in zip(names, files, strict=True) if path}
    if "insecure" in declared.tls:
        options["insecure"] = str(declared.tls["insecure"]).lower() == "true"
    if any(files):
        # Only where TLS is configured for gRPC, as grpc takes a while to import.
        import grpc

        contents = [Path(path).read_bytes() if path else None for path in files]
        options["credentials"] = grpc.ssl_channel_credentials(*contents)
    return options


@contextlib.contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Listen to what exporters log, which is all that they say, and keep it from the terminal."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("opentelemetry.exporter")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _reason(said: Sequence[str]) -> str:
    """Say what was answered, without paths and headers, which may hold a token."""
    text = said[-1] if said else ""
    answer = ANSWER.search(text)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted"
    if answer is None or answer[1] == "None":
        return "an empty request was not answered as the protocol says"
    # On one line and not too long: a proxy may answer with a page of HTML.
    details = " ".join(redact_url(answer[2]).split()).rstrip(".")
    return f"it answered {answer[1]} {details}"[:LONGEST_REASON].rstrip()
