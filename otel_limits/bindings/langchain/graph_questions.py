"""Requests more budget through an interrupt of a graph, and keeps its task until the answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from langchain_core.runnables.config import ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphInterrupt
from langgraph.types import Command, Interrupt

from otel_limits.bindings.extensions import log_question, question
from otel_limits.bindings.langchain.graph_invocation import UNANSWERED, LimitQuestion
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.bindings.langchain.langchain_probe import TASK
from otel_limits.core.internal_errors import suppress_errors, suppress_errors_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langgraph.checkpoint.base import CheckpointTuple
    from langgraph.types import StateSnapshot

    from otel_limits.bindings.langchain.graph_invocation import GraphInvocation
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.tasks import Task


# --- questions to a human -------------------------------------------------------------------------

QUESTION_NAME: Final = "otel_limits"
"""Value of `name` in our questions."""

NAMESPACE: Final = "langgraph_checkpoint_ns"
"""Key of a configuration's metadata with the task of a graph that it is for."""

INTERRUPT_ID: Final = re.compile(r"[0-9a-f]{32}")
"""A resume whose keys are all like this answers these interrupts, not the only one."""

OWN: Final = ("thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map")
"""Keys of a configuration that name a thread or a checkpoint."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resume of a thread that waits for an answer."""

    given: Any
    """The input without an answer to our question: LangGraph would pass it to an interrupt of the
    application, since it matches them with answers by their order in a node."""
    questions: Sequence[LimitQuestion]
    """Our questions."""
    answers: Sequence[str]
    """IDs of all its interrupts: an agent whose own is not answered yet ends with it again."""


# --- the answer, before an invocation -------------------------------------------------------------


@suppress_errors("binding")
def resumed(graph: Any, given: Any, config: Any) -> Resumed | None:
    """Return what an invocation resumes; `None` if nothing.

    Args:
        graph: The graph.
        given: The input of the call.
        config: Its configuration.
    """
    if not _may_resume(graph, given, config):
        return None
    state = graph.get_state(config)
    resume = _resumed_from(graph, state, given)
    while given is not None and _is_updated(state):
        state = graph.get_state(state.parent_config)
        resume = _with_answers(resume, state)
    if resume.answers:
        recall(graph, state.config)
    return resume


@suppress_errors_async("binding")
async def aresumed(graph: Any, given: Any, config: Any) -> Resumed | None:
    """Do the same as `resumed` without blocking the event loop."""
    if not _may_resume(graph, given, config):
        return None
    state = await graph.aget_state(config)
    resume = _resumed_from(graph, state, given)
    while given is not None and _is_updated(state):
        state = await graph.aget_state(state.parent_config)
        resume = _with_answers(resume, state)
    if resume.answers:
        await arecall(graph, state.config)
    return resume


def _is_updated(state: StateSnapshot) -> bool:
    """Return whether a state was changed by hand after its interrupt.

    That makes another checkpoint, without the interrupts. LangGraph passes it the answer.
    """
    is_change = (state.metadata or {}).get("source") in ("update", "fork")
    return is_change and not state.interrupts and state.parent_config is not None


def _with_answers(resume: Resumed, state: StateSnapshot) -> Resumed:
    return replace(resume, answers=[each.id for each in state.interrupts])


def _may_resume(graph: Any, given: Any, config: Any) -> bool:
    is_resume = given is None or (isinstance(given, Command) and given.resume is not None)
    return (
        is_resume
        and LANGCHAIN.host is not None
        and LANGCHAIN.host.is_on
        and isinstance(graph.checkpointer, BaseCheckpointSaver)
        and TASK not in configurable_of(graph, config)
    )


def configurable_of(graph: Any, config: Any) -> dict[str, Any]:
    """Return the `configurable` of a call, with that of the node in which it is made.

    A call that names its own thread or checkpoint is not within that node.
    """
    own: dict[str, Any] = {}
    for each in (graph.config, config):
        own |= (each or {}).get("configurable") or {}
    is_apart = any(own.get(key) for key in OWN)
    return own if is_apart else {**ensure_config()["configurable"], **own}


def _resumed_from(graph: Any, state: StateSnapshot, given: Any) -> Resumed:
    ours = [each for each in state.interrupts if _is_ours(each.value)]
    resume: Any = UNANSWERED if given is None else given.resume
    # Pending work begins a new task, but our question, which is asked again, keeps its task.
    answered = [each.id for each in (ours if given is None else state.interrupts)]
    is_by_id = isinstance(resume, Mapping) and bool(resume) and all(map(_is_id, resume))
    if not ours:
        return Resumed(_by_id(graph, state, given), (), answered)
    rest: Any
    if is_by_id:
        answers = {each.id: resume.get(each.id, UNANSWERED) for each in ours}
        rest = {key: value for key, value in resume.items() if key not in answers}
    elif len(state.interrupts) == 1:
        answers, rest = {ours[0].id: resume}, {}
    else:  # LangGraph refuses an answer without ID to several questions
        answers, rest = {each.id: UNANSWERED for each in ours}, resume
    questions = [LimitQuestion(each, answers[each.id]) for each in ours]
    if given is not None:
        given = replace(given, resume=rest or None)
        if given == Command():
            given = None  # which runs the interrupted nodes again
    return Resumed(given, questions, answered)


def _by_id(graph: Any, state: StateSnapshot, given: Any) -> Any:
    """Give an answer to the application's only interrupt by ID, in a graph that may ask later.

    LangGraph keeps one without ID until the next, and would pass it to a further interrupt of the
    node when that runs again after our question.
    """
    host = LANGCHAIN.host
    if given is None or host is None or host.policy(graph.get_name()).action != "ask":
        return given
    resume, pending = given.resume, state.interrupts
    if len(pending) != 1 or (isinstance(resume, Mapping) and all(map(_is_id, resume))):
        return given
    return replace(given, resume={pending[0].id: resume})


def _is_ours(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("name") == QUESTION_NAME


def _is_id(key: object) -> bool:
    return isinstance(key, str) and INTERRUPT_ID.fullmatch(key) is not None


def can_ask(graph: Any, configurable: Mapping[str, Any], parent: GraphInvocation | None) -> bool:
    """Return whether a graph can be interrupted, and resumed later.

    Args:
        graph: The graph.
        configurable: The configuration of the call.
        parent: The invocation that calls it.
    """
    if TASK in configurable:  # an interrupt of it also interrupts the graph around it
        return graph.checkpointer is not False and parent is not None and parent.can_ask
    return isinstance(graph.checkpointer, BaseCheckpointSaver)


# --- the question, at a model call ----------------------------------------------------------------


@suppress_errors("binding")
def unanswered(invocation: GraphInvocation) -> GraphInterrupt | None:
    """Return the interrupt that a model call must wait for, if any."""
    task = _task()
    if invocation.question is None:
        for each in invocation.questions:
            if each.answer is UNANSWERED and each.task == task:
                invocation.question = task, GraphInterrupt([each.interrupt])
    return _interruption(invocation, task)


@suppress_errors("binding")
def ask(invocation: GraphInvocation, verdict: Verdict) -> GraphInterrupt | None:
    """Return the interrupt with the question whether a limit may be extended.

    Only one call of an invocation asks. Others wait with their nodes for the answer.
    """
    task = _task()
    asked = {
        "name": QUESTION_NAME,
        **question(verdict, invocation.run.invocation),
        "checkpoint_ns": task,
    }
    with invocation.run.services.lock:
        is_first = invocation.question is None
        if is_first:
            invocation.unanswered = verdict
            # Not by LangGraph's `interrupt`, whose answers are matched by their order in a node.
            one = Interrupt(value=asked, id=uuid.uuid4().hex)
            invocation.question = task, GraphInterrupt([one])
    if is_first:
        log_question(verdict, invocation.run.invocation)
    return _interruption(invocation, task)


def _interruption(invocation: GraphInvocation, task: str) -> GraphInterrupt | None:
    """Return the question for its own node, and an empty interrupt for any other one."""
    if invocation.question is None:
        return None
    asked, interruption = invocation.question
    return interruption if asked == task else GraphInterrupt()


def _task() -> str:
    return str((ensure_config().get("metadata") or {}).get(NAMESPACE, ""))


# --- tasks in a checkpoint ------------------------------------------------------------------------
# LangGraph keeps the interrupt there, too. Our writes belong to no task of the graph, so it applies
# them nowhere.

CHANNEL: Final = "otel_limits:"
"""Prefix of the names of our writes; the rest is the key of an interrupt."""


def keep(graph: Any, thread: Any, waiting: Mapping[str, Task]) -> None:
    """Write the tasks that wait for answers into the last checkpoint of a thread.

    Args:
        graph: The graph, which has ended with interrupts.
        thread: The configuration of its thread; `None` if it has none.
        waiting: The tasks, by the keys of the interrupts.
    """
    if thread is None or not waiting:
        return
    saved = graph.checkpointer.get_tuple(thread)
    if saved is not None:
        graph.checkpointer.put_writes(saved.config, *_writes_of(waiting))


async def akeep(graph: Any, thread: Any, waiting: Mapping[str, Task]) -> None:
    """Do the same without blocking the event loop."""
    if thread is None or not waiting:
        return
    saved = await graph.checkpointer.aget_tuple(thread)
    if saved is not None:
        await graph.checkpointer.aput_writes(saved.config, *_writes_of(waiting))


def _writes_of(waiting: Mapping[str, Task]) -> tuple[Sequence[tuple[str, str]], str]:
    """Return the writes, and a name of their writer that no earlier writes have.

    Checkpoints keep the first write of each writer: further answers to parallel interrupts lead to
    further writes into the same checkpoint.
    """
    writes = [(CHANNEL + key, task.record()) for key, task in waiting.items()]
    resumes = max(task.resumes for task in waiting.values())
    return writes, f"{CHANNEL}{next(iter(waiting.values())).id}:{resumes}"


@suppress_errors("binding")
def recall(graph: Any, config: Any) -> None:
    """Read the tasks that a checkpoint has."""
    _recall_from(graph.checkpointer.get_tuple(config))


@suppress_errors_async("binding")
async def arecall(graph: Any, config: Any) -> None:
    """Do the same without blocking the event loop."""
    _recall_from(await graph.checkpointer.aget_tuple(config))


def _recall_from(saved: CheckpointTuple | None) -> None:
    host = LANGCHAIN.host
    if saved is None or host is None:
        return
    host.runs.interrupted.recall(
        (channel.removeprefix(CHANNEL), record)
        for _, channel, record in saved.pending_writes or ()
        if channel.startswith(CHANNEL)
    )
