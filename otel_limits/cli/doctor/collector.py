"""Checks that the configured OTLP endpoints accept exports."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.secrets import redact_secrets, redact_url, secrets_in
from otel_limits.settings.otel_config import (
    DeclarationError,
    DeclaredExporter,
    declared_exporters,
    named_file,
)
from otel_limits.settings.variables import OTLP_PREFIX, otlp_protocol

PATIENCE_SECONDS: Final = 3.0

SIGNALS: Final = ("traces", "metrics", "logs")

PORTS: Final[Mapping[str, int]] = {"grpc": 4317, "http/protobuf": 4318}
"""Default ports.
<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>"""

ANSWER: Final = re.compile(
    r"code: (?:StatusCode\.)?(\w+), (?:reason|error details): (.*)", re.DOTALL
)
"""How exporters log a response, over HTTP and gRPC."""

LONGEST_REASON: Final = 200


def examine_collectors(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Send one empty request to each configured endpoint.

    Args:
        environ: The variables of this process, which the exporters also read.
    """
    # Each signal can have its own protocol and endpoint.
    protocols = {signal: otlp_protocol(environ, signal) for signal in SIGNALS}
    wanted = [
        DeclaredExporter(signal, protocol) for signal, protocol in protocols.items() if protocol
    ]
    try:
        wanted += declared_exporters(environ)
    except DeclarationError as error:
        yield fail("otlp", str(error), "OpenTelemetry fails to start with it.")
    if not wanted and named_file(environ) is None:
        yield skipped("otlp", "OTEL_EXPORTER_OTLP_* is not set.")
    for package in sorted({_package(each.protocol) for each in wanted}):
        if not _is_installed(package):
            yield fail("otlp", f"{package} is not installed.", "pip install 'otel-limits[otlp]'")
    for endpoint, exporters in _by_endpoint(environ, wanted).items():
        yield _check(endpoint, exporters, _secrets(environ, exporters))


def _package(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        # `find_spec` imports the parent packages.
        return False


def _by_endpoint(
    environ: Mapping[str, str], wanted: Sequence[DeclaredExporter]
) -> dict[tuple[str, int], list[DeclaredExporter]]:
    """Group exporters by host and port."""
    endpoints: dict[tuple[str, int], list[DeclaredExporter]] = {}
    for each in wanted:
        endpoints.setdefault(_endpoint(environ, each), []).append(each)
    return endpoints


def _endpoint(environ: Mapping[str, str], exporter: DeclaredExporter) -> tuple[str, int]:
    """Return the host and port of an exporter."""
    named = (
        exporter.endpoint
        or environ.get(f"{OTLP_PREFIX}{exporter.signal.upper()}_ENDPOINT")
        or environ.get(f"{OTLP_PREFIX}ENDPOINT")
    )
    default = PORTS.get(exporter.protocol, PORTS["http/protobuf"])
    # The exporters' default is a collector on this machine.
    if not named:
        return "localhost", default
    try:
        parts = urlsplit(named if "://" in named else f"//{named}")
        port = parts.port
    except ValueError:
        # `_check` reports it.
        return "", 0
    if port is None and exporter.protocol != "grpc":
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.hostname or "", port or default


def _secrets(environ: Mapping[str, str], exporters: Sequence[DeclaredExporter]) -> set[str]:
    """Return what is sent to an endpoint and not shown: secrets of its URL, values of headers."""
    own = {name: text for name, text in environ.items() if name.startswith(OTLP_PREFIX)}
    urls = [text for name, text in own.items() if name.endswith("ENDPOINT")]
    urls += [each.endpoint for each in exporters if each.endpoint]
    headers = [
        unquote(pair.partition("=")[2].strip())
        for name, text in own.items()
        if name.endswith("HEADERS")
        for pair in text.split(",")
    ]
    headers += [text for each in exporters for _, text in dict(each.headers or {}).items()]
    # With and without a scheme such as `Bearer`.
    words = {word for text in headers for word in (text, text.partition(" ")[2].strip())}
    return (words - {""}).union(*map(secrets_in, urls))


def _check(
    endpoint: tuple[str, int], exporters: Sequence[DeclaredExporter], secrets: Collection[str]
) -> Finding:
    host, port = endpoint
    signals = ", ".join(dict.fromkeys(each.signal for each in exporters))
    shown = f"{redact_url(host)} port {port} ({signals})"
    advice = "Start the collector, or set OTEL_EXPORTER_OTLP_ENDPOINT."
    if not host:
        return fail("otlp", f"The endpoint for {signals} is not a valid URL.", advice)
    try:
        # Without the exporters, which retry and don't report why a connection failed.
        socket.create_connection(endpoint, PATIENCE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return fail("otlp", f"{shown} is unavailable: {reason}.", advice)
    for each in exporters:
        rejection = _probe(each, secrets) if _is_installed(_package(each.protocol)) else None
        if rejection is not None:
            advice = "Check protocol, path, headers and certificates of OTEL_EXPORTER_OTLP_*."
            return fail("otlp", f"{shown} rejects {each.signal}: {rejection}.", advice)
    return ok("otlp", f"{shown} accepts exports.")


# --- one request ----------------------------------------------------------------------------------


def _probe(declared: DeclaredExporter, secrets: Collection[str]) -> str | None:
    """Send an empty request with an exporter; return why it failed, if so.

    Collectors accept such a request: <https://opentelemetry.io/docs/specs/otlp/>, "the server
    SHOULD respond with success".
    """
    from otel_limits.otel.export import probe_endpoint

    with _captured_log() as messages:
        # Another client would not have the exporters' headers, certificates and bugs.
        try:
            accepted = probe_endpoint(declared.signal, declared.protocol, **_options(declared))
        except Exception as error:  # noqa: BLE001  settings may cause any exception
            return f"its exporter cannot be used ({type(error).__name__})"
    return None if accepted else _reason(messages, secrets)


def _options(declared: DeclaredExporter) -> dict[str, Any]:
    """Return the options that an exporter doesn't read from the environment."""
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
        # Imported here because grpc is slow to import.
        import grpc

        contents = [Path(path).read_bytes() if path else None for path in files]
        options["credentials"] = grpc.ssl_channel_credentials(*contents)
    return options


@contextlib.contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Capture the exporters' log messages, their only way to report errors."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("opentelemetry.exporter")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _reason(messages: Sequence[str], secrets: Collection[str]) -> str:
    """Describe the response, without paths and headers, which may contain a token."""
    text = messages[-1] if messages else ""
    answer = ANSWER.search(text)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted"
    if answer is None or answer[1] == "None":
        return "its response to an empty request violates the protocol"
    # A proxy may respond with a page of HTML.
    details = " ".join(redact_url(redact_secrets(answer[2], secrets)).split()).rstrip(".")
    return f"it responded {answer[1]} {details}"[:LONGEST_REASON].rstrip()
