"""The price of a model, the cost of one call, and the cost that its response states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Final

from otel_limits.core.usage import EXACT, NO_COST, Unplaced, Usage
from otel_limits.core.values import FEE, PRICE, WHOLE_NUMBER
from otel_limits.vendors.records import cost_rules, vendors

if TYPE_CHECKING:
    from otel_limits.vendors.records import CostRule


PER_MILLION: Final = -6
"""Power of ten from the price of a million tokens to the price of one."""

PER_TOKEN: Final = ("input", "output", "cache_read", "cache_write", "cache_write_1h")
PER_AUDIO_TOKEN: Final = ("input_audio", "output_audio")
PER_ITEM: Final = ("per_request", "web_search")
"""Rates in USD per item rather than per million."""
TIERED: Final = (*PER_TOKEN, *PER_AUDIO_TOKEN)
"""Rates that can be higher for long prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTier:
    """The rates for prompts above a size; unset rates stay the same.

    Raises:
        ValueError: `above` is not a number of tokens, or a rate is invalid.
    """

    above: int
    """Input tokens of the whole call, including cached ones."""
    input: Decimal | None = None
    output: Decimal | None = None
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_1h: Decimal | None = None
    input_audio: Decimal | None = None
    output_audio: Decimal | None = None

    def __post_init__(self) -> None:
        """Reject invalid rates."""
        WHOLE_NUMBER.of_value("above", self.above)
        for name in TIERED:
            if (amount := getattr(self, name)) is not None:
                object.__setattr__(self, name, PRICE.of_value(name, amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per million tokens of one model.

    Raises:
        ValueError: A rate is not a finite number of 0 or more.
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    """For cached input; defaults to `input`."""
    cache_write: Decimal | None = None
    """For input written to a cache; defaults to `input`."""
    cache_write_1h: Decimal | None = None
    """For input cached for an hour; unknown if unset although `cache_write` is set."""
    input_audio: Decimal | None = None
    """For audio input; unknown if unset."""
    output_audio: Decimal | None = None
    per_request: Decimal = NO_COST
    """USD per model call, in addition to tokens."""
    web_search: Decimal | None = None
    """USD per web search by the vendor; unknown if unset."""
    tiers: tuple[PriceTier, ...] = ()
    """Rates for long prompts. The highest tier reached applies to the whole call, as vendors bill
    it: https://ai.google.dev/gemini-api/docs/pricing ("prompts > 200k tokens")."""

    def __post_init__(self) -> None:
        """Reject invalid rates."""
        for each in fields(self):
            amount = getattr(self, each.name)
            if each.name != "tiers" and (amount is not None or each.default is not None):
                kind = FEE if each.name in PER_ITEM else PRICE
                object.__setattr__(self, each.name, kind.of_value(each.name, amount))

    def of(self, usage: Usage) -> Decimal | None:
        """Return the USD of one model call; `None` if `missing_rate` has a reason."""
        at = self.at(usage.input)
        if at.missing_rate(usage) is not None:
            return None
        one_hour = usage.cache_write_1h or 0
        read, write, kept = at.cache_rates
        spoken, answered = usage.input_audio or 0, usage.output_audio or 0
        # In a separate context: the application's may round or trap.
        with localcontext(EXACT):
            tokens = (
                _fresh(usage) * at.input
                + usage.cache_read * read
                + (usage.cache_write - one_hour) * write
                + one_hour * kept
                + spoken * (at.input_audio or NO_COST)
                + (usage.output - answered) * at.output
                + answered * (at.output_audio or NO_COST)
            )
            searches = (usage.web_searches or 0) * (at.web_search or NO_COST)
            return tokens.scaleb(PER_MILLION) + at.per_request + searches

    def at_most(self, usage: Usage, unplaced: Unplaced | None = None) -> Decimal | None:
        """Return the most that a call can cost; `None` if a rate without a bound is missing.

        Args:
            usage: Its tokens.
            unplaced: Those of them whose rate is unknown: each costs the highest of its side.
        """
        at = self.at(usage.input + (unplaced.more_input if unplaced else 0))
        if usage.cache_write_1h and at.cache_write_1h is None and at.cache_write is not None:
            # "1-hour cache write tokens are 2 times the base input tokens price":
            # https://platform.claude.com/docs/en/build-with-claude/prompt-caching.
            at = replace(at, cache_write_1h=max(2 * at.input, at.cache_write))
        amount = replace(at, tiers=()).of(usage)
        if amount is None or unplaced is None:
            return amount
        with localcontext(EXACT):
            return amount + at.added_by(unplaced, usage.cache_write_1h or 0)

    def added_by(self, unplaced: Unplaced, one_hour: int) -> Decimal:
        """Return the most USD that tokens of unknown rates can add to the price of a call."""
        kept = [self.cache_rates[2]] if one_hour else []
        sent = max(self.input, *self.cache_rates[:2], *kept, self.input_audio or NO_COST)
        answered = max(self.output, self.output_audio or NO_COST)
        with localcontext(EXACT):
            tokens = (
                unplaced.input * (sent - self.input)
                + unplaced.output * (answered - self.output)
                + unplaced.either * (max(sent, answered) - self.input)
                + unplaced.more_input * sent
                + unplaced.more_output * answered
            )
            return tokens.scaleb(PER_MILLION)

    def saved_by_cache(self, usage: Usage) -> Decimal | None:
        """Return the USD that a cache saved for a call; `None` if it used none."""
        if not (usage.cache_read or usage.cache_write):
            return None
        at = self.at(usage.input)
        one_hour = usage.cache_write_1h or 0
        read, write, kept = at.cache_rates
        with localcontext(EXACT):
            saved = (
                usage.cache_read * (at.input - read)
                + (usage.cache_write - one_hour) * (at.input - write)
                + one_hour * (at.input - kept)
            )
            return saved.scaleb(PER_MILLION)

    @property
    def cache_rates(self) -> tuple[Decimal, Decimal, Decimal]:
        """The rates for input read from a cache, written to one, and written for an hour."""
        read = self.input if self.cache_read is None else self.cache_read
        write = self.input if self.cache_write is None else self.cache_write
        return read, write, write if self.cache_write_1h is None else self.cache_write_1h

    def at(self, prompt: int) -> Price:
        """Return the price for a call with this many input tokens."""
        passed = [tier for tier in self.tiers if prompt > tier.above]
        if not passed:
            return self
        tier = max(passed, key=lambda each: each.above)
        changed = {name: getattr(tier, name) for name in TIERED}
        known = {name: amount for name, amount in changed.items() if amount is not None}
        return replace(self, **known)

    def times(self, factor: Decimal) -> Price:
        """Return the price with all token rates multiplied by a factor."""
        rates = {name: getattr(self, name) for name in (*PER_TOKEN, *PER_AUDIO_TOKEN)}
        with localcontext(EXACT):
            changed = {name: rate * factor for name, rate in rates.items() if rate is not None}
        return self if factor == 1 else replace(self, **changed)

    def missing_rate(self, usage: Usage) -> str | None:
        """Return why a call has no price, a missing rate or invalid counts; else `None`."""
        # Overlapping parts leave a negative rest, which would make a call cheaper than free.
        counted = (_fresh(usage), usage.cache_write - (usage.cache_write_1h or 0))
        if min(*counted, usage.output - (usage.output_audio or 0)) < 0:
            return "its parts are more than the whole"
        # The rate for five minutes would be too low for an hour.
        if usage.cache_write_1h and self.cache_write_1h is None and self.cache_write is not None:
            return "no price for one-hour cache writes is known"
        if usage.input_audio and self.input_audio is None:
            return "no price for audio input is known"
        if usage.output_audio and self.output_audio is None:
            return "no price for audio output is known"
        if usage.web_searches and self.web_search is None:
            return "no price for web searches is known"
        return None


def _fresh(usage: Usage) -> int:
    """Return the text tokens that were neither read from nor written to a cache."""
    return usage.input - usage.cache_read - usage.cache_write - (usage.input_audio or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The price of one model call, and its source."""

    price: Decimal | None = None
    """USD; `None` if unknown."""
    source: str | None = None
    """`policy`, `stated`, `genai-prices` or `local`; `None` if the price is unknown."""
    version: str | None = None
    """Version of the source."""
    cache_saved: Decimal | None = None
    """USD saved by a cache; `None` if it used none."""
    unknown: str | None = None
    """Why the price is unknown."""
    at_most: Decimal | None = None
    """Upper bound of an unknown price, if there is one."""
    rates: Price | None = None
    """The rates of this call; `None` if the price is unknown, or nothing as for local models, or if
    it is stated and not the product of the rates."""
    stated: Decimal | None = None
    """USD that the response states, also if it is not the price."""
    stated_by: str | None = None
    """The vendor that states it."""
    stated_refused: str = ""
    """Why what the response states is not a cost of this call."""
    listed: Decimal | None = None
    """The price by the policy file or the list, for comparison with a stated cost."""

    @property
    def charge(self) -> Decimal | None:
        """USD that limits and quotas count: the price, or its upper bound."""
        return self.at_most if self.price is None else self.price


NO_QUOTE: Final = Quote()
"""The quote for a call without tokens, and for all calls if there are no prices."""


# --- the cost that a response states --------------------------------------------------------------

STATED: Final = "stated"
"""Source of a price that the vendor states; its version is the vendor's name."""
FIRM: Final = frozenset({"policy", "local"})
"""Sources that precede it."""

SPEED: Final = "speed"
"""Anthropic's tier of speed, in addition to its service tier:
https://platform.claude.com/docs/en/build-with-claude/fast-mode."""
SEARCH_SIZE: Final = "search_context_size"
"""Perplexity's, on which its fee depends: https://docs.perplexity.ai/getting-started/pricing."""
COST_HEADER: Final = "x-litellm-response-cost"
"""Header of LiteLLM's proxy, in USD: https://docs.litellm.ai/docs/proxy/response_headers."""
INSTRUMENTATION: Final = "instrumentation"
"""The source of a cost in a span that otel-limits has not written, and its key."""
OWN_COST: Final = "otel_limits.stated_cost_usd"
OWN_COST_BY: Final = "otel_limits.stated_cost_by"
"""Our own attributes of a span: the cost in its response, in digits, and the vendor."""
AS_TEXT: Final = frozenset({COST_HEADER, OWN_COST})
GATEWAY: Final = "litellm_proxy"
"""The source of a cost outside of the fields of the vendor that bills."""

ABSURD: Final = 100
"""A stated cost is refused above this multiple of what the call can cost."""
MAX_DIFFERENCE: Final = Decimal("0.01")
"""A larger difference from the computed price is reported."""

MAX_AMOUNT_LENGTH: Final = 60
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
    fields = {rules[GATEWAY].field: GATEWAY, COST_HEADER: GATEWAY, INSTRUMENTATION: INSTRUMENTATION}
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
    if isinstance(value, str) and is_text and len(value) <= MAX_AMOUNT_LENGTH:
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
