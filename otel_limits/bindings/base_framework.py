"""The base class of frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.class_patches import Patches
from otel_limits.core.errors import stop_of_error
from otel_limits.core.events import stop_from_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.bindings.invocation import InvocationInProgress
    from otel_limits.bindings.script import ScriptedRun
    from otel_limits.core.events import Stop
    from otel_limits.otel.kinds import SpanNames


class BaseFramework(ABC):
    """A framework whose names are not checked, and whose spans are made by otel-limits.

    A binding overrides what is different: at least `invocation`, `watch`, `marker_of` and
    `run_script`.
    """

    name = module = distribution = binding = requirement = ""
    packages: Collection[str] = ()
    needed: Mapping[str, Sequence[str]] = MappingProxyType({})
    importers: Sequence[str] = ()
    without = ""
    parts: Collection[str] = ()
    spans: SpanNames | None = None
    stop_reasons: Collection[str] = ("end_turn", "interrupt")
    successes: Collection[str] = ("end_turn",)
    own_limits: Mapping[str, str] = MappingProxyType({})
    """The `stop_reasons` that are limits of the framework itself, and where each is set."""
    host: Host | None = None
    invocation: type[InvocationInProgress]
    """The class of its invocations."""

    def __init__(self) -> None:
        """Create a framework without patches."""
        self.patches = Patches()

    def gaps(self) -> Sequence[Gap]:
        """Return the names of the framework that are used but missing."""
        return ()

    def gaps_of(self, part: str) -> Sequence[Gap]:  # noqa: ARG002  it has no parts
        """Return no gap."""
        return ()

    @abstractmethod
    def watch(self) -> None:
        """Wrap the methods of the framework with `patches`. Idempotent."""

    def release(self) -> bool:
        """Restore the methods, and end the invocations in progress."""
        self.patches.restore()
        self.invocation.abort_all()
        return False

    @abstractmethod
    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`."""

    def markers_of(self, result: Any) -> Sequence[Mapping[str, Any]]:
        """Return the stops in a message or a result; by default its own only."""
        marker = self.marker_of(result)
        return () if marker is None else (marker,)

    def stops_of(self, result: Any) -> Sequence[Stop]:
        """Return the stops in a message, a result or an exception, in their order."""
        if isinstance(result, BaseException):
            stop = stop_of_error(result)
            return () if stop is None else (stop,)
        return [stop_from_json(each) for each in self.markers_of(result)]

    @abstractmethod
    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run an agent with a scripted model, for `otel-limits doctor` and `otel-limits demo`.

        Returns:
            The number of its model calls, and the reason for its end.
        """
