"""A program of agents, as data: the answers of their models, their tools, and their calls."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from otel_limits import Limits
from otel_limits.testing import Answer, fails, says, tokens, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_limits.core.policy import Action

Failure: TypeAlias = Literal["busy", "lost"]
"""A vendor that is `busy` is asked again, up to `ATTEMPTS` times in all."""

ATTEMPTS: Final = 3

Way: TypeAlias = str
"""The action of a tool: one of `ways.BUILDERS`, or of those that only one framework has."""

SEQUENTIAL: Final[tuple[Way, ...]] = ("look", "be", "ask")
"""The ways in which agents never run concurrently."""

WAYS: Final[tuple[Way, ...]] = (
    *SEQUENTIAL,
    *("gather", "pool", "threads", "timers", "own pool", "loops", "abandon"),
)
"""The ways of random programs."""

Call: TypeAlias = Literal["sync", "async", "stream"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One response of a model: requests for tools, a failure, or else a text."""

    tools: tuple[str, ...] = ()
    failure: Failure | None = None
    tokens: int = 4


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool of an agent."""

    name: str
    way: Way = "look"
    agents: tuple[str, ...] = ()
    events: int = 0
    """How much of a stream is read before it is abandoned."""
    is_closed: bool = True
    """Whether that stream is then closed immediately, not at the end of the program."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent and the answers of its model, which are repeated from the first one."""

    name: str
    is_model: bool = False
    """A model alone, which tools call themselves."""
    replies: tuple[Reply, ...] = (Reply(),)
    tools: tuple[Tool, ...] = ()
    limits: Limits = field(default_factory=Limits)
    tree: Limits = field(default_factory=Limits)
    action: Action | None = None
    traits: frozenset[str] = frozenset()
    """Settings that only one framework has."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Agents, of which the first is called, and the limits of all."""

    agents: tuple[Agent, ...]
    limits: Limits = field(default_factory=Limits)
    tree: Limits = field(default_factory=Limits)
    action: Action = "halt"
    calls: tuple[Call, ...] = ("sync",)
    """How the first agent is called, one time after the other."""
    is_concurrent: bool = False
    """Whether tools of one response run concurrently."""
    most_replies: int = 40
    """Responses after which every model answers in text: some programs would never end."""

    def __getitem__(self, name: str) -> Agent:
        """Return the agent with a name."""
        return next(each for each in self.agents if each.name == name)

    def policy(self) -> Mapping[str, Any]:
        """Return the policy file."""
        return {
            "models": {"*": {"local": True}},  # or the list of prices would be read each time
            "defaults": _section(self.limits, self.tree, self.action),
            "agents": {
                each.name: section
                for each in self.agents
                if (section := _section(each.limits, each.tree, each.action))
            },
        }


def _section(limits: Limits, tree: Limits, action: Action | None) -> dict[str, Any]:
    caps = {"limits": dict(limits.items()), "tree": dict(tree.items())}
    return {
        **{name: each for name, each in caps.items() if each},
        **({"action": action} if action else {}),
    }


class Script:
    """The answers of all models of one run.

    Args:
        program: The program.
        busy: The error of a busy vendor.
    """

    def __init__(self, program: Program, busy: Callable[[str], Exception]) -> None:
        self._program = program
        self._busy = busy
        self._lock = threading.Lock()
        self.given = 0
        """Responses so far, of all models."""

    def of(self, agent: Agent) -> Iterator[Answer]:
        """The answers of an agent's model, for any thread."""
        replies = itertools.cycle(agent.replies)
        return iter(lambda: self._next(replies), None)

    @property
    def is_over(self) -> bool:
        """Whether models only answer in text."""
        return self.given > self._program.most_replies

    def _next(self, replies: Iterator[Reply]) -> Answer:
        with self._lock:
            self.given += 1
            reply = next(replies)
            return says("done", usage=tokens(reply.tokens)) if self.is_over else self._of(reply)

    def _of(self, reply: Reply) -> Answer:
        if reply.failure == "busy":
            return fails(self._busy("busy"))
        if reply.failure == "lost":
            return fails(OSError("lost"))
        if reply.tools:
            return uses(*reply.tools, usage=tokens(reply.tokens))
        return says("done", usage=tokens(reply.tokens))
