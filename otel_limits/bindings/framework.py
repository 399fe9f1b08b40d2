"""The interface between agent frameworks and the rest of otel-limits.

A framework that otel-limits itself limits is a package next to `strands` with an object of this
type, one line in `otel_limits.bindings.known`, and its module, distribution, packages and classes
in `startup/otel_limits_startup.py`, which waits for its import, and in `bindings/recognition.py`.
Another distribution derives it from `BaseFramework`, and names it in an entry point: see
`bindings/third_party.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.script import ScriptedRun
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Overrides, Policy
    from otel_limits.otel.kinds import SpanNames
    from otel_limits.runs.registry import RunRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A name of a framework that otel-limits uses and that is missing."""

    name: str
    """The missing name, e.g. `strands.agent.agent.Agent.add_hook`."""
    version: str
    """The framework's release, e.g. `strands-agents 1.62.0`."""
    without: str
    """The consequence, as a sentence."""
    still_limited: Literal["all", "some", "none"]
    """The agents that are limited without it: `all`, as there is a fallback, `some`, such as each
    agent of a group alone, or `none`."""


class Host(Protocol):
    """The runtime of the process, which knows the policy of each agent."""

    @property
    def runs(self) -> RunRegistry:
        """The registry of tracked invocations."""

    @property
    def is_on(self) -> bool:
        """True while all agents are limited, not only those with a plugin."""

    def policy(self, agent: str) -> Policy:
        """Return the policy of an agent, or a group of agents, with this name."""

    def own_policy(self, framework: str, own: Overrides) -> Callable[[str], Policy] | None:
        """Return a function from an agent's name to its policy, for an agent with its own limits.

        Return `None` if otel-limits is disabled.

        Args:
            framework: The name of the agent's framework.
            own: The limits.

        Raises:
            ConfigurationError: A limit on cost is set but no price can be known.
        """

    def prepare(self, *, has_own: bool) -> None:
        """Prepare the process before the span of an invocation starts.

        Args:
            has_own: The agent has a plugin with limits.
        """

    def variable(self, name: str) -> str | None:
        """Return an environment variable of this process, e.g. one that a vendor's client reads."""

    def report_untracked_agent(self, framework: str, agent: str) -> None:
        """Report an agent whose invocation cannot be tracked, so no limits apply to it."""


class Framework(Protocol):
    """An agent framework. It is not imported before the application imports it."""

    name: str
    """Name of the framework, e.g. `strands`; also of the extra that installs it."""
    module: str
    """The module that every program with agents imports."""
    distribution: str
    """Its package, e.g. `strands-agents`."""
    packages: Collection[str]
    """The top-level packages that import each other while `module` is imported, e.g. `strands`. It
    is probed once none of their modules is being imported."""
    binding: str
    """The module of its binding if that may be imported first, and then imports `module`. It is
    probed once that is complete, too. Empty for a binding of otel-limits."""
    requirement: str
    """The versions that can be limited, e.g. `strands-agents >= 1.62`."""
    needed: Mapping[str, Sequence[str]]
    """Names by module without which no agent can be limited, e.g. `Agent.add_hook`. They are also
    looked up without an import: by `otel-limits check`, and before an import that would fail."""
    importers: Sequence[str]
    """Modules of the binding that import all other such names."""
    without: str
    """The consequence of a missing one, as a sentence."""
    parts: Collection[str]
    """Optional modules of `packages`, checked only once a program imports them."""
    spans: SpanNames | None
    """Its own spans. `None` if it makes none: `otel_limits.bindings.span_writer` does."""
    stop_reasons: Collection[str]
    """Reasons for which its invocations end without otel-limits."""
    successes: Collection[str]
    """The `stop_reasons` of invocations that answered."""
    host: Host | None
    """The runtime of the process, once there is one."""

    def gaps(self) -> Sequence[Gap]:
        """Import the framework and return the names of it that are used but missing.

        Raises:
            ImportError: It is not installed.
        """

    def gaps_of(self, part: str) -> Sequence[Gap]:
        """Return the used but missing names of one of the `parts`, which need not be imported.

        Raises:
            ImportError: It is not installed.
        """

    def watch(self) -> None:
        """Track every invocation, under the policies of `host`. Idempotent.

        It is called when `module` and the packages around it have been imported. Others of the
        `packages` may be incomplete, so only the first call of an agent can import more of them.
        """

    def release(self) -> bool:
        """Stop tracking invocations, except those of agents with a plugin.

        Returns:
            True while such an agent has an invocation in progress.
        """

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a result, else `None`.

        It consists of JSON values, plus `synthetic`.
        """

    def stops_of(self, result: Any) -> Sequence[Stop]:
        """Return the stops in a message, a result or an exception, in their order."""

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run an agent with a scripted model, for `otel-limits doctor` and `otel-limits demo`.

        Returns:
            The number of its model calls, and the reason for its end.
        """
