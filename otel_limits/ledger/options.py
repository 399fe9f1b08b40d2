"""Values of options, which the command line needs without importing the database.

They are when rows become durable, and which properties a query can name.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

LedgerSync = Literal["invocation", "call", "background"]
LEDGER_SYNCS: Final[tuple[LedgerSync, ...]] = ("invocation", "call", "background")

OWN_NAMES: Final = (
    "agent", "model", "provider", "session", "conversation", "state",
    "hour", "day", "week", "month",
    "trace", "invocation", "root", "task", "reason", "action", "limit", "tool", "side",
)  # fmt: skip
"""Properties that need not be chosen as audit keys."""

OF_CALLS: Final = frozenset({"model", "provider", "state", "side", "tool"})
"""Properties of which an invocation can have several, so it belongs to no single group of them."""

AFTER_TOOLS: Final = "(after tools)"
"""Tools whose results a model call received; no audit key can have this name."""

# The usual characters of baggage and attribute names, none of which SQL or CSV has to quote.
AUDIT_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,63}")
"""A name that is valid as an audit key."""

KEY_PREFIX: Final = "key:"
"""Prefix of an audit key with the name of another property, e.g. `key:tokens`."""


class Condition(NamedTuple):
    """A property or audit key, and the value that its rows must have, or must not have."""

    name: str
    value: str
    """`*` matches any characters; an empty value matches rows without one."""
    is_excluded: bool = False

    def __str__(self) -> str:
        """Return it as `about` shows it."""
        value = self.value or "(none)"
        return f"{self.name} {'!=' if self.is_excluded else '='} {value}"
