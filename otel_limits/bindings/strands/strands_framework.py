"""The interface of the Strands binding. Strands is not imported before it is used."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.strands.marks import HOST, SPANS, marker_of, stops_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.bindings.strands.patches import ClassPatcher
    from otel_limits.core.events import Stop
    from otel_limits.otel.span_names import SpanNames


class StrandsFramework:
    """Tracks Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    distribution = "strands-agents"
    packages: Collection[str] = ("strands",)
    binding = ""
    requirement = "strands-agents >= 1.62"
    needed: Mapping[str, Sequence[str]] = MappingProxyType(
        {
            "strands.agent.agent": ("Agent.add_hook", "Agent.add_middleware"),
            "strands.hooks.registry": ("HookRegistry.get_callbacks_for",),
            "strands.models.model": ("Model.stream",),
        }
    )
    """Looked up only when an agent calls them."""
    importers: Sequence[str] = (f"{__package__}.patches", f"{__package__}.tracked_requests")
    without = "Without it no agent can be tracked or halted."
    parts: Collection[str] = (
        "strands.multiagent.graph",
        "strands.multiagent.swarm",
        "strands.bidi.agent.agent",
        "strands.models.openai",
        "strands.models.openai_responses",
    )
    spans: SpanNames | None = SPANS
    stop_reasons: Collection[str] = (
        "cancelled",
        "checkpoint",
        "content_filtered",
        "end_turn",
        "guardrail_intervened",
        "interrupt",
        "limit_output_tokens",
        "limit_total_tokens",
        "limit_turns",
        "max_tokens",
        "stop_sequence",
        "tool_use",
    )
    successes: Collection[str] = ("end_turn", "stop_sequence", "tool_use")
    """`tool_use` is the end of an invocation that answers with a structured output."""
    _patcher: ClassPatcher | None = None

    @property
    def host(self) -> Host | None:
        """The runtime of the process."""
        return HOST.host

    @host.setter
    def host(self, host: Host | None) -> None:
        HOST.host = host

    def gaps(self) -> Sequence[Gap]:
        """Import Strands and return the names of it that are used but missing.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.strands.probe import gaps

        return gaps(self)

    def gaps_of(self, part: str) -> Sequence[Gap]:
        """Return the missing names of a module for groups of agents, or of a vendor's models.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.strands.probe import gaps_of

        return gaps_of(self, part)

    def watch(self) -> None:
        """Track every invocation."""
        from otel_limits.bindings.strands.patches import ClassPatcher

        self._patcher = self._patcher or ClassPatcher()
        self._patcher.start()

    def release(self) -> bool:
        """Stop tracking invocations, except those of agents with a plugin.

        Middleware stays attached, as Strands cannot remove it, and passes everything through.

        Returns:
            True while an agent with a plugin has an invocation in progress.
        """
        # Looked up, not imported: an import would load Strands into a program that may not use it.
        # Without the module, no invocation was ever tracked.
        invocations = sys.modules.get(f"{__package__}.invocations")
        states = tuple(invocations.STATES) if invocations is not None else ()
        for state in states:
            if state.own is None:
                state.abort()
        # An agent with a plugin keeps its limits after `disable()`, and needs the patches. If only
        # uncollected garbage is left, the patches pass everything through.
        attach = sys.modules.get(f"{__package__}.attach")
        if self._patcher is not None and (attach is None or not attach.ALL_WITH_OWN):
            self._patcher.stop()
        return any(state.own is not None and (state.live or state.direct) for state in states)

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`."""
        return marker_of(result)

    def stops_of(self, result: Any) -> Sequence[Stop]:
        """Return the stops in a result or an exception, in their order."""
        return stops_of(result)

    def run_away(self, most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
        """Run the agent of `otel-limits doctor`."""
        from otel_limits.bindings.strands.runaway_agent import run_away

        return run_away(most_calls, observe)


STRANDS: Final = StrandsFramework()
