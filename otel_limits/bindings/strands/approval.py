"""Requests more budget from a human through an interrupt of Strands, and reads the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from strands.hooks import AfterMultiAgentInvocationEvent
from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings import extensions
from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.registry import current
from otel_limits.runs.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strands.agent.agent import Agent
    from strands.hooks import AfterInvocationEvent

    from otel_limits.core.events import Invocation
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.tasks import Task

NAME: Final = "otel_limits"
"""Name of our interrupts, the prefix of their IDs, and our key in what Strands keeps with them."""


def is_unanswered(event: AfterInvocationEvent) -> bool:
    """Return whether a hook resumes a leg that ended with our question without answering it.

    Strands raises an exception for that, which the hook would never get without otel-limits.
    """
    interrupts = (event.result and event.result.interrupts) or ()
    # Each of them must be answered; the last one is certainly ours.
    asked = [each.id for each in interrupts if each.name == NAME]
    return bool(asked) and not _answers(event.resume, asked[-1])


def _answers(resume: object, question_id: str) -> bool:
    """Return whether a hook resumes only with answers, including one to a question."""
    if not isinstance(resume, list) or not all(isinstance(each, Mapping) for each in resume):
        return False
    answers = [each.get("interruptResponse") for each in resume]
    ids = [each.get("interruptId") for each in answers if isinstance(each, Mapping)]
    return len(ids) == len(resume) and question_id in ids


def question(verdict: Verdict, invocation: Invocation) -> InterruptException:
    """Create the interrupt that describes the limit that was reached, and the agent.

    Strands keeps the interrupts of all nodes of a graph by ID, so each question needs a unique one.
    """
    identity = f"{NAME}:{invocation.agent}:{invocation.id}"
    reason = extensions.question(verdict, invocation)
    return InterruptException(Interrupt(id=identity, name=NAME, reason=reason))


def answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, if this leg resumes it.

    An answer of `None` does not raise the limit.
    """
    state = interrupt_state(agent)
    # While tools wait, an interrupt with our name belongs to an agent that is one of the tools.
    if state is None or state.pending_tool_execution is not None:
        return None
    ours = [each for each in state.interrupts.values() if each.name == NAME]
    return ours[-1] if ours else None


def keys_of(agent: Agent, interrupts: Iterable[str]) -> list[str]:
    """Return the keys of interrupts of an agent, which has the same session when it is resumed.

    Their IDs alone are not enough: those of hooks contain only the ID of a tool call.
    """
    place = ["strands", agent.session_id, agent.agent_id]
    return [json.dumps([*place, each]) for each in interrupts]


def keys_of_group(group: Any, interrupts: Iterable[str]) -> list[str]:
    """Return the keys of interrupts of a graph or swarm."""
    session = getattr(getattr(group, "session_manager", None), "session_id", None) or id(group)
    return [json.dumps(["strands", session, group.id, each]) for each in interrupts]


def answered_keys(agent: Agent) -> list[str]:
    """Return the keys of the interrupts that an invocation answers, if it is resumed."""
    state = interrupt_state(agent)
    keys = [] if state is None else keys_of(agent, state.interrupts)
    recall_task(agent, keys)
    return keys


def keep_task(owner: Any, task: Task) -> None:
    """Add its task to what an agent or group keeps with its interrupts until they are answered."""
    if (state := interrupt_state(owner)) is not None:
        state.context[NAME] = task.record()


@suppress_errors("binding")
def watch_group(group: Any) -> None:
    """Add a hook for the end of a graph or swarm, before a session manager stores it."""
    ended = AfterMultiAgentInvocationEvent(group)
    if keep_task_of_group not in list(group.hooks.get_callbacks_for(ended)):
        group.hooks.add_callback(type(ended), keep_task_of_group, order=-math.inf)


@suppress_errors("binding")
def keep_task_of_group(event: AfterMultiAgentInvocationEvent) -> None:
    """Keep the task of a graph or swarm that ends with interrupts."""
    group = current()
    while isinstance(group, Run):
        group = group.parent
    if group is not None:
        group.task.handoffs = group.handoffs.count
        keep_task(event.source, group.task)


@suppress_errors("binding")
def recall_task(owner: Any, keys: Sequence[str]) -> None:
    """Read the task of interrupts that an agent or group has kept, e.g. in a session.

    Args:
        owner: The agent or the group.
        keys: The keys of the interrupts that are answered.
    """
    state = interrupt_state(owner)
    if state is not None and STRANDS.host is not None and NAME in state.context:
        STRANDS.host.runs.interrupted.recall([(key, state.context[NAME]) for key in keys])


def is_answered_by_person(agent: Agent, use: Mapping[str, Any]) -> bool:
    """Return whether a person has answered a question about a tool call, which a hook asked.

    `BeforeToolCallEvent.interrupt` puts the ID of the call into that of the interrupt.
    """
    state = interrupt_state(agent)
    asked = [] if state is None else state.interrupts.values()
    return any(f":{use['toolUseId']}:" in each.id for each in asked if each.name != NAME)


def consume_answer(agent: Agent, answer: Interrupt | None) -> None:
    """Remove an answer once it is used.

    Strands would keep it until the agent ends, and a later resume, which answers a tool's question,
    would find it again.
    """
    state = interrupt_state(agent)
    if answer is not None and state is not None:
        state.interrupts.pop(answer.id, None)


def declined_verdict(answer: Interrupt | None) -> Verdict | None:
    """Restore the verdict of a question that was answered without an extension."""
    return None if answer is None else extensions.declined_verdict(answer.reason, answer.response)
