"""Strands Agents, as the rest of the product knows it; nothing of it is imported before its use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.strands.marks import HOST, SPANS, marker_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.bindings.strands.patches import ClassPatcher


class StrandsFramework:
    """Follows Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    parts: Collection[str] = (
        "strands.multiagent.graph",
        "strands.multiagent.swarm",
        "strands.models.openai",
    )
    spans = SPANS
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
    """`tool_use` is how an invocation ends that answers with a structured output."""
    _patcher: ClassPatcher | None = None

    @property
    def host(self) -> Host | None:
        """The runtime of the process."""
        return HOST.host

    @host.setter
    def host(self, host: Host | None) -> None:
        HOST.host = host

    def gaps(self) -> Sequence[Gap]:
        """Import Strands, and look for everything of it that is used.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.strands.probe import gaps

        return gaps()

    def gaps_of(self, part: str) -> Sequence[Gap]:
        """Look for what is used of a module about groups of agents, or of a vendor's models.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.strands.probe import gaps_of

        return gaps_of(part)

    def watch(self) -> None:
        """Follow every invocation from now on."""
        from otel_limits.bindings.strands.patches import ClassPatcher

        self._patcher = self._patcher or ClassPatcher()
        self._patcher.start()

    def release(self) -> bool:
        """Follow no invocation any more, but those of agents with a plugin.

        What was attached stays, as Strands cannot remove middleware, and passes all through.

        Returns:
            True while an agent with a plugin has an invocation that is live.
        """
        # Looked up, not imported: that would import Strands into a program that may not use it, and
        # where it was never imported, no invocation was ever followed.
        invocations = sys.modules.get("otel_limits.bindings.strands.invocations")
        states = tuple(invocations.STATES) if invocations is not None else ()
        for state in states:
            if state.own is None:
                state.abort()
        # An agent with a plugin keeps its limits after `disable()`, and it is the patches that see
        # it begin. Where none is left but garbage that nobody has collected, they pass all through.
        attach = sys.modules.get("otel_limits.bindings.strands.attach")
        if self._patcher is not None and (attach is None or not attach.ALL_WITH_OWN):
            self._patcher.stop()
        return any(state.own is not None and (state.live or state.direct) for state in states)

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`."""
        return marker_of(result)


STRANDS: Final = StrandsFramework()
