"""Logs the limits in use at the first agent call of a process, and agents without limits."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import Enforcing, PolicyRead, Started
from otel_limits.core.labels import MAX_LENGTH, quoted
from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("otel_limits")

MAX_UNLIMITED: Final = 100
"""Agents without limits that are logged: a program may generate a name for each call."""

UNLIMITED: Final = "No limits set for {who}. Set one, e.g. OTEL_LIMITS_MAX_TURNS=30."


class FirstCalls(BaseObserver):
    """Logs the first call of a process, and the first call of each agent without limits.

    Args:
        quiet: Don't log the former.
    """

    component = "first_calls"

    def __init__(self, *, quiet: bool) -> None:
        """Start in a process that has not called an agent."""
        self._is_logged = quiet
        self._quiet = quiet
        self._source = ""
        self._policy = ""
        self._unlimited: set[str] = set()
        self.subscribes_to = {
            Enforcing: self._enforcing,
            PolicyRead: self._policy_read,
            Started: self._started,
        }

    def after_fork(self) -> None:
        """Reset: a child logs its own first call."""
        self._is_logged = self._quiet
        self._unlimited.clear()

    def _enforcing(self, event: Enforcing) -> None:
        self._source = event.source

    def _policy_read(self, event: PolicyRead) -> None:
        # A tool of an agent could change its limits.
        self._policy = "policy=changeable, " if event.changeable else ""

    def _started(self, event: Started) -> None:
        agent = event.invocation.agent
        caps = [f"{name}={cap}" for name, cap in _caps(event)] + ["quotas"] * event.has_quotas
        if caps:
            if not self._is_logged:
                self._announce(logging.INFO, _enforced(event, ", ".join(caps), policy=self._policy))
        # By agent: a policy file may limit all agents but the one that runs away.
        elif agent not in self._unlimited and len(self._unlimited) < MAX_UNLIMITED:
            self._unlimited.add(agent)
            unlimited = UNLIMITED.format(who=f"agent {quoted(agent)}")
            self._announce(logging.WARNING, f"{unlimited}{event.note and ' '}{event.note}")

    def _announce(self, level: int, sentence: str) -> None:
        """Print the first sentence of a program under `otel-limits run`; log all others."""
        if self._source == "run" and not self._is_logged:
            # Visible in a shell whatever the program does with its log.
            print(f"otel-limits: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            logger.log(level, "otel-limits: %s", sentence)
        self._is_logged = True


def _enforced(event: Started, caps: str, *, policy: str) -> str:
    """Describe the limits of an agent in one line."""
    source = "hooks" if event.unsampled else "spans"
    # Otherwise a model without a price would be an unexpected reason for a halt.
    unpriced = "unpriced=halt, " if event.unpriced == "halt" else ""
    return (
        f"enforcing {caps} on agent {quoted(event.invocation.agent)} "
        f"(action={event.configured_action}, {unpriced}{policy}source={source})"
        f"{event.note and '. '}{event.note}"
    )


def _caps(event: Started) -> Iterator[tuple[str, object]]:
    """Return every cap of an invocation; 0 turns one off."""
    for caps in (event.limits.items(), event.tree.items()):
        for name, cap in caps:
            if isinstance(cap, dict) or hasattr(cap, "items"):
                yield name, ",".join(f"{tool[:MAX_LENGTH]}={each}" for tool, each in cap.items())
            elif cap:
                yield name, cap
