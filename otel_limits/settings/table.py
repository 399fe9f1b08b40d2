"""The settings: name, kind of value, default and help of every variable and option.

Each setting is declared once, with `setting`: in `Settings` for a process, in `Policy` of
`core/policy.py` if a policy file can set it by agent. Caps come from `LIMITS` of `core/limits.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import MAX_AGENTS
from otel_limits.core.limits import LIMITS, PREFIX, SHARED_LIMITS
from otel_limits.core.policy import Policy
from otel_limits.core.secrets import quote_value
from otel_limits.core.values import (
    BOOLEAN,
    DURATION,
    PATH,
    PORT,
    SECONDS,
    TEXT,
    WHOLE_NUMBER,
    CheckedKind,
    InvalidValueError,
    Kind,
    TextKind,
    choice,
    choices,
    setting,
    split_names,
)
from otel_limits.ledger.options import AUDIT_KEY, LEDGER_SYNCS, OWN_NAMES, LedgerSync
from otel_limits.quotas.stores import MEMORY_URL, require_store_url
from otel_limits.settings.ledgers import LEDGER, LEDGER_GROUP, TIME_ZONE
from otel_limits.settings.variables import AUTHORIZATION

if TYPE_CHECKING:
    from otel_limits.core.comparisons import IsLooser
    from otel_limits.core.secrets import Secret
    from otel_limits.ledger.address import Address


def variable_of(name: str) -> str:
    """Return the name in the environment of a setting such as `max_turns`."""
    return PREFIX + name.upper()


PRESETS: Final[Mapping[str, Mapping[str, int]]] = {
    "none": {},
    "recommended": {
        "max_iterations": 25,
        "max_model_calls": 100,
        "max_identical_tool_calls": 5,
        "max_consecutive_tool_failures": 5,
        "max_consecutive_handoffs": 20,
        # As for one invocation: the work is not worth more because several agents share it.
        "tree_max_model_calls": 100,
    },
}
"""Caps of each preset, named as in the environment."""

METRICS: Final = ("prometheus", "otlp")

NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def _audit_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        # An export has one column per key, and column names must be unique.
        if key in OWN_NAMES:
            raise InvalidValueError(f"The ledger already has a column {key!r}.")
        if not AUDIT_KEY.fullmatch(key):
            raise InvalidValueError(f"{quote_value(key)} cannot be a column.")
    return keys


def _namespace(text: object) -> str:
    # Part of the names of keys, within braces that mean something to a cluster.
    if not isinstance(text, str) or not NAMESPACE.fullmatch(text):
        raise InvalidValueError
    return text


NAMESPACES: Final = CheckedKind[str](
    phrase="up to 64 letters, digits, '.', '-' and '_'", check=_namespace, parse=str
)

AUDIT_KEYS: Final = CheckedKind[tuple[str, ...]](
    phrase="names such as tenant.id, separated by commas", check=_audit_keys, parse=split_names
)


STORE_URL: Final = TextKind(read=require_store_url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a process."""

    policy: Policy = Policy()  # noqa: RUF009  immutable
    policy_path: str | None = setting(
        None,
        PATH,
        "Policy file (YAML): limits, actions, prices and exemptions by agent, model and tool.",
        name="policy",
    )
    """It wins over `policy`."""
    tool_log_dir: str | None = setting(
        None,
        PATH,
        "Directory of the tool log: tool calls with arguments and results, for "
        "post-mortems. Unset: no tool log.",
    )
    tool_log_interval: int = setting(1, WHOLE_NUMBER, "Log every Nth tool call of an invocation.")
    preset: str = setting(
        "none",
        choice(*PRESETS),
        "Limits to start from, e.g. recommended; it sets max_iterations=25, "
        "max_model_calls=100, tree_max_model_calls=100, max_identical_tool_calls=5, "
        "max_consecutive_tool_failures=5 and max_consecutive_handoffs=20.",
    )
    quota_store: str = setting(
        MEMORY_URL,
        STORE_URL,
        "Quota store URL: memory:// (per process), redis://host:port/db, rediss://, "
        "unix://, redis+cluster:// or redis+sentinel://.",
    )
    quota_store_timeout: float = setting(
        2.0,
        SECONDS,
        "Maximum wait for the quota store, in seconds. During an outage no call waits.",
    )
    quota_namespace: str = setting(
        "",
        NAMESPACES,
        "Namespace that separates fleets sharing a quota store, e.g. staging and production.",
    )
    metrics: tuple[str, ...] = setting(
        ("prometheus",),
        choices(*METRICS),
        "Exporters: prometheus, otlp, both (comma-separated) or none. "
        "Unset: prometheus; otlp as well if OTEL_EXPORTER_OTLP_* is set and "
        "OTEL_LIMITS_PROMETHEUS_PORT is not.",
        default=None,
    )
    metrics_max_agents: int = setting(
        MAX_AGENTS,
        WHOLE_NUMBER,
        "Maximum agent and model label values; the rest become _other. Names in the "
        "policy file always have their own. The maximum for tools is five times as high.",
    )
    metrics_created: bool = setting(
        False,
        BOOLEAN,
        "Export _created series (for Prometheus created-timestamp ingestion, "
        "--enable-feature=created-timestamp-zero-ingestion). Without that feature, Prometheus "
        "stores them as additional series.",
    )
    genai_metrics: bool = setting(
        False,
        BOOLEAN,
        "Also emit the OpenTelemetry GenAI metrics for agents "
        "(gen_ai.client.token.usage and others), unless another instrumentation does.",
    )
    prometheus_port: int | None = setting(
        None, PORT, "Serve /metrics on this port. Unset: no server."
    )
    prometheus_host: str = setting("127.0.0.1", TEXT, "Listen address for /metrics.")
    ledger: Address | None = setting(
        None,
        LEDGER,
        "Ledger: a path, sqlite:///PATH, postgresql://… or none. Unset: none, "
        "except in otel-limits run, which uses the user's data directory.",
    )
    ledger_sync: LedgerSync = setting(
        "invocation",
        choice(*LEDGER_SYNCS),
        "When rows become durable: invocation (on return), call (after each model "
        "call), or background (within a second).",
    )
    ledger_group: int | None = setting(
        None, LEDGER_GROUP, "System group allowed to read ledger files. Unset: only their owner."
    )
    ledger_retention: timedelta | None = setting(
        None, DURATION, "Delete finished budget trees older than this, e.g. 90d. Unset: never."
    )
    audit_keys: tuple[str, ...] = setting(
        (), AUDIT_KEYS, "Baggage and trace attributes to record, e.g. tenant.id,user.id."
    )
    time_zone: str = setting(
        "UTC", TIME_ZONE, "Time zone for ledger queries, e.g. Europe/Berlin. Quotas have their own."
    )
    billing_account: str = setting("", TEXT, "Billing account ID in FOCUS exports.")
    sub_account_key: str = setting("tenant.id", TEXT, "Audit key of sub-accounts in FOCUS exports.")
    prometheus_authorization: Secret | None = setting(
        None,
        AUTHORIZATION,
        "Authorization header for Prometheus queries by audit and top, e.g. "
        "Bearer TOKEN. Never shown.",
        is_secret=True,
    )
    strict: bool = setting(
        False,
        BOOLEAN,
        "Exit with status 2 on invalid settings, or if limits cannot be enforced, "
        "instead of logging an error.",
    )
    quiet: bool = setting(False, BOOLEAN, "Suppress startup and exit notices.")
    disabled: bool = setting(False, BOOLEAN, "Turn otel-limits off.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable, which is also a command-line option."""

    name: str
    kind: Kind[Any]
    help: str
    default: Any = None
    is_secret: bool = False
    """It has no option, because every user of a machine can read the command lines of all."""
    is_looser: IsLooser | None = None
    """Compares two values; `None` if it has no effect on limits."""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return variable_of(self.name)

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


def fields_of(owner: type[Policy | Settings]) -> dict[str, Setting]:
    """Return the settings that a class declares, by the name of their field."""
    return {
        each.name: Setting(**{"name": each.name, "default": each.default, **each.metadata})
        for each in dataclasses.fields(owner)
        if each.metadata
    }


POLICY_FIELDS: Final = fields_of(Policy)
PROCESS_FIELDS: Final = fields_of(Settings)

SETTINGS: Final = (
    *(Setting(name=each.name, kind=each.kind, help=each.help) for each in LIMITS.values()),
    *(
        Setting(
            name=f"{shared}_{name}",
            kind=LIMITS[name].kind,
            help=LIMITS[name].help_across(shared),
        )
        for shared, names in SHARED_LIMITS.items()
        for name in names
    ),
    *POLICY_FIELDS.values(),
    *PROCESS_FIELDS.values(),
)
"""Every setting, in the order of help and documentation."""
