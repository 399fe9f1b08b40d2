"""Writes the stops of a run into its live result, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.errors import stop_of_error
from otel_limits.core.stop_json import MARKER, stop_from_json, stop_to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from otel_limits.bindings.framework import Host
    from otel_limits.core.events import Stop

INNER: Final = "otel_limits_called"
"""Attribute of a result with the stops of agents whose answers are its final output."""


class AgentsHost:
    """Holds the runtime that the binding reports to, once there is one."""

    host: Host | None = None


SLOT: Final = AgentsHost()


# Attributes of the result, as every field of an item is sent to the API. `to_input_list()` and
# sessions contain only items.


def mark(result: Any, stop: Stop, *, synthetic: bool) -> None:
    """Write `stop` into a run's result."""
    setattr(result, MARKER, {**stop_to_json(stop), "synthetic": synthetic})


def mark_inner(result: Any, stops: Iterable[tuple[Stop, bool]]) -> None:
    """Write the stops of agents whose answers are a run's final output into its result.

    Args:
        result: The result.
        stops: Each stop, and whether the output is the text of that halt.
    """
    kept = [{**stop_to_json(stop), "synthetic": synthetic} for stop, synthetic in stops]
    setattr(result, INNER, kept)


def marker_of(result: Any) -> Mapping[str, Any] | None:
    """Return what `mark` wrote into a result."""
    own = _own(result)
    inner = [each for each in own.get(INNER, ()) if each["synthetic"]]
    marker = own.get(MARKER, next(iter(inner), None))
    return marker if isinstance(marker, dict) else None


def stops_of(result: Any) -> Sequence[Stop]:
    """Return the stops in a result or an exception, in their order."""
    if isinstance(result, BaseException):
        stop = stop_of_error(result)
        return () if stop is None else (stop,)
    stops = [stop_from_json(each) for each in _own(result).get(INNER, ())]
    if isinstance(marker := _own(result).get(MARKER), dict):
        stops.append(stop_from_json(marker))
    return stops


def _own(result: Any) -> Mapping[str, Any]:
    """Return the attributes of a run's result; of anything else nothing."""
    is_result = any(each.__name__ == "RunResultBase" for each in type(result).__mro__)
    return vars(result) if is_result else {}
