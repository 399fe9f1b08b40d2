"""The price of a model, and what it makes of the tokens of one call."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from decimal import Decimal, localcontext
from typing import Final

from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.core.values import FEE, PRICE, WHOLE_NUMBER

PER_MILLION: Final = -6
"""Power of ten from the price of a million tokens to that of one."""

PER_TOKEN: Final = ("input", "output", "cache_read", "cache_write", "cache_write_1h")
PER_AUDIO_TOKEN: Final = ("input_audio", "output_audio")
PER_ITEM: Final = ("per_request", "web_search")
"""Parts in USD for one, and not for a million."""
TIERED: Final = (*PER_TOKEN, *PER_AUDIO_TOKEN)
"""Parts that can cost more in a long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTier:
    """What a call costs whose prompt is above a size; what is unset costs as before.

    Raises:
        ValueError: `above` is not a number of tokens, or an amount is not exact.
    """

    above: int
    """Input tokens of the whole call, cached ones included."""
    input: Decimal | None = None
    output: Decimal | None = None
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_1h: Decimal | None = None
    input_audio: Decimal | None = None
    output_audio: Decimal | None = None

    def __post_init__(self) -> None:
        """Refuse what is not an exact amount."""
        WHOLE_NUMBER.of_value("above", self.above)
        for name in TIERED:
            if (amount := getattr(self, name)) is not None:
                object.__setattr__(self, name, PRICE.of_value(name, amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per million tokens of one model.

    Raises:
        ValueError: An amount is not a finite `Decimal` of 0 or more.
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    """For the cached part of the input; as `input` where it is unset."""
    cache_write: Decimal | None = None
    """For the part of the input that is put in the cache; as `input` where it is unset."""
    cache_write_1h: Decimal | None = None
    """For what is kept there for an hour; unknown where it is unset and `cache_write` is not."""
    input_audio: Decimal | None = None
    """For the spoken part of the input; unknown where it is unset."""
    output_audio: Decimal | None = None
    per_request: Decimal = NO_COST
    """USD per model call, on top of its tokens."""
    web_search: Decimal | None = None
    """USD for each search that the vendor makes for the model; unknown where it is unset."""
    tiers: tuple[PriceTier, ...] = ()
    """What long prompts cost. The highest one that is passed holds for the whole call, as vendors
    bill it: https://ai.google.dev/gemini-api/docs/pricing ("prompts > 200k tokens")."""

    def __post_init__(self) -> None:
        """Refuse what is not an exact amount."""
        for each in fields(self):
            amount = getattr(self, each.name)
            if each.name != "tiers" and (amount is not None or each.default is not None):
                kind = FEE if each.name in PER_ITEM else PRICE
                object.__setattr__(self, each.name, kind.of_value(each.name, amount))

    def of(self, usage: Usage) -> Decimal | None:
        """USD for one model call; `None` when that is not known, as `lack` says."""
        at = self.at(usage.input)
        if at.missing_rate(usage) is not None:
            return None
        one_hour = usage.cache_write_1h or 0
        read = at.input if at.cache_read is None else at.cache_read
        write = at.input if at.cache_write is None else at.cache_write
        spoken, answered = usage.input_audio or 0, usage.output_audio or 0
        # In a context of our own: the application's may round, or trap.
        with localcontext(EXACT):
            tokens = (
                _fresh(usage) * at.input
                + usage.cache_read * read
                + (usage.cache_write - one_hour) * write
                + one_hour * (write if at.cache_write_1h is None else at.cache_write_1h)
                + spoken * (at.input_audio or NO_COST)
                + (usage.output - answered) * at.output
                + answered * (at.output_audio or NO_COST)
            )
            searches = (usage.web_searches or 0) * (at.web_search or NO_COST)
            return tokens.scaleb(PER_MILLION) + at.per_request + searches

    def saved_by_cache(self, usage: Usage) -> Decimal | None:
        """USD that a call would have cost more without a cache; `None` where it used none."""
        if not (usage.cache_read or usage.cache_write):
            return None
        at = self.at(usage.input)
        one_hour = usage.cache_write_1h or 0
        read = at.input if at.cache_read is None else at.cache_read
        write = at.input if at.cache_write is None else at.cache_write
        kept = write if at.cache_write_1h is None else at.cache_write_1h
        with localcontext(EXACT):
            saved = (
                usage.cache_read * (at.input - read)
                + (usage.cache_write - one_hour) * (at.input - write)
                + one_hour * (at.input - kept)
            )
            return saved.scaleb(PER_MILLION)

    def at(self, prompt: int) -> Price:
        """Return what a call with so many input tokens costs."""
        passed = [tier for tier in self.tiers if prompt > tier.above]
        if not passed:
            return self
        tier = max(passed, key=lambda each: each.above)
        changed = {name: getattr(tier, name) for name in TIERED}
        known = {name: amount for name, amount in changed.items() if amount is not None}
        return replace(self, **known)

    def times(self, factor: Decimal) -> Price:
        """Return what tokens cost at so many times these prices; what else is paid for stays."""
        rates = {name: getattr(self, name) for name in (*PER_TOKEN, *PER_AUDIO_TOKEN)}
        with localcontext(EXACT):
            changed = {name: rate * factor for name, rate in rates.items() if rate is not None}
        return self if factor == 1 else replace(self, **changed)

    def missing_rate(self, usage: Usage) -> str | None:
        """Say which price is missing for a call, or which of its counts cannot be; else `None`."""
        # Parts that overlap leave a negative rest, which would make a call cheaper than free.
        counted = (_fresh(usage), usage.cache_write - (usage.cache_write_1h or 0))
        if min(*counted, usage.output - (usage.output_audio or 0)) < 0:
            return "its parts are more than the whole"
        # An hour costs more than five minutes, so that the price of the latter would be too low.
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
    """Tokens of text that were neither in a cache nor put there."""
    return usage.input - usage.cache_read - usage.cache_write - (usage.input_audio or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What one model call costs, and who says so."""

    price: Decimal | None = None
    """USD; `None` where nobody knows."""
    source: str | None = None
    """`policy`, `genai-prices` or `local`; `None` where the price is unknown."""
    version: str | None = None
    """Tells the prices of one time from those of another."""
    cache_saved: Decimal | None = None
    """USD that it would have cost more without a cache; `None` where it used none."""
    unknown: str | None = None
    """Why the price is unknown, in words."""


OF_NO_CALL: Final = Quote()
"""What is said of a call without tokens, and where there are no prices at all."""
