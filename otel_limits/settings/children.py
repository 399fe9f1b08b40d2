"""The environment that child processes inherit: where they load otel-limits, and their limits.

`otel_limits.enable()` writes it, and a child process enables itself from it as soon as it imports a
framework. A child started by fork has the limits of its parent anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from otel_limits.core.limits import PREFIX, SHARED_LIMITS, Limits
from otel_limits.core.policy import NO_OVERRIDES, Overrides
from otel_limits.core.secrets import redact_url, redact_value
from otel_limits.settings.table import variable_of
from otel_limits.settings.variables import environment, set_variable, variable

ON_PATH: Final = Path(__file__).parents[1] / "startup" / "on_path"
"""Directory of the `sitecustomize` that Python imports at startup."""

MARKER: Final = "_ENABLED_BY_OTEL_LIMITS"
"""Variable with the arguments of `enable()` in the parent, as JSON."""

RUN: Final = "_RUN_BY_OTEL_LIMITS"
"""Variable with the ID of the process that `otel-limits run` became, read by `sitecustomize`."""

HANDED: Final = "_OTEL_LIMITS_FRAMEWORKS"
"""Variable with the frameworks of other distributions, so that no process has to look for them."""

OFFERED: Final = "_OTEL_LIMITS_RAN_OFFERED"
"""Variable with the path of a note that the process which `otel-limits run` became may use. Only a
Python does, which removes it: behind a shell, nothing would."""

NOTE: Final = "_OTEL_LIMITS_RAN"
"""Variable with a file that a child of `otel-limits run` creates when it has called an agent."""

PLACES: Final = tuple(map(variable_of, ("policy", "quota_store", "quota_namespace")))
"""Variables that children need even if the parent changes them, or its directory, afterwards."""

SINGLE: Final = ("action", "halt_message")
"""Arguments of `enable()` with one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """The arguments of `enable()` that a child process inherits from its parent."""

    own: Overrides = NO_OVERRIDES
    observers: int = 0
    """Number of the parent's observers, which a child does not have."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of the child, with the places of its policy and its quotas."""


def obstacle_of_children() -> str | None:
    """Return why Python would not load otel-limits in child processes, or `None` if it would."""
    if getattr(sys, "frozen", False) or not ON_PATH.is_dir():
        return "otel-limits is part of a frozen program or an archive"
    if sys.flags.no_site:
        return "Python runs with -S"
    if sys.flags.ignore_environment:
        return "Python runs with -I or -E, which child processes inherit"
    return None


def has_fork_server() -> bool:
    """Return whether `multiprocessing` has a fork server, whose environment children inherit."""
    # There is no public way to ask.
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return getattr(server, "_forkserver_pid", None) is not None


def path_with_hook(path: str | None) -> str:
    """Return PYTHONPATH with the directory of our `sitecustomize`."""
    entries = path.split(os.pathsep) if path else []
    # First, because Python imports only one `sitecustomize`; ours then imports the next one.
    return os.pathsep.join([str(ON_PATH), *(each for each in entries if each != str(ON_PATH))])


def environment_for_run(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with variables that enable otel-limits at startup."""
    # `run` replaces this process, whose ID the program keeps; its child processes have others and
    # print no notice at exit.
    by_run = {"PYTHONPATH": path_with_hook(environ.get("PYTHONPATH")), RUN: str(os.getpid())}
    return {**environ, **by_run}


class ChildEnvironment:
    """Writes what children inherit into the environment of this process, and restores it."""

    def __init__(self) -> None:
        """Start without changes."""
        self._before: dict[str, str | None] = {}
        self._written: dict[str, str] = {}

    @property
    def is_written(self) -> bool:
        """True while children inherit the arguments of `enable()`."""
        return bool(self._written)

    def write(self, own: Overrides, observers: int, handed: str) -> None:
        """Let later children limit their agents with these arguments of `enable()`.

        Args:
            own: The arguments.
            observers: The number of observers, which children do not have.
            handed: The frameworks of other distributions.
        """
        content = {
            "limits": dict(own.limits.items()),
            **{name: dict(getattr(own, name).items()) for name in SHARED_LIMITS},
            **{name: getattr(own, name) for name in SINGLE},
            "origin": own.origin,
            "observers": observers,
            "places": _places(),
            # To recognize variables that are set for a child alone.
            "seen": _seen(own),
        }
        written = {
            MARKER: json.dumps(content, default=_as_json),
            "PYTHONPATH": path_with_hook(variable("PYTHONPATH")),
            HANDED: handed,
        }
        for name, value in written.items():
            before = variable(name)
            if name not in self._written or before != self._written[name]:
                self._before[name] = before
            set_variable(name, value)
        self._written = written

    def restore(self) -> None:
        """Undo `write`, except for what the application has changed since."""
        for name, text in self._written.items():
            if variable(name) == text:
                set_variable(name, self._before[name])
        self._written = {}


CHILD_ENVIRONMENT: Final = ChildEnvironment()
"""The changes in this process."""


def inherited() -> Inherited | None:
    """Return what this process inherits from `enable()` in its parent, if anything.

    Variables of this process override it, unless the parent had the same when it called `enable()`,
    where arguments override variables.

    Raises:
        ValueError: It was written by another release, and cannot be read.
    """
    environ = environment()
    text = environ.get(MARKER)
    if text is None:
        return None
    try:
        content = json.loads(text)
        seen = content["seen"]
        own = {
            name: value
            for name, value in environ.items()
            if name.startswith(PREFIX) and value.strip() and value != seen.get(name)
        }
        singles = {name: content[name] for name in SINGLE if variable_of(name) not in own}
        shared: dict[str, Any] = {
            name: _without_own(content[name], own, f"{name}_") for name in SHARED_LIMITS
        }
        return Inherited(
            own=Overrides(
                limits=_without_own(content["limits"], own, ""),
                **shared,
                origin=content["origin"],
                **singles,
            ),
            observers=content["observers"],
            variables={**environ, **content["places"], **own},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The limits of the parent process cannot be read ({redact_value(repr(error))})."
        ) from None


def _without_own(caps: Mapping[str, Any], own: Mapping[str, str], prefix: str) -> Limits:
    """Return the inherited caps that the child's own variables do not set."""
    return Limits(
        **{name: cap for name, cap in caps.items() if variable_of(prefix + name) not in own}
    )


def _places() -> dict[str, str]:
    """Return where policy and quotas are, without secrets."""
    found = {name: (variable(name) or "").strip() for name in PLACES}
    policy = variable_of("policy")
    if found[policy]:
        found[policy] = str(Path(found[policy]).absolute())
    # A URL with a password is left to the environment, where it is already.
    return {name: text for name, text in found.items() if text and redact_url(text) == text}


def _seen(own: Overrides) -> dict[str, str]:
    """Return this process's variables for everything that children inherit."""
    names = (
        *(variable_of(name) for name, _ in own.limits.items()),
        *(
            variable_of(f"{shared}_{name}")
            for shared in SHARED_LIMITS
            for name, _ in getattr(own, shared).items()
        ),
        *map(variable_of, SINGLE),
        *PLACES,
    )
    environ = environment()
    texts = {name: environ[name] for name in names if name in environ}
    return {name: text for name, text in texts.items() if redact_url(text) == text}


def _as_json(value: object) -> object:
    """Return an exact amount as JSON has it, and a mapping of tools as an object."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.100} cannot be inherited")


def note_agent() -> None:
    """Note for the process that `otel-limits run` became that an agent was limited in a child."""
    note = variable(NOTE)
    if note and variable(RUN) != str(os.getpid()):
        with contextlib.suppress(OSError):
            Path(note).touch(mode=0o600)
