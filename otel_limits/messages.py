"""The message that a halt leaves: how it is worded, marked and recognised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_limits.facts import Stop
from otel_limits.limits import Breach, Usage

if TYPE_CHECKING:
    from collections.abc import MutableMapping

MARKER: Final = "otel_limits"
"""Key of our object under a message's `metadata["custom"]`, which never reaches a model."""


def halt_text(breach: Breach) -> str:
    """What stands in the conversation where the agent was stopped."""
    unit = KIND[breach.limit].unit
    return (
        f"Stopped by otel-limits: {breach.limit} reached "
        f"({breach.observed} of {breach.cap} {unit} used). No model wrote this message."
    )


def halt_message(breach: Breach) -> dict[str, Any]:
    """Make the assistant message that ends a halted conversation."""
    return {"role": "assistant", "content": [{"text": halt_text(breach)}]}


def mark(message: MutableMapping[str, Any], stop: Stop, *, synthetic: bool = True) -> None:
    """Write `stop` into the metadata of `message`.

    No `usage` is written: the framework takes the last assistant message that has one as the
    baseline of its next projection, and a zero would make that collapse.
    """
    custom = {**message.get("metadata", {}).get("custom", {}), "synthetic": synthetic}
    custom[MARKER] = _to_json(stop)
    message["metadata"] = {"custom": custom}


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Tell whether `message` was put there by a halt, so that no model wrote it.

    A real answer, even one for which the provider reported zero tokens, is never synthetic.
    """
    custom = _custom(message)
    return custom.get("synthetic") is True and MARKER in custom


def stop_of(result: Any) -> Stop | None:
    """How otel-limits ended the invocation that `result` came from.

    Args:
        result: What an agent returned, live or read back from a session.

    Returns:
        The stop with its breach, or `None` when nothing halted the invocation.
    """
    marker = _custom(getattr(result, "message", None) or {}).get(MARKER)
    return _from_json(marker) if isinstance(marker, Mapping) else None


def _custom(message: Mapping[str, Any]) -> Mapping[str, Any]:
    custom = (message.get("metadata") or {}).get("custom")
    return custom if isinstance(custom, Mapping) else {}


def _to_json(stop: Stop) -> dict[str, Any]:
    """Write a stop as plain JSON values, the deciding limit on top."""
    values = dataclasses.asdict(stop)
    breach = values.pop("breach") or {}
    del values["levels"]
    return {
        **values,
        "limit": breach.get("limit"),
        "cap": breach.get("cap"),
        "observed": breach.get("observed"),
        "breaches": [dict(each) for each in values["breaches"]],
    }


def _from_json(marker: Mapping[str, Any]) -> Stop:
    known = {spec.name for spec in dataclasses.fields(Stop)}
    values = {name: value for name, value in marker.items() if name in known}
    breaches = tuple(Breach(**each) for each in marker.get("breaches", ()))
    values["breaches"] = breaches
    values["breach"] = breaches[0] if breaches else None
    values["usage"] = Usage(**marker.get("usage", {}))
    return Stop(**values)
