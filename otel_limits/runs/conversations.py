"""Conversations: the usage of all invocations of one thread or session."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from otel_limits.core.usage import NO_COST
from otel_limits.core.values import FrozenDict

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.core.usage import Number

HASH_LENGTH: Final = 32


def conversation_hash(*parts: str) -> str:
    """Return the hash of an agent and the ID of its conversation, which may have any length."""
    # As JSON, so that no part can run into the next one.
    text = json.dumps(parts, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSums:
    """The usage of a conversation, or a part of it that is added."""

    turns: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    cost: Decimal = NO_COST
    """USD of the model calls with a known price."""
    cost_at_most: Decimal = NO_COST
    """`cost`, plus the upper bounds of unknown prices: the value that a limit counts."""
    has_wrapped_up: bool = False
    """True once its last answer was asked for. True in either of two sums is true in both."""
    has_asked: bool = False
    """True once a person was asked to extend it; added like `has_wrapped_up`."""
    granted: Mapping[str, Number] = field(default_factory=dict)
    """By how much persons have raised its caps, by the name of the limit, such as `max_turns`."""

    def __post_init__(self) -> None:
        """Copy the grants, so that later changes don't affect the sums."""
        object.__setattr__(self, "granted", FrozenDict(self.granted))


class ConversationStore(Protocol):
    """Keeps the sums of conversations, which processes share and restarts survive."""

    def read(self, key: str) -> ConversationSums | None:
        """Return the sums of a conversation; `None` if it is unknown.

        Called before the first model call of an invocation, in a thread that may wait. What this
        process has added before is included.

        Args:
            key: The hash of the conversation.
        """

    def add(self, key: str, agent: str, part: ConversationSums, idle_seconds: float) -> None:
        """Add usage, without waiting.

        Args:
            key: The hash of the conversation.
            agent: The name of its agent.
            part: What is added; a number can be negative, as a tool call may be taken back.
            idle_seconds: How long the conversation is remembered after this.
        """
