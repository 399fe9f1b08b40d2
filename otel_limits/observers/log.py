"""Logs halts, soft limits, the limits in use, and once each what is not counted."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import (
    Enforcing,
    Halt,
    LimitWarning,
    ModelCall,
    PolicyRead,
    RepeatedFailures,
    Started,
    TaskLost,
    ToolCall,
)
from otel_limits.core.labels import MAX_LENGTH, clean, misspelled, quoted
from otel_limits.core.limits import PRESET, over_resumes
from otel_limits.core.wording import shortest
from otel_limits.observers.protocol import BaseObserver

if TYPE_CHECKING:
    from collections.abc import Iterator


MOST_UNPRICED = 100
"""Models logged at each level; the others are only in the metric."""
MOST_UNKNOWN = 100
"""Names in usages that are logged; calls with others are only in the metric."""

MOST_REFUSING = 1000
"""Invocations and tools whose refusal was logged, until these are forgotten and logged again."""

MORE_UNPRICED = (
    "More than %d models have no price. Further models are only counted in the metric "
    "otel_limits_unpriced_tokens_total."
)
BOUND_EFFECT = "Limits and quotas in USD count its upper bound."
UNPRICED_EFFECT = {
    logging.INFO: "Its tokens are counted as unpriced.",
    logging.WARNING: "max_cost_usd does not cover such calls: they count as 0 USD. Set "
    "OTEL_LIMITS_UNPRICED=halt to halt the agent instead.",
}
"""The effect of a missing price."""

MOST_AGENTS = 100
"""Agents whose lost tasks are logged; the others are only in the metric."""

LOST_TASK = (
    "Agent %s continues after an interrupt, but its usage before it is not known, so its limits "
    "start from zero. It was interrupted before a restart, in another process or more than seven "
    "days ago, and the framework did not keep its usage. Further ones are only counted in the "
    "metric otel_limits_lost_tasks_total."
)

logger = logging.getLogger("otel_limits")


class LogObserver(BaseObserver):
    """Logs halts, reached soft limits, failures in a row, missing prices and lost tasks."""

    component = "log"

    def __init__(self) -> None:
        """Subscribe to halts, warnings, failures in a row, model calls and lost tasks."""
        self._with_lost_tasks: dict[str, object] = {}
        self._unpriced: dict[int, dict[str, object]] = {logging.INFO: {}, logging.WARNING: {}}
        self._unknown: set[str] = set()
        self._refused: set[str] = set()
        self._refusing: set[tuple[str, str]] = set()
        self.subscribes_to = {
            Halt: _log_halt,
            LimitWarning: _log_threshold,
            RepeatedFailures: _log_repeated_failures,
            ModelCall: self._log_call,
            TaskLost: self._log_lost_task,
            ToolCall: self._log_refusal,
        }

    def _log_refusal(self, event: ToolCall) -> None:
        """Log the first call of a tool that a cap refuses, or would refuse, in an invocation."""
        # At the cap on all tools, the agent halts, which is logged.
        if event.limit != "max_calls_per_tool":
            return
        refusing = (event.invocation.id, event.tool)
        if refusing in self._refusing:
            return
        if len(self._refusing) >= MOST_REFUSING:
            self._refusing.clear()
        self._refusing.add(refusing)
        logger.warning(
            "Agent %s reached %s for tool %s: this call and later ones %s refused.",
            quoted(event.invocation.agent),
            event.limit,
            quoted(event.tool),
            "are" if event.status == "refused" else "would have been",
        )

    def _log_lost_task(self, event: TaskLost) -> None:
        """Log once per agent that an answer to an interrupt begins a new task, and why."""
        if event.invocation is None:
            return
        agent, logged = event.invocation.agent, self._with_lost_tasks
        if len(logged) < MOST_AGENTS and _is_new(agent, logged):
            logger.warning(LOST_TASK, quoted(agent))

    def _log_call(self, event: ModelCall) -> None:
        for each in event.unknown_usage:
            self._log_unknown(each, event.model)
        if event.stated_refused:
            self._log_refused(event)
        self._log_unpriced(event)

    def _log_unknown(self, name: str, model: str) -> None:
        """Log once what a usage contains that no rule understands."""
        if name in self._unknown or len(self._unknown) >= MOST_UNKNOWN:
            return
        self._unknown.add(name)
        logger.warning(
            "The usage of model %r has tokens with an unknown meaning: %s. The price of such calls "
            "is unknown, and limits in USD count its upper bound.",
            clean(model),
            clean(name),
        )

    def _log_refused(self, event: ModelCall) -> None:
        """Log once per vendor that a stated amount is not a cost."""
        vendor = str(event.stated_by)
        if vendor in self._refused or len(self._refused) >= MOST_UNKNOWN:
            return
        self._refused.add(vendor)
        logger.warning(
            "The cost that %s states for a call of model %r is not used: it is %s. The price list "
            "applies, where it has a price.",
            clean(vendor),
            clean(event.model),
            event.stated_refused,
        )

    def _log_unpriced(self, event: ModelCall) -> None:
        """Log once per model and level why it has no price; a warning if cost is limited."""
        if event.unpriced is None:
            return
        is_bounded = event.price_at_most is not None
        level = logging.WARNING if event.cost_is_limited and not is_bounded else logging.INFO
        logged = self._unpriced[level]
        # Bounded, because model names may come from user input.
        if len(logged) > MOST_UNPRICED or not _is_new(event.model, logged):
            return
        if len(logged) > MOST_UNPRICED:
            logger.log(level, MORE_UNPRICED, MOST_UNPRICED)
            return
        logger.log(
            level,
            "Cannot price model %r: %s. %s Add a price under models in the policy file.",
            clean(event.model),
            event.unpriced,
            BOUND_EFFECT if is_bounded else UNPRICED_EFFECT[level],
        )


def _log_threshold(event: LimitWarning) -> None:
    logger.warning(
        "Agent %s has used %.0f%% of %s: %s of %s%s.",
        quoted(event.invocation.agent),
        event.level.ratio * 100,
        event.level.limit,
        f"{'at most ' if event.level.at_most else ''}{shortest(event.level.observed)}",
        event.level.cap,
        over_resumes(event.level, "in"),
    )


def _log_repeated_failures(event: RepeatedFailures) -> None:
    logger.warning(
        "Agent %s has failed %d times in a row with the same input, last error: %r. Set "
        "max_repeated_failures to refuse further attempts.",
        quoted(event.invocation.agent),
        event.failures,
        event.error,
    )


def _log_halt(event: Halt) -> None:
    logger.warning("%s", event.sentence)


# --- limits in use, and agents without limits -----------------------------------------------------

MOST_UNLIMITED: Final = 100
"""Agents without limits that are logged: a program may generate a name for each call."""

MOST_TOOLS: Final = 1_000
"""Tools whose names are compared: a model may invent a name for each call."""

NAMED_ENTRY: Final = "The policy file names {entry}, not {agent}."
NAMED_TOOL: Final = "The limits name tool %s, but agent %s calls %s."
UNLIMITED: Final = "No limits set for {who}. Set one, e.g. OTEL_LIMITS_MAX_TURNS=30."


class FirstCalls(BaseObserver):
    """Logs the first call of a process, of each agent without limits, and of misspelled tools.

    Args:
        quiet: Don't log the former.
    """

    component = "first_calls"

    def __init__(self, *, quiet: bool) -> None:
        """Start in a process that has not called an agent."""
        self._quiet = quiet
        self._first: dict[str, object] = {}
        """The first sentence of the process, once it is chosen."""
        self._source = ""
        self._policy = ""
        self._entries: tuple[str, ...] = ()
        self._unlimited: dict[str, object] = {}
        self._tools: dict[str, object] = {}
        self._limited_tools: set[str] = set()
        self.subscribes_to = {
            Enforcing: self._enforcing,
            PolicyRead: self._policy_read,
            Started: self._started,
            ToolCall: self._tool_called,
        }

    def after_fork(self) -> None:
        """Reset: a child logs its own first call."""
        self._first.clear()
        self._unlimited.clear()

    def _enforcing(self, event: Enforcing) -> None:
        self._source = event.source

    def _policy_read(self, event: PolicyRead) -> None:
        # A tool of an agent could change its limits.
        self._policy = "policy=changeable, " if event.changeable else ""
        self._entries = event.agents

    def _tool_called(self, event: ToolCall) -> None:
        """Log the first call of a tool whose limit may have been given to a misspelled name."""
        if len(self._tools) >= MOST_TOOLS or not _is_new(event.tool, self._tools):
            return
        near = misspelled(event.tool, self._limited_tools)
        # A tool that was called is not a misspelling.
        if near is not None and near not in self._tools:
            agent = event.invocation.agent
            logger.warning(NAMED_TOOL, quoted(near), quoted(agent), quoted(event.tool))

    def _started(self, event: Started) -> None:
        agent = event.invocation.agent
        if len(self._limited_tools) < MOST_TOOLS:
            self._limited_tools.update(event.tools)
        caps = [f"{name}={cap}" for name, cap in _caps(event)] + ["quotas"] * event.has_quotas
        if caps:
            if self._is_first():
                enforced = _enforced(event, ", ".join(caps), policy=self._policy)
                notes = self._notes(event)
                sentence = f"{enforced}. {notes}" if notes else enforced
                self._announce(logging.INFO, sentence, is_first=True)
        # By agent: a policy file may limit all agents but the one that runs away.
        elif len(self._unlimited) < MOST_UNLIMITED and _is_new(agent, self._unlimited):
            unlimited = UNLIMITED.format(who=f"agent {quoted(agent)}")
            sentence = f"{unlimited} {self._notes(event)}".rstrip()
            self._announce(logging.WARNING, sentence, is_first=self._is_first())

    def _is_first(self) -> bool:
        """Return, once, that no sentence was logged before."""
        return not self._quiet and _is_new("sentence", self._first)

    def _notes(self, event: Started) -> str:
        """Return sentences about the agent's name: that it has none, or may be misspelled."""
        agent = event.invocation.agent
        near = misspelled(agent, self._entries)
        named = "" if near is None else NAMED_ENTRY.format(entry=quoted(near), agent=quoted(agent))
        return f"{event.note} {named}".strip()

    def _announce(self, level: int, sentence: str, *, is_first: bool) -> None:
        """Print the first sentence of a program under `otel-limits run`; log all others."""
        if self._source == "run" and is_first:
            # Visible in a shell whatever the program does with its log.
            print(f"otel-limits: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            logger.log(level, "otel-limits: %s", sentence)


def _is_new(name: str, known: dict[str, object]) -> bool:
    """Add a name; return whether it was added now. Other threads may add it concurrently."""
    mine = object()
    return known.setdefault(name, mine) is mine


def _enforced(event: Started, caps: str, *, policy: str) -> str:
    """Describe the limits of an agent in one line."""
    source = "hooks" if event.unsampled else "spans"
    # Otherwise a model without a price would be an unexpected reason for a halt.
    unpriced = "unpriced=halt, " if event.unpriced == "halt" else ""
    presets = {of.split()[1] for of in event.origins.values() if of.startswith(PRESET)}
    preset = "".join(f"preset={name}, " for name in sorted(presets))
    does = "observing" if event.configured_action == "observe" else "enforcing"
    return (
        f"{does} {caps} on agent {quoted(event.invocation.agent)} "
        f"(action={event.configured_action}, {preset}{unpriced}{policy}source={source})"
    )


def _caps(event: Started) -> Iterator[tuple[str, object]]:
    """Return every cap of an invocation; 0 turns one off."""
    for caps in (event.limits.items(), event.tree.items()):
        for name, cap in caps:
            if isinstance(cap, dict) or hasattr(cap, "items"):
                yield name, ",".join(f"{tool[:MAX_LENGTH]}={each}" for tool, each in cap.items())
            elif cap:
                yield name, cap
