"""The interface of the Strands binding. Strands is not imported before it is used."""

from __future__ import annotations

import importlib
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.base_framework import BaseFramework
from otel_limits.bindings.strands.marks import SPANS, marker_of, stops_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap
    from otel_limits.bindings.script import ScriptedRun
    from otel_limits.core.events import Stop
    from otel_limits.otel.kinds import SpanNames


class StrandsFramework(BaseFramework):
    """Tracks Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    distribution = "strands-agents"
    packages: Collection[str] = ("strands",)
    requirement = "strands-agents >= 1.62"
    needed: Mapping[str, Sequence[str]] = MappingProxyType(
        {
            "strands.agent.agent": ("Agent.add_hook", "Agent.add_middleware"),
            "strands.hooks.registry": ("HookRegistry.get_callbacks_for",),
            "strands.models.model": ("Model.stream",),
        }
    )
    """Looked up only when an agent calls them."""
    importers: Sequence[str] = (f"{__package__}.patches", f"{__package__}.sent_requests")
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
    # strands-agents 1.62, `Limits` in types/agent.py.
    own_limits: Mapping[str, str] = MappingProxyType(
        {
            f"limit_{name}": f"{name} in limits of a Strands agent's call"
            for name in ("turns", "total_tokens", "output_tokens")
        }
    )
    _patcher: Any = None

    def gaps(self) -> Sequence[Gap]:
        """Import Strands and return the names of it that are used but missing.

        Raises:
            ImportError: It is not installed.
        """
        gaps: Sequence[Gap] = _module("probe").gaps(self)
        return gaps

    def gaps_of(self, part: str) -> Sequence[Gap]:
        """Return the missing names of a module for groups of agents, or of a vendor's models.

        Raises:
            ImportError: It is not installed.
        """
        gaps: Sequence[Gap] = _module("probe").gaps_of(self, part)
        return gaps

    def watch(self) -> None:
        """Track every invocation."""
        self._patcher = self._patcher or _module("patches").ClassPatcher(self.patches)
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
        attach = sys.modules.get(f"{__package__}.agent_hooks")
        if self._patcher is not None and (attach is None or not attach.ALL_WITH_OWN):
            self._patcher.stop()
        return any(
            state.own is not None and (state.invocations or state.direct) for state in states
        )

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`."""
        return marker_of(result)

    def stops_of(self, result: Any) -> Sequence[Stop]:
        """Return the stops in a result or an exception, in their order."""
        return stops_of(result)

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run an agent with a scripted model."""
        found: tuple[int, str] = _module("scripted_agent").run_script(run)
        return found


def _module(name: str) -> Any:
    """Import a module of the binding, which imports Strands or this one."""
    return importlib.import_module(f"{__package__}.{name}")


STRANDS: Final = StrandsFramework()
