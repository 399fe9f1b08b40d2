"""Strands Agents, as the rest of the product knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.framework import SpanNames

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from otel_limits.bindings.framework import Framework, Host
    from otel_limits.core.facts import Stop


class StrandsFramework:
    """Follows Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    spans = SpanNames(
        scope="strands.telemetry.tracer", agent="invoke_agent", cycle="execute_event_loop_cycle"
    )
    host: Host | None = None
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

    @property
    def has_own(self) -> bool:
        """True while there is an agent with a `LimitsPlugin`."""
        raise NotImplementedError

    def watch(self) -> None:
        """Follow every invocation from now on."""
        raise NotImplementedError

    def release(self) -> None:
        """Follow no invocation any more, but those of agents with a plugin."""
        raise NotImplementedError

    def mark(self, message: Any, stop: Stop, *, synthetic: bool) -> None:
        """Write `stop` into the metadata of `message`."""
        raise NotImplementedError

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return what `mark` wrote."""
        raise NotImplementedError

    def put_stop(self, ending: Any, reason: str) -> None:
        """Put `reason` into a stop event."""
        raise NotImplementedError


STRANDS: Final[Framework] = StrandsFramework()
