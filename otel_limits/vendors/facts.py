"""Reads facts from YAML files, on first use: also prices on which two lists disagree."""

from __future__ import annotations

import logging  # noqa: F401  before a fork, our lock comes before that of logging
import os
import pkgutil
import threading
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

LOADING: Final = threading.RLock()
"""Held while a package is imported on first use: a process forked during the import would wait
forever for it to finish, in a thread that does not exist there. The fork waits instead."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LOADING.acquire,
        after_in_parent=LOADING.release,
        after_in_child=LOADING.release,
    )


def facts(file: str) -> Any:
    """Return the contents of a file of this package, such as `vendors/openai.yaml`."""
    text = pkgutil.get_data("otel_limits", file)
    assert text is not None  # as every loader of packages has data
    with LOADING:
        import yaml

        # PyYAML may be built without the parser in C, which is ten times faster.
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def hook_directories() -> list[str]:
    """Return where PyInstaller finds how to include the files."""
    return [str(Path(__file__).parent)]


# --- prices on which two lists disagree -----------------------------------------------------------


class ComparedPrices(NamedTuple):
    """The contents of `price_lists.yaml`."""

    stand_ins: Mapping[str, frozenset[str]]
    """Models that a vendor sells at their maker's price, by the maker's ID."""
    latest: Mapping[str, frozenset[str]]
    """Names of a vendor's current model that both lists price alike."""
    disputed: Mapping[str, Mapping[str, Mapping[str, Decimal]]]
    """Models on which the lists disagree for no known reason, and at which usage: with the factor
    by which the second list's rates exceed ours at most, or 1."""


@cache
def compared_prices() -> ComparedPrices:
    """Return the result of the comparison."""
    known = facts("vendors/price_lists.yaml")
    return ComparedPrices(
        stand_ins=_sets(known["stand_ins"]),
        latest=_sets(known["latest"]),
        disputed={
            vendor: {
                model: {part: Decimal(str(factor)) for part, factor in parts.items()}
                for model, parts in models.items()
            }
            for vendor, models in known["disputed"].items()
        },
    )


def _sets(lists: Mapping[str, list[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(held) for name, held in lists.items()}
