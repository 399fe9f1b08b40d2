"""Where a call is processed, and what that adds to its price."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Final

from otel_limits.core.listings import BEDROCK
from otel_limits.vendors.records import GLOBAL, vendors

if TYPE_CHECKING:
    import re

    from otel_limits.vendors.records import Premium

NO_PREMIUM: Final = Decimal(1)


def region_of(
    model: str,
    addresses: Iterable[str] = (),
    *,
    set_as: Iterable[str] = (),
    of_client: Iterable[str] = (),
) -> str | None:
    """Return the region where a call is processed; `None` if it is global or nothing shows it.

    Args:
        model: The model ID as sent.
        addresses: URLs or hosts of the endpoint.
        set_as: Regions in the settings of the request.
        of_client: Regions that the client would use by default.
    """
    in_hosts, in_model_ids = _patterns()
    urls = [at if "//" in at else f"//{at}" for at in addresses]
    found = (
        *set_as,
        *(found[1] for url in urls for each in in_hosts if (found := each.search(url))),
        *(found[1] for each in in_model_ids if (found := each.search(model))),
        *of_client,
    )
    region = next(iter(found), area_of(model)) or GLOBAL
    return None if region == GLOBAL else region


@cache
def _patterns() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return the patterns of all vendors by which addresses and model IDs contain a region."""
    rules = [each.region for each in vendors().values() if each.region is not None]
    in_hosts = [each for rule in rules for each in rule.hosts]
    return in_hosts, [each for rule in rules for each in rule.model_ids]


def area_of(model: str) -> str | None:
    """Return the area of an inference profile of Bedrock, such as `eu` or `global`."""
    profile = BEDROCK.match(model.rpartition("/")[2])
    return profile[1].rstrip(".") if profile and profile[1] else None


def premium(vendor: str, model: str, region: str | None) -> Decimal | None:
    """Return the factor on list prices; `None` if unknown.

    Args:
        vendor: The vendor, as named on the list.
        model: The vendor's model ID.
        region: The requested region, if any.
    """
    known = vendors().get(vendor)
    if region is None or known is None or known.region is None:
        return NO_PREMIUM
    return _first(known.region.premium, model, region)


def highest_premium(vendor: str, region: str) -> Decimal | None:
    """Return the upper bound of an unknown `premium`; `None` if there is none."""
    known = vendors().get(vendor)
    return (
        None if known is None or known.region is None else _first(known.region.dearest, "", region)
    )


def _first(premiums: Iterable[Premium], model: str, region: str) -> Decimal | None:
    for each in premiums:
        if each.models.match(model) and each.regions.fullmatch(region):
            return each.factor
    return None
