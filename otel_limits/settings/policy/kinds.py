"""What can be written in a policy file, key by key; how it is read is said in `core.values`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from otel_limits.settings.table import SETTINGS, Setting

AGENT_SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: setting
    for setting in SETTINGS
    if setting.name
    in ("action", "warn_at", "tell_model", "nudge_disabled", "unmeasured", "unpriced")
}
"""What can be set for an agent besides its caps; each is named as in the environment."""

SECTION_KEYS: Final = ("limits", "tree", *AGENT_SETTINGS)
"""What can be said about all agents, or about some."""

PRICES: Final[Mapping[str, str]] = {
    "input": "USD per million input tokens.",
    "output": "USD per million output tokens.",
    "cache_read": "USD per million input tokens read from a cache; unset, they cost as input.",
    "cache_write": "USD per million input tokens written to a cache; unset, they cost as input.",
}
REQUIRED_PRICES: Final = ("input", "output")

ROOT: Final[Mapping[str, str]] = {
    "defaults": "What applies to every agent, unless something more specific is said below.",
    "agents": "What applies to the agents whose name fits a glob; the most specific glob wins, "
    "value by value.",
    "models": "Prices of the models whose id fits a glob; the most specific glob wins.",
    "tools": "What applies to the tools whose name fits a glob; the most specific glob wins.",
    "quotas": "Budgets over a time window, shared by many invocations.",
}

EXEMPT_HELP: Final = "Whether loop limits ignore the tool, as befits one that is meant to poll."
