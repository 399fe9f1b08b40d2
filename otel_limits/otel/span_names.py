"""The names of spans that are invocations: those of a framework, and our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


# By names, not by attributes: Strands sets attributes after a span has started, and its invocation
# must be known at the start.
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNames:
    """Names by which a framework's own spans are recognized."""

    scope: str
    """Its instrumentation scope."""
    agent: str
    """Prefix of the name of an invocation's span."""
    realtime: str | None = None
    """Prefix of the name of the span of a realtime agent, if there are any."""
    cycle: str | None = None
    """Name of the span of one loop cycle: a model call and the tools it requested."""

    @property
    def invocations(self) -> tuple[str, ...]:
        """Prefixes of the names of all spans that are a whole invocation."""
        return (self.agent,) if self.realtime is None else (self.agent, self.realtime)


OWN_SPANS: Final = SpanNames(scope="otel_limits", agent="invoke_agent")
"""Our own spans, for frameworks that make none."""
