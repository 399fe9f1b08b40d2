"""Sees every invocation, group and direct model call of Strands begin and end, by its classes."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import wrapt

from otel_limits.core.faults import never_raises
from otel_limits.runs.calls import FOLLOWED
from otel_limits.runs.run import Run, is_followed
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from opentelemetry.trace import Span
    from strands.agent.agent import Agent

    from otel_limits.bindings.strands.binding import Binding
    from otel_limits.core.policy import Policy
    from otel_limits.runs.calls import OpenCall
    from otel_limits.runs.registry import Runs


class Host(Protocol):
    """Who knows what applies to an agent."""

    def binding_of(self, agent: Agent) -> Binding | None:
        """Return the agent's binding, or `None` when otel-limits is off for it."""

    def prepare(self) -> None:
        """Do what has to be done before the span of an invocation begins."""

    def policy(self, agent: str) -> Policy:
        """Return what applies to an agent, or a group, of this name without limits of its own."""


class Watch:
    """Wraps Strands' classes as they are imported, and puts them back.

    A module that the application does not use is not imported for it.
    """

    def __init__(self, host: Host, runs: Runs) -> None:
        """Wrap nothing yet."""
        self._host = host
        self._runs = runs
        self._on = False
        self._registered = False
        self._originals: dict[tuple[type, str], Any] = {}

    def start(self) -> None:
        """Wrap the classes that are there, and those that are imported later."""
        self._on = True
        for module, wrap in (
            ("strands.agent.agent", self._wrap_agents),
            ("strands.multiagent.graph", functools.partial(self._wrap_groups, name="Graph")),
            ("strands.multiagent.swarm", functools.partial(self._wrap_groups, name="Swarm")),
        ):
            if not self._registered:
                wrapt.register_post_import_hook(self._if_on(wrap), module)
            else:
                self._wrap_again(module, wrap)
        self._registered = True

    def stop(self) -> None:
        """Put every class back as it was."""
        self._on = False
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()

    def watch_class(self, model: type) -> None:
        """Follow what is asked of models of a class outside the agent loop, such as a summary.

        The class is wrapped, once: an attribute of an object would go along into its copies.
        """
        owner = next((each for each in model.__mro__ if "stream" in vars(each)), None)
        if owner is not None and self._on and (owner, "stream") not in self._originals:
            self._wrap(owner, "stream", self._model_stream)

    # --- when to wrap -----------------------------------------------------------------------------

    def _if_on(self, wrap: Callable[[Any], None]) -> Callable[[Any], None]:
        def imported(module: Any) -> None:
            if self._on:
                wrap(module)

        return imported

    def _wrap_again(self, name: str, wrap: Callable[[Any], None]) -> None:
        import sys

        module = sys.modules.get(name)
        if module is not None:
            wrap(module)

    def _wrap(self, owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
        if (owner, name) not in self._originals:
            original = self._originals[owner, name] = vars(owner)[name]
            setattr(owner, name, wrapper(original))

    def _wrap_agents(self, module: Any) -> None:
        self._wrap(module.Agent, "_start_agent_trace_span", self._agent_start)
        self._wrap(module.Agent, "_end_agent_trace_span", self._agent_end)
        self._wrap(module.Agent, "structured_output_async", self._structured_output)

    def _wrap_groups(self, module: Any, name: str) -> None:
        self._wrap(getattr(module, name), "stream_async", self._group_stream)

    # --- invocations ------------------------------------------------------------------------------

    def _agent_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(agent: Agent, *args: Any, **kwargs: Any) -> Any:
            self._host.prepare()
            span = original(agent, *args, **kwargs)
            self._begun(agent, span)
            return span

        return start

    @never_raises("binding")
    def _begun(self, agent: Agent, span: Span) -> None:
        binding = self._host.binding_of(agent)
        if binding is not None:
            self._watch_models_of(agent)
            binding.begin(agent, span)

    def _agent_end(self, original: Any) -> Any:
        @functools.wraps(original)
        def end(
            agent: Agent,
            response: Any = None,
            error: Exception | None = None,
            cancellation: BaseException | None = None,
        ) -> Any:
            try:
                return original(agent, response, error, cancellation)
            finally:
                self._ended(agent, response, error, cancellation)

        return end

    @never_raises("binding")
    def _ended(self, agent: Agent, *how: Any) -> None:
        binding = self._host.binding_of(agent)
        if binding is not None:
            binding.end(*how)

    def _structured_output(self, original: Any) -> Any:
        """Follow `agent.structured_output(…)`, which asks the model without the agent loop."""

        @functools.wraps(original)
        async def structured_output_async(
            agent: Agent, output_model: Any, prompt: Any = None, **kwargs: Any
        ) -> Any:
            binding = self._host.binding_of(agent)
            if binding is None:
                return await original(agent, output_model, prompt, **kwargs)
            self._watch_models_of(agent)
            run = binding.begin_direct(agent)
            output = None
            try:
                output = await original(agent, output_model, prompt, **kwargs)
            finally:
                binding.end_direct(run, agent, prompt, output)
            return output

        return structured_output_async

    # --- groups -----------------------------------------------------------------------------------

    def _group_stream(self, original: Any) -> Any:
        """Let the nodes of a graph or swarm share one budget tree."""

        @functools.wraps(original)
        async def stream_async(group: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            before = CURRENT.get()
            name = str(getattr(group, "id", "group"))
            scope = self._runs.group(name, self._host.policy(name))
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

    # --- direct model calls -----------------------------------------------------------------------

    @never_raises("binding")
    def _watch_models_of(self, agent: Agent) -> None:
        from strands.models import Model

        for model in (agent.model, agent._aux_model):
            if model is not None and (type(model), "stream") not in self._originals:
                self.watch_class(type(model))
        for derived in subclasses_of(Model):  # a tool may ask a model of any of them
            if (derived, "stream") not in self._originals and "stream" in vars(derived):
                self.watch_class(derived)

    def _model_stream(self, original: Any) -> Any:
        # not always a function: another instrumentation may have put its own thing there
        call = original if isinstance(original, FunctionType) else _as_function(original)

        @functools.wraps(original)
        def stream(model: Any, *args: Any, **kwargs: Any) -> Any:
            run = CURRENT.get()
            events = call(model, *args, **kwargs)
            if not isinstance(run, Run) or run.finished or run.call is not None:
                return events  # nobody's, or a call that the agent loop has opened
            return follow_direct(run, model, args, events)

        return stream


def _as_function(method: Any) -> Callable[..., Any]:
    """Return what takes an object first, of whatever stands for a method of its class."""
    bind = getattr(method, "__get__", lambda _, __: method)
    return lambda model, *args, **kwargs: bind(model, type(model))(*args, **kwargs)


def subclasses_of(owner: type) -> list[type]:
    """Return every class that is derived from `owner`, by now; one of two parents comes twice."""
    derived: list[type] = owner.__subclasses__()
    for each in derived:  # which grows meanwhile
        derived += each.__subclasses__()
    return derived


async def follow_direct(
    run: Run, model: Any, args: tuple[Any, ...], events: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass on what the model streams, and book the call when it ends."""
    from otel_limits.bindings.strands.reading import (
        estimate_tokens,
        model_id,
        note_usage,
        provider_of,
    )

    if is_followed(run):  # this is what a call that is followed asks in its turn
        async for chunk in events:
            yield chunk
        return
    asked = estimate_tokens(args[0] if args else "")
    call = run.open_side_call(model_id(model), asked, provider_of(model.__class__))
    try:
        async for chunk in inside(call, events):
            call.streamed = True
            note_usage(call, chunk)
            yield chunk
    except Exception:
        _settle(run, call, failed=True)
        raise
    finally:
        _settle(run, call, failed=False)
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


@never_raises("binding")
def _settle(run: Run, call: OpenCall, *, failed: bool) -> None:
    """Book a call that has not been booked yet."""
    if call.is_open:
        run.settle(call, failed=failed)


async def inside(call: OpenCall, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Pass events on, and say to whatever is called for each of them that it is followed."""
    chunks = aiter(events)
    while True:
        token = FOLLOWED.set(call)
        try:
            chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        finally:
            FOLLOWED.reset(token)
        yield chunk
