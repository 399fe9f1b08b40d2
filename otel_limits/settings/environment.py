"""The only reader of the environment: variables → settings, with a sentence per mistake.

Precedence: an argument in code, then the environment, then the preset, then the default. An empty
variable is unset, and only `true` is true, as OpenTelemetry has it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.core.labels import MAX_AGENTS
from otel_limits.core.limits import (
    ACTIONS,
    LIMIT_NAMES,
    LOOP_LIMITS,
    TREE_LIMITS,
    TREE_PREFIX,
    UNMEASURED,
    UNPRICED,
    Action,
    Limits,
    Policy,
    Unmeasured,
    Unpriced,
    require_choice,
    require_seconds,
    require_usd,
)
from otel_limits.ledger.words import LEDGER_SYNCS, OWN_NAMES, LedgerSync
from otel_limits.quotas.stores import MEMORY_URL, require_store_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_limits.ledger.address import Address

PREFIX: Final = "OTEL_LIMITS_"

OTLP_PREFIX: Final = "OTEL_EXPORTER_OTLP_"

PRESETS: Final[Mapping[str, Limits]] = {
    "none": Limits(),
    "recommended": Limits(max_iterations=25, max_identical_tool_calls=5),
}

DEFAULT_POLICY: Final = Policy()

METRICS: Final = ("prometheus", "otlp")

MAX_PORT: Final = 65_535

AUDIT_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,63}")
DEFAULT_OTLP_TIMEOUT_SECONDS: Final = 10.0


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


def count(name: str, text: str) -> int:
    """Parse how many of something there may be.

    Raises:
        ValueError: It is no whole number of 1 or more.
    """
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"{name} must be a whole number of 1 or more, got {text!r}.")


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


def several(*choices: str) -> Callable[[str, str], tuple[str, ...]]:
    """Make a parser for one or more of `choices`, separated by commas; `none` for none of them."""

    def parse(name: str, text: str) -> tuple[str, ...]:
        words = [word.strip() for word in text.lower().split(",")]
        if words == ["none"]:
            return ()
        return tuple(require_choice(name, word, choices) for word in dict.fromkeys(words))

    return parse


def plain(name: str, text: str) -> str:  # noqa: ARG001  the signature of every parser
    """Take any text."""
    return text


def switchable(name: str, text: str) -> int:
    """Parse a cap that 0 switches off.

    Raises:
        ValueError: It is no whole number of 0 or more.
    """
    if text.isascii() and text.isdecimal():
        return int(text)
    raise ValueError(
        f"{name} must be a whole number of 1 or more, or 0 to switch it off, got {text!r}."
    )


def seconds(name: str, text: str) -> float:
    """Parse a duration in seconds.

    Raises:
        ValueError: It is no finite number above 0.
    """
    try:
        return require_seconds(name, float(text))
    except ValueError:
        raise ValueError(f"{name} must be a number of seconds above 0, got {text!r}.") from None


def usd(name: str, text: str) -> Decimal:
    """Parse an amount of money, exactly.

    Raises:
        ValueError: It is no finite amount above 0.
    """
    try:
        return require_usd(name, Decimal(text))
    except (ValueError, ArithmeticError):
        raise ValueError(
            f"{name} must be an amount of USD above 0, such as 0.50, got {text!r}."
        ) from None


def calls_per_tool(name: str, text: str) -> dict[str, int]:
    """Parse `search=20,fetch=5`.

    Raises:
        ValueError: A part is no tool name with a whole number of 1 or more.
    """
    caps = {}
    for part in text.split(","):
        tool, equals, number = part.strip().rpartition("=")
        if not equals or not tool:
            raise ValueError(f"{name} must look like search=20,fetch=5, got {text!r}.")
        caps[tool] = whole_number(f"{name} for tool {tool!r}", number)
    return caps


def fractions(name: str, text: str) -> tuple[float, ...]:
    """Parse `0.5,0.8,0.95`.

    Raises:
        ValueError: A part is no number above 0 and up to 1.
    """
    try:
        parsed = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        parsed = ()
    if not parsed or not all(0 < each <= 1 for each in parsed):
        raise ValueError(
            f"{name} must be fractions above 0 and up to 1, such as 0.5,0.8,0.95, got {text!r}."
        )
    return parsed


def names(name: str, text: str) -> frozenset[str]:  # noqa: ARG001  the signature of every parser
    """Parse `poll_status,wait`."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "max_cost_usd": usd,
    "max_duration_seconds": seconds,
    "max_calls_per_tool": calls_per_tool,
    **dict.fromkeys(LOOP_LIMITS, switchable),
}
"""How a limit is read; a whole number of 1 or more unless told otherwise."""


def _limit_setting(name: str, prefix: str = "", note: str = "") -> Setting:
    text = next(spec for spec in dataclasses.fields(Limits) if spec.name == name).metadata["help"]
    return Setting(
        name=prefix + name,
        parse=PARSERS.get(name, whole_number),
        default=None,
        help=note + text,
    )


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


def audited_ledger(option: str | None) -> Address:
    """The ledger that questions go to: an option's, the environment's, or the user's own.

    Raises:
        ValueError: The option, or the environment, names none that can be used.
    """
    from otel_limits.ledger.address import parse

    text = os.environ.get(PREFIX + "LEDGER", "").strip()
    if option is not None:
        return parse("--ledger", option, data_directory())
    if text and text.lower() != "none":
        return parse(PREFIX + "LEDGER", text, data_directory())
    return parse("The ledger", default_ledger(), data_directory())


def recorded_ledger() -> Address | None:
    """The ledger that commands record to: where questions go, or `None` where there is to be none.

    Raises:
        ValueError: The environment names none that can be used.
    """
    is_off = os.environ.get(PREFIX + "LEDGER", "").strip().lower() == "none"
    return None if is_off else audited_ledger(None)


def ledger_address(name: str, text: str) -> Address | None:
    """Parse the address of a ledger; `none` is no ledger.

    Raises:
        ValueError: It is no address, or the driver of its server is not installed.
    """
    if text.lower() == "none":
        return None
    from otel_limits.ledger.address import parse

    return parse(name, text, data_directory())


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


LIMIT_SETTINGS: Final = tuple(_limit_setting(name) for name in LIMIT_NAMES)
TREE_SETTINGS: Final = tuple(
    _limit_setting(name, TREE_PREFIX, "Over the whole budget tree. ") for name in TREE_LIMITS
)

SETTINGS: Final = (
    *LIMIT_SETTINGS,
    *TREE_SETTINGS,
    Setting(
        name="action",
        parse=choice(*ACTIONS),
        default="halt",
        help="What is done when a limit is reached: observe (go on, but record it), "
        "halt (return with the stop reason), wrap_up (one last model call without tools writes "
        "the answer), raise (halt, then raise from the call) or ask (interrupt for a human).",
    ),
    Setting(
        name="warn_at",
        parse=fractions,
        default=(),
        help="Fractions of a cap at which a warning is given once, such as 0.5,0.8,0.95.",
    ),
    Setting(
        name="tell_model",
        parse=boolean,
        default=False,
        help="Tell the model with each call what is left; never stored in the conversation.",
    ),
    Setting(
        name="nudge_disabled",
        parse=boolean,
        default=False,
        help="Don't tell the model, one repetition before a loop limit, that it repeats itself.",
    ),
    Setting(
        name="exempt_tools",
        parse=names,
        default=frozenset(),
        help="Tools that loop limits don't look at, such as poll_status,wait.",
    ),
    Setting(
        name="unpriced",
        parse=choice(*UNPRICED),
        default="warn",
        help="How a model call without a known price counts against max_cost_usd: warn, or halt.",
    ),
    Setting(
        name="unmeasured",
        parse=choice(*UNMEASURED),
        default="estimate",
        help="How a model call without reported usage counts: estimate its tokens, "
        "ignore them, or halt as if every token limit were reached.",
    ),
    Setting(
        name="policy",
        parse=plain,
        default=None,
        help="Policy file (YAML): limits, actions, prices and exemptions by agent, model and tool.",
    ),
    Setting(
        name="tool_log_dir",
        parse=plain,
        default=None,
        help="Directory of the tool log: tool calls with arguments and results, for post-mortems. "
        "Unset: none is written.",
    ),
    Setting(
        name="tool_log_interval",
        parse=whole_number,
        default=1,
        help="Of every so many tool calls of an invocation, the last is written to the tool log.",
    ),
    Setting(
        name="preset",
        parse=choice(*PRESETS),
        default="none",
        help="Limits to start from; recommended sets max_iterations=25 and "
        "max_identical_tool_calls=5.",
    ),
    Setting(
        name="quota_store",
        parse=require_store_url,
        default=MEMORY_URL,
        help="Where quotas are counted: memory:// (each process by itself), redis://host:port/db, "
        "rediss://, unix://, redis+cluster:// or redis+sentinel://.",
    ),
    Setting(
        name="metrics",
        parse=several(*METRICS),
        default=None,
        help="Ways in which metrics leave the process: prometheus (prometheus_client), "
        "otlp (the OpenTelemetry meter), both with a comma between them, or none. "
        "Unset: prometheus; and otlp too where OTEL_EXPORTER_OTLP_* is set "
        "and OTEL_LIMITS_PROMETHEUS_PORT is not, so that nothing arrives twice.",
    ),
    Setting(
        name="metrics_max_agents",
        parse=count,
        default=MAX_AGENTS,
        help="Agent names that metrics tell apart; the rest is counted as _other. "
        "Twice as many models and five times as many tools are told apart.",
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
        "model call ends (call), or a second later (background).",
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
    policy_path: str | None = None
    """Policy file, which wins over `policy`."""
    tool_log_dir: str | None = None
    tool_log_interval: int = 1
    quota_store: str = MEMORY_URL
    preset: str = "none"
    metrics: tuple[str, ...] = ("prometheus",)
    metrics_max_agents: int = MAX_AGENTS
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
            sources[setting.name] = "default, the environment's is invalid"
    if values["metrics"] is None:
        values["metrics"] = default_metrics(environ, values["prometheus_port"])
    mistakes.extend(unknown_variables(environ))
    mistakes.extend(contradictions(values))
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


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Name the settings that cannot both be meant."""
    if values["prometheus_port"] is not None and "prometheus" not in values["metrics"]:
        return [
            (
                f"OTEL_LIMITS_PROMETHEUS_PORT is {values['prometheus_port']}, but "
                f"OTEL_LIMITS_METRICS has no prometheus that could be served there. "
                f"Add it, or unset the port."
            )
        ]
    return []


def default_metrics(environ: Mapping[str, str], prometheus_port: int | None) -> tuple[str, ...]:
    """Return the ways out of the process where OTEL_LIMITS_METRICS is unset."""
    if prometheus_port is None and otlp_protocol(environ, "metrics") is not None:
        return METRICS
    return ("prometheus",)


def otlp_protocol(environ: Mapping[str, str] | None = None, signal: str = "traces") -> str | None:
    """Return the OTLP protocol for a signal, or `None` when it is not to be exported.

    Args:
        environ: Variables; those of the process unless given.
        signal: `traces`, `metrics` or `logs`. It is exported when OTEL_EXPORTER_OTLP_* is set,
            for all signals or for this one, and OTEL_<SIGNAL>_EXPORTER is not something else.
    """
    environ = os.environ if environ is None else environ
    others = tuple(
        f"{OTLP_PREFIX}{other.upper()}_"
        for other in ("traces", "metrics", "logs")
        if other != signal
    )
    wanted = any(
        name.startswith(OTLP_PREFIX) and not name.startswith(others) and environ[name]
        for name in environ
    )
    exporters = environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    if not wanted or not any(each.strip().startswith("otlp") for each in exporters.split(",")):
        return None
    return (
        environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


def otlp_timeout_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return how long the slowest exporter may take; like the exporters, in seconds."""
    environ = os.environ if environ is None else environ
    texts = [
        environ.get(f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
        or environ.get("OTEL_EXPORTER_OTLP_TIMEOUT")
        for signal in ("TRACES", "METRICS", "LOGS")
    ]
    return max(_seconds(text) for text in texts)


def _seconds(text: str | None) -> float:
    try:
        return float(text or DEFAULT_OTLP_TIMEOUT_SECONDS)
    except ValueError:
        return DEFAULT_OTLP_TIMEOUT_SECONDS


def environment() -> dict[str, str]:
    """Copy the environment, for a program that is about to be started."""
    return dict(os.environ)


def _settings(values: Mapping[str, Any]) -> Settings:
    limits = Limits(**{name: values[name] for name in LIMIT_NAMES})
    tree = Limits(**{name: values[TREE_PREFIX + name] for name in TREE_LIMITS})
    return Settings(
        policy=Policy(
            limits=limits,
            tree=tree,
            action=cast("Action", values["action"]),
            unmeasured=cast("Unmeasured", values["unmeasured"]),
            unpriced=cast("Unpriced", values["unpriced"]),
            warn_at=values["warn_at"],
            tell_model=values["tell_model"],
            nudge=not values["nudge_disabled"],
            exempt_tools=values["exempt_tools"],
        ),
        policy_path=values["policy"],
        tool_log_dir=values["tool_log_dir"],
        tool_log_interval=values["tool_log_interval"],
        quota_store=values["quota_store"],
        preset=values["preset"],
        metrics=values["metrics"],
        metrics_max_agents=values["metrics_max_agents"],
        prometheus_port=values["prometheus_port"],
        prometheus_host=values["prometheus_host"],
        ledger=values["ledger"],
        ledger_sync=cast("LedgerSync", values["ledger_sync"]),
        audit_keys=values["audit_keys"],
        strict=values["strict"],
        disabled=values["disabled"],
    )
