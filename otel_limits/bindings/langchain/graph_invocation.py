"""One invocation of a graph in progress: its turns, its tools, and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from langgraph.errors import GraphBubbleUp

from otel_limits.bindings.invocation import InvocationInProgress, ToolAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langgraph.errors import GraphInterrupt
    from langgraph.types import Interrupt

    from otel_limits.core.policy import Verdict
    from otel_limits.runs.tasks import Task


class GraphHaltedError(BaseException):
    """Carries a halt from a model call to the graph's own method, which ends the graph.

    Not an `Exception`, as a node may handle any of these: retries, fallbacks and parsers do.
    """

    # No `__init__`: an error raised in it would reach the application.
    invocation: GraphInvocation
    """The invocation that was halted."""
    has_left_node = False
    """True once no code of its node can handle it, but nodes next to it may still run."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` takes it for, in addition to its own class.

        LangGraph cancels the other nodes of a step, unless an exception is a `GraphBubbleUp`, such
        as that of a node that waits for a human.
        """
        return GraphBubbleUp if self.has_left_node else GraphHaltedError


UNANSWERED: Final = object()

DEFAULT_NAME: Final = "LangGraph"
"""The name of each graph that has none."""


@dataclass(frozen=True, slots=True)
class LimitQuestion:
    """Our question that an earlier invocation has ended with."""

    interrupt: Interrupt
    answer: object
    """The answer, or `UNANSWERED`."""

    @property
    def task(self) -> str:
        """The task whose model call was refused."""
        return str(self.interrupt.value.get("checkpoint_ns", ""))

    def is_of(self, space: str, agent: str) -> bool:
        """Return whether it comes from an agent in a namespace of checkpoints."""
        parts = [part for part in self.task.split("|")[:-1] if not part.isdecimal()]
        return "|".join(parts) == space and self.interrupt.value.get("agent") == agent


@dataclass(slots=True, eq=False)
class GraphInvocation(InvocationInProgress):
    """The state of an invocation of a graph."""

    graph: Any = field(kw_only=True)
    answer: Any = field(default=None, kw_only=True)
    """The model's last answer after a limit, if it gave one."""
    has_asked_for_form: bool = field(default=False, kw_only=True)
    """True once the model was asked to give its answer another form."""
    lacks_form: bool = field(default=False, kw_only=True)
    """True if the refused model call would only have given the answer another form."""
    call_metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Metadata of the model call that was refused or failed: its node, among others."""
    is_refused: bool = field(default=False, kw_only=True)
    """True once a model call was refused, even if a node has handled that."""
    can_ask: bool = field(default=False, kw_only=True)
    """True if an interrupt can be resumed later, so that a human can be asked."""
    questions: Sequence[LimitQuestion] = field(default=(), kw_only=True)
    """Our questions that earlier invocations of the thread have ended with."""
    answers: Sequence[str] = field(default=(), kw_only=True)
    """IDs of the interrupts that the call answers, in this graph or in one within it."""
    question: tuple[str, GraphInterrupt] | None = field(default=None, kw_only=True)
    """The question that this invocation ends with, and its task of the graph."""
    unanswered: Verdict | None = field(default=None, kw_only=True)
    """The limit that the question is about."""
    waiting: dict[str, Task] = field(default_factory=dict, kw_only=True)
    """Tasks that wait for answers, by the keys of the interrupts: of it and of graphs within it."""
    tokens: dict[int, tuple[Any, int]] = field(default_factory=dict, kw_only=True)
    """Estimated tokens of each message, by identity."""

    # --- turns ------------------------------------------------------------------------------------

    def end_turns_before(self, messages: Sequence[Any]) -> None:
        """Record the tools of turns that have ended before a conversation is sent."""
        if self.turns:
            self.end_turns(lambda: _answers_in(messages), _last_tools_in(messages))

    # --- the end ----------------------------------------------------------------------------------

    def refuse(self, verdict: Verdict, metadata: Mapping[str, Any]) -> GraphHaltedError:
        """Return the exception that ends the graph before a model call."""
        self.verdict, self.call_metadata, self.is_refused = verdict, metadata, True
        error = GraphHaltedError("halted by otel-limits")
        error.invocation = self
        return error


def _answers_in(messages: Sequence[Any]) -> dict[str, ToolAnswer]:
    """Return the results of tools in a conversation."""
    return {
        each.tool_call_id: ToolAnswer(str(each.content), each.status == "error")
        for each in messages
        if hasattr(each, "tool_call_id")
    }


def _last_tools_in(messages: Sequence[Any]) -> set[str]:
    """Return the IDs of the last tool calls in a conversation."""
    shown: set[str] = set()
    for message in reversed(messages):
        if (answered := getattr(message, "tool_call_id", None)) is not None:
            shown.add(answered)
        if calls := getattr(message, "tool_calls", None):
            return shown.union(call["id"] or call["name"] for call in calls)
    return shown
