"""Every private name of Strands that is used: why, and what is done where it is gone.

`PRIVATE_NAMES` is the list. A name that is missing never keeps `strands` from being imported, and
an agent never feels it: what stands under `without` is done instead, and its limits stay in force.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.types.content import Message


class PrivateName(NamedTuple):
    """One private name of Strands."""

    module: str
    name: str
    """As it is reached from the module; after `Agent().`, of an object that was made."""
    why: str
    without: str

    @property
    def exists(self) -> bool:
        """Look for it; of an object that is made it is known what its class sets or has."""
        owner, made, attribute = self.name.partition("().")
        if not made:
            return found(self.module, self.name) is not None
        # Only where it is there: a vendor's client takes a second to import, and where nobody has
        # imported it, there are no such objects.
        return self.module not in sys.modules or _is_set(found(self.module, owner), attribute)


def _is_set(owner: Any, name: str) -> bool:
    """Tell whether objects of a class have an attribute, without making one."""
    if owner is None or hasattr(owner, name):
        return owner is not None
    # What stands around `__init__`, of another instrumentation, may not say what is within it.
    code = getattr(inspect.unwrap(owner.__init__), "__code__", None)
    return code is None or name in code.co_names


SPAN_METHODS: Final = ("Agent._start_agent_trace_span", "Agent._end_agent_trace_span")
"""Between these two an invocation has a span."""

EVENTS: Final = "strands.types._events"
AGENT: Final = "strands.agent.agent"

PRIVATE_NAMES: Final = (
    PrivateName(
        AGENT,
        SPAN_METHODS[0],
        "An invocation begins, after its span and before any hook: no hook has the span's ids.",
        "Invocations are followed from `stream_async`, without their spans.",
    ),
    PrivateName(
        AGENT,
        SPAN_METHODS[1],
        "An invocation ends with a result, with an exception or because nobody waits for it.",
        "Invocations are followed from `stream_async`, without their spans.",
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
        AGENT,
        "Agent()._checkpointing",
        "The loop is going to end by itself after these tools.",
        "A natural end at the cap is a halt.",
    ),
    PrivateName(
        AGENT,
        "Agent()._middleware_registry",
        "Shows that an application has replaced the registry that our stages were added to.",
        "The wrap of `Model.stream` judges alone, without a stage.",
    ),
    PrivateName(
        "strands.models.openai",
        "OpenAIModel()._custom_client",
        "A client that the application has made knows the address, which says who sells.",
        "Such calls are priced as those of OpenAI.",
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


class MissingType:
    """Stands for a class that is gone: nothing is an instance of it."""


# Looked up at import and never again, as these are compared by `type(event) is` for every event of
# a stream. A class in the place of `None` keeps those comparisons valid where one is gone.
ModelStreamChunkEvent: Any = found(EVENTS, "ModelStreamChunkEvent") or MissingType
AgentStreamStage: Any = found("strands.middleware._agent_stream", "AgentStreamStage")
EventLoopStopEvent: Any = found(EVENTS, "EventLoopStopEvent") or MissingType
StartEventLoopEvent: Any = found(EVENTS, "StartEventLoopEvent") or MissingType
StructuredOutputEvent: Any = found(EVENTS, "StructuredOutputEvent") or MissingType


def custom_client(model: Any) -> Any:
    """Return the client that an application has given a model, if there is one."""
    return getattr(model, "_custom_client", None)


async def append_message(agent: Agent, message: Message) -> None:
    """Add a message to the conversation, and tell the hooks."""
    from strands.hooks import MessageAddedEvent

    # It also gives the message the tracking id by which session managers of 1.62 know it.
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


def will_end_anyway(agent: Agent) -> bool:
    """Tell whether the loop is going to end after the tools that have just run."""
    return bool(
        getattr(agent, "_deferred_cancel", False) or getattr(agent, "_checkpointing", False)
    )


def middleware_registry(agent: Agent) -> Any:
    """Return the registry that `agent.add_middleware` adds to, or `None`."""
    return getattr(agent, "_middleware_registry", None)
