"""Reads what a halt left, whichever framework the agent is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.messages import stop_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_limits.core.events import Stop


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Tell whether `message` was put there by a halt, so that no model wrote it.

    A real answer, even one for which the provider reported zero tokens, is never synthetic.
    """
    marker = _marker_of(message)
    return marker is not None and marker["synthetic"] is True


def stop_of(result: Any) -> Stop | None:
    """How otel-limits ended the invocation that `result` came from.

    Args:
        result: What an agent returned, live or read back from a session.

    Returns:
        The stop with its breach, or `None` when nothing halted the invocation.
    """
    marker = _marker_of(result)
    return None if marker is None else stop_from_json(marker)


def _marker_of(result: Any) -> Mapping[str, Any] | None:
    markers = (framework.marker_of(result) for framework in FRAMEWORKS)
    return next((marker for marker in markers if marker is not None), None)
