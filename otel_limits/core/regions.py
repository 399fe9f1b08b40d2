"""Where a call is processed, and what that adds to its price."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from otel_limits.core.listings import BEDROCK
from otel_limits.vendors.records import BY_NAME, VENDORS
from otel_limits.vendors.vendor import GLOBAL, NO_PREMIUM

if TYPE_CHECKING:
    from decimal import Decimal

RULES: Final = tuple(each.place for each in VENDORS if each.place is not None)
IN_HOSTS: Final = tuple(host for rule in RULES for host in rule.hosts)
IN_MODEL_IDS: Final = tuple(model_id for rule in RULES for model_id in rule.model_ids)


def place_of(
    model: str,
    addresses: Iterable[str] = (),
    *,
    set_as: Iterable[str] = (),
    of_client: Iterable[str] = (),
) -> str | None:
    """Return the place where a call is processed; `None` if it is global or nothing shows it.

    Args:
        model: The model ID as sent.
        addresses: URLs or hosts of the endpoint.
        set_as: Places in the settings of the request.
        of_client: Places that the client would use by default.
    """
    found = (
        *set_as,
        *(found[1] for at in addresses for each in IN_HOSTS if (found := each.search(_url(at)))),
        *(found[1] for each in IN_MODEL_IDS if (found := each.search(model))),
        *of_client,
    )
    place = next(iter(found), area_of(model)) or GLOBAL
    return None if place == GLOBAL else place


def _url(address: str) -> str:
    return address if "//" in address else f"//{address}"


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
    known = BY_NAME.get(vendor)
    if region is None or known is None or known.place is None:
        return NO_PREMIUM
    return known.place.premium(model, region)


def highest_premium(vendor: str, region: str) -> Decimal | None:
    """Return the upper bound of an unknown `premium`; `None` if there is none."""
    known = BY_NAME.get(vendor)
    return None if known is None or known.place is None else known.place.dearest(region)
