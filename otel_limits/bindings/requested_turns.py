"""Turns and their tools, for frameworks whose spans do not report them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_limits.bindings.path import Path
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.loops import Call, fingerprint
from otel_limits.core.texts import not_run_note, refusal_note
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.tree import TASK_SCOPE, TaskScope, for_threads, is_within

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from otel_limits.core.events import Stop
    from otel_limits.core.limits import Breach
    from otel_limits.runs.calls import InFlightCall


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
    def is_answered(self) -> bool:
        """Whether it was answered, if by a tool or not."""
        return self.status in ("success", "error")


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a tool call, as the conversation shows it."""

    text: str
    is_error: bool = False


NO_ANSWERS: Final[Mapping[str, ToolAnswer]] = MappingProxyType({})


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
class TurnPath(Path):
    """The state of an invocation whose turns and tools the binding follows itself."""

    attributes: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    """Attributes for quotas and the audit, from the configuration of the call."""
    span: trace.Span = field(default=trace.INVALID_SPAN, kw_only=True)
    is_halted: bool = field(default=False, kw_only=True)
    """True once the agent was made to end, by our text or exception or the model's last answer."""
    turns: list[RequestedTurn] = field(default_factory=list, kw_only=True)
    """Turns whose tools have not all ended."""
    tools: dict[str, RequestedTool] = field(default_factory=dict, kw_only=True)
    """The tools of these turns, by the ID of the call."""
    resumed: RequestedTurn | None = field(default=None, kw_only=True)
    """Tools that a response of an earlier, interrupted invocation has requested."""
    nudge_for: str | None = field(default=None, kw_only=True)
    """The repeated tool call to warn the model about."""

    @suppress_errors("binding")
    def begin_turn(
        self, text: str, requested: Iterable[tuple[str, str, object]], call: InFlightCall
    ) -> None:
        """Count a response as a turn, and decide in its order which of its tools may run.

        Args:
            text: The text of the response.
            requested: The ID, name and arguments of each tool call.
            call: The call that the response answers.
        """
        run = self.run
        run.turn(call)
        turn = RequestedTurn(text)
        for identity, name, arguments in requested:
            tool = RequestedTool(name, arguments, run.tools.admit(name))
            turn.tools[identity] = self.tools[identity] = tool
        self.turns.append(turn)
        if run.policy.warn_at:
            run.warn()

    def resume_tool(self, identity: str, name: str, arguments: object) -> RequestedTool:
        """Begin a tool that a response of an earlier, interrupted invocation has requested."""
        tool = RequestedTool(name, arguments, self.run.tools.admit(name))
        if self.resumed is None or self.resumed not in self.turns:
            self.resumed = RequestedTurn("")
            self.turns.append(self.resumed)
        self.resumed.tools[identity] = self.tools[identity] = tool
        return tool

    @suppress_errors("binding")
    def end_turns(
        self,
        answers: Mapping[str, ToolAnswer] = NO_ANSWERS,
        shown: Collection[str] | None = None,
    ) -> None:
        """Record the tools of turns that have ended.

        Args:
            answers: The results that the conversation shows that is sent now, by the ID of the tool
                call. Not every one comes from a tool: its name may be unknown, its arguments
                invalid, or the application answers instead of it.
            shown: IDs of the tool calls at the end of that conversation; `None` ends all turns.
        """
        for turn in tuple(self.turns):
            if shown is None or turn.has_ended(shown):
                with contextlib.suppress(ValueError):  # another thread ends it
                    self.turns.remove(turn)
                    self._end(turn, answers)

    def _end(self, turn: RequestedTurn, answers: Mapping[str, ToolAnswer]) -> None:
        """Record the tools of a turn in the order of the response, and check for loops.

        A request of the model counts for loops, however it was answered.
        """
        run, tools = self.run, turn.tools
        for identity in tools:
            self.tools.pop(identity, None)
        calls: list[Call] = []
        identities: list[str] = []
        for identity, tool in tools.items():
            if tool.refusal is not None:
                run.tools.record(tool.name, "refused", None, None)
                continue
            self._note_answer(tool, answers.get(identity))
            if not tool.is_answered:  # such as the last one, which is structured output
                continue
            shown = None
            if run.loops is not None or run.services.keeps_fingerprints:
                call = self._fingerprints_of(tool)
                calls.append(call)
                identities.append(identity)
                shown = fingerprint(call.request, call.result)
            status: Any = tool.status
            run.tools.record(tool.name, status, tool.seconds, shown)
        if run.loops is not None:
            run.check_loops(calls, turn.text)
            if (repeated := run.nudge()) is not None and identities:
                self.nudge_for = identities[repeated]
        if run.policy.warn_at:
            run.warn()
        verdict = run.check_limits() if run.services.tool_log is not None else None
        ended = [tool for tool in tools.values() if tool.is_answered and tool.refusal is None]
        for number, tool in enumerate(ended, start=1):
            halts = verdict is not None and number == len(ended)
            run.tools.log(tool.name, tool.arguments, tool.result, trigger=halts)

    def _note_answer(self, tool: RequestedTool, answer: ToolAnswer | None) -> None:
        """Note how a call was answered that no tool of the framework has run."""
        if tool.is_answered:
            return
        if answer is not None:
            tool.status = "error" if answer.is_error else "success"
            tool.result = answer.text
        if tool.status != "success":  # only calls that ran use a limit on tool calls
            self.run.tools.release(tool.name)

    def _fingerprints_of(self, tool: RequestedTool) -> Call:
        return Call(
            tool=tool.name,
            request=fingerprint(tool.name, tool.arguments),
            result=fingerprint(tool.status, tool.result),
            exempt=self.run.policy.exempts(tool.name),
        )


class RunningTool:
    """One call of a tool, as a context manager while the tool's own code runs."""

    def __init__(self, path: TurnPath, requested: RequestedTool) -> None:
        """Begin the call."""
        self.path = path
        self.requested = requested
        self.scope = requested.scope = TaskScope(path.run, TASK_SCOPE.get())
        self._started = CLOCK.now()
        self._tokens: tuple[Any, Any] | None = None

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let what the tool starts belong to it, in plain threads as well."""
        context = otel_context.get_current()
        context = for_threads(self.path.run, self.scope, context) or context
        self._tokens = TASK_SCOPE.set(self.scope), otel_context.attach(context)

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Leave the tool's code."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:  # else an internal error, which was reported
            scope, context = tokens
            otel_context.detach(context)
            TASK_SCOPE.reset(scope)

    @suppress_errors("binding")
    def refusal_text(self) -> str | None:
        """Return the result of a call that must not run, for the model."""
        breach = self.requested.refusal
        pending = self.path.verdict or self.path.wrapping
        if breach is not None:
            note = refusal_note(breach)
        elif pending is not None:
            note = not_run_note(pending)
        else:
            return None
        self.requested.status = "refused"
        return note

    @property
    def inner_stops(self) -> list[Stop]:
        """The halts of agents that it has called."""
        return [
            child.stop(verdict.reason)
            for child, verdict in self.path.run.halted.values()
            if is_within(child, self.scope)
        ]

    def note(self, status: str, text: str) -> None:
        """Note how the call ended."""
        requested = self.requested
        requested.status, requested.result = status, text
        requested.seconds = CLOCK.now() - self._started
        self.scope.has_ended = True
