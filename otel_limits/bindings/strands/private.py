"""The private names of Strands in use: the purpose and fallback of each.

`PRIVATE_NAMES` is the list. A missing name never makes the import of `strands` fail or affects an
agent: the fallback under `without` applies, and limits are still enforced.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from strands.agent.agent import Agent
    from strands.bidi import BidiAgent
    from strands.types.content import Message


class PrivateName(NamedTuple):
    """One private name of Strands."""

    module: str
    name: str
    """Path from the module; after `Agent().`, an attribute of an instance."""
    why: str
    without: str

    @property
    def exists(self) -> bool:
        """True if the name exists. Attributes of instances are found in their class's code."""
        owner, made, attribute = self.name.partition("().")
        if not made:
            return found(self.module, self.name) is not None
        # Not imported for this: a vendor's client takes a second to import, and without the import
        # there are no such objects.
        return self.module not in sys.modules or _is_set(found(self.module, owner), attribute)


def _is_set(owner: Any, name: str) -> bool:
    """Return whether instances of a class have an attribute, without creating one."""
    if owner is None or hasattr(owner, name):
        return owner is not None
    # Another instrumentation's wrapper of `__init__` may hide its code.
    code = getattr(inspect.unwrap(owner.__init__), "__code__", None)
    return code is None or name in code.co_names


SPAN_METHODS: Final = ("Agent._start_agent_trace_span", "Agent._end_agent_trace_span")
"""They start and end the span of an invocation."""

CONVERTERS: Final = ("format_chunk", "_format_chunk")
"""Methods of model classes that convert a part of an answer: public ones, or else private ones."""

EVENTS: Final = "strands.types._events"
AGENT: Final = "strands.agent.agent"
REALTIME_AGENT: Final = "strands.bidi.agent.agent"
REALTIME_LOOP: Final = "strands.bidi.agent.loop"

PRIVATE_NAMES: Final = (
    PrivateName(
        AGENT,
        SPAN_METHODS[0],
        "Starts an invocation, after its span and before any hook: hooks do not have its IDs.",
        "Invocations are tracked through `stream_async`, without their spans.",
    ),
    PrivateName(
        AGENT,
        SPAN_METHODS[1],
        "Ends an invocation, after a result, an exception or a cancellation.",
        "Invocations are tracked through `stream_async`, without their spans.",
    ),
    PrivateName(
        "strands.middleware._agent_stream",
        "AgentStreamStage",
        "The only place where a stop reason can be changed.",
        "Agents are halted, but keep the framework's stop reason, and stream no text of a halt.",
    ),
    PrivateName(
        EVENTS,
        "EventLoopStopEvent",
        "Carries the stop reason through that stage.",
        "Agents are halted, but keep the framework's stop reason.",
    ),
    PrivateName(
        EVENTS,
        "StartEventLoopEvent",
        "Starts a cycle; the only sign of one in invocations without a recorded span.",
        "Cycles of such invocations are not counted, and context overflows are not noticed.",
    ),
    PrivateName(
        EVENTS,
        "StructuredOutputEvent",
        "The turn produced its structured output, so its end is natural.",
        "An agent may be halted in the turn that produced its output.",
    ),
    PrivateName(
        EVENTS,
        "ModelStreamChunkEvent",
        "A response is streamed, possibly by a model whose class is not patched, e.g. a proxy.",
        "Calls of such models are not counted.",
    ),
    PrivateName(
        AGENT,
        "Agent()._append_messages",
        "Adds the synthetic message with an ID, and calls the hooks.",
        "The message is added, and the hooks are called, through public names.",
    ),
    PrivateName(
        AGENT,
        "Agent()._interrupt_state",
        "Holds the human's answer to a question, the tools that finished before, and the task.",
        "An answer counts as a refusal, and after a restart it begins a new task.",
    ),
    PrivateName(
        "strands.multiagent.graph",
        "Graph()._interrupt_state",
        "Holds the task of an interrupted graph.",
        "After a restart, an answer begins a new task of the graph.",
    ),
    PrivateName(
        "strands.multiagent.swarm",
        "Swarm()._interrupt_state",
        "Holds the task of an interrupted swarm.",
        "After a restart, an answer begins a new task of the swarm.",
    ),
    PrivateName(
        AGENT,
        "Agent()._session_manager",
        "Shows whether an agent has a session: its public ID is random if it has none.",
        "An agent's conversation ends with the agent object, although its session does not.",
    ),
    PrivateName(
        REALTIME_AGENT,
        "BidiAgent()._session_manager",
        "The same for realtime agents.",
        "An agent's conversation ends with the agent object, although its session does not.",
    ),
    PrivateName(
        AGENT,
        "Agent()._deferred_cancel",
        "The loop will end after these tools anyway.",
        "A natural end at the cap counts as a halt.",
    ),
    PrivateName(
        AGENT,
        "Agent()._checkpointing",
        "The loop will end after these tools anyway.",
        "A natural end at the cap counts as a halt.",
    ),
    PrivateName(
        AGENT,
        "Agent()._middleware_registry",
        "Shows whether an application has replaced the registry with our stages.",
        "Only the wrapper of `Model.stream` checks limits, without a stage.",
    ),
    PrivateName(
        "strands.models.openai",
        "OpenAIModel()._custom_client",
        "A client created by the application has the address, which identifies the vendor.",
        "Such calls are priced as calls to OpenAI.",
    ),
    *(
        PrivateName(
            module,
            f"{name}()._bedrock_mantle_config",
            "Set if the client calls Bedrock's OpenAI-compatible endpoint, in the region of it.",
            "Such calls are priced as calls to OpenAI.",
        )
        for module, name in (
            ("strands.models.openai", "OpenAIModel"),
            ("strands.models.openai_responses", "OpenAIResponsesModel"),
        )
    ),
    *(
        PrivateName(
            module,
            f"{name}()._format_chunk",
            "Converts the vendor's usage, and drops stated costs and the tier that was served.",
            "Such calls cost what the price list says, at the tier of the request.",
        )
        for module, name in (
            ("strands.models.gemini", "GeminiModel"),
            ("strands.models.openai_responses", "OpenAIResponsesModel"),
        )
    ),
    PrivateName(
        REALTIME_AGENT,
        "BidiAgent()._loop",
        "Holds the span of a realtime agent, whose IDs hooks do not have.",
        "Realtime agents are tracked without their spans.",
    ),
    PrivateName(
        REALTIME_LOOP,
        "_AgentLoop()._session_span",
        "The span of a realtime agent, whose IDs hooks do not have.",
        "Realtime agents are tracked without their spans.",
    ),
)


def found(module: str, path: str) -> Any:
    """Return the object at a path in a module, or `None`."""
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return None
    return value


class MissingType:
    """Replaces a missing class: nothing is an instance of it."""


# Looked up once, as these are compared with `type(event)` for every event of a stream. A class
# instead of `None` keeps those comparisons valid if one is missing.
ModelStreamChunkEvent: Any = found(EVENTS, "ModelStreamChunkEvent") or MissingType
AgentStreamStage: Any = found("strands.middleware._agent_stream", "AgentStreamStage")
EventLoopStopEvent: Any = found(EVENTS, "EventLoopStopEvent") or MissingType
StartEventLoopEvent: Any = found(EVENTS, "StartEventLoopEvent") or MissingType
StructuredOutputEvent: Any = found(EVENTS, "StructuredOutputEvent") or MissingType


def custom_client(model: Any) -> Any:
    """Return the client that an application passed to a model, if any."""
    return getattr(model, "_custom_client", None)


def bedrock_url(model: Any) -> str | None:
    """Return the address of the OpenAI-compatible endpoint of Bedrock that a model calls, if any.

    Strands resolves it for each request: `_openai_bedrock.py`.
    """
    config = getattr(model, "_bedrock_mantle_config", None)
    if not isinstance(config, dict):
        return None
    region = config.get("region") or getattr(config.get("boto_session"), "region_name", None)
    if not region:
        import boto3

        region = boto3.Session().region_name
    return f"https://bedrock-mantle.{region}.api.aws" if region else None


def realtime_span(agent: BidiAgent) -> Span | None:
    """Return the span of a realtime agent."""
    return getattr(getattr(agent, "_loop", None), "_session_span", None)


async def append_message(agent: Agent, message: Message) -> None:
    """Add a message to the conversation, and call the hooks."""
    from strands.hooks import MessageAddedEvent

    # It also sets the tracking ID that session managers of 1.62 need.
    append = getattr(agent, "_append_messages", None)
    if append is not None:
        await append(message)
        return
    agent.messages.append(message)
    await agent.hooks.invoke_callbacks_async(MessageAddedEvent(agent=agent, message=message))


def interrupt_state(owner: Any) -> Any:
    """Return the interrupt state of an agent or group while it has interrupts, else `None`."""
    state = getattr(owner, "_interrupt_state", None)
    return state if getattr(state, "activated", False) else None


def session_of(agent: Agent | BidiAgent) -> str:
    """Return the ID of an agent's session; empty if it has no session manager."""
    return str(getattr(getattr(agent, "_session_manager", None), "session_id", None) or "")


def will_end_anyway(agent: Agent) -> bool:
    """Return whether the loop will end after the current tools."""
    return bool(
        getattr(agent, "_deferred_cancel", False) or getattr(agent, "_checkpointing", False)
    )


def middleware_registry(agent: Agent) -> Any:
    """Return the registry that `agent.add_middleware` adds to, or `None`."""
    return getattr(agent, "_middleware_registry", None)
