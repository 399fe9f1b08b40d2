"""The stop of a halted invocation as JSON, as its last message carries it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from otel_limits.core.events import Stop, TaskUsage
from otel_limits.core.limits import Breach
from otel_limits.core.quota_state import QuotaRefusal
from otel_limits.core.usage import Usage

MARKER: Final = "otel_limits"
"""Key of the stop under a message's `metadata["custom"]`, which is never sent to a model."""


QUOTA_NUMBERS: Final = ("used", "reserved", "limit")


def stop_to_json(stop: Stop) -> dict[str, Any]:
    """Return a stop as plain JSON values, with the deciding limit at the top."""
    values: dict[str, Any] = dataclasses.asdict(stop, dict_factory=_exact)
    breach = values.pop("breach") or {}
    # Two repeat other fields, and every message of a halt is stored with a session. The third is
    # known only at the end.
    for name in ("levels", "invocation", "repeated_failures"):
        del values[name]
    # The deciding limit is repeated at the top, so that log queries need not look into a list.
    return {
        **values,
        "limit": breach.get("limit"),
        "cap": breach.get("cap"),
        "observed": breach.get("observed"),
        "breaches": [dict(each) for each in values["breaches"]],
    }


def marked_stop(stop: Stop, *, synthetic: bool) -> dict[str, Any]:
    """Return what a binding writes into the result of a halt.

    Args:
        stop: The stop.
        synthetic: The text of the result is that of the halt, not written by the model.
    """
    return {**stop_to_json(stop), "synthetic": synthetic}


def _exact(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert exact amounts to text, so that they stay exact in JSON."""
    return {name: str(each) if isinstance(each, Decimal) else each for name, each in items}


def stop_from_json(marker: Mapping[str, Any]) -> Stop:
    """Parse the result of `stop_to_json`."""
    # A newer otel-limits may have written the message, with fields unknown to this version.
    known = {spec.name for spec in dataclasses.fields(Stop)}
    values = {name: value for name, value in marker.items() if name in known}
    breaches = tuple(breach_from_json(each) for each in marker.get("breaches", ()))
    values["breaches"] = breaches
    # The breach is always the first of the list, so that they cannot differ.
    values["breach"] = breaches[0] if breaches else None
    values["usage"] = Usage(**marker.get("usage", {}))
    values["cost"] = Decimal(marker.get("cost", 0))
    values["task"] = _task_from_json(marker.get("task", {}))
    return Stop(**values)


def _task_from_json(values: Mapping[str, Any]) -> TaskUsage:
    """Parse the sums of a task; unknown fields are ignored."""
    known = {spec.name for spec in dataclasses.fields(TaskUsage)}  # as above
    named = {name: value for name, value in values.items() if name in known}
    usage, cost = Usage(**named.pop("usage", {})), Decimal(named.pop("cost", 0))
    return TaskUsage(**named, usage=usage, cost=cost)


def breach_from_json(values: Mapping[str, Any]) -> Breach:
    """Parse a breach; unknown fields are ignored."""
    quota = values.get("quota")
    refusal = None if quota is None else QuotaRefusal(**_with_money(quota, *QUOTA_NUMBERS))
    known = {spec.name for spec in dataclasses.fields(Breach)}  # as above
    read = _with_money(values, "cap", "observed", "reserved")
    named = {name: value for name, value in read.items() if name in known}
    return Breach(**{**named, "quota": refusal})


def _with_money(values: Mapping[str, Any], *numbers: str) -> dict[str, Any]:
    """Parse numbers; only amounts of money were written as text."""
    return {
        name: Decimal(each) if name in numbers and isinstance(each, str) else each
        for name, each in values.items()
    }
