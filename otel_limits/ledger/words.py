"""What a user says about a ledger: when its rows are durable, and what can be named in it."""

from __future__ import annotations

from typing import Final, Literal

LedgerSync = Literal["invocation", "call", "background"]
LEDGER_SYNCS: Final[tuple[LedgerSync, ...]] = ("invocation", "call", "background")

OWN_NAMES: Final = (
    "agent", "model", "provider", "session", "state",
    "hour", "day", "week", "month",
    "trace", "invocation", "root", "reason", "action", "limit", "tool", "side",
)  # fmt: skip
"""What an auditor can name without choosing it as an audit key."""

OF_CALLS: Final = frozenset({"model", "provider", "state", "side", "tool"})
"""What an invocation can have several of, so that it belongs to no group that is made by them."""

AFTER_TOOLS: Final = "(after tools)"
"""The tools whose results a model call got, which no audit key can be called."""

KEY_PREFIX: Final = "key:"
"""Before the name of an audit key that is called like something else, as in `key:tokens`."""
