"""The changes by which a new version of the policy file loosens limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.comparisons import change
from otel_limits.core.policy import COST
from otel_limits.core.secrets import quote_value

if TYPE_CHECKING:
    from otel_limits.core.policy import Policy
    from otel_limits.quotas.quota import Quota
    from otel_limits.settings.policy.document import Document

USD: Final = "usd"
"""Unit of the quotas that depend on prices."""


def loosened(before: Document, after: Document, base: Policy) -> tuple[str, ...]:
    """Return what is looser in a new version, or may be: by agent, quota and model."""
    names = dict.fromkeys(("", *before.agents, *after.agents))
    old = {name: before.effective(name, base) for name in names}
    new = {name: after.effective(name, base) for name in names}
    return (
        *_of_agents(old, new),
        *dict.fromkeys(_of_quotas(before, after, old, new)),
        *_of_prices(before, after, old),
    )


def _of_agents(old: Mapping[str, Policy], new: Mapping[str, Policy]) -> Iterator[str]:
    """Yield what is looser for agents; once if it is for all of them."""
    agents: dict[str, list[str]] = {}
    for name, policy in new.items():
        for phrase in policy.loosened(old[name]):
            agents.setdefault(phrase, []).append(name)
    for phrase, names in agents.items():
        if len(names) == len(new):
            yield f"all agents: {phrase}"
            continue
        for name in names:
            yield f"{f'agent {quote_value(name)}' if name else 'agents without an entry'}: {phrase}"


def _of_quotas(
    before: Document, after: Document, old: Mapping[str, Policy], new: Mapping[str, Policy]
) -> Iterator[str]:
    for name, entry in before.quotas.items():
        former: Quota = entry.value
        if name not in after.quotas:
            yield f"quota {quote_value(name)}: {former} -> no quota"
            continue
        quota: Quota = after.quotas[name].value
        for phrase in quota.loosened(former):
            yield f"quota {quote_value(name)}: {phrase}"
        # Without an action, a quota has that of each agent.
        if quota.action != former.action and any(
            (quota.action or new[agent].action) == "observe"
            and (former.action or old[agent].action) != "observe"
            for agent in new
        ):
            actions = f"{former.action or 'unset'} -> {quota.action or 'unset'}"
            yield f"quota {quote_value(name)}: action {actions}"


def _of_prices(before: Document, after: Document, old: Mapping[str, Policy]) -> Iterator[str]:
    """Yield prices that count less against limits in USD, if there are any."""
    if not any(entry.value.unit == USD for entry in before.quotas.values()) and not any(
        getattr(caps, COST)
        for policy in old.values()
        for caps in (policy.limits, policy.tree, policy.conversation)
    ):
        return
    for key in dict.fromkeys((*before.written_prices, *after.written_prices)):
        old_price, new_price = (
            document.written_prices[key].value if key in document.written_prices else None
            for document in (before, after)
        )
        yield from change(key, old_price, new_price, _is_cheaper)


def _is_cheaper(old: Any, new: Any) -> bool | None:
    """Compare prices of the file; with those of the price list, there is nothing to compare."""
    if old == new:
        return False
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.keys() != new.keys():
        return None
    differing = [(old[key], new[key]) for key in old if old[key] != new[key]]
    if not all(isinstance(each, int | Decimal) for pair in differing for each in pair):
        return None
    return any(rate < former for former, rate in differing)
