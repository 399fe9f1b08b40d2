"""Where prices change: between two steps, calls with the same terms have the same rates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, time, timezone
from typing import TYPE_CHECKING, NamedTuple

from otel_limits.core.catalogue import LONG_PROMPT, current_list

if TYPE_CHECKING:
    from otel_limits.core.price import Price


class PriceSteps(NamedTuple):
    """All steps of some prices, each in ascending order."""

    prompts: list[int]
    """Input tokens of a call above which rates change."""
    dates: list[date]
    """Days in UTC from which on rates change."""
    times: list[time]
    """Times of day in UTC from which on rates change."""


def price_steps(own: Iterable[Price], *, has_list: bool) -> PriceSteps | None:
    """Return the steps of a policy file's prices and of the package's list.

    `None` if the list has a condition of another kind than dates and times of day.
    """
    prompts = {LONG_PROMPT, *(tier.above for price in own for tier in price.tiers)}
    dates: set[date] = set()
    times: set[time] = set()
    providers = current_list().providers if has_list else []
    for model in (model for provider in providers for model in provider.models):
        listed = model.prices if isinstance(model.prices, list) else []
        conditional = [*listed, *(model.price_variants or ())]
        prices = [each.prices for each in conditional]
        if not isinstance(model.prices, list):
            prices.append(model.prices)
        for rate in (rate for each in prices for rate in vars(each).values()):
            prompts.update(tier.start for tier in getattr(rate, "tiers", ()))
        for condition in (each.constraint for each in conditional):
            match type(condition).__name__:
                case "NoneType":
                    pass
                case "StartDateConstraint":
                    dates.add(condition.start_date)
                case "TimeOfDateConstraint":
                    times.update({_in_utc(condition.start_time), _in_utc(condition.end_time)})
                case _:
                    return None
    return PriceSteps(sorted(prompts), sorted(dates), sorted(times))


def _in_utc(moment: time) -> time:
    """Return a time of day in UTC; without a zone, it already is."""
    if moment.tzinfo is None:
        return moment
    return datetime.combine(date(1970, 1, 1), moment).astimezone(timezone.utc).time()
