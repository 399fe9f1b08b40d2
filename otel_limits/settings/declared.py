"""Reads the exporters of a declarative configuration, where OpenTelemetry's variables do not count.

<https://opentelemetry.io/docs/specs/otel/configuration/data-model/>; the names are those of
<https://github.com/open-telemetry/opentelemetry-configuration>.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

FILES: Final = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""Variables with the path of the file; the second is the older name."""

PROVIDERS: Final[Mapping[str, str]] = {
    "tracer_provider": "traces",
    "meter_provider": "metrics",
    "logger_provider": "logs",
}

PROTOCOLS: Final[Mapping[str, str]] = {"otlp_http": "http/protobuf", "otlp_grpc": "grpc"}

SUBSTITUTION: Final = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}\n]*))?\}")
"""`${NAME}`, `${env:NAME}` and `${NAME:-default}`."""

LEADING: Final = frozenset(("endpoint", "headers", "headers_list", "tls", "output_stream"))
"""Where an exporter sends to, and with what: all that a sandbox must not have."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An OTLP exporter of the file."""

    signal: str
    protocol: str
    endpoint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Mapping[str, str] = field(default_factory=dict)
    """Values of `ca_file`, `key_file`, `cert_file` and `insecure`, where they are set."""


class DeclarationError(Exception):
    """The file cannot be read; a sentence that says why."""


def named_file(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that names a file, and what it says; `None` where there is none."""
    return next(((name, environ[name]) for name in FILES if environ.get(name)), None)


def declared_exporters(environ: Mapping[str, str]) -> list[Declared]:
    """Read the OTLP exporters of the file.

    Raises:
        DeclarationError: The file cannot be read.
    """
    named = named_file(environ)
    if named is None:
        return []
    document = _substituted(_read(*named), environ)
    sections = document if isinstance(document, Mapping) else {}
    return [
        exporter
        for provider, signal in PROVIDERS.items()
        for exporter in _exporters(sections.get(provider), signal)
    ]


def harmless_copy(environ: Mapping[str, str], place: Path, url: str) -> dict[str, str]:
    """Write a copy of the file whose exporters all lead to `url`; return the variable for it.

    A file that cannot be read is left as it is: it does not configure anything.
    """
    named = named_file(environ)
    if named is None:
        return {}
    try:
        document = _led_to(_read(*named), url)
    except DeclarationError:
        return {}
    copy = place / "opentelemetry.yaml"
    copy.write_text(yaml.safe_dump(document), encoding="utf-8")
    return {named[0]: str(copy)}


def _read(variable: str, path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{variable} cannot be read: {error.strerror}.") from None
    # Neither error is quoted, nor its cause kept: both show lines of a file that may hold
    # credentials.
    except (yaml.YAMLError, ValueError, RecursionError):
        raise DeclarationError(f"{variable} is not valid YAML.") from None


def _substituted(value: Any, environ: Mapping[str, str]) -> Any:
    """Put variables of the environment where they are named."""
    if isinstance(value, Mapping):
        return {name: _substituted(each, environ) for name, each in value.items()}
    if isinstance(value, list):
        return [_substituted(each, environ) for each in value]
    if isinstance(value, str):
        # In text alone and after it was parsed: what a variable holds must not become YAML.
        return SUBSTITUTION.sub(lambda found: environ.get(found[1]) or found[2] or "", value)
    return value


def _exporters(section: Any, signal: str) -> Iterator[Declared]:
    """Find the exporters below a provider, in whatever processor or reader they stand."""
    # Whatever stands between provider and exporter: processors and readers are named freely.
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name in PROTOCOLS:
            yield _exporter(value if isinstance(value, Mapping) else {}, signal, PROTOCOLS[name])
        else:
            yield from _exporters(value, signal)
    for each in section if isinstance(section, list) else ():
        yield from _exporters(each, signal)


def _exporter(values: Mapping[str, Any], signal: str, protocol: str) -> Declared:
    listed = str(values.get("headers_list") or "").split(",")
    headers = dict(each.split("=", 1) for each in listed if "=" in each)
    for each in values.get("headers") or ():
        if isinstance(each, Mapping):
            headers[str(each.get("name"))] = str(each.get("value"))
    tls = values.get("tls")
    return Declared(
        signal=signal,
        protocol=protocol,
        endpoint=values.get("endpoint"),
        headers=headers,
        tls=tls if isinstance(tls, Mapping) else {},
    )


def _led_to(value: Any, url: str) -> Any:
    """Return a configuration with every exporter's destination in one place."""
    if isinstance(value, list):
        return [_led_to(each, url) for each in value]
    if not isinstance(value, Mapping):
        return value
    # The endpoints go before new ones are put in: a sandbox must never reach a collector of the
    # user.
    led = {name: _led_to(each, url) for name, each in value.items() if name not in LEADING}
    # Also those that have none of their own: the default may be a collector that is there.
    return {
        name: {**(each or {}), "endpoint": url}
        if str(name).startswith(("otlp", "zipkin"))
        else each
        for name, each in led.items()
    }
