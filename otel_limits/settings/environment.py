"""Reads every setting from the environment, with a sentence per mistake.

Precedence: an argument in code, then the environment, then the preset, then the default. An empty
variable is unset, and only `true` is true, as OpenTelemetry has it.

Names that are almost ours are told: whoever misspells one believes to have set a limit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.core.limits import LIMIT_NAMES, TREE_LIMITS, TREE_PREFIX, Limits
from otel_limits.core.policy import Policy
from otel_limits.core.wording import closest_match
from otel_limits.settings.table import (
    METRICS,
    POLICY_FIELDS,
    PREFIX,
    PRESETS,
    PROCESS_FIELDS,
    SETTINGS,
    Settings,
)
from otel_limits.settings.variables import environment, otlp_protocol

VARIABLES: Final = {setting.variable: setting for setting in SETTINGS}

SUFFIXES: Final = tuple(name.removeprefix(PREFIX) for name in VARIABLES)

PRESET: Final = "preset "
"""What the source of a value begins with that a preset gives."""

NEAR: Final = 0.85
"""How alike a prefix must be; of two that differ in one or two letters more than this is alike."""

LOOKS_LIKE_OURS: Final = re.compile("(?i)lim|otel")
"""Most variables have neither, and are not looked at any further."""

KUBERNETES: Final = re.compile(
    PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes puts into every container beside a Service that is named `otel-limits`
(https://kubernetes.io/docs/tutorials/services/connect-applications-service/#environment-variables
and `pkg/kubelet/envvars/envvars.go`). It is none of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read: the valid settings, where each came from, and what is wrong with the rest."""

    settings: Settings
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    mistakes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Variables of others, as it seems, that may have been meant for us."""


def read(environ: Mapping[str, str] | None = None) -> Reading:
    """Read the settings from the environment.

    A value that is invalid is a sentence among the mistakes and leaves every other one in force.
    """
    environ = environment() if environ is None else environ
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    sources = dict.fromkeys(values, "default")
    mistakes = []
    for setting in SETTINGS:
        # Stripped, as a variable from a file or a mounted secret often ends with a line break.
        text = environ.get(setting.variable, "").strip()
        if not text:
            continue
        try:
            values[setting.name] = setting.kind.of_text(setting.variable, text)
            sources[setting.name] = "environment"
        except Exception as error:  # noqa: BLE001  whatever it is, every other setting is in force
            mistakes.append(_sentence(setting.variable, error))
            sources[setting.name] = "default, the environment's is invalid"
    # Only now, as its default depends on what else was read.
    if values["metrics"] is None:
        values["metrics"] = exporters = default_metrics(environ, values["prometheus_port"])
        if "otlp" in exporters:
            sources["metrics"] = "OTEL_EXPORTER_OTLP_*"
    # A mistake and not a warning: the prefix is ours alone, so that somebody meant a setting.
    mistakes.extend(unknown_variables(environ))
    mistakes.extend(contradictions(values))
    # Last, as a preset only fills what nobody has set.
    for name, value in PRESETS[values["preset"]].items():
        if values[name] is None:
            values[name], sources[name] = value, PRESET + values["preset"]
    return Reading(
        settings=_settings(values, sources),
        values=values,
        sources=sources,
        mistakes=tuple(mistakes),
        warnings=tuple(near_misses(environ)),
    )


def _sentence(name: str, error: Exception) -> str:
    """Say what is wrong; of an error that nobody has foreseen only the kind, not what it quotes."""
    # What no reader raises on purpose may quote the value, which may be a secret.
    if isinstance(error, ValueError):
        return str(error)
    return f"{name} cannot be read ({type(error).__name__})."


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Name the variables that look like ours but are not: a typing error would set no limit."""
    return [
        f"{name} is not a setting of otel-limits. {_advice(name)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in VARIABLES and not KUBERNETES.fullmatch(name)
    ]


def _advice(name: str) -> str:
    near = closest_match(name, VARIABLES)
    return f"Did you mean {near}?" if near else "See: otel-limits check"


def near_misses(environ: Mapping[str, str]) -> list[str]:
    """Ask about variables whose prefix is almost ours, and whose rest is the name of a setting."""
    asked = []
    for name in sorted(environ):
        if LOOKS_LIKE_OURS.search(name) and not name.startswith(PREFIX) and environ[name].strip():
            variable = _variable_near(name)
            if variable is not None:
                # Only asked, as another product may have a name like ours.
                asked.append(
                    f"{name} is not a setting of otel-limits, which begin with {PREFIX}. "
                    f"Did you mean {variable}?"
                )
    return asked


def _variable_near(name: str) -> str | None:
    """Return the variable that a name stands for if what it begins with is a misspelt prefix."""
    words = re.split(r"[^A-Z0-9]+", name.upper().strip("_"))
    for number in (1, 2, 3):  # OTELLIMITS_…, OTEL_LIMIT_…, O_TEL_LIMITS_…
        # More words than three belong to no prefix of ours, however it is misspelt.
        prefix, rest = "_".join(words[:number]), "_".join(words[number:])
        matcher = difflib.SequenceMatcher(None, prefix, PREFIX.rstrip("_"))
        if rest and matcher.ratio() >= NEAR:
            # Both parts have to be near: a rest that is not the name of a setting was meant for
            # another.
            return (
                closest_match(PREFIX + rest, VARIABLES) if closest_match(rest, SUFFIXES) else None
            )
    return None


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Name the settings that cannot both be meant."""
    # A server for metrics that nobody counts would answer every scrape with nothing.
    if values["prometheus_port"] is not None and "prometheus" not in values["metrics"]:
        sentence = (
            f"OTEL_LIMITS_PROMETHEUS_PORT is {values['prometheus_port']}, but OTEL_LIMITS_METRICS "
            "has no prometheus that could be served there. Add it, or unset the port."
        )
        return [sentence]
    return []


def default_metrics(environ: Mapping[str, str], prometheus_port: int | None) -> tuple[str, ...]:
    """Return the ways out of the process where OTEL_LIMITS_METRICS is unset."""
    # Both ways, as an application that serves /metrics itself may export over OTLP as well.
    if prometheus_port is None and otlp_protocol(environ, "metrics") is not None:
        return METRICS
    return ("prometheus",)


def _origins(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, str]:
    """Say of each cap which variable sets it, or would replace that of a preset."""
    caps = (*LIMIT_NAMES, *(TREE_PREFIX + name for name in TREE_LIMITS))
    # With the prefix of trees, as that is what the variable of such a cap has.
    variables = {name: PREFIX + name.upper() for name in caps if values[name] is not None}
    return {
        # The variable is named although it is unset: it is what has to be set to get rid of a
        # preset's cap.
        name: f"{sources[name]}, which {variable} replaces"
        if sources[name].startswith(PRESET)
        else variable
        for name, variable in variables.items()
    }


def _settings(values: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    policy = Policy(
        origins=_origins(values, sources),
        **{name: values[name] for name in POLICY_FIELDS},
        limits=Limits(**{name: values[name] for name in LIMIT_NAMES}),
        tree=Limits(**{name: values[TREE_PREFIX + name] for name in TREE_LIMITS}),
    )
    named = {name: values[setting.name] for name, setting in PROCESS_FIELDS.items()}
    return Settings(policy=policy, **named)
