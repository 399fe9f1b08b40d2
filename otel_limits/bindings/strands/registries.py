"""Stands in for an agent's registries, so that being told of everything costs it a call at most.

What is registered the usual way, Strands asks again for every event whether it is a coroutine
function, which takes longer than what we do then; and around a stage it lays two generators that
all events of the agent pass. What the agent's own hooks and middleware are stays where it was.
"""

from __future__ import annotations

import copy
import functools
import logging
from inspect import iscoroutinefunction
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from strands.hooks import HookRegistry
from strands.interrupt import InterruptException
from strands.middleware import InvokeModelStage
from strands.middleware._agent_stream import AgentStreamStage
from strands.middleware._registry import MiddlewareRegistry

from otel_limits.core.faults import note

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping

    from strands.agent.agent import Agent
    from strands.interrupt import Interrupt
    from strands.middleware import MiddlewareNext, MiddlewareStage

    Callbacks: TypeAlias = Mapping[type, Callable[[Any], None]]
    """What is called, by the type of the event; a failure of it is never felt."""


class Turns(Protocol):
    """Where an invocation is in a turn."""

    asked: bool
    """True from when a response is asked for until it is taken into the conversation."""


class Follower(Protocol):
    """Who follows both stages; each is called with what Strands does in it, and the context."""

    @property
    def newest(self) -> Turns | None:
        """The invocation that is live."""

    def agent_stage(
        self, next_fn: MiddlewareNext[Any, Any], context: Any
    ) -> AsyncGenerator[Any, None]:
        """Follow a leg."""

    def model_stage(
        self, next_fn: MiddlewareNext[Any, Any], context: Any
    ) -> AsyncGenerator[Any, None]:
        """Follow a model call."""


REPLACED: Final = ("invoke_callbacks_async", "get_callbacks_for")
"""What `Hooks` does itself, in Strands' own way."""

CALLBACK_OF: Final = attrgetter("callback")

strands_logger: Final = logging.getLogger(HookRegistry.__module__)


class Hooks(HookRegistry):
    """Calls ours before every other hook, or after every other, so that what they said is known.

    It stands in for a plain registry alone, and so answers for it: it calls whom that would call.
    """

    def __init__(self, former: HookRegistry, first: Callbacks, last: Callbacks) -> None:
        """Stand in for `former`."""
        self.former = former
        self._registered_callbacks = former._registered_callbacks
        self._plain = HookRegistry.invoke_callbacks_async
        self._plain_order = HookRegistry.get_callbacks_for
        self._first = first
        self._last = last
        self._known: dict[int, tuple[object, bool]] = {}
        """Hooks by their identity, which is theirs while they are here: is each a coroutine?"""

    @property
    def first(self) -> Collection[Callable[[Any], None]]:
        """Ours that come before every other hook."""
        return self._first.values()

    async def invoke_callbacks_async(  # noqa: C901, PLR0912  every event of every agent is here
        self, event: Any
    ) -> tuple[Any, list[Interrupt]]:
        """Call whoever waits for this event, and collect interrupts, as Strands does."""
        kind = type(event)
        interrupts: list[Interrupt] = []
        if kind in self._first:
            try:
                self._first[kind](event)
            except Exception as error:  # noqa: BLE001  the agent must not feel it
                note("binding", error)
        # a class that was instrumented meanwhile sees what nobody waits for, too
        if HookRegistry.invoke_callbacks_async is not self._plain:
            event, interrupts = await super().invoke_callbacks_async(event)
        elif entries := self._registered_callbacks.get(kind):
            callbacks: Iterable[Any]
            callback: Any
            if HookRegistry.get_callbacks_for is not self._plain_order:
                callbacks = self.get_callbacks_for(event)
            elif not event.should_reverse_callbacks:
                callbacks = map(CALLBACK_OF, entries)  # with those that are added meanwhile
            elif len(entries) == 1:
                callbacks = (entries[0].callback,)
            else:
                callbacks = self.get_callbacks_for(event)
            for callback in callbacks:
                known = self._known.get(id(callback)) or self._learn(callback)
                try:
                    if known[1]:
                        await callback(event)
                    else:
                        callback(event)
                except InterruptException as exception:  # the others are called all the same
                    add_interrupt(interrupts, exception)
        if kind in self._last:
            try:
                self._last[kind](event)
            except Exception as error:  # noqa: BLE001  the agent must not feel it
                note("binding", error)
        return event, interrupts

    def __deepcopy__(self, memo: dict[int, Any]) -> HookRegistry:
        """Be copied as what it stands for, without ours: the copy is nobody's yet."""
        ours = [getattr(callback, "__self__", None) for callback in self._first.values()]
        others = {
            event: [each for each in entries if is_none_of(ours, each.callback)]
            for event, entries in self._registered_callbacks.items()
        }
        plain = copy.copy(self.former)
        plain._registered_callbacks = {event: each for event, each in others.items() if each}
        return copy.deepcopy(plain, memo)

    def _learn(self, callback: object) -> tuple[object, bool]:
        """Remember whether a hook is a coroutine function."""
        known = self._known[id(callback)] = (callback, iscoroutinefunction(callback))
        return known


def is_none_of(owners: list[Any], callback: object) -> bool:
    """Tell whether a callback is no method of any of these."""
    owner = getattr(callback, "__self__", None)
    return owner is None or all(owner is not each for each in owners)


def add_interrupt(interrupts: list[Interrupt], raised: InterruptException) -> None:
    """Keep one more interrupt.

    Raises:
        ValueError: There is one of that name; Strands has the same sentence for it.
    """
    name = raised.interrupt.name
    if any(each.name == name for each in interrupts):
        message = f"interrupt_name=<{name}> | interrupt name used more than once"
        strands_logger.error(message)
        raise ValueError(message) from raised
    interrupts.append(raised.interrupt)


class Stages(MiddlewareRegistry):
    """Calls ours inside of every middleware, next to what Strands itself does in a stage.

    Of a middleware that calls the model several times, only what is inside of it sees each call.
    """

    def __init__(self, former: MiddlewareRegistry, follower: Follower) -> None:
        """Stand in for `former`."""
        self.former = former
        self._handlers = former._handlers
        self.follower = follower
        plain = is_plain(former, MiddlewareRegistry, "invoke")
        self._plain = MiddlewareRegistry.invoke if plain else None

    def invoke(
        self,
        stage: MiddlewareStage[Any, Any, Any],
        context: Any,
        terminal: MiddlewareNext[Any, Any],
    ) -> AsyncGenerator[Any, None]:
        """Run a stage: the middleware of the agent, then ours, then Strands' own part.

        What they make is passed on as it is: a plain registry lays one more generator around it.
        """
        if stage is InvokeModelStage:
            live = self.follower.newest
            if live is not None:
                live.asked = True  # whoever answers: a middleware can do so itself
            terminal = functools.partial(self.follower.model_stage, terminal)
        elif stage is AgentStreamStage:
            terminal = functools.partial(self.follower.agent_stage, terminal)
        if MiddlewareRegistry.invoke is not self._plain:
            return self.former.invoke(stage, context, terminal)
        return self.compose(stage, terminal)(context)

    def __deepcopy__(self, memo: dict[int, Any]) -> MiddlewareRegistry:
        """Be copied as what it stands for: the copy is nobody's yet."""
        return copy.deepcopy(self.former, memo)


def follow_stages(agent: Agent, follower: Follower) -> None:
    """Have the stages of `agent` followed from now on."""
    former = agent._middleware_registry
    if isinstance(former, Stages):  # of the agent that this one is a copy of
        former = former.former
    agent._middleware_registry = Stages(former, follower)


def hear_hooks(agent: Agent, first: Callbacks, last: Callbacks) -> bool:
    """Have these called for `agent` from now on; false where its hooks are not Strands' own."""
    former = vars(agent).get("hooks")
    if isinstance(former, Hooks):  # of the agent that this one is a copy of
        former = former.former
    if not all(is_plain(former, HookRegistry, method) for method in REPLACED):
        return False
    agent.hooks = Hooks(cast("HookRegistry", former), first, last)
    return True


def hears(agent: Agent, callback: Callable[[Any], None]) -> bool:
    """Tell whether what stands in for the hooks of `agent` calls `callback`."""
    return isinstance(agent.hooks, Hooks) and callback in agent.hooks.first


def follower_of(agent: Agent) -> Follower | None:
    """Return who follows the stages of `agent`: of a copy, whoever follows the original."""
    registry = agent._middleware_registry
    return registry.follower if isinstance(registry, Stages) else None


def step_back(agent: Agent) -> None:
    """Undo both."""
    if isinstance(agent.hooks, Hooks):
        agent.hooks = agent.hooks.former
    if isinstance(agent._middleware_registry, Stages):
        agent._middleware_registry = agent._middleware_registry.former


def is_plain(registry: object, owner: type, method: str) -> bool:
    """Tell whether a registry does what it does in Strands: an application may have its own."""
    function = vars(owner)[method]
    return (
        type(registry) is owner
        and method not in vars(registry)
        and isinstance(function, FunctionType)
        and function.__globals__["__name__"] == owner.__module__
    )
