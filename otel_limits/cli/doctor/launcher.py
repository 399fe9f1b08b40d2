"""Reads the launcher that is examined: what it starts, and which settings it brings along."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from otel_limits.core.secrets import redact_url
from otel_limits.settings.table import PREFIX

SERVERS: Final = frozenset(
    {
        "celery",
        "chainlit",
        "daphne",
        "dramatiq",
        "fastapi",
        "flask",
        "granian",
        "gunicorn",
        "hypercorn",
        "rq",
        "streamlit",
        "uvicorn",
        "uwsgi",
        "waitress-serve",
    }
)
"""They load an application by the name of its module, and take no program in its place."""

INSTRUMENT_OPTION: Final = re.compile(r"--(limits_\w+)(?:=(.*))?", re.DOTALL)
"""How `opentelemetry-instrument` takes a variable of ours: without its OTEL_."""

ASSIGNMENT: Final = re.compile(rf"({PREFIX}\w+)=(.*)", re.DOTALL)
"""How `env` takes one."""

RunOptions = Callable[[Sequence[str]], "tuple[dict[str, str], list[str]]"]
"""Reads the arguments of `otel-limits run`: variables, and the command."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher without the settings that it would bring along."""

    words: tuple[str, ...]
    settings: dict[str, str]
    """Variables that it would set: they are examined, and kept from the runaway."""

    @property
    def shown(self) -> str:
        """Its name; the other words may hold a secret."""
        return PurePath(redact_url(self.words[0])).name

    def has(self, program: str) -> bool:
        """Tell whether a program is among its words."""
        return any(PurePath(word).name == program for word in self.words)


def read_launcher(words: Sequence[str], run_options: RunOptions) -> Launcher:
    """Take the settings out of a launcher."""
    settings: dict[str, str] = {}
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option = INSTRUMENT_OPTION.fullmatch(word)
        assignment = ASSIGNMENT.fullmatch(word)
        # They are taken out of the words: the launcher would set them again over those of the
        # runaway.
        if option is not None:
            value = option[2] if option[2] is not None else (rest.pop(0) if rest else "")
            settings["OTEL_" + option[1].upper()] = value
        elif assignment is not None:
            settings[assignment[1]] = assignment[2]
        elif PurePath(word).name == "otel-limits" and rest[:1] == ["run"]:
            variables, rest = run_options(rest[1:])
            settings |= variables
            # `run` stays, without its options: it is a way of starting a program, and that is
            # examined.
            kept += [word, "run", "--"]
        else:
            kept.append(word)
    return Launcher(tuple(kept), settings)


def server_in(words: Sequence[str]) -> str | None:
    """Find a server in a command that would not run a program of ours."""
    names = (PurePath(word).name for word in words)
    return next((name for name in names if name in SERVERS), None)
