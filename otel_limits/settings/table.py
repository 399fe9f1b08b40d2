"""The table of settings: name, kind of value, default and help of every variable and option."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import MAX_AGENTS
from otel_limits.core.limits import LIMITS, TREE_LIMITS, TREE_PREFIX, Limit, Limits
from otel_limits.core.policy import ACTION, UNMEASURED_CALLS, UNPRICED_CALLS, Policy
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import (
    BOOLEAN,
    DURATION,
    FRACTIONS,
    NAMES,
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
    split_names,
)
from otel_limits.ledger.words import LEDGER_SYNCS, OWN_NAMES, LedgerSync
from otel_limits.quotas.stores import MEMORY_URL, require_store_url
from otel_limits.settings.credentials import AUTHORIZATION
from otel_limits.settings.ledgers import LEDGER, LEDGER_GROUP, TIME_ZONE

if TYPE_CHECKING:
    from otel_limits.core.secrets import Secret
    from otel_limits.ledger.address import Address

PREFIX: Final = "OTEL_LIMITS_"

PRESETS: Final[Mapping[str, Limits]] = {
    "none": Limits(),
    "recommended": Limits(max_iterations=25, max_identical_tool_calls=5, max_model_calls=100),
}

METRICS: Final = ("prometheus", "otlp")

# What baggage and attribute names are made of by custom, and nothing that SQL or a CSV file would
# have to quote.
NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

AUDIT_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set for a process."""

    policy: Policy = Policy()  # noqa: RUF009  it cannot be changed
    policy_path: str | None = None
    """Policy file, which wins over `policy`."""
    tool_log_dir: str | None = None
    tool_log_interval: int = 1
    quota_store: str = MEMORY_URL
    quota_store_timeout: float = 2.0
    quota_namespace: str = ""
    preset: str = "none"
    metrics: tuple[str, ...] = ("prometheus",)
    metrics_max_agents: int = MAX_AGENTS
    metrics_created: bool = False
    genai_metrics: bool = False
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"
    ledger: Address | None = None
    ledger_sync: LedgerSync = "invocation"
    ledger_group: int | None = None
    ledger_retention: timedelta | None = None
    audit_keys: tuple[str, ...] = ()
    time_zone: str = "UTC"
    prometheus_authorization: Secret | None = None
    strict: bool = False
    quiet: bool = False
    disabled: bool = False


DEFAULTS: Final = {
    **{
        each.name: each.default
        for each in (*dataclasses.fields(Policy), *dataclasses.fields(Settings))
    },
    "nudge_disabled": False,
    "policy": None,  # the path of a file, not what applies without one
    "metrics": None,  # depends on other settings
}
"""Of the settings that are fields, under the same name; a cap is unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable of the environment."""

    name: str
    kind: Kind[Any]
    help: str
    is_secret: bool = False
    """It has no option: every user of a machine can read the command lines of all."""

    @property
    def default(self) -> Any:
        """What it is where nothing sets it."""
        return DEFAULTS.get(self.name)

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


def _audit_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        # An export has one column for each: two of one name could not be told apart.
        if key in OWN_NAMES:
            raise InvalidValueError(f"The ledger has a column {key!r} already.")
        if not AUDIT_KEY.fullmatch(key):
            raise InvalidValueError(f"{redact_url(key)!r} cannot be a column.")
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


def _limit_setting(limit: Limit, prefix: str = "", note: str = "") -> Setting:
    return Setting(name=prefix + limit.name, kind=limit.kind, help=note + limit.help)


SETTINGS: Final = (
    *(_limit_setting(limit) for limit in LIMITS.values()),
    *(
        _limit_setting(LIMITS[name], TREE_PREFIX, "Over the whole budget tree. ")
        for name in TREE_LIMITS
    ),
    Setting(
        name="action",
        kind=ACTION,
        help="What is done when a limit is reached: observe (go on, but record it), "
        "halt (return with the stop reason), wrap_up (one last model call without tools writes "
        "the answer), raise (halt, then raise from the call) or ask (interrupt for a human).",
    ),
    Setting(
        name="warn_at",
        kind=FRACTIONS,
        help="Fractions of a cap at which a warning is given once, as 0.5,0.8 "
        "(in a file [0.5, 0.8]).",
    ),
    Setting(
        name="budget_hints",
        kind=BOOLEAN,
        help="Tell the model with each call what is left; never stored in the conversation.",
    ),
    Setting(
        name="nudge_disabled",
        kind=BOOLEAN,
        help="Don't tell the model, one repetition before a loop limit, that it repeats itself.",
    ),
    Setting(
        name="exempt_tools",
        kind=NAMES,
        help="Tools that loop limits don't look at, such as poll_status,wait.",
    ),
    Setting(
        name="unpriced",
        kind=UNPRICED_CALLS,
        help="How a model call without a known price counts against max_cost_usd: warn, or halt.",
    ),
    Setting(
        name="unmeasured",
        kind=UNMEASURED_CALLS,
        help="How a model call without reported usage counts: estimate its tokens, "
        "ignore them, or halt as if every token limit were reached.",
    ),
    Setting(
        name="policy",
        kind=TEXT,
        help="Policy file (YAML): limits, actions, prices and exemptions by agent, model and tool.",
    ),
    Setting(
        name="tool_log_dir",
        kind=TEXT,
        help="Directory of the tool log: tool calls with arguments and results, for post-mortems. "
        "Unset: none is written.",
    ),
    Setting(
        name="tool_log_interval",
        kind=WHOLE_NUMBER,
        help="Of every so many tool calls of an invocation, the last is written to the tool log.",
    ),
    Setting(
        name="preset",
        kind=choice(*PRESETS),
        help="Limits to start from; recommended sets max_iterations=25, "
        "max_identical_tool_calls=5 and max_model_calls=100.",
    ),
    Setting(
        name="quota_store",
        kind=STORE_URL,
        help="Where quotas are counted: memory:// (each process by itself), redis://host:port/db, "
        "rediss://, unix://, redis+cluster:// or redis+sentinel://.",
    ),
    Setting(
        name="quota_store_timeout",
        kind=SECONDS,
        help="Seconds that a model call waits for the quota store at most. "
        "While the store is known to be away, no call waits.",
    ),
    Setting(
        name="quota_namespace",
        kind=NAMESPACES,
        help="Keeps fleets on one quota store apart, such as staging and production: counts, "
        "grants and kills of one are not those of another.",
    ),
    Setting(
        name="metrics",
        kind=choices(*METRICS),
        help="Ways in which metrics leave the process: prometheus (prometheus_client), "
        "otlp (the OpenTelemetry meter), both with a comma between them, or none. "
        "Unset: prometheus; and otlp too where OTEL_EXPORTER_OTLP_* is set "
        "and OTEL_LIMITS_PROMETHEUS_PORT is not, so that nothing arrives twice.",
    ),
    Setting(
        name="metrics_max_agents",
        kind=WHOLE_NUMBER,
        help="Names of agents, and of models, that metrics tell apart beside those that the policy "
        "file gives; the rest is counted as _other. Five times as many tools are told apart.",
    ),
    Setting(
        name="metrics_created",
        kind=BOOLEAN,
        help="Tell in OpenMetrics since when each counter counts (its _created series), for a "
        "Prometheus 3 with --enable-feature=created-timestamp-zero-ingestion. Any other one keeps "
        "them as series of their own, twice as many as before.",
    ),
    Setting(
        name="genai_metrics",
        kind=BOOLEAN,
        help="Emit the metrics of OpenTelemetry's GenAI conventions for agents as well "
        "(gen_ai.client.token.usage and others), where no other instrumentation does.",
    ),
    Setting(
        name="prometheus_port",
        kind=PORT,
        help="Serve /metrics on this port. Unset: no server.",
    ),
    Setting(
        name="prometheus_host",
        kind=TEXT,
        help="Address that /metrics is served on; loopback unless told otherwise.",
    ),
    Setting(
        name="ledger",
        kind=LEDGER,
        help="Where every model call is recorded: a path, sqlite:///PATH or postgresql://…; "
        "none for no ledger. Unset: none, except in otel-limits run, which keeps one in the "
        "user's data directory.",
    ),
    Setting(
        name="ledger_sync",
        kind=choice(*LEDGER_SYNCS),
        help="When recorded rows are durable: when an invocation returns (invocation), when each "
        "model call ends (call), or a second later (background).",
    ),
    Setting(
        name="ledger_group",
        kind=LEDGER_GROUP,
        help="Group of users who may read the files of the ledger, besides their owner. "
        "Unset: nobody.",
    ),
    Setting(
        name="ledger_retention",
        kind=DURATION,
        help="Age at which budget trees that have ended are deleted from the ledger, in the "
        "background, such as 90d. Unset: never.",
    ),
    Setting(
        name="audit_keys",
        kind=AUDIT_KEYS,
        help="Baggage entries and agent trace attributes that become columns of the ledger, "
        "separated by commas, such as tenant.id,user.id.",
    ),
    Setting(
        name="time_zone",
        kind=TIME_ZONE,
        help="Time zone of the days, weeks, months and times in questions to the ledger, such as "
        "Europe/Berlin. Quotas have a time zone of their own.",
    ),
    Setting(
        name="prometheus_authorization",
        kind=AUTHORIZATION,
        help="What follows Authorization: in requests to a Prometheus that `audit`, `top` or "
        "`dashboards preview` asks, such as Bearer TOKEN. It is never shown.",
        is_secret=True,
    ),
    Setting(
        name="strict",
        kind=BOOLEAN,
        help="End the process with status 2 when a setting is invalid or no limit can be in force, "
        "instead of logging it.",
    ),
    Setting(
        name="quiet",
        kind=BOOLEAN,
        help="Don't say at the first call of an agent what limits it, nor at the exit of a program "
        "under otel-limits run that it called no agent.",
    ),
    Setting(
        name="disabled",
        kind=BOOLEAN,
        help="Switch otel-limits off altogether.",
    ),
)
"""Every variable; the documentation's table and the command line's flags are made from this."""


def policy_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name as `Policy` does what is set besides caps; the others are settings of the process."""
    names = {field.name for field in dataclasses.fields(Policy)}
    named = {name: value for name, value in values.items() if name in names}
    if "nudge_disabled" in values:
        named["nudge"] = not values["nudge_disabled"]
    return named
