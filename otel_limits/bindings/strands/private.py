"""Every private name of Strands that is used: why, and what is done where it is gone.

`PRIVATE_NAMES` is the list. A name that is missing never keeps `strands` from being imported, and
an agent never feels it: what stands under `without` is done instead.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from strands.hooks import MessageAddedEvent

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.types.content import Message


class PrivateName(NamedTuple):
    """One private name of Strands."""

    module: str
    name: str
    """As it is reached from the module; after `Agent().`, of an agent that was made."""
    why: str
    without: str

    @property
    def is_there(self) -> bool:
        """Look for it; names of an agent that was made are looked for where they are used."""
        return self.name.startswith("Agent().") or found(self.module, self.name) is not None


EVENTS: Final = "strands.types._events"
AGENT: Final = "strands.agent.agent"

PRIVATE_NAMES: Final = (
    PrivateName(
        AGENT,
        "Agent._start_agent_trace_span",
        "An invocation begins, after its span and before any hook: no hook has the span's ids.",
        "No invocation is followed.",
    ),
    PrivateName(
        AGENT,
        "Agent._end_agent_trace_span",
        "An invocation ends with a result, with an exception or because nobody waits for it.",
        "No invocation is followed.",
    ),
    PrivateName(
        "strands.middleware._agent_stream",
        "AgentStreamStage",
        "The only place where a stop reason can be changed.",
        "Agents are stopped, and the stop reason stays the framework's.",
    ),
    PrivateName(
        EVENTS,
        "EventLoopStopEvent",
        "Carries the stop reason through that stage.",
        "Agents are stopped, and the stop reason stays the framework's.",
    ),
    PrivateName(
        EVENTS,
        "StartEventLoopEvent",
        "A cycle begins; of an invocation without a recorded span nothing else says so.",
        "Cycles of such invocations are not counted, nor is a recovered context overflow seen.",
    ),
    PrivateName(
        EVENTS,
        "StructuredOutputEvent",
        "The turn produced its structured output, so that its end is natural.",
        "An agent may be halted in the turn that produced its output.",
    ),
    PrivateName(
        EVENTS,
        "ModelStreamChunkEvent",
        "A response is streamed, also by a model whose class is not patched, such as a proxy.",
        "Calls of such models are not counted.",
    ),
    PrivateName(
        AGENT,
        "Agent()._append_messages",
        "Adds the synthetic message with an id, and tells the hooks.",
        "The message is added, and the hooks are told, through public names.",
    ),
    PrivateName(
        AGENT,
        "Agent()._interrupt_state",
        "Holds the answer of the human who was asked, and the tools that were done before.",
        "An answer is taken for a refusal.",
    ),
    PrivateName(
        AGENT,
        "Agent()._deferred_cancel",
        "The loop is going to end by itself after these tools.",
        "A natural end at the cap is a halt.",
    ),
    PrivateName(
        AGENT, "Agent()._checkpointing", "As for `_deferred_cancel`.", "As for `_deferred_cancel`."
    ),
    PrivateName(
        AGENT,
        "Agent()._middleware_registry",
        "Shows that an application has replaced the registry that our stages were added to.",
        "The wrap of `Model.stream` judges alone, without a stage.",
    ),
)


def found(module: str, path: str) -> Any:
    """Return what a module has under a name, or `None`."""
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return None
    return value


class Missing:
    """Stands for a class that is gone: nothing is an instance of it."""


ModelStreamChunkEvent: Any = found(EVENTS, "ModelStreamChunkEvent") or Missing
AgentStreamStage: Any = found("strands.middleware._agent_stream", "AgentStreamStage")
EventLoopStopEvent: Any = found(EVENTS, "EventLoopStopEvent") or Missing
StartEventLoopEvent: Any = found(EVENTS, "StartEventLoopEvent") or Missing
StructuredOutputEvent: Any = found(EVENTS, "StructuredOutputEvent") or Missing


async def append_message(agent: Agent, message: Message) -> None:
    """Add a message to the conversation, and tell the hooks."""
    append = getattr(agent, "_append_messages", None)
    if append is not None:
        await append(message)
        return
    agent.messages.append(message)
    await agent.hooks.invoke_callbacks_async(MessageAddedEvent(agent=agent, message=message))


def interrupt_state(agent: Agent) -> Any:
    """Return what holds the interrupts of an agent while it is resumed, else `None`."""
    state = getattr(agent, "_interrupt_state", None)
    return state if getattr(state, "activated", False) else None


def ends_by_itself(agent: Agent) -> bool:
    """Tell whether the loop is going to end after the tools that have just run."""
    return bool(
        getattr(agent, "_deferred_cancel", False) or getattr(agent, "_checkpointing", False)
    )


def middleware_registry(agent: Agent) -> Any:
    """Return the registry that `agent.add_middleware` adds to, or `None`."""
    return getattr(agent, "_middleware_registry", None)
