"""Reads exporters from an OpenTelemetry configuration file, which overrides `OTEL_*` variables.

<https://opentelemetry.io/docs/specs/otel/configuration/data-model/>; names follow
<https://github.com/open-telemetry/opentelemetry-configuration>.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FILES: Final = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""Variables with the path of the file; the second is the old name."""

PROVIDERS: Final[Mapping[str, str]] = {
    "tracer_provider": "traces",
    "meter_provider": "metrics",
    "logger_provider": "logs",
}

PROTOCOLS: Final[Mapping[str, str]] = {"otlp_http": "http/protobuf", "otlp_grpc": "grpc"}

SUBSTITUTION: Final = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}\n]*))?\}")
"""`${NAME}`, `${env:NAME}` and `${NAME:-default}`."""

DESTINATION_KEYS: Final = frozenset(("endpoint", "headers", "headers_list", "tls", "output_stream"))
"""Keys that define the destination and credentials of an exporter, removed in a sandbox."""


@dataclass(frozen=True, slots=True)
class DeclaredExporter:
    """An OTLP exporter in the file."""

    signal: str
    protocol: str
    endpoint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Mapping[str, str] = field(default_factory=dict)
    """`ca_file`, `key_file`, `cert_file` and `insecure`, if set."""


class DeclarationError(Exception):
    """The file cannot be read; the message states why."""


def named_file(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that contains the path of the file, and the path; `None` if unset."""
    return next(((name, environ[name]) for name in FILES if environ.get(name)), None)


def declared_exporters(environ: Mapping[str, str]) -> list[DeclaredExporter]:
    """Return the OTLP exporters in the file.

    Raises:
        DeclarationError: The file cannot be read.
    """
    named = named_file(environ)
    if named is None:
        return []
    document = _substitute(_read(*named), environ)
    sections = document if isinstance(document, Mapping) else {}
    return [
        exporter
        for provider, signal in PROVIDERS.items()
        for exporter in _exporters(sections.get(provider), signal)
    ]


def harmless_copy(environ: Mapping[str, str], directory: Path, url: str) -> dict[str, str]:
    """Copy the file with all exporters redirected to `url`; return the variable that names it.

    An unreadable file is ignored, because it configures nothing.
    """
    named = named_file(environ)
    if named is None:
        return {}
    import yaml  # here, as few programs have such a file

    try:
        document = _redirect(_read(*named), url)
    except DeclarationError:
        return {}
    copy = directory / "opentelemetry.yaml"
    copy.write_text(yaml.safe_dump(document), encoding="utf-8")
    return {named[0]: str(copy)}


def _read(variable: str, path: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{variable} cannot be read: {error.strerror}.") from None
    # Neither the message nor the cause is kept: they quote a file that may contain credentials.
    except (yaml.YAMLError, ValueError, RecursionError):
        raise DeclarationError(f"{variable} is not valid YAML.") from None


def _substitute(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace references to environment variables by their values."""
    if isinstance(value, Mapping):
        return {name: _substitute(each, environ) for name, each in value.items()}
    if isinstance(value, list):
        return [_substitute(each, environ) for each in value]
    if isinstance(value, str):
        # In parsed strings only: the value of a variable must not be parsed as YAML.
        return SUBSTITUTION.sub(lambda found: environ.get(found[1]) or found[2] or "", value)
    return value


def _exporters(section: Any, signal: str) -> Iterator[DeclaredExporter]:
    """Yield the exporters of a provider, at any depth."""
    # Processors and readers between provider and exporter have arbitrary names.
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name in PROTOCOLS:
            yield _exporter(value if isinstance(value, Mapping) else {}, signal, PROTOCOLS[name])
        else:
            yield from _exporters(value, signal)
    for each in section if isinstance(section, list) else ():
        yield from _exporters(each, signal)


def _exporter(values: Mapping[str, Any], signal: str, protocol: str) -> DeclaredExporter:
    listed = str(values.get("headers_list") or "").split(",")
    headers = dict(each.split("=", 1) for each in listed if "=" in each)
    for each in values.get("headers") or ():
        if isinstance(each, Mapping):
            headers[str(each.get("name"))] = str(each.get("value"))
    tls = values.get("tls")
    return DeclaredExporter(
        signal=signal,
        protocol=protocol,
        endpoint=values.get("endpoint"),
        headers=headers,
        tls=tls if isinstance(tls, Mapping) else {},
    )


def _redirect(value: Any, url: str) -> Any:
    """Return the configuration with every exporter sending to `url`."""
    if isinstance(value, list):
        return [_redirect(each, url) for each in value]
    if not isinstance(value, Mapping):
        return value
    # Remove all destinations first: a sandbox must never send to the user's collector.
    redirected = {
        name: _redirect(each, url) for name, each in value.items() if name not in DESTINATION_KEYS
    }
    # Also for exporters without an endpoint: a collector may run at the default one.
    return {
        name: {**(each or {}), "endpoint": url}
        if str(name).startswith(("otlp", "zipkin"))
        else each
        for name, each in redirected.items()
    }
