"""Patches Strands' classes to intercept invocations, groups and model calls."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.context import attach, detach, get_current

from otel_limits.bindings.class_patches import subclasses_of, when_imported
from otel_limits.bindings.span_writer import write_end
from otel_limits.bindings.strands.private import CONVERTERS
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.vendor_usage import reads_usage
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.runs.current import CURRENT, TASK_SCOPE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextvars import Token

    from opentelemetry.context import Context
    from strands.agent.agent import Agent

    from otel_limits.bindings.class_patches import Patches
    from otel_limits.core.policy import Policy
    from otel_limits.runs.run import Group, Run, TaskScope


# --- classes of Strands ---------------------------------------------------------------------------


class ClassPatcher:
    """Patches Strands' classes when they are imported, and restores them.

    Modules that the application does not use are not imported, and modules of this package that
    import Strands only in functions. Names missing in Strands never make its import fail.
    """

    def __init__(self, patches: Patches) -> None:
        """Create a patcher that is off."""
        self._on = False
        self._registered = False
        self._patches = patches
        self._doors = ModelPatcher(self._patches, lambda: self._on)

    def start(self) -> None:
        """Patch classes that are imported already, and later ones on import."""
        if self._on:
            return
        self._on = True
        for module, patch in PATCHES.items():
            # wrapt cannot remove a hook, so each is registered once per process and checks whether
            # the patcher is on. Later starts patch modules that are imported already.
            if module in sys.modules and self._registered:
                self.patch_imported(patch, sys.modules[module])
            elif not self._registered:
                when_imported(module, functools.partial(self.patch_imported, patch))
        self._registered = True

    def stop(self) -> None:
        """Restore every class."""
        # First, so that concurrent imports are no longer patched.
        self._on = False
        self._patches.restore()

    @suppress_errors("binding")
    def patch_imported(self, patch: Callable[[ClassPatcher, Any], None], module: Any) -> None:
        """Patch the classes of a module that has just been imported."""
        if self._on:
            patch(self, module)

    def agents(self, module: Any) -> None:
        """Patch agents."""
        from otel_limits.bindings.strands.private import SPAN_METHODS

        begin, end = (name.removeprefix("Agent.") for name in SPAN_METHODS)
        if hasattr(module.Agent, begin) and hasattr(module.Agent, end):
            self._patches.wrap(module.Agent, begin, self._agent_start)
            self._patches.wrap(module.Agent, end, self._agent_end)
            self._patches.wrap(module.Agent, "stream_async", keep_apart)
        else:
            self._patches.wrap(module.Agent, "stream_async", self._agent_stream)
        self._patches.wrap(module.Agent, "structured_output_async", self._structured_output)
        from otel_limits.bindings.admission import retry_unless_spent

        self._patches.wrap(module.ModelRetryStrategy, "is_retryable", retry_unless_spent)

    def graphs(self, module: Any) -> None:
        """Patch graphs."""
        self._patches.wrap(module.Graph, "stream_async", self._group_stream)

    def swarms(self, module: Any) -> None:
        """Patch swarms."""
        self._patches.wrap(module.Swarm, "stream_async", self._group_stream)

    def models(self, module: Any) -> None:
        """Patch models, including those defined later."""
        self._doors.watch_classes_of(module.Model)

    def servers(self, module: Any) -> None:
        """Patch the server for A2A."""
        from otel_limits.bindings.strands.a2a import track_execute

        self._patches.wrap(module.StrandsA2AExecutor, "execute", track_execute)

    def clients(self, module: Any) -> None:
        """Patch the client for A2A."""
        from otel_limits.bindings.strands.a2a import track_client

        self._patches.wrap(module.A2AAgent, "stream_async", track_client)

    def realtime_agents(self, module: Any) -> None:
        """Patch realtime agents."""
        from otel_limits.bindings.strands import realtime

        self._patches.wrap(module.BidiAgent, "start", realtime.track_start)
        self._patches.wrap(module.BidiAgent, "send", realtime.track_send)
        self._patches.wrap(module.BidiAgent, "receive", realtime.track_receive)
        self._patches.wrap(module.BidiAgent, "stop", realtime.track_stop)

    # --- invocations ------------------------------------------------------------------------------

    def _agent_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            # Before the span is created: it may be the first, before a provider is set.
            self._prepare(agent)
            span = original(agent, *args, **kwargs)
            self._begun(agent, span, args[0] if args else kwargs.get("messages"))
            return span

        return start

    def _begun(self, agent: Agent, span: trace.Span, given: object) -> None:
        self._begin(agent, span, given)
        host = STRANDS.host
        if host is not None and host.is_on and not self._is_followed(agent, span):
            host.report_untracked_agent("strands", agent.name)

    @suppress_errors("binding")
    def _begin(self, agent: Agent, span: trace.Span, given: object) -> None:
        from otel_limits.bindings.strands import invocations

        if (policy_of := self._policy_of(agent)) is not None:
            self._doors.watch_of(agent)
            invocations.StrandsInvocation.begin(agent, span, policy_of(agent.name), given)

    @suppress_errors("binding")
    def _is_followed(self, agent: Agent, span: trace.Span) -> bool:
        from otel_limits.bindings.strands import invocations

        invocation = invocations.invocation_of(agent)
        return invocation is not None and invocation.span is span

    @suppress_errors("binding")
    def _policy_of(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return the policies of an agent and attach to it; `None` if none apply."""
        from otel_limits.bindings.strands import agent_hooks

        host, own = STRANDS.host, self._own_of(agent)
        if host is None or (own is None and not host.is_on):
            return None
        agent_hooks.attach(agent)
        return own or host.policy

    @suppress_errors("binding")
    def _prepare(self, agent: Agent) -> None:
        """Prepare the process for a call of `agent`."""
        if (host := STRANDS.host) is not None:
            host.prepare(has_own=not host.is_on and self._own_of(agent) is not None)

    def _own_of(self, agent: Agent) -> Callable[[str], Policy] | None:
        """Return the policies of an agent's plugin, including one it has as a copy."""
        from otel_limits.bindings.strands import agent_hooks, invocations

        state = invocations.STATES.get(agent)
        if state is not None and state.own is not None:
            return state.own
        attachment = agent_hooks.attachment_of(agent)
        return None if attachment is None else attachment.own

    def _agent_end(self, original: Any) -> Any:
        @functools.wraps(original)
        def end(
            agent: Agent,
            response: Any = None,
            error: Exception | None = None,
            cancellation: BaseException | None = None,
        ) -> Any:
            self._ending(agent, response)
            try:
                return original(agent, response, error, cancellation)
            # Also if ending the span fails: otherwise the invocation would never end, and the next
            # one of this agent would seem nested.
            finally:
                self._ended(agent, response, error, cancellation)

        return end

    @suppress_errors("binding")
    def _ending(self, agent: Agent, response: Any) -> None:
        from otel_limits.bindings.strands import invocations

        if (invocation := invocations.invocation_of(agent)) is not None:
            is_interrupted = bool(getattr(response, "interrupts", None))
            write_end(agent.trace_span, invocation.run, is_interrupted=is_interrupted)

    @suppress_errors("binding")
    def _ended(self, agent: Agent, *outcome: Any) -> None:
        from otel_limits.bindings.strands import invocations

        invocations.end(agent, *outcome)

    def _agent_stream(self, original: Any) -> Any:
        """Wrap `stream_async`, for releases without methods that start and end the span."""

        @keep_apart
        @functools.wraps(original)
        async def stream_async(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            self._prepare(agent)
            self._begun(agent, trace.INVALID_SPAN, args[0] if args else kwargs.get("prompt"))
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
        """Wrap `agent.structured_output(…)`, which calls the model without the agent loop."""

        @functools.wraps(original)
        async def structured_output_async(
            agent: Agent, output_model: Any, prompt: Any = None, **kwargs: Any
        ) -> Any:
            from otel_limits.bindings.strands import invocations

            self._prepare(agent)
            policy_of = self._policy_of(agent)
            if policy_of is None:
                return await original(agent, output_model, prompt, **kwargs)
            self._doors.watch_of(agent)
            run = invocations.begin_direct(agent, policy_of)
            output = None
            try:
                output = await original(agent, output_model, prompt, **kwargs)
            finally:
                invocations.end_direct(run, agent, prompt, output)
            return output

        return structured_output_async

    # --- groups -----------------------------------------------------------------------------------

    def _group_stream(self, original: Any) -> Any:
        """Wrap a graph or swarm, so that its nodes share one budget tree."""
        from otel_limits.bindings.strands.nested_stops import GroupStops

        @keep_apart
        @functools.wraps(original)
        async def stream_async(group: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            task = args[0] if args else kwargs.get("task")
            own_group = self._group_begun(group, task)
            if own_group is not None:
                CURRENT.set(own_group)
            events = original(group, *args, **kwargs)
            stops = GroupStops(group)
            try:
                async for event in events:
                    stops.note(event)
                    yield event
            finally:
                try:
                    await events.aclose()  # cancels its remaining nodes
                finally:
                    if own_group is not None:
                        self._group_ended(own_group, group, stops.interrupts)

        return stream_async

    @suppress_errors("binding")
    def _group_begun(self, group: Any, task: Any) -> Group | None:
        from otel_limits.bindings.invocation import conversation_of
        from otel_limits.bindings.strands import invocations, tool_context

        host = STRANDS.host
        assert host is not None  # set before the patches are applied
        self._doors.watch_all()
        tool_context.watch_nodes(group)
        invocations.watch_group(group)
        name = str(getattr(group, "id", "group"))
        # Last: an error after it would leave the trees with a member that never ends.
        answers = invocations.keys_of_group(group, answered_ids(task))
        invocations.recall_task(group, answers)
        session = getattr(getattr(group, "session_manager", None), "session_id", None)
        policy = host.policy(name)
        own = None if session is None else str(session)
        conversation = conversation_of(policy, {}, own)
        return host.runs.group(name, policy, answers, conversation)

    @suppress_errors("binding")
    def _group_ended(self, own_group: Group, group: Any, interrupts: list[str]) -> None:
        from otel_limits.bindings.strands import invocations

        host = STRANDS.host
        assert host is not None
        keys = invocations.keys_of_group(group, interrupts)
        host.runs.end_group(own_group, keys)


def answered_ids(task: Any) -> list[str]:
    """Return the IDs of the interrupts that the input of a group answers."""
    if not isinstance(task, list):
        return []
    answers = [each.get("interruptResponse") for each in task if isinstance(each, dict)]
    return [str(each.get("interruptId")) for each in answers if isinstance(each, dict)]


PATCHES: Final[dict[str, Callable[[ClassPatcher, Any], None]]] = {
    "strands.agent.a2a_agent": ClassPatcher.clients,
    "strands.agent.agent": ClassPatcher.agents,
    "strands.bidi.agent.agent": ClassPatcher.realtime_agents,
    "strands.models.model": ClassPatcher.models,
    "strands.multiagent.a2a.executor": ClassPatcher.servers,
    "strands.multiagent.graph": ClassPatcher.graphs,
    "strands.multiagent.swarm": ClassPatcher.swarms,
}


# --- classes of models ----------------------------------------------------------------------------

MODEL_METHODS: Final = ("stream", "structured_output")
"""The methods of a model that call its provider."""


def usage_in_chunk(_: Any, event: Any, **__: Any) -> object:
    """Return the vendor's usage in what a model class converts to a chunk."""
    if event.get("chunk_type") == "metadata":
        return event.get("data")
    if event.get("type") == "message_start":  # Anthropic's, whose tier the class drops
        return event["message"].get("usage")
    return None


class ModelPatcher:
    """Patches model classes, including those outside of Strands."""

    def __init__(self, patches: Patches, is_on: Callable[[], bool]) -> None:
        """Patch no class yet. No class is patched while `is_on` returns False."""
        self._patches = patches
        self._is_on = is_on

    def watch_classes_of(self, model: Any) -> None:
        """Patch every subclass of `model`, including those defined later."""
        self._patches.watch_subclasses(model, suppress_errors("binding")(self._watch_class))

    @suppress_errors("binding")
    def watch_of(self, agent: Agent) -> None:
        """Patch every model that may be called, including models that no agent has."""
        for model in (agent.model, agent.aux_model):
            self._watch_model(model)
        self.watch_all()

    @suppress_errors("binding")
    def watch_all(self) -> None:
        """Patch all model classes: a node of a graph may call one without an agent."""
        from strands.models import Model

        # At every invocation: an `__init_subclass__` may not call its parent's.
        for derived in subclasses_of(Model):
            self._watch_class(derived)

    def _watch_model(self, model: Any) -> None:
        """Patch the class of a model, as an attribute of the object would be copied with it."""
        for name in MODEL_METHODS:
            owner = next((each for each in type(model).__mro__ if name in vars(each)), None)
            if owner is not None:
                self._watch_class(owner)

    def _watch_class(self, owner: type) -> None:
        """Patch a class; inherited methods are patched in its parents."""
        if self._is_on() and not all((owner, name) in self._patches for name in MODEL_METHODS):
            from otel_limits.bindings.strands import sent_requests

            self._patches.wrap(owner, "stream", sent_requests.track_stream)
            self._patches.wrap(owner, "structured_output", sent_requests.track_structured_output)
            for name in CONVERTERS:
                if name in vars(owner):
                    self._patches.wrap(owner, name, reads_usage(usage_in_chunk))


# --- the context of a stream ----------------------------------------------------------------------
# Python runs an asynchronous generator in the context of its reader, so whatever the generator sets
# there would stay between two events, and after the reader has left the stream. Agents and spans
# that the reader starts would then belong to the agent whose stream it reads.


class StreamContext:
    """The owner of a stream and its span, while the stream itself runs.

    It is entered for each event, possibly in different tasks. It begins with the values of its
    first reader. Other context variables are the application's, and shared as Python does.
    """

    # No `__init__`: an error in it could not be suppressed.
    _kept: tuple[Run | Group | None, TaskScope | None, Context] | None = None
    """The values of the stream between two events."""
    _tokens: tuple[Token[Any], Token[Any], Token[Any]] | None = None
    """Restore the values of the reader."""

    # Guarded inside, not by a decorator, because both run for each event of a stream.

    def switch_in(self) -> None:
        """Set the values of the stream."""
        try:
            kept = self._kept or (CURRENT.get(), TASK_SCOPE.get(), get_current())
            self._tokens = CURRENT.set(kept[0]), TASK_SCOPE.set(kept[1]), attach(kept[2])
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)

    def switch_out(self) -> None:
        """Restore the values of the reader."""
        try:
            tokens, self._tokens = self._tokens, None
            if tokens is None:
                return
            self._kept = CURRENT.get(), TASK_SCOPE.get(), get_current()
            try:
                CURRENT.reset(tokens[0])
            except ValueError:  # a waiting task that is destroyed is closed in another context
                return
            TASK_SCOPE.reset(tokens[1])
            detach(tokens[2])
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)


def keep_apart(
    original: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap a method that streams, so that its reader keeps its own context."""

    @functools.wraps(original)
    async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        context, events = StreamContext(), original(*args, **kwargs)
        try:
            while True:
                context.switch_in()
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                finally:
                    context.switch_out()
                yield event
        finally:
            context.switch_in()
            try:
                await events.aclose()
            finally:
                context.switch_out()

    return stream_async
