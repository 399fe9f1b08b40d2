"""Prices on which two lists agree or disagree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from otel_limits.vendors.facts import facts


class ComparedPrices(NamedTuple):
    """The contents of `price_lists.yaml`."""

    stand_ins: Mapping[str, frozenset[str]]
    """Models that a vendor sells at their maker's price, by the maker's ID."""
    latest: Mapping[str, frozenset[str]]
    """Names of a vendor's current model that both lists price alike."""
    disputed: Mapping[str, Mapping[str, frozenset[str]]]
    """Models on which the lists disagree for no known reason, and at which usage."""


@cache
def compared_prices() -> ComparedPrices:
    """Return the result of the comparison."""
    known = facts("vendors/price_lists.yaml")
    return ComparedPrices(
        stand_ins=_sets(known["stand_ins"]),
        latest=_sets(known["latest"]),
        disputed={vendor: _sets(models) for vendor, models in known["disputed"].items()},
    )


def _sets(lists: Mapping[str, list[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(held) for name, held in lists.items()}
