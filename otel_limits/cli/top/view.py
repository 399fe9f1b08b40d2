"""What somebody looks at: order, filter and the chosen agent, and what each key changes."""

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
"""Rows that the keys for pages go up or down."""


@dataclass(frozen=True, slots=True)
class Order:
    """One way to sort the rows."""

    title: str
    value: Callable[[AgentRow], Any]
    is_rising: bool = False
    """True where the least comes first."""


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
"""By the key that chooses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What somebody looks at."""

    order: str = "c"
    is_reversed: bool = False
    filter: str = ""
    chosen: str | None = None
    """The agent; the first row where it is none of them."""
    mode: Mode = "rows"
    typed: str = ""
    """The filter that is being typed."""
    message: str = ""
    """What came of the last key, until the next one."""

    def rows(self, fleet: Fleet) -> list[AgentRow]:
        """Return the rows that pass the filter, sorted."""
        order = ORDERS[self.order]
        wanted = self.typed if self.mode == "filter" else self.filter
        rows = [row for row in fleet.agents if matches(wanted, row.agent)]
        # By name first, so that rows with equal values do not change places each second.
        rows.sort(key=lambda row: row.agent.casefold())
        return sorted(rows, key=order.value, reverse=order.is_rising == self.is_reversed)

    def chosen_row(self, rows: Sequence[AgentRow]) -> AgentRow | None:
        """Return the row that keys are about."""
        found = [row for row in rows if row.agent == self.chosen]
        # The first row where the chosen one is gone, or is kept out by the filter.
        return found[0] if found else rows[0] if rows else None


def matches(wanted: str, agent: str) -> bool:
    """Tell whether a name has a filter in it, or fits it where it is a glob."""
    name, wanted = agent.casefold(), wanted.casefold()
    if any(wildcard in wanted for wildcard in WILDCARDS):
        return fnmatch.fnmatchcase(name, wanted)
    # Anywhere in it: who looks for "archive" need not know how a name begins.
    return wanted in name


def press(view: View, key: str, fleet: Fleet) -> View | Literal["quit", "kill"]:
    """Return what is looked at after a key, or what else is to be done."""
    view = dataclasses.replace(view, message="")
    if view.mode == "filter":
        return type_filter(view, key)
    if view.mode == "help":
        return dataclasses.replace(view, mode="rows")  # whichever key it is
    if view.mode == "kill":
        after = dataclasses.replace(view, mode="rows", message="Nothing was killed.")
        # Only this key: anything else, a slip of the hand too, kills nothing.
        return "kill" if key in ("y", "Y") else after
    if key == "q":
        return "quit"
    return choose(view, key, fleet)


def type_filter(view: View, key: str) -> View:
    """Take a key of a filter."""
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
    """Take a key that changes what is looked at."""
    rows = view.rows(fleet)
    row = view.chosen_row(rows)
    if key in ORDERS:
        # The same key again turns the order round; another one begins with its own.
        is_reversed = key == view.order and not view.is_reversed
        return dataclasses.replace(view, order=key, is_reversed=is_reversed)
    if key in STEPS and row is not None:
        place = min(max(rows.index(row) + STEPS[key], 0), len(rows) - 1)
        return dataclasses.replace(view, chosen=rows[place].agent)
    if key == "k" and row is not None:
        said = kill_refusal(row.agent)
        # Kept, as another row may be the first one when the answer comes.
        ask: dict[str, Any] = {"message": said} if said else {"mode": "kill"}
        return dataclasses.replace(view, chosen=row.agent, **ask)
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
    """Say why an agent cannot be told to end by the name that the metrics have, if it cannot."""
    if agent == OTHER:
        return f"{OTHER} stands for many agents. Run: otel-limits kill --agent GLOB"
    # What metrics show is cleaned and cut; the pattern of a kill is compared with the real name.
    if "\N{REPLACEMENT CHARACTER}" in agent or len(agent) >= MAX_LENGTH:
        return (
            "Metrics do not have the whole name of this agent. Run: otel-limits kill --agent GLOB"
        )
    return None
