"""Sees invocations, groups and model calls begin and end, by patches of Strands' classes."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import wrapt
from opentelemetry import trace

from otel_limits.bindings.strands.marks import HOST
from otel_limits.bindings.strands.model_patches import ModelPatcher, Patches
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from strands.agent.agent import Agent

    from otel_limits.core.policy import Policy
    from otel_limits.runs.run import Group


class ClassPatcher:
    """Patches Strands' classes as they are imported, and puts them back.

    A module that the application does not use is not imported for it. Whatever is missing in
    Strands, importing it never fails because of us.
    """

    def __init__(self) -> None:
        """Patch nothing yet."""
        self._on = False
        self._registered = False
        self._patches = Patches()
        self._doors = ModelPatcher(self._patches, lambda: self._on)

    def start(self) -> None:
        """Patch the classes that are there, and those that are imported later."""
        if self._on:
            return
        self._on = True
        for module, patch in PATCHES.items():
            # wrapt has no way to take a hook back, so that each is registered once for the life of
            # the process and asks whether we are on. Later starts patch by themselves what has been
            # imported by then.
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
        self._patches.restore()

    @suppress_errors("binding")
    def _patched(
        self, module: str, patch: Callable[[ClassPatcher, Any], None], _imported: Any = None
    ) -> None:
        if self._on:
            patch(self, sys.modules[module])

    def agents(self, module: Any) -> None:
        """Patch agents."""
        from otel_limits.bindings.strands.private import SPAN_METHODS

        begin, end = (name.removeprefix("Agent.") for name in SPAN_METHODS)
        if hasattr(module.Agent, begin) and hasattr(module.Agent, end):
            self._patches.wrap(module.Agent, begin, self._agent_start)
            self._patches.wrap(module.Agent, end, self._agent_end)
        else:
            self._patches.wrap(module.Agent, "stream_async", self._agent_stream)
        self._patches.wrap(module.Agent, "structured_output_async", self._structured_output)

    def graphs(self, module: Any) -> None:
        """Patch graphs."""
        self._patches.wrap(module.Graph, "stream_async", self._group_stream)

    def swarms(self, module: Any) -> None:
        """Patch swarms."""
        self._patches.wrap(module.Swarm, "stream_async", self._group_stream)

    def models(self, module: Any) -> None:
        """Patch models, those that are defined later included."""
        self._doors.watch_classes_of(module.Model)

    def servers(self, module: Any) -> None:
        """Patch what serves agents over A2A."""
        from otel_limits.bindings.strands.a2a import track_execute

        self._patches.wrap(module.StrandsA2AExecutor, "execute", track_execute)

    # --- invocations ------------------------------------------------------------------------------

    def _agent_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            # Before the span is made: it may be the first, and the provider that would see it not
            # yet set.
            _prepare(agent)
            span = original(agent, *args, **kwargs)
            self._begun(agent, span)
            return span

        return start

    @suppress_errors("binding")
    def _begun(self, agent: Agent, span: trace.Span) -> None:
        from otel_limits.bindings.strands.invocations import begin

        policy_of = self._policy_of(agent) or self._policy_of(agent)  # a fault must not let it go
        is_followed = False
        if policy_of is not None:
            self._doors.watch_of(agent)
            is_followed = begin(agent, span, policy_of) is True
            self._wait_for_quotas(agent)
        host = HOST.host
        if host is not None and host.is_on and not is_followed:
            host.report_untracked_agent(agent.name)

    # With a guard of its own: what fails here must not leave the agent without its other limits.
    @suppress_errors("quotas")
    def _wait_for_quotas(self, agent: Agent) -> None:
        from otel_limits.bindings.strands.attach import attach_quota_hooks

        host = HOST.host
        if host is not None and host.runs.observers.gate is not None:
            attach_quota_hooks(agent)

    @suppress_errors("binding")
    def _policy_of(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return what applies to an agent, which is attached to if something does."""
        from otel_limits.bindings.strands.attach import attach

        host, own = HOST.host, _own_of(agent)
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
            self._ending(agent)
            try:
                return original(agent, response, error, cancellation)
            # Also where ending the span fails: otherwise the invocation would be live for ever, and
            # the next one of this agent taken for one inside it.
            finally:
                self._ended(agent, response, error, cancellation)

        return end

    @suppress_errors("binding")
    def _ending(self, agent: Agent) -> None:
        from otel_limits.bindings.strands.invocations import live_of
        from otel_limits.bindings.strands.span_writer import write_end

        if (live := live_of(agent)) is not None:
            write_end(agent.trace_span, live.run)

    @suppress_errors("binding")
    def _ended(self, agent: Agent, *outcome: Any) -> None:
        from otel_limits.bindings.strands.invocations import end

        end(agent, *outcome)

    def _agent_stream(self, original: Any) -> Any:
        """Follow invocations where nothing else says when one begins and ends."""

        @functools.wraps(original)
        async def stream_async(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            _prepare(agent)
            self._begun(agent, trace.INVALID_SPAN)
            result, failure, broken_off = None, None, None
            events = original(agent, *args, **kwargs)
            try:
                async for event in events:
                    result = event.get("result", result)
                    yield event
            except Exception as error:
                failure = error
                raise
            except BaseException as error:
                broken_off = error
                raise
            finally:
                await events.aclose()
                self._ended(agent, result, failure, broken_off)

        return stream_async

    def _structured_output(self, original: Any) -> Any:
        """Follow `agent.structured_output(…)`, which asks the model without the agent loop."""

        @functools.wraps(original)
        async def structured_output_async(
            agent: Agent, output_model: Any, prompt: Any = None, **kwargs: Any
        ) -> Any:
            from otel_limits.bindings.strands.invocations import begin_direct, end_direct

            _prepare(agent)
            policy_of = self._policy_of(agent)
            if policy_of is None:
                return await original(agent, output_model, prompt, **kwargs)
            self._doors.watch_of(agent)
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
        from otel_limits.bindings.strands.activities import within

        @functools.wraps(original)
        async def stream_async(group: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            before = CURRENT.get()
            # A fault must not let its nodes go: without a scope each is limited by itself alone.
            scope = self._group_begun(group) or self._group_begun(group)
            events = within(scope or before, original(group, *args, **kwargs))
            try:
                async for event in events:
                    yield event
            finally:
                try:
                    await events.aclose()  # which cancels what is left of its nodes
                finally:
                    CURRENT.set(before)
                    if scope is not None:
                        self._group_ended(scope)

        return stream_async

    @suppress_errors("binding")
    def _group_begun(self, group: Any) -> Group | None:
        from otel_limits.bindings.strands.activities import watch_nodes

        host = HOST.host
        assert host is not None  # it is what switched the patches on
        self._doors.watch_all()
        watch_nodes(group)
        name = str(getattr(group, "id", "group"))
        # Last: nothing that fails afterwards may leave its trees with a member that never ends.
        return host.runs.group(name, host.policy(name))

    @suppress_errors("binding")
    def _group_ended(self, scope: Group) -> None:
        host = HOST.host
        assert host is not None
        host.runs.end_group(scope)


@suppress_errors("binding")
def _prepare(agent: Agent) -> None:
    """Prepare the process for a call of `agent`."""
    if (host := HOST.host) is not None:
        host.prepare(has_own=not host.is_on and _own_of(agent) is not None)


def _own_of(agent: Agent) -> Callable[[str], Policy] | None:
    """Return what applies to an agent by a plugin of its own, or of what it is a copy of."""
    from otel_limits.bindings.strands.attach import attachment_of
    from otel_limits.bindings.strands.invocations import STATES

    state, attachment = STATES.get(agent), attachment_of(agent)
    if state is not None and state.own is not None:
        return state.own
    return None if attachment is None else attachment.own


PATCHES: Final[dict[str, Callable[[ClassPatcher, Any], None]]] = {
    "strands.agent.agent": ClassPatcher.agents,
    "strands.models.model": ClassPatcher.models,
    "strands.multiagent.a2a.executor": ClassPatcher.servers,
    "strands.multiagent.graph": ClassPatcher.graphs,
    "strands.multiagent.swarm": ClassPatcher.swarms,
}
