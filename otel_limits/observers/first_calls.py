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
        self._is_policy_changeable = False
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
        self._is_policy_changeable = event.changeable

    def _started(self, event: Started) -> None:
        agent = event.invocation.agent
        caps = [f"{name}={cap}" for name, cap in _caps(event)] + ["quotas"] * event.has_quotas
        # By agent: a policy file may limit all agents but the one that runs away.
        if not caps and agent not in self._unlimited and len(self._unlimited) < MAX_UNLIMITED:
            self._unlimited.add(agent)
            logger.warning("otel-limits: %s", UNLIMITED.format(who=f"agent {quoted(agent)}"))
        if not self._is_logged:
            self._is_logged = True
            self._log_first_call(event, ", ".join(caps) or "no limits")

    def _log_first_call(self, event: Started, caps: str) -> None:
        source = "hooks" if event.unsampled else "spans"
        # Otherwise a model without a price would be an unexpected reason for a halt.
        unpriced = "unpriced=halt, " if event.unpriced == "halt" else ""
        # A tool of an agent could change its limits.
        policy = "policy=changeable, " if self._is_policy_changeable else ""
        sentence = (
            f"enforcing {caps} on agent {quoted(event.invocation.agent)} "
            f"(action={event.configured_action}, {unpriced}{policy}source={source})"
            f"{event.note and '. '}{event.note}"
        )
        if self._source == "run":
            # Visible in a shell whatever the program does with its log.
            print(f"otel-limits: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            logger.info("otel-limits: %s", sentence)


def _caps(event: Started) -> Iterator[tuple[str, object]]:
    """Return every cap of an invocation; 0 turns one off."""
    for caps in (event.limits.items(), event.tree.items()):
        for name, cap in caps:
            if isinstance(cap, dict) or hasattr(cap, "items"):
                yield name, ",".join(f"{tool[:MAX_LENGTH]}={each}" for tool, each in cap.items())
            elif cap:
                yield name, cap
