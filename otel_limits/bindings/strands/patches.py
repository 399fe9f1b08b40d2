"""Sees invocations, groups and model calls begin and end, by patches of Strands' classes."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import wrapt

from otel_limits.core.faults import never_raises
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from opentelemetry.trace import Span
    from strands.agent.agent import Agent

    from otel_limits.bindings.framework import Host
    from otel_limits.core.policy import Policy


class ClassPatcher:
    """Patches Strands' classes as they are imported, and puts them back.

    A module that the application does not use is not imported for it. Whatever is missing in
    Strands, importing it never fails because of us.
    """

    def __init__(self, host: Callable[[], Host | None]) -> None:
        """Patch nothing yet."""
        self._host = host
        self._on = False
        self._registered = False
        self._originals: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def start(self) -> None:
        """Patch the classes that are there, and those that are imported later."""
        if self._on:
            return
        self._on = True
        for module, patch in PATCHES.items():
            if module in sys.modules and self._registered:
                self._patched(module, patch)
            elif not self._registered:
                patched = functools.partial(self._patched, module, patch)
                wrapt.register_post_import_hook(patched, module)
        self._registered = True

    def stop(self) -> None:
        """Put every class back as it was."""
        # First, so that what is imported meanwhile is not patched any more.
        self._on = False
        for (owner, name), (original, ours) in self._originals.items():
            if vars(owner).get(name) is ours:  # another instrumentation may stand around it
                setattr(owner, name, original)
        self._originals.clear()

    @never_raises("binding")
    def _patched(
        self, module: str, patch: Callable[[ClassPatcher, Any], None], _imported: Any = None
    ) -> None:
        if self._on:
            patch(self, sys.modules[module])

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put a wrapper in the place of what a class has under a name, where it has something."""
        original = vars(owner).get(name)
        if original is not None and (owner, name) not in self._originals:
            ours = wrapper(original)
            self._originals[owner, name] = original, ours
            setattr(owner, name, ours)

    def agents(self, module: Any) -> None:
        """Patch agents."""
        self._wrap(module.Agent, "_start_agent_trace_span", self._agent_start)
        self._wrap(module.Agent, "_end_agent_trace_span", self._agent_end)
        self._wrap(module.Agent, "structured_output_async", self._structured_output)

    def graphs(self, module: Any) -> None:
        """Patch graphs."""
        self._wrap(module.Graph, "stream_async", self._group_stream)

    def swarms(self, module: Any) -> None:
        """Patch swarms."""
        self._wrap(module.Swarm, "stream_async", self._group_stream)

    # --- invocations ------------------------------------------------------------------------------

    def _agent_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            host = self._host()
            if host is not None:
                host.prepare()
            span = original(agent, *args, **kwargs)
            self._begun(agent, span)
            return span

        return start

    @never_raises("binding")
    def _begun(self, agent: Agent, span: Span) -> None:
        from otel_limits.bindings.strands.invocations import begin

        policy_of = self._policy_of(agent) or self._policy_of(agent)  # a fault must not let it go
        if policy_of is not None:
            self._watch_models_of(agent)
            begin(agent, span, policy_of)
            self._wait_for_quotas(agent)

    @never_raises("quotas")
    def _wait_for_quotas(self, agent: Agent) -> None:
        from otel_limits.bindings.strands.attach import wait_for_quotas

        host = self._host()
        if host is not None and host.runs.observers.gate is not None:
            wait_for_quotas(agent)

    @never_raises("binding")
    def _policy_of(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return what applies to an agent, which is attached to if something does."""
        from otel_limits.bindings.strands.attach import attach, attachment_of
        from otel_limits.bindings.strands.invocations import STATES

        host, state, attachment = self._host(), STATES.get(agent), attachment_of(agent)
        own = (state and state.own) or (attachment and attachment.own)
        if host is None or (own is None and not host.is_on):
            return None
        attach(agent)
        return own or host.policy

    def _agent_end(self, original: Any) -> Any:
        @functools.wraps(original)
        def end(
            agent: Agent,
            response: Any = None,
            error: Exception | None = None,
            cancellation: BaseException | None = None,
        ) -> Any:
            from otel_limits.bindings.strands import invocations

            try:
                return original(agent, response, error, cancellation)
            finally:
                invocations.end(agent, response, error, cancellation)

        return end

    def _structured_output(self, original: Any) -> Any:
        """Follow `agent.structured_output(…)`, which asks the model without the agent loop."""

        @functools.wraps(original)
        async def structured_output_async(
            agent: Agent, output_model: Any, prompt: Any = None, **kwargs: Any
        ) -> Any:
            from otel_limits.bindings.strands.invocations import begin_direct, end_direct

            policy_of = self._policy_of(agent)
            if policy_of is None:
                return await original(agent, output_model, prompt, **kwargs)
            self._watch_models_of(agent)
            run = begin_direct(agent, policy_of)
            output = None
            try:
                output = await original(agent, output_model, prompt, **kwargs)
            finally:
                end_direct(run, agent, prompt, output)
            return output

        return structured_output_async

    # --- groups -----------------------------------------------------------------------------------

    def _group_stream(self, original: Any) -> Any:
        """Let the nodes of a graph or swarm share one budget tree."""

        @functools.wraps(original)
        async def stream_async(group: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            before, host = CURRENT.get(), self._host()
            assert host is not None  # it is what switched the patches on
            name = str(getattr(group, "id", "group"))
            scope = host.runs.group(name, host.policy(name))
            CURRENT.set(scope)
            events = original(group, *args, **kwargs)
            try:
                async for event in events:
                    yield event
            finally:
                scope.finished = True
                CURRENT.set(before)
                await events.aclose()

        return stream_async

    # --- models -----------------------------------------------------------------------------------

    @never_raises("binding")
    def _watch_models_of(self, agent: Agent) -> None:
        """Follow every model that may be asked: a tool may ask one that no agent has."""
        from strands.models import Model

        # At every invocation, as an application may define a class of models at any time.
        for model in (agent.model, agent.aux_model):
            self._watch_model(model)
        for derived in subclasses_of(Model):
            self._watch_class(derived)

    def _watch_model(self, model: Any) -> None:
        """Follow a model by its class: an attribute of an object would go along into its copies."""
        owner = next((each for each in type(model).__mro__ if "stream" in vars(each)), None)
        if owner is not None:
            self._watch_class(owner)

    def _watch_class(self, owner: type) -> None:
        if self._on and (owner, "stream") not in self._originals:
            from otel_limits.bindings.strands.calls import followed_stream

            self._wrap(owner, "stream", followed_stream)


PATCHES: Final[dict[str, Callable[[ClassPatcher, Any], None]]] = {
    "strands.agent.agent": ClassPatcher.agents,
    "strands.multiagent.graph": ClassPatcher.graphs,
    "strands.multiagent.swarm": ClassPatcher.swarms,
}


def subclasses_of(owner: type) -> list[type]:
    """Return every class that is derived from `owner`, by now; one of two parents comes twice."""
    derived: list[type] = owner.__subclasses__()
    for each in derived:  # which grows meanwhile
        derived += each.__subclasses__()
    return derived
