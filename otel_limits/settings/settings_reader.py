"""Reads all settings from the environment, with one sentence per mistake.

As in OpenTelemetry, an empty variable is unset, and only `true` is true.

Misspelled names are reported: their authors believe that a limit is set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from otel_limits.core.errors import ConfigurationError
from otel_limits.core.limits import LIMIT_NAMES, PREFIX, PRESET, RUN, SHARED_LIMITS, Limits
from otel_limits.core.policy import Policy
from otel_limits.core.wording import closest_match, suggestion
from otel_limits.settings.run_options import options_in
from otel_limits.settings.table import (
    METRICS,
    POLICY_FIELDS,
    PRESETS,
    PROCESS_FIELDS,
    SETTINGS,
    Setting,
    Settings,
    variable_of,
)
from otel_limits.settings.variables import environment, long_timeouts, otlp_protocol

VARIABLES: Final = {setting.variable: setting for setting in SETTINGS}

SUFFIXES: Final = tuple(name.removeprefix(PREFIX) for name in VARIABLES)

ENVIRONMENT: Final = "environment"
OPTION: Final = "option"
"""Sources of values that a variable or an option of `otel-limits run` sets."""

DEFAULT: Final = "default"
"""Source of values that neither sets; more follows if one of them is invalid."""

NEAR: Final = 0.85
"""Minimum similarity of a prefix, exceeded if it differs in one or two letters."""

LOOKS_LIKE_OURS: Final = re.compile("(?i)lim|otel")
"""Most variables contain neither and are skipped quickly."""

KUBERNETES: Final = re.compile(
    PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes adds to containers for a Service named `otel-limits`
(https://kubernetes.io/docs/tutorials/services/connect-applications-service/#environment-variables
and `pkg/kubelet/envvars/envvars.go`). They are not settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The valid settings, their sources, and the mistakes in the rest."""

    settings: Settings
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    mistakes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """About variables of other products that may be misspelled settings."""

    @property
    def given(self) -> tuple[str, ...]:
        """The variables and options that set something, as they are written."""
        return tuple(
            self.written(name)
            for name, source in self.sources.items()
            if source in (ENVIRONMENT, OPTION)
        )

    def written(self, name: str) -> str:
        """Return how a setting is written where it is set: as an option or as a variable."""
        setting = VARIABLES[variable_of(name)]
        return setting.flag if self.sources[name] == OPTION else setting.variable


def read_settings(environ: Mapping[str, str] | None = None) -> Reading:
    """Read the settings from the environment.

    Each invalid value is one sentence in `mistakes`; all other values apply.
    """
    environ = environment() if environ is None else environ
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    sources = dict.fromkeys(values, DEFAULT)
    options, mistakes = options_in(environ), []
    for setting in SETTINGS:
        # Stripped, as a variable from a file or a mounted secret often ends with a line break.
        text = environ.get(setting.variable, "").strip()
        source, written = ENVIRONMENT, setting.variable
        if setting.variable in options:
            source, written = OPTION, setting.flag
        elif not text:
            continue
        try:
            values[setting.name] = setting.kind.of_text(written, text)
            sources[setting.name] = source
        except Exception as error:  # noqa: BLE001  all other settings must apply
            # An unexpected error may quote the value, which may be a secret.
            unexpected = f"{written} cannot be read ({type(error).__name__})."
            mistakes.append(str(error) if isinstance(error, ValueError) else unexpected)
            sources[setting.name] = f"{DEFAULT} ({source} value is invalid)"
    # Its default depends on other settings.
    if values["metrics"] is None:
        values["metrics"] = exporters = default_metrics(environ, values["prometheus_port"])
        if "otlp" in exporters:
            sources["metrics"] = "OTEL_EXPORTER_OTLP_*"
    # Mistakes, not warnings: only otel-limits has this prefix, so a setting is meant.
    mistakes.extend(unknown_variables(environ))
    mistakes.extend(contradictions(values))
    # Last, because a preset only sets what is unset.
    for name, value in PRESETS[values["preset"]].items():
        if values[name] is None:
            values[name], sources[name] = value, PRESET + values["preset"]
    return Reading(
        settings=_settings(values, sources),
        values=values,
        sources=sources,
        mistakes=tuple(mistakes),
        warnings=(*near_misses(environ), *long_timeouts(environ)),
    )


def settings_with(*names: str) -> Settings:
    """Read the settings from the environment, for a command that uses those with these names.

    Raises:
        ConfigurationError: One of their values is invalid, or a misspelled variable means one.
    """
    reading = read_settings()
    # The default would apply, and mislead.
    used = re.compile(rf"\b({'|'.join(map(variable_of, names))})\b")
    if wrong := [each for each in reading.mistakes if used.search(each)]:
        raise ConfigurationError(wrong)
    return reading.settings


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Report variables that have our prefix but are not settings, such as misspelled ones."""
    return [
        f"{name} is not a setting of otel-limits. "
        + suggestion(name, VARIABLES, "See: otel-limits check --all")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in VARIABLES and not KUBERNETES.fullmatch(name)
    ]


def near_misses(environ: Mapping[str, str]) -> list[str]:
    """Report variables with a misspelled prefix and the name of a setting."""
    warnings = []
    for name in sorted(environ):
        if LOOKS_LIKE_OURS.search(name) and not name.startswith(PREFIX) and environ[name].strip():
            variable = _variable_near(name)
            if variable is not None:
                # Only a question, because another product may have a similar name.
                warnings.append(
                    f"{name} is not a setting of otel-limits: its variables start with {PREFIX}. "
                    f"Did you mean {variable}?"
                )
    return warnings


def _variable_near(name: str) -> str | None:
    """Return the setting that is meant by a name with a misspelled prefix, or `None`."""
    words = re.split(r"[^A-Z0-9]+", name.upper().strip("_"))
    for number in (1, 2, 3):  # OTELLIMITS_…, OTEL_LIMIT_…, O_TEL_LIMITS_…
        # No misspelling of our prefix has more than three words.
        prefix, rest = "_".join(words[:number]), "_".join(words[number:])
        matcher = difflib.SequenceMatcher(None, prefix, PREFIX.rstrip("_"))
        if rest and matcher.ratio() >= NEAR:
            # Both parts must be similar: otherwise the variable is meant for another product.
            return (
                closest_match(PREFIX + rest, VARIABLES) if closest_match(rest, SUFFIXES) else None
            )
    return None


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Report settings that contradict each other."""
    # A server without metrics would answer every scrape with nothing.
    if values["prometheus_port"] is not None and "prometheus" not in values["metrics"]:
        sentence = (
            f"OTEL_LIMITS_PROMETHEUS_PORT is {values['prometheus_port']}, but OTEL_LIMITS_METRICS "
            "does not include prometheus. Add it, or unset the port."
        )
        return [sentence]
    return []


def default_metrics(environ: Mapping[str, str], prometheus_port: int | None) -> tuple[str, ...]:
    """Return the exporters that are used if OTEL_LIMITS_METRICS is unset."""
    # Both, because an application that serves /metrics itself may also export over OTLP.
    if prometheus_port is None and otlp_protocol(environ, "metrics") is not None:
        return METRICS
    return ("prometheus",)


def _origins(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, str]:
    """Return the variable or option that sets each cap, or that overrides the preset."""
    shared = (f"{what}_{name}" for what, names in SHARED_LIMITS.items() for name in names)
    caps = [name for name in (*LIMIT_NAMES, *shared) if values[name] is not None]
    return {name: _origin(VARIABLES[variable_of(name)], sources[name]) for name in caps}


def _origin(setting: Setting, source: str) -> str:
    if source == OPTION:
        return f"{RUN} {setting.flag}"
    # The variable is named although it is unset, because setting it overrides the preset.
    is_preset = source.startswith(PRESET)
    return f"{source} (override it with {setting.variable})" if is_preset else setting.variable


def _settings(values: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    shared: dict[str, Any] = {
        what: Limits(**{name: values[f"{what}_{name}"] for name in names})
        for what, names in SHARED_LIMITS.items()
    }
    policy = Policy(
        origins=_origins(values, sources),
        **{name: values[name] for name in POLICY_FIELDS},
        limits=Limits(**{name: values[name] for name in LIMIT_NAMES}),
        **shared,
    )
    named = {name: values[setting.name] for name, setting in PROCESS_FIELDS.items()}
    return Settings(policy=policy, **named)
