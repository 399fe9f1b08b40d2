"""A small agent framework, for tests only: a second one to be limited, which knows no limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""`by` is `user`, `bot` or `tool`; `text` is its message."""


@dataclass
class Reply:
    """The answer of a model."""

    text: str = ""
    tools: Sequence[tuple[str, str, Any]] = ()
    """ID, name and argument of each requested tool."""
    tokens: tuple[int, int] = (0, 0)
    """Input and output tokens."""


class Model:
    """A model; a program derives its own."""

    async def ask(self, messages: list[Message], tools: Sequence[str]) -> Reply:
        """Answer a conversation."""
        raise NotImplementedError

    async def stream(self, messages: list[Message], tools: Sequence[str]) -> AsyncIterator[Any]:
        """Stream the parts of a text, and then the whole reply."""
        reply = await self.ask(messages, tools)
        for part in reply.text.split():
            yield part
        yield reply


@dataclass
class Ending:
    """How a run has ended: `done`, or `paused` until a person answers."""

    reason: str
    message: Message


@dataclass
class Bot:
    """Calls a model and the tools that it requests, until it requests none."""

    name: str
    model: Any
    tools: dict[str, Callable[[Any], Awaitable[str]]] = field(default_factory=dict)
    said: list[Message] = field(default_factory=list)

    async def run(self, text: Any, show: Callable[[str], object] = len) -> Ending:
        """Answer a text of the user, and show the parts of each answer."""
        self.said.append({"by": "user", "text": str(text)})
        while True:
            reply = Reply()
            async for part in self.model.stream(self.said, list(self.tools)):
                if isinstance(part, Reply):
                    reply = part
                else:
                    show(part)
            self.said.append({"by": "bot", "text": reply.text})
            if not reply.tools:
                return Ending("done", self.said[-1])
            for identity, name, argument in reply.tools:
                result = await self.use(identity, name, argument)
                self.said.append({"by": "tool", "id": identity, "text": result})

    async def use(self, identity: str, name: str, argument: Any) -> str:  # noqa: ARG002
        """Call a tool."""
        if name not in self.tools:
            return f"There is no tool {name}."
        return await self.tools[name](argument)
