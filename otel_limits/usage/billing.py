"""Reads the fields of a usage that decide its price without being tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from otel_limits.core.price import (
    HEADER,
    INSTRUMENTATION,
    OWN_COST,
    OWN_COST_BY,
    SEARCH_SIZE,
    SPEED,
)
from otel_limits.usage.fields import within_usage
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import cost_rules


@functools.cache
def _paths() -> tuple[tuple[str, ...], ...]:
    """Return the levels of all such fields."""
    rules = cost_rules().values()
    costs = [path for rule in rules for path in (rule.field, rule.own_key, rule.has_own_key)]
    paths = dict.fromkeys([*costs, HEADER, SPEED, SEARCH_SIZE])
    return tuple(tuple(path.split(".")) for path in paths if path)


def billing_in(raw: object) -> dict[str, object]:
    """Return the fields of a usage as sent, by their path.

    Args:
        raw: A dictionary, an object of a client library, or the headers of a response.
    """
    if raw is None:
        return {}
    found: dict[str, object] = {}
    fields = raw if isinstance(raw, Mapping) else None
    for path in _paths():
        # Most usages have none of them.
        if fields is not None and path[0] not in fields:
            continue
        if (value := _at(raw, path)) is not None:
            found[".".join(path)] = value
    return found


def billing_in_span(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Return the same from the attributes of a span.

    A cost there was computed by the instrumentation, unless otel-limits has copied that of the
    response.
    """
    found = {name: attributes[name] for name in (OWN_COST, OWN_COST_BY) if name in attributes}
    computed = next((attributes[name] for name in _computed() if name in attributes), None)
    if computed is not None:
        found[INSTRUMENTATION] = computed
    for name, value in attributes.items():
        if (within := within_usage(name)) in (SPEED, SEARCH_SIZE):
            found[within] = value
    return found


@functools.cache
def _computed() -> Iterable[str]:
    """Return the attributes of spans that have a cost."""
    return tuple(facts("usage/fields.yaml")["costs"])


def _at(raw: object, path: Iterable[str]) -> object:
    """Return what is at a path; `None` if it is not there, or has further levels."""
    for name in path:
        raw = raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
    return raw if isinstance(raw, (bool, int, float, Decimal, str)) else None
