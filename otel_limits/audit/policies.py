"""The question `policies`: limits in force, where they were set, versions of policy files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import AuditQuery, Question
from otel_limits.audit.sums import property_of
from otel_limits.core.limits import EXTENSION, PREFIX, PRESET, RUN, setting_of
from otel_limits.ledger.rows import IN_FORCE, caps_in

# --- limits of an invocation ----------------------------------------------------------------------

CAPS: Final = (
    Column("limit", "Limit", is_key=True),
    Column("cap", "Cap", is_key=True),
    Column("action", "Action"),
    Column("source", "Source", is_key=True),
    Column("place", "Set at", "sentence", is_key=True),
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
        note="Limits as they were when an invocation started. Imported invocations have no "
        "recorded limits.",
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
    if origin.startswith(EXTENSION):
        return "answer", setting_of(origin) or None
    return ("file" if FILE.fullmatch(origin) else "code"), origin


# --- the question ---------------------------------------------------------------------------------

LIMITS: Final = (
    Column("first_day", "First day", "date", is_key=True),
    Column("last_day", "Last day", "date", is_key=True),
    *OF_AGENTS,
)

VERSIONS: Final = (
    Column("at", "First read", "time", is_key=True),
    Column("host", "Host", is_key=True),
    Column("path", "File", "sentence"),
    Column("owner", "Owner"),
    Column("modified", "Modified", "time"),
    Column("digest", "SHA-256", "id"),
    Column("accepted", "Accepted", is_key=True),
    Column("loosened", "Loosened", "sentence", is_key=True),
)


def policies(inquiry: AuditQuery) -> Answer:
    """Answer which limits were in force, and which versions of policy files were read."""
    from otel_limits.ledger import queries

    inquiry.require_known()
    connection, selection = inquiry.connection, inquiry.selection
    days: dict[str, dict[str, Counter[Cap]]] = {}
    for keys, (*stored, invocations) in queries.limits_in_force(connection, selection):
        day = property_of(keys, "day", selection.zone)
        found = days.setdefault(keys["agent"], {}).setdefault(day, Counter())
        for cap in caps_of(*stored):
            found[cap] += invocations
    rows = [
        (*period, agent, *cap, invocations)
        for agent, of_agent in days.items()
        for period, cap, invocations in periods(of_agent)
    ]
    limits = Table(
        name="limits",
        title="Limits in force",
        columns=LIMITS,
        # As text, since a value may be missing.
        rows=sorted(rows, key=lambda row: (row[2], *map(str, row))),
        note="Limits as they were when an invocation started, from the first to the last such day. "
        "Imported invocations have no recorded limits. Quotas are in `otel-limits audit budget`.",
    )
    versions = versions_table(queries.policy_versions(connection, selection))
    title = "Policies"
    return Answer(question="policies", title=title, about=inquiry.about, tables=[limits, versions])


def periods(days: Mapping[str, Counter[Cap]]) -> Iterator[tuple[tuple[str, str], Cap, int]]:
    """Yield first and last day, cap and number of invocations of each period of an agent.

    A period ends before a day on which the agent ran without the cap.
    """
    current: dict[Cap, tuple[str, str, int]] = {}
    for day in sorted(days):
        for cap in [cap for cap in current if cap not in days[day]]:
            first, last, invocations = current.pop(cap)
            yield (first, last), cap, invocations
        for cap, number in days[day].items():
            first, _, invocations = current.get(cap, (day, day, 0))
            current[cap] = first, day, invocations + number
    for cap, (first, last, invocations) in current.items():
        yield (first, last), cap, invocations


def versions_table(found: Iterable[Any]) -> Table:
    """Build a table with one row per version and host."""
    versions: dict[tuple[Any, ...], tuple[int, str | None]] = {}
    for row in found:
        key = (row.host, row.path, row.owner, row.modified_us, row.digest, bool(row.accepted))
        # Its processes may have read it at their start, or in place of an earlier version.
        at, loosened = versions.get(key, (row.at_us, None))
        versions[key] = at, loosened or loosened_by(row.loosened)
    return Table(
        name="versions",
        title="Versions of the policy file",
        columns=VERSIONS,
        rows=[
            (at, *key[:-1], "yes" if key[-1] else "no", loosened)
            for key, (at, loosened) in versions.items()
        ],
        note="Owner is the owner of the file; who edited it is not known. A "
        "version is recorded once an invocation follows. Loosened is unknown if no process had an "
        "earlier version to compare with.",
    )


def loosened_by(text: str | None) -> str | None:
    """Describe what a version loosened; `None` if it was compared with none."""
    return None if text is None else "; ".join(json.loads(text)) or "nothing"


POLICIES: Final = Question(
    name="policies",
    help="List limits in force with their sources, and versions of policy files.",
    answer=policies,
    tables={"limits": LIMITS, "versions": VERSIONS},
)
