"""Strands Agents, as the rest of the product knows it; nothing of it is imported before its use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.framework import SpanNames
from otel_limits.core.messages import MARKER, stop_to_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping, Sequence

    from strands.agent.agent import Agent

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.bindings.strands.patches import ClassPatcher
    from otel_limits.core.events import Stop
    from otel_limits.core.limits import Limits
    from otel_limits.core.policy import Action


class StrandsFramework:
    """Follows Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    parts: Collection[str] = (
        "strands.multiagent.graph",
        "strands.multiagent.swarm",
        "strands.models.openai",
    )
    spans = SpanNames(
        scope="strands.telemetry.tracer", agent="invoke_agent", cycle="execute_event_loop_cycle"
    )
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
    host: Host | None = None
    _patcher: ClassPatcher | None = None

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

        self._patcher = self._patcher or ClassPatcher(lambda: self.host)
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

    def adopt(
        self, agent: Agent, limits: Limits, action: Action | None, tree: Limits, origin: str
    ) -> None:
        """Give one agent limits of its own, set at `origin`, which its copies keep.

        Raises:
            ConfigurationError: A limit on cost is asked for where no price can be known.
        """
        from otel_limits.bindings.strands.attach import ALL_WITH_OWN, anchor
        from otel_limits.bindings.strands.invocations import STATES

        assert self.host is not None  # `otel_limits.plugin` sees to it
        own = self.host.own_policy(limits, action, tree, origin)
        if own is None:
            return
        attachment = anchor(agent)
        STATES.of(agent).own = own
        if attachment.agent() is agent:  # a copy that is given others must not change its original
            attachment.own = own
        ALL_WITH_OWN.add(attachment)

    def mark(
        self, message: MutableMapping[str, Any], stop: Stop, *, synthetic: bool = True
    ) -> None:
        """Write `stop` into the metadata of `message`, which no model is ever sent.

        A synthetic message has no `usage` and gets none: Strands takes the last assistant message
        that has one as the baseline of its next projection, and a zero would make it collapse.
        """
        metadata = {**message.get("metadata", {})}
        if synthetic and not metadata.get("usage", {}).get("totalTokens"):
            metadata.pop("usage", None)  # of a response that was broken off
        custom = {**metadata.get("custom", {}), "synthetic": synthetic}
        custom[MARKER] = stop_to_json(stop)
        message["metadata"] = {**metadata, "custom": custom}

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return what `mark` wrote into a message, or into the message of a result."""
        message = result if isinstance(result, dict) else getattr(result, "message", None)
        if not isinstance(message, dict):
            return None
        custom = (message.get("metadata") or {}).get("custom")
        if not isinstance(custom, dict) or not isinstance(marker := custom.get(MARKER), dict):
            return None
        return {**marker, "synthetic": custom.get("synthetic") is True}

    def put_stop(self, ending: Any, reason: str) -> None:
        """Put `reason` into a stop event, whose result and span then have it as well."""
        # Strands appends fields to this tuple as it grows (seven in 1.62), so their number is left
        # open.
        _, *rest = ending["stop"]
        ending["stop"] = (reason, *rest)


STRANDS: Final = StrandsFramework()
