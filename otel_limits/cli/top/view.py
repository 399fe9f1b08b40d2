"""The state of the live view (order, filter, chosen agent) and how keys change it."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from otel_limits.core.labels import MAX_LENGTH, OTHER, WILDCARDS

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, Fleet

Mode = Literal["rows", "filter", "kill", "help"]

PAGE: Final = 10
"""Rows per page up or down."""


@dataclass(frozen=True, slots=True)
class Order:
    """A sort order."""

    title: str
    value: Callable[[AgentRow], Any]
    is_rising: bool = False
    """Whether the lowest value comes first."""


ORDERS: Final[Mapping[str, Order]] = {
    "c": Order("cost", lambda row: row.rates.usd_per_hour or 0),
    "t": Order("tokens", lambda row: row.rates.tokens_per_minute or 0),
    "u": Order("turns", lambda row: row.rates.turns_per_minute or 0),
    "r": Order("running", lambda row: row.in_progress or 0),
    "n": Order("nearest cap", lambda row: row.nearest),
    "h": Order("halts", lambda row: row.halt_count),
    "e": Order("errors", lambda row: row.error_count),
    "a": Order("agent", lambda row: row.agent.casefold(), is_rising=True),
}
"""Sort orders by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the live view."""

    order: str = "c"
    is_reversed: bool = False
    filter: str = ""
    chosen: str | None = None
    """The chosen agent. If it is not shown, the first row is chosen."""
    mode: Mode = "rows"
    typed: str = ""
    """The filter being typed."""
    message: str = ""
    """Result of the last key, until the next one."""

    def rows(self, fleet: Fleet) -> list[AgentRow]:
        """Return the rows that match the filter, sorted."""
        order = ORDERS[self.order]
        pattern = self.typed if self.mode == "filter" else self.filter
        rows = [row for row in fleet.agents if matches(pattern, row.agent)]
        # By name first, so rows with equal values keep their order.
        rows.sort(key=lambda row: row.agent.casefold())
        return sorted(rows, key=order.value, reverse=order.is_rising == self.is_reversed)

    def chosen_row(self, rows: Sequence[AgentRow]) -> AgentRow | None:
        """Return the chosen row."""
        found = [row for row in rows if row.agent == self.chosen]
        return found[0] if found else rows[0] if rows else None


def matches(pattern: str, agent: str) -> bool:
    """Return whether a name matches a glob or contains a text."""
    name, pattern = agent.casefold(), pattern.casefold()
    if any(wildcard in pattern for wildcard in WILDCARDS):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def press(view: View, key: str, fleet: Fleet) -> View | Literal["quit", "kill"]:
    """Return the view after a key, or another action."""
    view = dataclasses.replace(view, message="")
    if view.mode == "filter":
        return type_filter(view, key)
    if view.mode == "help":
        return dataclasses.replace(view, mode="rows")
    if view.mode == "kill":
        after = dataclasses.replace(view, mode="rows", message="Not killed.")
        # Any other key cancels.
        return "kill" if key in ("y", "Y") else after
    if key == "q":
        return "quit"
    return choose(view, key, fleet)


def type_filter(view: View, key: str) -> View:
    """Edit the filter."""
    if key == "enter":
        return dataclasses.replace(view, mode="rows", filter=view.typed)
    if key == "escape":
        return dataclasses.replace(view, mode="rows", filter="", typed="")
    if key == "backspace":
        return dataclasses.replace(view, typed=view.typed[:-1])
    if len(key) == 1 and key.isprintable() and len(view.typed) < MAX_LENGTH:
        return dataclasses.replace(view, typed=view.typed + key)
    return view


def choose(view: View, key: str, fleet: Fleet) -> View:
    """Handle a key that changes order, choice or mode."""
    rows = view.rows(fleet)
    row = view.chosen_row(rows)
    if key in ORDERS:
        # Pressing the same key again reverses the order.
        is_reversed = key == view.order and not view.is_reversed
        return dataclasses.replace(view, order=key, is_reversed=is_reversed)
    if key in STEPS and row is not None:
        index = min(max(rows.index(row) + STEPS[key], 0), len(rows) - 1)
        return dataclasses.replace(view, chosen=rows[index].agent)
    if key == "k" and row is not None:
        refusal = kill_refusal(row.agent)
        # Choose the row explicitly, as rows may be reordered before the confirmation.
        change: dict[str, Any] = {"message": refusal} if refusal else {"mode": "kill"}
        return dataclasses.replace(view, chosen=row.agent, **change)
    changes: dict[str, dict[str, Any]] = {
        "/": {"mode": "filter", "typed": view.filter},
        "escape": {"filter": "", "typed": ""},
        "?": {"mode": "help"},
    }
    return dataclasses.replace(view, **changes.get(key, {}))


STEPS: Final = {
    "up": -1,
    "down": 1,
    "page up": -PAGE,
    "page down": PAGE,
    "home": -(10**6),
    "end": 10**6,
}


def kill_refusal(agent: str) -> str | None:
    """Return why an agent cannot be killed by its name in the metrics, if so."""
    if agent == OTHER:
        return f"{OTHER} groups several agents. Run: otel-limits kill --agent GLOB"
    # Metrics clean and truncate names; a kill is matched against the original name.
    if "\N{REPLACEMENT CHARACTER}" in agent or len(agent) >= MAX_LENGTH:
        return "The name of this agent is truncated in metrics. Run: otel-limits kill --agent GLOB"
    return None
