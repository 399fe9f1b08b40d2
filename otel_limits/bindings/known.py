"""The supported agent frameworks, and what a halt left in their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.errors import stop_of_error
from otel_limits.core.stop_json import stop_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_limits.bindings.framework import Framework
    from otel_limits.core.events import Stop

FRAMEWORKS: Final[tuple[Framework, ...]] = (STRANDS,)


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Return whether `message` was written by a halt, not by a model.

    A model's answer is never synthetic, even if the provider reported zero tokens for it.
    """
    marker = _marker_of(message)
    return marker is not None and marker["synthetic"] is True


def stop_of(result: Any) -> Stop | None:
    """Return how otel-limits ended the invocation that `result` came from.

    Args:
        result: What an agent returned, live or restored from a session, or an exception that it
            raised.

    Returns:
        The stop with its breach, or `None` when the invocation was not halted.
    """
    if isinstance(result, BaseException):
        return stop_of_error(result)
    marker = _marker_of(result)
    return None if marker is None else stop_from_json(marker)


def _marker_of(result: Any) -> Mapping[str, Any] | None:
    markers = (framework.marker_of(result) for framework in FRAMEWORKS)
    return next((marker for marker in markers if marker is not None), None)
