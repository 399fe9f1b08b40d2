"""The options of `otel-limits run`: the program gets them as variables, and which were options."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Final

from otel_limits.core.secrets import redact_url

RUN_OPTIONS: Final = "_OPTIONS_OF_OTEL_LIMITS_RUN"
"""Variable with the variables that options have set, and their texts, as JSON."""


def with_options(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with options, which are given by their variables."""
    if not given:
        return dict(environ)
    # A URL with a password is left to its own variable.
    safe = {name: text for name, text in given.items() if redact_url(text) == text}
    return {**environ, **given, RUN_OPTIONS: json.dumps({**_written(environ), **safe})}


def options_in(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the variables that options of `otel-limits run` have set."""
    # Any other text was set by the program, for its child processes.
    return frozenset(name for name, text in _written(environ).items() if environ.get(name) == text)


def _written(environ: Mapping[str, str]) -> dict[str, str]:
    # Another release may have written it, and only names of origins depend on it.
    with contextlib.suppress(TypeError, ValueError):
        return dict(json.loads(environ.get(RUN_OPTIONS, "{}")))
    return {}
