"""The effects of settings on agents, in sentences for `check` and `doctor`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_limits.core.policy import Policy


def unpriced_halts(policies: Mapping[str, Policy]) -> str | None:
    """Return which agents are halted by a call without a price because only cost is limited.

    Args:
        policies: The policies by name or glob; under `""` that of all other agents.
    """
    halted = [
        name for name, each in policies.items() if each.unpriced is None and each.halts_unpriced
    ]
    if not halted:
        return None
    return (
        f"Only limits in USD apply to {agents(halted, policies)}, so a model call without a price "
        "halts them. Add a limit in another unit, e.g. OTEL_LIMITS_MAX_TURNS=30, or set "
        "OTEL_LIMITS_UNPRICED=warn."
    )


def observed_only(policies: Mapping[str, Policy]) -> list[str]:
    """Return the names of the policies that no limit or quota halts."""
    return [
        name
        for name, each in policies.items()
        if each.action == "observe"
        and all(action in (None, "observe") for _, action in each.quotas)
    ]


def agents(names: Collection[str], policies: Mapping[str, Policy]) -> str:
    """Name agents, given as names or globs."""
    named = [repr(name) for name in names if name]
    if "" not in names:
        return f"agents {', '.join(named)}"
    return ", ".join([*named, "all other agents" if len(policies) > 1 else "agents"])
