"""The cost of a call that its response states: whether it is the price, and how far it is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.vendors.records import cost_rules, vendors

if TYPE_CHECKING:
    from otel_limits.core.price import Quote
    from otel_limits.vendors.records import CostRule

STATED: Final = "stated"
"""Source of a price that the vendor states; its version is the vendor's name."""
FIRM: Final = frozenset({"policy", "local"})
"""Sources that precede it."""

SPEED: Final = "speed"
"""Anthropic's tier of speed, in addition to its service tier:
https://platform.claude.com/docs/en/build-with-claude/fast-mode."""
SEARCH_SIZE: Final = "search_context_size"
"""Perplexity's, on which its fee depends: https://docs.perplexity.ai/getting-started/pricing."""
HEADER: Final = "x-litellm-response-cost"
"""Header of LiteLLM's proxy, in USD: https://docs.litellm.ai/docs/proxy/response_headers."""
INSTRUMENTATION: Final = "instrumentation"
"""The source of a cost in a span that otel-limits has not written, and its key."""
OWN_COST: Final = "otel_limits.stated_cost_usd"
OWN_COST_BY: Final = "otel_limits.stated_cost_by"
"""Our own attributes of a span: the cost in its response, in digits, and the vendor."""
AS_TEXT: Final = frozenset({HEADER, OWN_COST})
GATEWAY: Final = "litellm_proxy"
"""The source of a cost outside of the fields of the vendor that bills."""

ABSURD: Final = 100
"""A stated cost is refused above this multiple of what the call can cost."""
MAX_DIFFERENCE: Final = Decimal("0.01")
"""A larger difference from the computed price is reported."""

LONGEST: Final = 60
"""Characters of an amount in a text."""

NOT_A_NUMBER: Final = "not a number"
NEGATIVE: Final = "negative"
INCOMPLETE: Final = "without the amount that the maker bills to the customer's own key"
TOO_MUCH: Final = f"more than {ABSURD} times what the call can cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedCost:
    """The cost of one model call in its response."""

    amount: Decimal = NO_COST
    """USD."""
    by: str
    """The vendor that states it."""
    is_bill: bool = True
    """True if it is what the vendor bills; else it is recorded and compared only."""
    refused: str = ""
    """Why the amount cannot be taken."""


def recorded(amount: Decimal, by: object) -> StatedCost:
    """Return a stated cost from the ledger."""
    rule = cost_rules().get(str(by))
    is_bill = rule is not None and rule.is_bill and amount >= 0
    return StatedCost(amount=amount, by=str(by), is_bill=is_bill)


def stated_in(
    billing: Mapping[str, object], at_address: str | None, named: str, client: str
) -> StatedCost | None:
    """Return the cost that a response states, if it does.

    Args:
        billing: The fields of its usage that decide the price.
        at_address: The vendor at the address of the request, if that identifies one.
        named: The vendor that the model's ID names, if it does; else that of the class.
        client: The vendor of the model's class; `litellm` for its library, which calls others.
    """
    if OWN_COST in billing:
        told = _stated(billing[OWN_COST], OWN_COST, GATEWAY)
        return replace(recorded(told.amount, billing.get(OWN_COST_BY)), refused=told.refused)
    rules, library = cost_rules(), vendors().get(client)
    is_library = library is not None and library.drops_usage
    # Elsewhere an ID may be an alias of a gateway, such as `openrouter/x` at LiteLLM's proxy.
    vendor = at_address or (named if is_library else client)
    if (rule := rules.get(vendor)) is not None and rule.field in billing:
        stated = _by_rule(billing, rule, vendor)
        # It may have dropped that the customer's own key was used.
        if is_library and (rule.has_own_key or rule.field) not in billing:
            return replace(stated, by=client, is_bill=False)
        return stated
    fields = {rules[GATEWAY].field: GATEWAY, HEADER: GATEWAY, INSTRUMENTATION: INSTRUMENTATION}
    computed = ((field, by) for field, by in fields.items() if field in billing)
    return next((_stated(billing[each], each, by, is_bill=False) for each, by in computed), None)


def _by_rule(billing: Mapping[str, object], rule: CostRule, vendor: str) -> StatedCost:
    stated = _stated(billing[rule.field], rule.field, vendor, rule.per_usd, is_bill=rule.is_bill)
    if stated.refused or rule.own_key is None or billing.get(rule.has_own_key or "") is not True:
        return stated
    if rule.own_key not in billing:
        return replace(stated, refused=INCOMPLETE)
    more = _stated(billing[rule.own_key], rule.own_key, vendor, rule.per_usd)
    return replace(more, amount=EXACT.add(stated.amount, more.amount))


def _stated(
    value: object, field: str, by: str, per_usd: int = 1, *, is_bill: bool = True
) -> StatedCost:
    amount = _number(value, is_text=field in AS_TEXT)
    if amount is None or amount < 0:
        refused = NOT_A_NUMBER if amount is None else NEGATIVE
        return StatedCost(by=by, is_bill=is_bill, refused=refused)
    return StatedCost(amount=EXACT.divide(amount, per_usd), by=by, is_bill=is_bill)


def _number(value: object, *, is_text: bool) -> Decimal | None:
    """Return an amount; `None` for booleans, NaN, infinities, and a text where none belongs."""
    if isinstance(value, str) and is_text and len(value) <= LONGEST:
        amount = EXACT.create_decimal(value)
    elif isinstance(value, float):
        # The shortest digits of a float are those that the vendor has sent.
        amount = EXACT.create_decimal(float.__repr__(value))
    elif isinstance(value, (int, Decimal)) and not isinstance(value, bool):
        amount = EXACT.create_decimal(value)
    else:
        return None
    return amount if amount.is_finite() else None


def priced_with(computed: Quote, stated: StatedCost, highest: Decimal) -> Quote:
    """Return the price of a call whose response states a cost.

    The policy file comes first, then the vendor that bills, then the price list.

    Args:
        computed: The price by the policy file or the list.
        stated: What the response states.
        highest: The highest amount of one call, in USD.
    """
    bound = computed.charge
    refused = stated.refused
    if not refused and (stated.amount > highest or (bound and stated.amount > ABSURD * bound)):
        refused = TOO_MUCH
    if refused:
        return replace(computed, stated_by=stated.by, stated_refused=refused)
    told = replace(computed, stated=stated.amount, stated_by=stated.by, listed=computed.price)
    if not stated.is_bill or computed.source in FIRM:
        return told
    is_same = computed.price == stated.amount
    return replace(
        told,
        price=stated.amount,
        source=STATED,
        version=stated.by,
        unknown=None,
        at_most=None,
        rates=computed.rates if is_same else None,
    )


def differs(stated: Decimal | None, listed: Decimal | None) -> bool:
    """Return whether a stated cost and a computed price are known, and differ by more than 1%."""
    if stated is None or listed is None:
        return False
    return abs(EXACT.subtract(stated, listed)) > EXACT.multiply(MAX_DIFFERENCE, listed)
