"""Option values: when rows become durable, and which properties a query can name."""

from __future__ import annotations

from typing import Final, Literal

LedgerSync = Literal["invocation", "call", "background"]
LEDGER_SYNCS: Final[tuple[LedgerSync, ...]] = ("invocation", "call", "background")

OWN_NAMES: Final = (
    "agent", "model", "provider", "session", "state",
    "hour", "day", "week", "month",
    "trace", "invocation", "root", "reason", "action", "limit", "tool", "side",
)  # fmt: skip
"""Properties that need not be chosen as audit keys."""

OF_CALLS: Final = frozenset({"model", "provider", "state", "side", "tool"})
"""Properties of which an invocation can have several, so it belongs to no single group of them."""

AFTER_TOOLS: Final = "(after tools)"
"""Tools whose results a model call received; no audit key can have this name."""

KEY_PREFIX: Final = "key:"
"""Prefix of an audit key with the name of another property, e.g. `key:tokens`."""
