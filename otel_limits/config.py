"""The only reader of the environment: variables → settings, with a sentence per mistake.

Precedence: an argument in code, then the environment, then the preset, then the default. An empty
variable is unset, and only `true` is true, as OpenTelemetry has it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from otel_limits.ledger.address import Address, parse
from otel_limits.ledger.rows import LEDGER_SYNCS, OWN_NAMES, LedgerSync
from otel_limits.limits import (
    ACTIONS,
    UNMEASURED,
    Action,
    Limits,
    Policy,
    Unmeasured,
    require_choice,
)

PREFIX: Final = "OTEL_LIMITS_"

PRESETS: Final[Mapping[str, Limits]] = {
    "none": Limits(),
    "recommended": Limits(max_iterations=25),
}

DEFAULT_POLICY: Final = Policy()

MAX_PORT: Final = 65_535

AUDIT_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable of the environment."""

    name: str
    parse: Callable[[str, str], Any]
    """Takes the variable's name and its text; raises `ValueError` with a sentence."""
    default: Any
    help: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


def whole_number(name: str, text: str) -> int:
    """Parse a cap.

    Raises:
        ValueError: It is no whole number of 1 or more.
    """
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(
        f"{name} must be a whole number of 1 or more, got {text!r}. Unset it for no such limit."
    )


def boolean(name: str, text: str) -> bool:
    """Parse a boolean as OpenTelemetry does.

    Raises:
        ValueError: It is neither `true` nor `false`; it counts as false then.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ValueError(f"{name} must be true or false, got {text!r}. It counts as false.")


def port(name: str, text: str) -> int:
    """Parse a TCP port.

    Raises:
        ValueError: It is no port.
    """
    if text.isascii() and text.isdecimal() and 0 < int(text) <= MAX_PORT:
        return int(text)
    raise ValueError(f"{name} must be a port from 1 to {MAX_PORT}, got {text!r}.")


def choice(*choices: str) -> Callable[[str, str], str]:
    """Make a parser for one of `choices`, in any case."""

    def parse(name: str, text: str) -> str:
        return require_choice(name, text.lower(), choices)

    return parse


def plain(name: str, text: str) -> str:  # noqa: ARG001  the signature of every parser
    """Take any text."""
    return text


def data_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep their data, by the custom of the platform."""
    environ = os.environ if environ is None else environ
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "otel-limits"


def default_ledger() -> str:
    """The ledger of `otel-limits run` and of the questions, where none is named."""
    return str(data_directory() / "ledger.db")


def ledger_address(name: str, text: str) -> Address | None:
    """Parse the address of a ledger; `none` is no ledger.

    Raises:
        ValueError: It is no address, or the driver of its server is not installed.
    """
    return None if text.lower() == "none" else parse(name, text, data_directory())


def audit_keys(name: str, text: str) -> tuple[str, ...]:
    """Parse names of baggage entries and trace attributes, separated by commas.

    Raises:
        ValueError: One is no such name, or is what a column of the ledger is called.
    """
    keys = tuple(dict.fromkeys(key.strip() for key in text.split(",") if key.strip()))
    for key in keys:
        if not AUDIT_KEY.fullmatch(key):
            raise ValueError(
                f"{name} must be names such as tenant.id, separated by commas, got {key!r}."
            )
        if key in OWN_NAMES:
            raise ValueError(f"{name} cannot contain {key!r}: the ledger has that already.")
    return keys


LIMIT_SETTINGS: Final = tuple(
    Setting(name=spec.name, parse=whole_number, default=None, help=spec.metadata["help"])
    for spec in dataclasses.fields(Limits)
)

SETTINGS: Final = (
    *LIMIT_SETTINGS,
    Setting(
        name="action",
        parse=choice(*ACTIONS),
        default="halt",
        help="What is done when a limit is reached: observe (go on, but record it), "
        "halt (return with the stop reason) or raise (halt, then raise from the call).",
    ),
    Setting(
        name="unmeasured",
        parse=choice(*UNMEASURED),
        default="estimate",
        help="How a model call without reported usage counts: estimate its tokens, "
        "ignore them, or halt as if every token limit were reached.",
    ),
    Setting(
        name="preset",
        parse=choice(*PRESETS),
        default="none",
        help="Limits to start from; recommended sets max_iterations=25.",
    ),
    Setting(
        name="prometheus_port",
        parse=port,
        default=None,
        help="Serve /metrics on this port. Unset: no server.",
    ),
    Setting(
        name="prometheus_host",
        parse=plain,
        default="127.0.0.1",
        help="Address that /metrics is served on; loopback unless told otherwise.",
    ),
    Setting(
        name="ledger",
        parse=ledger_address,
        default=None,
        help="Where every model call is recorded: a path, sqlite:///PATH or postgresql://…; "
        "none for no ledger. Unset: none, except in otel-limits run, which keeps one in the "
        "user's data directory.",
    ),
    Setting(
        name="ledger_sync",
        parse=choice(*LEDGER_SYNCS),
        default="invocation",
        help="When recorded rows are durable: when an invocation returns (invocation), when each "
        "model call ends (call), or a quarter of a second later (background).",
    ),
    Setting(
        name="audit_keys",
        parse=audit_keys,
        default=(),
        help="Baggage entries and agent trace attributes that become columns of the ledger, "
        "separated by commas, such as tenant.id,user.id.",
    ),
    Setting(
        name="strict",
        parse=boolean,
        default=False,
        help="End the process with status 2 when a setting is invalid, instead of logging it.",
    ),
    Setting(
        name="disabled",
        parse=boolean,
        default=False,
        help="Switch otel-limits off altogether.",
    ),
)
"""Every variable; the README's table and the command line's flags are generated from this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set for a process."""

    policy: Policy = DEFAULT_POLICY
    preset: str = "none"
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"
    ledger: Address | None = None
    ledger_sync: LedgerSync = "invocation"
    audit_keys: tuple[str, ...] = ()
    strict: bool = False
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read: the valid settings, where each came from, and what is wrong with the rest."""

    settings: Settings
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    mistakes: tuple[str, ...]


def read(environ: Mapping[str, str] | None = None) -> Reading:
    """Read the settings from the environment.

    A value that is invalid is a sentence among the mistakes and leaves every other one in force.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    sources = dict.fromkeys(values, "default")
    mistakes = []
    for setting in SETTINGS:
        text = environ.get(setting.variable, "").strip()
        if not text:
            continue
        try:
            values[setting.name] = setting.parse(setting.variable, text)
            sources[setting.name] = "environment"
        except ValueError as error:
            mistakes.append(str(error))
    mistakes.extend(unknown_variables(environ))
    for name, value in PRESETS[values["preset"]].items():
        if values[name] is None:
            values[name], sources[name] = value, f"preset {values['preset']}"
    return Reading(
        settings=_settings(values), values=values, sources=sources, mistakes=tuple(mistakes)
    )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Name the variables that look like ours and are none: a typing error is no limit."""
    known = {setting.variable for setting in SETTINGS}
    return [
        f"{name} is not a setting of otel-limits. See: otel-limits check"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]


def otlp_protocol(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the OTLP protocol for traces, or `None` when no OTEL_EXPORTER_OTLP_* is set."""
    environ = os.environ if environ is None else environ
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") and environ[name] for name in environ):
        return None
    return (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


def _settings(values: Mapping[str, Any]) -> Settings:
    limits = Limits(**{setting.name: values[setting.name] for setting in LIMIT_SETTINGS})
    return Settings(
        policy=Policy(
            limits=limits,
            action=cast("Action", values["action"]),
            unmeasured=cast("Unmeasured", values["unmeasured"]),
        ),
        preset=values["preset"],
        prometheus_port=values["prometheus_port"],
        prometheus_host=values["prometheus_host"],
        ledger=values["ledger"],
        ledger_sync=cast("LedgerSync", values["ledger_sync"]),
        audit_keys=values["audit_keys"],
        strict=values["strict"],
        disabled=values["disabled"],
    )
