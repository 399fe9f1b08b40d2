"""The limits that an invocation has stored, and where each was set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from otel_limits.audit.answer import Column, Table
from otel_limits.core.limits import EXTENSION, PREFIX, PRESET, RUN
from otel_limits.ledger.rows import IN_FORCE, caps_in

CAPS: Final = (
    Column("limit", "Limit", is_key=True),
    Column("cap", "Cap", is_key=True),
    Column("action", "Action"),
    Column("source", "Source", is_key=True),
    Column("place", "Set at", "sentence"),
    Column("invocations", "Invocations", "count"),
)
"""Columns of `caps_of`, and how many invocations had that cap."""

OF_AGENTS: Final = (Column("agent", "Agent", is_key=True), *CAPS)

Cap: TypeAlias = "tuple[str, str | None, str | None, str | None, str | None]"

NO_LIMITS: Final = "no limits"
NOT_RECORDED: Final = "not recorded"
FILE: Final = re.compile(r".+:\d+")
SET_BY_PRESET: Final = re.compile(rf"{re.escape(PRESET)}(\S+).*")


def limits_table(runs: Iterable[Any]) -> Table:
    """Build a table of the limits of some invocations, those of one agent together."""
    found = Counter[tuple[str, Cap]]()
    for run in runs:
        found.update(
            (run.agent, cap) for cap in caps_of(*(getattr(run, each) for each in IN_FORCE))
        )
    return Table(
        name="limits",
        title="Limits in force",
        columns=OF_AGENTS,
        rows=[(agent, *cap, invocations) for (agent, cap), invocations in found.items()],
        note="By the start of the invocation. Imported invocations have no recorded limits.",
    )


def caps_of(limits: str | None, sources: str | None, action: str | None) -> Iterator[Cap]:
    """Yield limit, cap, action, source and place of each cap that an invocation has stored."""
    if action is None:
        yield NOT_RECORDED, None, None, None, None
        return
    caps, origins = flat(caps_in(limits)), caps_in(sources)
    if not caps:
        yield NO_LIMITS, None, action, None, None
    for name, cap in caps.items():
        yield name, str(cap) if cap else "off", action, *source_of(origins.get(name, ""))


def flat(caps: Mapping[str, Any]) -> dict[str, Any]:
    """Return caps by name, those of single tools by `max_calls_per_tool.search`."""
    return {
        name if tool is None else f"{name}.{tool}": each
        for name, cap in caps.items()
        for tool, each in (cap.items() if isinstance(cap, dict) else [(None, cap)])
    }


def source_of(origin: str) -> tuple[str | None, str | None]:
    """Return the kind of source of a cap, and which one."""
    if not origin:
        return None, None
    if preset := SET_BY_PRESET.fullmatch(origin):
        return "preset", preset[1]
    if origin.startswith(PREFIX):
        return "environment", origin
    if origin.startswith(RUN):
        return "option", origin
    if origin == EXTENSION:
        return "answer", None
    return ("file" if FILE.fullmatch(origin) else "code"), origin
