"""Reads every setting from the environment, with a sentence per mistake.

Precedence: an argument in code, then the environment, then the preset, then the default. An empty
variable is unset, and only `true` is true, as OpenTelemetry has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from otel_limits.core.limits import LIMIT_NAMES, TREE_LIMITS, TREE_PREFIX, Limits
from otel_limits.core.policy import Policy
from otel_limits.settings.table import METRICS, PREFIX, PRESETS, SETTINGS, Settings, policy_fields
from otel_limits.settings.variables import environment, otlp_protocol


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
    environ = environment() if environ is None else environ
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    sources = dict.fromkeys(values, "default")
    mistakes = []
    for setting in SETTINGS:
        text = environ.get(setting.variable, "").strip()
        if not text:
            continue
        try:
            values[setting.name] = setting.kind.of_text(setting.variable, text)
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
    """Name the variables that look like ours but are not: a typing error would set no limit."""
    known = {setting.variable for setting in SETTINGS}
    return [
        f"{name} is not a setting of otel-limits. See: otel-limits check"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Name the settings that cannot both be meant."""
    if values["prometheus_port"] is not None and "prometheus" not in values["metrics"]:
        sentence = (
            f"OTEL_LIMITS_PROMETHEUS_PORT is {values['prometheus_port']}, but OTEL_LIMITS_METRICS "
            "has no prometheus that could be served there. Add it, or unset the port."
        )
        return [sentence]
    return []


def default_metrics(environ: Mapping[str, str], prometheus_port: int | None) -> tuple[str, ...]:
    """Return the ways out of the process where OTEL_LIMITS_METRICS is unset."""
    if prometheus_port is None and otlp_protocol(environ, "metrics") is not None:
        return METRICS
    return ("prometheus",)


def _settings(values: Mapping[str, Any]) -> Settings:
    policy = Policy(
        **policy_fields(values),
        limits=Limits(**{name: values[name] for name in LIMIT_NAMES}),
        tree=Limits(**{name: values[TREE_PREFIX + name] for name in TREE_LIMITS}),
    )
    # a field is named as its setting, except for the path of the policy file
    fields = {field.name for field in dataclasses.fields(Settings)}
    named = {name: value for name, value in values.items() if name in fields}
    return Settings(**named | {"policy": policy, "policy_path": values["policy"]})
