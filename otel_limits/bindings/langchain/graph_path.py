"""One invocation of a graph on its way: its turns, its tools, and its end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from otel_limits.bindings.path import Path
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.loops import Call, fingerprint
from otel_limits.runs.tree import current_scope

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from langgraph.errors import GraphInterrupt
    from langgraph.types import Interrupt

    from otel_limits.core.limits import Breach
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.tree import TaskScope


class GraphHaltedError(BaseException):
    """Carries a halt from a model call to the graph's own method, which ends the graph.

    Not an `Exception`, as a node may handle any of these: retries, fallbacks and parsers do.
    """

    # No `__init__`: an error raised in it would reach the application.
    path: GraphPath
    """The invocation that was halted."""


UNANSWERED: Final = object()


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


@dataclass(slots=True)
class RequestedTool:
    """A tool call that a response has requested."""

    name: str
    arguments: object
    refusal: Breach | None
    """The limit that refuses it."""
    scope: TaskScope | None = None
    """Its scope, once it runs."""
    status: str = ""
    """`success`, `error` or `refused`, once it has ended."""
    result: str = ""
    seconds: float | None = None

    @property
    def has_run(self) -> bool:
        """Whether it has run to its end."""
        return self.status in ("success", "error")


@dataclass(slots=True, eq=False)
class RequestedTurn:
    """A response whose tools have not all ended. Parallel branches of a graph have one each."""

    text: str
    tools: dict[str, RequestedTool] = field(default_factory=dict)
    """The requested tools, by the ID of the call."""

    def has_ended(self, shown: Collection[str]) -> bool:
        """Return whether the conversation has gone on.

        Args:
            shown: IDs of the tool calls at the end of the conversation that is sent now.
        """
        return all(tool.status for tool in self.tools.values()) or any(
            identity in shown for identity in self.tools
        )


@dataclass(slots=True, eq=False)
class GraphPath(Path):
    """The state of an invocation of a graph."""

    attributes: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    """Attributes for quotas and the audit, from the configuration of the call."""
    span: trace.Span = field(default=trace.INVALID_SPAN, kw_only=True)
    turns: list[RequestedTurn] = field(default_factory=list, kw_only=True)
    """Turns whose tools have not all ended."""
    tools: dict[str, RequestedTool] = field(default_factory=dict, kw_only=True)
    """The tools of these turns, by the ID of the call."""
    resumed: RequestedTurn | None = field(default=None, kw_only=True)
    """Tools that a response of an earlier invocation of the thread has requested."""
    answer: Any = field(default=None, kw_only=True)
    """The model's last answer after a limit, if it gave one."""
    nudge_for: str | None = field(default=None, kw_only=True)
    """The repeated tool call to warn the model about."""
    place: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Metadata of the model call that was refused or failed: its node, among others."""
    can_ask: bool = field(default=False, kw_only=True)
    """True if an interrupt can be resumed later, so that a human can be asked."""
    questions: Sequence[LimitQuestion] = field(default=(), kw_only=True)
    """Our questions that earlier invocations of the thread have ended with."""
    question: tuple[str, GraphInterrupt] | None = field(default=None, kw_only=True)
    """The question that this invocation ends with, and its task of the graph."""
    unanswered: Verdict | None = field(default=None, kw_only=True)
    """The limit that the question is about."""
    tokens: dict[int, tuple[Any, int]] = field(default_factory=dict, kw_only=True)
    """Estimated tokens of each message, by identity."""

    # --- turns ------------------------------------------------------------------------------------

    @suppress_errors("binding")
    def begin_turn(self, message: Any, call: InFlightCall) -> None:
        """Count a response as a turn, and decide in its order which of its tools may run."""
        run = self.run
        run.turn(call)
        turn = RequestedTurn(message.text if isinstance(message.text, str) else message.text())
        for each in message.tool_calls:
            name = each["name"]
            tool = RequestedTool(name, each["args"], run.tools.admit(name))
            identity = each["id"] or name
            turn.tools[identity] = self.tools[identity] = tool
        self.turns.append(turn)
        if run.policy.warn_at:
            run.warn()

    def resume_tool(self, identity: str, name: str, arguments: object) -> RequestedTool:
        """Begin a tool that a response of an earlier invocation of the thread has requested."""
        tool = RequestedTool(name, arguments, self.run.tools.admit(name))
        if self.resumed is None or self.resumed not in self.turns:
            self.resumed = RequestedTurn("")
            self.turns.append(self.resumed)
        self.resumed.tools[identity] = self.tools[identity] = tool
        return tool

    @suppress_errors("binding")
    def end_turns(self, messages: Sequence[Any] | None = None) -> None:
        """Record the tools of turns that have ended.

        Args:
            messages: The conversation that is sent now; `None` ends all turns.
        """
        if not self.turns:
            return
        shown = None if messages is None else _last_tools_in(messages)
        for turn in tuple(self.turns):
            if shown is None or turn.has_ended(shown):
                with contextlib.suppress(ValueError):  # another thread ends it
                    self.turns.remove(turn)
                    self._end(turn)

    def _end(self, turn: RequestedTurn) -> None:
        """Record the tools of a turn in the order of the response, and check for loops."""
        run, tools = self.run, turn.tools
        for identity in tools:
            self.tools.pop(identity, None)
        calls: list[Call] = []
        identities: list[str] = []
        for identity, tool in tools.items():
            if tool.refusal is not None:
                run.tools.record(tool.name, "refused", None, None)
            elif tool.status in (
                "",
                "refused",
            ):  # it never ran: structured outputs are requested like tools
                run.tools.release(tool.name)
            else:
                call = self._fingerprints_of(tool)
                calls.append(call)
                identities.append(identity)
                status: Any = tool.status
                shown = fingerprint(call.request, call.result)
                run.tools.record(tool.name, status, tool.seconds, shown)
        if run.loops is not None:
            run.check_loops(calls, turn.text)
            if (repeated := run.nudge()) is not None and identities:
                self.nudge_for = identities[repeated]
        if run.policy.warn_at:
            run.warn()
        verdict = run.check_limits() if run.services.tool_log is not None else None
        ended = [
            tool
            for tool in tools.values()
            if tool.status not in ("", "refused") and tool.refusal is None
        ]
        for number, tool in enumerate(ended, start=1):
            halts = verdict is not None and number == len(ended)
            run.tools.log(tool.name, tool.arguments, tool.result, trigger=halts)

    def _fingerprints_of(self, tool: RequestedTool) -> Call:
        return Call(
            tool=tool.name,
            request=fingerprint(tool.name, tool.arguments),
            result=fingerprint(tool.status, tool.result),
            exempt=self.run.policy.exempts(tool.name),
        )

    # --- the end ----------------------------------------------------------------------------------

    def refuse(self, verdict: Verdict, place: Mapping[str, Any]) -> GraphHaltedError:
        """Return the exception that ends the graph before a model call."""
        self.verdict, self.place = verdict, place
        error = GraphHaltedError("halted by otel-limits")
        error.path = self
        return error


def _last_tools_in(messages: Sequence[Any]) -> set[str]:
    """Return the IDs of the last tool calls in a conversation."""
    shown: set[str] = set()
    for message in reversed(messages):
        if (answered := getattr(message, "tool_call_id", None)) is not None:
            shown.add(answered)
        if calls := getattr(message, "tool_calls", None):
            return shown.union(call["id"] or call["name"] for call in calls)
    return shown


def path_of_task() -> GraphPath | None:
    """Return the graph in whose own task the current code runs, outside of its tools."""
    run, scope = current_scope()
    path = getattr(run, "state", None)
    if not isinstance(path, GraphPath) or path.run.finished:
        return None
    return None if scope is not None and scope.owner is run else path


LIVE: Final[set[GraphPath]] = set()
"""Invocations in progress, to end them when otel-limits is disabled."""


def abort_all() -> None:
    """End all invocations when otel-limits is disabled."""
    for path in list(LIVE):
        path.run.released = True
        path.run.finish("aborted")
