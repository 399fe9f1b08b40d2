"""Conversations: the usage of all invocations of one thread or session."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import quoted
from otel_limits.core.limits import CONVERSATION_PREFIX, Limits
from otel_limits.core.usage import NO_COST, Tally
from otel_limits.core.values import FrozenDict
from otel_limits.runs.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from decimal import Decimal

    from otel_limits.core.policy import Policy
    from otel_limits.core.usage import Number

logger = logging.getLogger("otel_limits")

MAX_CONVERSATIONS: Final = 10_000
"""Conversations that are kept in memory; a further one drops the one that was idle longest."""

HASH_LENGTH: Final = 32


def conversation_hash(*parts: str) -> str:
    """Return the hash of an agent and the ID of its conversation, which may have any length."""
    # As JSON, so that no part can run into the next one.
    text = json.dumps(parts, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def keyed_identity(key: str, value: str) -> str:
    """Return the ID of a conversation that `conversation_key` names."""
    # With the key, as a thread may have the same ID.
    return json.dumps([key, value])


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


class Conversation(Budget):
    """The budget of one conversation, which its invocations share, also concurrent ones."""

    __slots__ = ("agent", "asked_by", "granted", "key", "sent", "used", "warned")

    def __init__(self, key: str, agent: str, policy: Policy, now: float) -> None:
        """Begin a conversation."""
        super().__init__(policy, now, CONVERSATION_PREFIX)
        self.key, self.agent = key, agent
        self.used = now
        """When an invocation last began or ended in it."""
        self.asked_by = ""
        """ID of the invocation whose question to a person could extend it, if any."""
        self.granted: dict[str, Any] = {}
        """By how much persons have raised its caps, by the name of the limit."""
        self.sent: Mapping[str, int] = {}
        """The part of its sums that a shared store has, or gets without a further addition."""
        self.warned: set[tuple[str, float]] = set()
        """Soft thresholds that were reported, by limit."""
        self.follow(policy)

    @property
    def configured(self) -> dict[str, Any]:
        """Its caps without the answers of persons, which hold for the agents within it, too."""
        caps = super().configured
        return {name: cap - self.granted.get(name, 0) for name, cap in caps.items()}

    def is_forgotten(self, now: float) -> bool:
        """Return whether it was idle for too long."""
        idle = self.policy.conversation_idle.total_seconds()
        return not self.members and now - self.used >= idle

    def follow(self, policy: Policy) -> None:
        """Apply the caps that are set now, which may have changed since the last message."""
        policy = policy.conversation_policy()
        if self.granted:
            now = dict(policy.limits.items())
            caps = {name: now[name] + more for name, more in self.granted.items() if name in now}
            policy = policy.extended_to(Limits(**caps), CONVERSATION_PREFIX)
        self.policy = policy

    def extend(self, more: Limits) -> None:
        """Raise its caps to what is used now plus `more`."""
        now = dict(self.policy.limits.items())
        used = more.extended_by(self.tally, {})
        caps = {name: cap for name, cap in used.items() if cap > now.get(name, cap)}
        for name, cap in caps.items():
            self.granted[name] = self.granted.get(name, 0) + cap - now[name]
        self.policy = self.policy.extended_to(Limits(**caps), CONVERSATION_PREFIX)


class Conversations:
    """The conversations of a process, bounded in number and age. Guarded by the registry's lock."""

    def __init__(self, now: Callable[[], float], most: int = MAX_CONVERSATIONS) -> None:
        """Create an empty table."""
        self.forgotten = 0
        """Conversations that were dropped because there were too many, or because of their age."""
        self._now, self._most = now, most
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._without: set[str] = set()
        """Agents whose calls belong to no conversation, although they have limits for it."""

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Conversation]:
        """Iterate over the conversations, the one used longest ago first."""
        return iter(self._kept.values())

    def of(self, key: str, agent: str, policy: Policy) -> Conversation:
        """Return a conversation for an invocation that begins, with the caps of its policy."""
        now = self._now()
        kept = self._kept.get(key)
        if kept is not None and kept.is_forgotten(now):
            self.forgotten += 1
            kept = None
        if kept is None:
            kept = self._kept[key] = Conversation(key, agent, policy, now)
        else:
            kept.follow(policy)
        kept.used = now
        self._kept.move_to_end(key)
        self._forget(now)
        return kept

    def leave(self, conversation: Conversation) -> None:
        """Note that an invocation has ended in a conversation."""
        conversation.used = self._now()
        if conversation.key in self._kept:
            self._kept.move_to_end(conversation.key)

    def report_missing(self, agent: str) -> None:
        """Log, once for each agent, that its limits per conversation do not apply."""
        if agent not in self._without:
            self._without.add(agent)
            logger.warning(
                "otel-limits: agent %s has limits per conversation, but its calls belong to none, "
                "so they do not apply. Pass a thread_id or a session, or set conversation_key.",
                quoted(agent),
            )

    def after_fork(self) -> None:
        """Reset in a child process: the parent's calls in flight end in the parent."""
        for each in self:
            each.members, each.reserved = 0, Tally()

    def _forget(self, now: float) -> None:
        """Drop conversations that are idle for too long, and the oldest one of too many."""
        while (oldest := self._oldest()) is not None:
            if len(self._kept) <= self._most and not oldest.is_forgotten(now):
                return
            del self._kept[oldest.key]
            self.forgotten += 1

    def _oldest(self) -> Conversation | None:
        """Return the one that is idle longest, if one is."""
        return next((each for each in self._kept.values() if not each.members), None)
