"""Says what is wrong with settings that are each valid, once the policy file is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from otel_limits.core import pricing
from otel_limits.core.pricing import Prices

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits
    from otel_limits.settings.environment import Reading
    from otel_limits.settings.policy import PolicyFile
    from otel_limits.settings.policy.document import Document


def price_mistakes(limits: Iterable[Limits], document: Document) -> list[str]:
    """Say that a limit on cost is asked for where no price can be known.

    That the policy file itself asks for one is a mistake of the file.
    """
    capped = any(each.max_cost_usd is not None for each in limits)
    if not capped or Prices(document.price_list()).available:
        return []
    return [f"max_cost_usd {pricing.MISSING}"]


def policy_mistakes(reading: Reading, policy_file: PolicyFile) -> list[str]:
    """Say what is wrong with the policy file, and with what the environment asks of it."""
    policy = reading.settings.policy
    return [
        *policy_file.mistakes,
        *price_mistakes([policy.limits, policy.tree], policy_file.document),
    ]
