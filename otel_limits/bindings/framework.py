"""What the rest of the product may know of an agent framework: this protocol, and nothing else.

A new framework is one package beside `strands` that has an object like this, one line in
`otel_limits.bindings.known`, and its module in `startup/otel_limits_startup.py`, which waits for
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.core.limits import Limits
    from otel_limits.core.policy import Action, Policy
    from otel_limits.runs.registry import RunRegistry


# By names and not by attributes: Strands sets its attributes after a span has begun, and whose it
# is has to be known when it begins.
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNames:
    """How a framework's own spans are recognised."""

    scope: str
    """Its instrumentation scope."""
    agent: str
    """Begin of the name of the span of an invocation."""
    cycle: str
    """Name of the span of one pass through its loop: a model call and the tools it asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something of a framework that is used, and is not there."""

    name: str
    """Where it was looked for, such as `strands.agent.agent.Agent.add_hook`."""
    version: str
    """What it was looked for in, such as `strands-agents 1.62.0`."""
    without: str
    """What that means, as a sentence."""
    is_vital: bool
    """True where no limit can be in force without it; otherwise there is a fallback."""
    spares_agents: bool = False
    """True where it is vital, and each agent by itself is limited all the same."""


class Host(Protocol):
    """Who knows what applies to an agent: the runtime of the process."""

    @property
    def runs(self) -> RunRegistry:
        """Where invocations are followed."""

    @property
    def is_on(self) -> bool:
        """True while every agent is limited, not only those with limits of their own."""

    def policy(self, agent: str) -> Policy:
        """Return what applies to an agent, or a group of agents, of this name."""

    def own_policy(
        self, limits: Limits, action: Action | None, tree: Limits, origin: str = ""
    ) -> Callable[[str], Policy] | None:
        """Return what applies to an agent that sets these itself, by its name, from now on.

        `None` where otel-limits is disabled. `origin` is where it sets them, in words.

        Raises:
            ConfigurationError: A limit on cost is asked for where no price can be known.
        """

    def prepare(self, *, has_own: bool) -> None:
        """Do what has to be done before the span of an invocation begins.

        Args:
            has_own: Its agent has limits of its own.
        """

    def variable(self, name: str) -> str | None:
        """Return what a variable of this process says, such as one that a vendor's client reads."""

    def report_untracked_agent(self, agent: str) -> None:
        """An invocation of an agent cannot be followed, so that nothing limits it."""


class Framework(Protocol):
    """One agent framework. Nothing of it is imported before the application imports it."""

    name: str
    """Such as `strands`."""
    module: str
    """The module whose import shows that a program has agents."""
    parts: Collection[str]
    """Modules of it that a program may import besides, and that are looked at only then."""
    spans: SpanNames
    stop_reasons: Collection[str]
    """How its invocations end without us."""
    successes: Collection[str]
    """Those of `stop_reasons` with which an invocation has answered."""
    host: Host | None
    """Who is asked; the runtime of the process, as soon as there is one."""

    def gaps(self) -> Sequence[Gap]:
        """Import the framework, and look for everything of it that is used.

        Raises:
            ImportError: It is not installed.
        """

    def gaps_of(self, part: str) -> Sequence[Gap]:
        """Look for everything that is used of one of the parts, which need not be imported.

        Raises:
            ImportError: It is not installed.
        """

    def watch(self) -> None:
        """Follow every invocation from now on, by what `host` says; again is harmless."""

    def release(self) -> bool:
        """Follow no invocation any more, but those of agents with limits of their own.

        Returns:
            True while such an agent has an invocation that is live.
        """

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`.

        It consists of JSON values, plus `synthetic`.
        """
