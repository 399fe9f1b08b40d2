"""One run of the SDK: its agents, its end, and its task while it is interrupted."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

from agents import RunState

from otel_limits.bindings.extensions import extension_of
from otel_limits.bindings.invocation import InvocationInProgress, invocation_of_task
from otel_limits.bindings.openai_agents.run_marks import mark, mark_inner
from otel_limits.bindings.span_writer import write_halt
from otel_limits.core.internal_errors import INTERNAL_ERRORS, suppress_errors
from otel_limits.core.labels import quoted
from otel_limits.core.limits import NO_LIMITS
from otel_limits.core.policy import KILLED, Policy
from otel_limits.runs.tasks import UNKNOWN_INPUT, InvalidRecordError, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.bindings.framework import Host
    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Overrides, Verdict
    from otel_limits.runs.run import Run, TaskScope
    from otel_limits.runs.tasks import InterruptedTasks


# --- runs and their agents ------------------------------------------------------------------------

HANDOFF: Final = "handoff"
"""Reason for the end of an agent whose run another agent has ended."""


@dataclass(slots=True, eq=False)
class AgentInvocation(InvocationInProgress):
    """The invocation of one agent within a run."""

    agent_run: AgentRun = field(kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)
    """The exception that has ended the run."""
    answered_items: int = field(default=0, kw_only=True)
    """Number of items of the last request and its response."""
    first_item: Any = field(default=None, kw_only=True)
    """The first of these items; an application may send only the last ones."""
    answered_tokens: int = field(default=0, kw_only=True)
    """Tokens of these items, as the vendor reported them, or as they were estimated."""

    @property
    def enders(self) -> tuple[AgentInvocation, ...]:
        """The active agent and the first one, whose invocation contains those of all others."""
        root = self.agent_run.root
        return (self,) if self is root else (self, root)

    @property
    def end(self) -> Verdict | None:
        """The halt that ends the run: of the active agent, or of the first one."""
        return self.verdict or self.agent_run.root.verdict

    def share(self, verdict: Verdict, other: Run) -> None:
        """Halt it by what has halted another agent of the run, which has written the message."""
        self.run.halt(verdict, "raised" if other.raised else "halted")
        write_halt(self.span, verdict, self.run)


class AgentRun:
    """One run: a call of `Runner.run`, `run_sync` or `run_streamed`.

    Each agent that is active in it is an invocation: the first one, and within it each agent that a
    hand-off makes active.

    Args:
        host: The runtime of the process.
        agent: The name of the first agent.
        attributes: Attributes for quotas and the audit.
        session_id: The ID of the session, if any.
        given: The user's input.
        questions: Our questions that it answers, by their IDs.
        answers: The tasks that it continues after an interrupt.
    """

    def __init__(  # noqa: PLR0913  what is known when a run begins
        self,
        host: Host,
        agent: str,
        *,
        attributes: Mapping[str, object],
        session_id: str | None = None,
        given: object = UNKNOWN_INPUT,
        questions: Mapping[str, object] = MappingProxyType({}),
        answers: Entries = MappingProxyType({}),
    ) -> None:
        """Start the invocation of the first agent."""
        self.attributes = attributes
        self.result: Any = None
        """The result of a streamed run, which exists from its start."""
        self.questions = dict(questions)
        """Our questions that the run resumes with and that are not answered yet, by their IDs."""
        self.has_questions = True
        """False once its first request was seen to contain none: no later one can, either."""
        self.called: list[tuple[Stop, bool]] = []
        """The halts of agents that its tools have called since the last model call, and whether
        the answer is the text of the halt."""
        self.waiting: set[TaskScope] = set()
        """Tools within which an agent waits for a person."""
        self.next_input: Any = None
        """The input of the loop's next request; a guardrail, for example, sends its own."""
        self.own_cap: int | None = None
        """The SDK's own `max_turns` of the run."""
        self._host = host
        self._session_id = session_id
        self._answers = answers
        self._interrupted: Any = None
        """The result of a run that waits for a person."""
        self._reason = "aborted"
        self.root = self.active = self._begin(agent, given)
        self._paths = {agent: self.root}

    def _begin(self, agent: str, given: object = UNKNOWN_INPUT) -> AgentInvocation:
        return AgentInvocation.start(
            self._host,
            agent,
            attributes=self.attributes,
            session_id=self._session_id,
            given=given,
            answers=self._answers.get(agent, ())[:1],
            more=self._extension_for(agent),
            agent_run=self,
        )

    def _extension_for(self, agent: str) -> Overrides | None:
        """Return by how much an approval extends the limits of an agent's task.

        A question is also answered if it is declined, and then ends the run before a model call.
        """
        for asked in self.questions.values():
            identity = asked.get("invocation_id") if isinstance(asked, Mapping) else None
            if key_of(identity) in self._answers.get(agent, ()):
                more = extension_of(asked, True)  # noqa: FBT003
                return more and replace(more, conversation=NO_LIMITS)
        return None

    # --- the active agent -------------------------------------------------------------------------

    @suppress_errors("binding")
    def activate(self, agent: str) -> None:
        """Make an agent active. An agent that becomes active again continues its invocation."""
        if (invocation := self._paths.get(agent)) is None:
            invocation = self._paths[agent] = self._begin(agent)
        if invocation is not self.active:
            invocation.run.handoffs.count += 1
        self.active.run.has_handed_off, invocation.run.has_handed_off = True, False
        self.active = invocation

    @property
    def ended(self) -> AgentInvocation | None:
        """The invocation whose limit or kill ends the run, if any."""
        return next((each for each in self.active.enders if each.verdict is not None), None)

    # --- the end ----------------------------------------------------------------------------------

    @suppress_errors("binding")
    def succeed(self, result: Any) -> LimitReachedError | None:
        """Note that the run has returned a result; return the error to raise instead, if any."""
        invocation = self.active
        if result.interruptions:
            self._reason, self._interrupted = "interrupt", result
            self._wait_in_tool()
        elif result is self.result and result.final_output is None:
            # A streamed run ends without an exception, which its reader raises, or by `cancel()`.
            is_last = result.max_turns is not None and result.current_turn > result.max_turns
            self._reason = "cancelled"
            if is_last:
                self.end_at_own_cap()
        else:
            self._reason = "end_turn"
        for each in (self.root, invocation):
            if each.run.freeze_outcome() and not each.is_halted:
                each.run.halt(KILLED, "halted")  # when no model call was left to refuse
        is_refused = self._halt_on_answer(result)
        self.write_marks(result)
        return invocation.raised_error() if is_refused else None

    def _wait_in_tool(self) -> None:
        """Note for the agent around it, if any, that one of its tools waits."""
        scope = self.root.scope
        around = None if scope is None else getattr(scope.owner, "state", None)
        if scope is not None and isinstance(around, AgentInvocation):
            around.agent_run.waiting.add(scope)

    def _halt_on_answer(self, result: Any) -> bool:
        """Halt a run whose final output is the refusal of a tool that it stops at."""
        invocation, output = self.active, result.final_output
        verdict = invocation.verdict_on_answer(output) if isinstance(output, str) else None
        if verdict is None or invocation.is_halted or invocation.run.killed:
            return False
        if result is self.result:  # its reader no longer gets an exception
            verdict = replace(verdict, action="halt")
        result.final_output = invocation.halt(verdict)
        return True

    @suppress_errors("binding")
    def write_marks(self, result: Any) -> None:
        """Write the halt into a result, and those of agents whose answers are the final output."""
        if self.called and not result.interruptions:
            mark_inner(result, self.called)
        for invocation in self._paths.values():
            if invocation.is_halted and invocation.run.verdict is not None:
                stop = invocation.run.stop(invocation.run.verdict.reason)
                mark(result, stop, synthetic=stop.synthetic)

    @suppress_errors("binding")
    def end_with(self, reason: str) -> None:
        """Note why the run has ended without a result."""
        self._reason = reason

    def end_at_own_cap(self) -> None:
        """Note that the SDK has ended the run, and report it once if we would allow more turns."""
        self._reason = "max_turns_exceeded"
        own, ours = self.own_cap, self.root.run.policy.limits.max_turns
        if own is not None and ours is not None and own < ours:
            report_own_cap(self.root.run.invocation.agent, own, ours)

    def finish(self) -> None:
        """End the invocations of all agents, however the run has ended."""
        self._share_halt()
        # Its input is that of the first agent, not that of the last one.
        self.root.run.judge(self._reason, self.root.error, self.active.run)
        # The first agent's invocation contains the others.
        for invocation in reversed(tuple(self._paths.values())):
            run, reason = invocation.run, self._reason if invocation is self.active else HANDOFF
            if self._interrupted is not None:
                invocation.interrupts = [key_of(run.invocation.id)]
            if run.verdict is not None and run.action != "observed":
                reason = run.verdict.reason
            invocation.finish(reason, invocation.error)
        if self._interrupted is not None:
            self._keep_tasks()

    @suppress_errors("binding")
    def _share_halt(self) -> None:
        """Halt the active agent with the first one, within whose invocation it runs.

        The first one also ends with the active one if both were to end, as with a kill of both.
        """
        root, active = self.root, self.active
        halt, of_active = root.run.ending_halt, active.run.ending_halt
        if halt is None:
            if of_active and root.verdict and root.verdict.reason == of_active.reason:
                root.share(root.verdict, active.run)
        elif of_active is None:
            first = quoted(root.run.invocation.agent)
            remark = f"The run ended with its first agent, {first}."
            active.share(replace(halt, remark=remark), root.run)

    @suppress_errors("binding")
    def _keep_tasks(self) -> None:
        # Also of agents that it has begun without: a hand-off can make them active later.
        runs = {agent: each.run for agent, each in self._paths.items()}
        own = {agent: [key_of(run.invocation.id), run.task.record()] for agent, run in runs.items()}
        keep(self._interrupted, {**self._answers, **own})


OWN_CAPS: Final[set[str]] = set()
"""Agents whose runs the SDK has ended before our limit."""


@suppress_errors("binding")
def report_own_cap(agent: str, own: int, ours: int) -> None:
    """Log, once for each agent, that the SDK's own limit is lower than ours.

    Args:
        agent: The name of the agent.
        own: The SDK's limit.
        ours: Ours.
    """
    if agent not in OWN_CAPS:
        OWN_CAPS.add(agent)
        logger.warning(
            "otel-limits: the OpenAI Agents SDK ended agent %s at its own max_turns=%d, before "
            "max_turns=%d of otel-limits was reached. Set max_turns=%d in Runner.run(), or in "
            "as_tool() for an agent that is a tool, to let otel-limits decide.",
            quoted(agent),
            own,
            ours,
            ours + 1,
        )


def active_of_task() -> AgentInvocation | None:
    """Return the active agent of the run in whose own task the code runs, outside of its tools."""
    invocation = invocation_of_task(AgentInvocation)
    return None if invocation is None else invocation.agent_run.active


# --- tasks in the state of a run ------------------------------------------------------------------
# The state has a record of the tools that each agent has used. The SDK ignores what it says about
# agents that do not exist, and writes and reads it with the rest of the state.

Entries: TypeAlias = "Mapping[str, Sequence[str]]"
"""Tasks that wait for an answer, by agent: the key and the record of each."""

logger = logging.getLogger("otel_limits")

RECOUNTED: Final = (
    "Its turns, model calls, tool calls and tokens are those that the state shows; its cost, its "
    "time and the usage of agents within it start from zero"
)

WAITING: Final = "otel_limits_waiting"
"""Attribute of a result with the tasks that wait for an answer."""

ENTRY: Final = "otel_limits:"
"""Prefix of the names of our entries in a state; the rest is the name of an agent."""


def key_of(invocation: object) -> str:
    """Return the key of the task of an invocation, by the ID of the invocation."""
    return f"openai-agents:{invocation}"


def keep(result: Any, waiting: Entries) -> None:
    """Keep tasks in the result of an interrupted run."""
    setattr(result, WAITING, waiting)


def track_to_state(original: Any) -> Any:
    """Wrap `to_state` of a class of results."""

    @functools.wraps(original)
    def to_state(result: Any) -> Any:
        state = original(result)
        _write(state, vars(result).get(WAITING, {}))
        return state

    return to_state


@suppress_errors("binding")
def _write(state: Any, waiting: Entries) -> None:
    if waiting:
        ours = {ENTRY + agent: texts for agent, texts in waiting.items()}
        state.set_tool_use_tracker_snapshot({**state.get_tool_use_tracker_snapshot(), **ours})


@suppress_errors("binding")
def recalled(given: Any, agent: str, host: Host) -> Entries:
    """Return the tasks that a run continues with the state that it is given.

    Args:
        given: The input of the run.
        agent: The name of its first agent.
        host: The runtime of the process.
    """
    if not isinstance(given, RunState) or not given.get_interruptions():
        return {}
    interrupted = host.runs.interrupted
    entries = {
        name.removeprefix(ENTRY): texts
        for name, texts in given.get_tool_use_tracker_snapshot().items()
        if name.startswith(ENTRY) and len(texts) == 2  # noqa: PLR2004  key and record
    }
    if host.policy(agent).on_resume != "continue":
        return entries
    for key, record in entries.values():
        problem = _problem_with(record)
        if problem is not None and interrupted.find([key]) is None:
            INTERNAL_ERRORS.report("tasks", problem, f"{problem} {RECOUNTED}")
            _recount(given, key, interrupted)
        else:
            interrupted.recall([(key, record)])
    if agent not in entries:
        _report_missing(agent)
        key = key_of(uuid4().hex)
        for name in (agent, *_recount(given, key, interrupted)):
            entries.setdefault(name, [key, ""])
    return entries


def _problem_with(record: str) -> InvalidRecordError | None:
    try:
        Task.from_record(record)
    except InvalidRecordError as error:
        return error
    return None


@suppress_errors("binding")
def _recounted(state: RunState[Any], key: str, interrupted: InterruptedTasks) -> Sequence[str]:
    shown = state.to_json(context_serializer=lambda _: {})
    interrupted.keep([key], task_of(uuid4().hex, shown))
    return (shown["current_agent"]["name"],)


def _recount(state: RunState[Any], key: str, interrupted: InterruptedTasks) -> Sequence[str]:
    """Keep a task with what a state shows; return the agents that it is about besides the first."""
    return _recounted(state, key, interrupted) or ()


MISSING: Final[set[str]] = set()
"""Agents whose states had no record."""


def _report_missing(agent: str) -> None:
    """Log, once for each agent, that a state has no record."""
    if agent not in MISSING:
        MISSING.add(agent)
        logger.warning(
            "otel-limits: agent %s continues from a RunState without a record of its task. %s.",
            quoted(agent),
            RECOUNTED,
        )


# --- tasks whose record is lost -------------------------------------------------------------------
# What a run has used is recounted from its own state.


def task_of(identity: str, state: Mapping[str, Any]) -> Task:
    """Return a task that has used what a state shows, which is never more than it has used.

    Args:
        identity: Its ID.
        state: The state as JSON values. It may have been changed in a store.
    """
    task = Task(identity, Policy(), 0)
    tally, responses = task.budget.tally, state["model_responses"]
    tally.turns = _count(state["current_turn"])
    for usage in (each["usage"] for each in responses):
        tally.model_calls += max(_count(usage["requests"]), 1)
        tally.input += _count(usage["input_tokens"])
        tally.output += _count(usage["output_tokens"])
    task.calls_by_tool = dict(Counter(_answered_tools(state)))
    tally.tool_calls = sum(task.calls_by_tool.values())
    return task


def _answered_tools(state: Mapping[str, Any]) -> Iterator[str]:
    items = [item for each in state["model_responses"] for item in each["output"]]
    names = {item["call_id"]: item["name"] for item in items if item["type"] == "function_call"}
    for item in state["session_items"]:
        call = item["raw_item"].get("call_id")
        if item["type"] == "tool_call_output_item" and call in names:
            yield names[call]


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
