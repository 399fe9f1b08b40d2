"""Says once what limits a process, at its first call of an agent, and which agent has no limit."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import Enforcing, Started
from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("otel_limits")

MAX_UNLIMITED: Final = 100
"""Agents without a limit that are told apart: a program may make up a name for each call."""

UNLIMITED: Final = (
    "No limit is set: nothing stops {who}. Set one, such as OTEL_LIMITS_MAX_TURNS=30."
)


class FirstCalls(BaseObserver):
    """Tells the first call of a process, and the first one of each agent without a limit.

    Args:
        quiet: Don't tell the former.
    """

    component = "first_calls"

    def __init__(self, *, quiet: bool) -> None:
        """Begin in a process that has called no agent."""
        self._is_told = quiet
        self._quiet = quiet
        self._source = ""
        self._unlimited: set[str] = set()
        self.subscribes_to = {Enforcing: self._enforcing, Started: self._started}

    def after_fork(self) -> None:
        """Begin again in a child, which is a process of its own."""
        self._is_told = self._quiet
        self._unlimited.clear()

    def _enforcing(self, event: Enforcing) -> None:
        self._source = event.source

    def _started(self, event: Started) -> None:
        caps = dict(_caps(event))
        # By agent: a policy file may limit all but one, which is the one that runs away.
        if not caps and not event.has_quotas:
            self._warn(event.invocation.agent)
        if not self._is_told:
            self._is_told = True
            self._say(event, caps)

    def _warn(self, agent: str) -> None:
        if agent not in self._unlimited and len(self._unlimited) < MAX_UNLIMITED:
            self._unlimited.add(agent)
            logger.warning("otel-limits: %s", UNLIMITED.format(who=f"agent {agent!r}"))

    def _say(self, event: Started, caps: dict[str, object]) -> None:
        shown = [f"{name}={cap}" for name, cap in caps.items()] + ["quotas"] * event.has_quotas
        sentence = (
            f"limits {event.invocation.agent}: {', '.join(shown) or 'none'}; "
            f"action {event.configured_action}; {'hooks' if event.unsampled else 'spans'}"
        )
        if self._source == "run":
            # Whoever watches a program from a shell reads it there, whatever the program does
            # with its log.
            print(f"otel-limits: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            logger.info("otel-limits: %s", sentence)


def _caps(event: Started) -> Iterator[tuple[str, object]]:
    """Every cap that binds an invocation; 0 switches one off."""
    for caps in (event.limits.items(), event.tree.items()):
        for name, cap in caps:
            if isinstance(cap, dict) or hasattr(cap, "items"):
                yield name, ",".join(f"{tool}={each}" for tool, each in cap.items())
            elif cap:
                yield name, cap
