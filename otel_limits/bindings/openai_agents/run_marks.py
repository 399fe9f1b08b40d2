"""Writes the stops of a run into its live result, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import MARKER, marked_stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from otel_limits.core.events import Stop

INNER: Final = "otel_limits_called"
"""Attribute of a result with the stops of agents whose answers are its final output."""


# Attributes of the result, as every field of an item is sent to the API. `to_input_list()` and
# sessions contain only items.


def mark(result: Any, stop: Stop, *, synthetic: bool) -> None:
    """Write `stop` into a run's result."""
    setattr(result, MARKER, marked_stop(stop, synthetic=synthetic))


def mark_inner(result: Any, stops: Iterable[tuple[Stop, bool]]) -> None:
    """Write the stops of agents whose answers are a run's final output into its result.

    Args:
        result: The result.
        stops: Each stop, and whether the output is the text of that halt.
    """
    setattr(result, INNER, [marked_stop(stop, synthetic=synthetic) for stop, synthetic in stops])


def marker_of(result: Any) -> Mapping[str, Any] | None:
    """Return what `mark` wrote into a result."""
    own = _own(result)
    inner = [each for each in own.get(INNER, ()) if each["synthetic"]]
    found = own.get(MARKER, next(iter(inner), None))
    return found if isinstance(found, dict) else None


def markers_of(result: Any) -> Sequence[Mapping[str, Any]]:
    """Return what was written into a result, in its order."""
    own = _own(result)
    found = [*own.get(INNER, ()), own.get(MARKER)]
    return [each for each in found if isinstance(each, dict)]


def _own(result: Any) -> Mapping[str, Any]:
    """Return the attributes of a run's result; of anything else nothing."""
    is_result = any(each.__name__ == "RunResultBase" for each in type(result).__mro__)
    return vars(result) if is_result else {}
