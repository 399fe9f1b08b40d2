"""Strands Agents, as the rest of the product knows it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.framework import SpanNames
from otel_limits.bindings.strands.classes import Watch
from otel_limits.core.faults import never_raises
from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from strands.agent.agent import Agent

    from otel_limits.bindings.strands.binding import Binding
    from otel_limits.core.facts import Stop
    from otel_limits.core.limits import Action, Limits, Policy


class StrandsFramework:
    """Follows Strands agents."""

    name = "strands"
    module = "strands.agent.agent"
    spans = SpanNames(
        scope="strands.telemetry.tracer", agent="invoke_agent", cycle="execute_event_loop_cycle"
    )
    host: Any = None
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

    def __init__(self) -> None:
        """Follow nothing yet."""
        self._lock = threading.RLock()
        self._bindings: weakref.WeakKeyDictionary[Agent, Binding] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakSet[Agent] = weakref.WeakSet()
        self._watch = Watch(self, LIVE)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    @property
    def has_own(self) -> bool:
        """True while there is an agent with a `LimitsPlugin`."""
        return len(self._own) > 0

    def watch(self) -> None:
        """Follow every invocation from now on."""
        self._watch.start()

    def release(self) -> None:
        """Follow no invocation any more, but those of agents with a plugin."""
        with self._lock:
            for agent, binding in list(self._bindings.items()):
                if agent not in self._own:
                    binding.detach(agent)
                    del self._bindings[agent]
            if not self._own:
                self._watch.stop()

    def adopt(self, agent: Agent, limits: Limits, action: Action | None, tree: Limits) -> None:
        """Give `agent` limits of its own, over those of all agents."""
        own = self.host.own_policy(limits, action, tree)
        if own is None:
            return
        with self._lock:
            former = self._bindings.pop(agent, None)
            if former is not None:
                former.detach(agent)
            self._bind(agent, own)

    def binding_of(self, agent: Agent) -> Binding | None:
        """Return the agent's binding, made on first use while every agent is limited."""
        binding = self._bindings.get(agent)
        if binding is not None:
            return binding
        policy = self._policy_of_copied(agent)
        if policy is None and not self.host.is_on:
            return None
        with self._lock:
            return (
                self._bindings.get(agent)
                or self._bind_safely(agent, policy)
                or self._bind_safely(agent, policy)  # a fault must not leave it without its limits
            )

    def prepare(self) -> None:
        """Do what has to be done before the span of an invocation begins."""
        self.host.prepare()

    def policy(self, agent: str) -> Policy:
        """Return what applies to a group of this name."""
        policy: Policy = self.host.policy(agent)
        return policy

    @never_raises("binding")
    def _policy_of_copied(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return the own limits of the agent that this one is a copy of, if it is one."""
        from otel_limits.bindings.strands.binding import Binding
        from otel_limits.bindings.strands.registries import follower_of

        follower = follower_of(agent)
        if not isinstance(follower, Binding) or not follower.is_own:
            return None
        return follower.policy if follower.stands_in_for(agent) else None

    def _bind(self, agent: Agent, own: Callable[[str], Policy] | None = None) -> Binding:
        from otel_limits.bindings.strands.binding import Binding

        binding = Binding(LIVE, own or self.host.policy, is_own=own is not None)
        try:
            binding.attach(agent)
        except Exception:
            binding.detach(agent)
            raise
        if own is not None:
            self._own.add(agent)
        self._bindings[agent] = binding
        return binding

    _bind_safely = never_raises("binding")(_bind)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def mark(self, message: Any, stop: Stop, *, synthetic: bool) -> None:
        """Write `stop` into the metadata of `message`."""
        raise NotImplementedError

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return what `mark` wrote."""
        raise NotImplementedError

    def put_stop(self, ending: Any, reason: str) -> None:
        """Put `reason` into a stop event."""
        raise NotImplementedError


STRANDS: Final = StrandsFramework()
