"""Notes the vendor's own usage where a framework converts it, and drops some of its fields."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.current import ENCLOSING_CALL

if TYPE_CHECKING:
    from collections.abc import Callable


def reads_usage(usage_in: Callable[..., object]) -> Callable[[Any], Any]:
    """Return the wrapper of a framework's method that converts a part of an answer.

    Args:
        usage_in: Returns the vendor's usage in the arguments of the method, if it is there.
    """
    guarded = suppress_errors("binding")(usage_in)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def convert(*args: Any, **options: Any) -> Any:
            if (raw := guarded(*args, **options)) is not None:
                note_usage(raw)
            return original(*args, **options)

        return convert

    return wrap


@suppress_errors("binding")
def note_usage(raw: object) -> None:
    """Note the usage of the call that the current task is within."""
    within = ENCLOSING_CALL.get()
    if within is not None and (calls := getattr(within.request, "calls", None)):
        calls[0].raw = raw
