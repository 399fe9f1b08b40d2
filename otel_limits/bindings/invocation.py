"""An invocation in progress: its start, its turns with their tools, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context

from otel_limits.bindings.admission import Admission, halt_from_error
from otel_limits.bindings.extensions import declined_verdict, extension_of, log_question, question
from otel_limits.bindings.span_writer import (
    end_span,
    start_agent_span,
    write_end,
    write_halt,
    write_warnings,
)
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.events import marked_stop
from otel_limits.core.failures import first_line, without_moving_parts
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.loops import Call, fingerprint
from otel_limits.runs.conversations import keyed_identity
from otel_limits.runs.current import CURRENT, TASK_SCOPE, current_scope, for_threads
from otel_limits.runs.run import Run
from otel_limits.runs.tasks import UNKNOWN_INPUT
from otel_limits.runs.tool_calls import ADMITTED, ToolAdmission

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from typing_extensions import Self

    from otel_limits.bindings.framework import Host
    from otel_limits.core.limits import Breach
    from otel_limits.core.policy import Overrides, Policy, Verdict
    from otel_limits.runs.run import TaskScope


class LoopEndError(BaseException):
    """Ends an agent from within a model call, deep in the framework's loop.

    Not an `Exception`, which retries of the framework or the application's code would handle.
    """

    def __init__(self, verdict: Verdict, *, asks: bool = False) -> None:
        """End it by a halt, or to wait for a person."""
        super().__init__(verdict.reason)
        self.verdict, self.asks = verdict, asks


@dataclass(slots=True)
class RequestedTool:
    """A tool call that a response has requested."""

    name: str
    arguments: object
    admitted: ToolAdmission = ADMITTED
    """Whether a limit refuses it."""
    scope: TaskScope | None = None
    """Its scope, once it runs."""
    status: str = ""
    """`success`, `error` or `refused`, once it has ended."""
    result: str = ""
    seconds: float | None = None
    is_rejected: bool = False
    """True if a person has rejected it."""
    is_handoff: bool = False
    """True if another agent continues after it."""
    has_waited: bool = False
    """True if the invocation before this one has ended with a question to a person about it."""

    @property
    def refusal(self) -> Breach | None:
        """The limit that refuses it."""
        return self.admitted.refusal

    @property
    def is_answered(self) -> bool:
        """Whether it was answered, if by a tool or not."""
        return self.status in ("success", "error")


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a tool call, as the conversation shows it."""

    text: str
    is_error: bool = False


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
class InvocationInProgress(Admission):
    """One invocation, as a context manager while the framework's or the application's code runs.

    Between two parts of a stream its reader's code runs, which is not the agent's work. So leave it
    before a part is handed on, and enter it again.
    """

    can_ask_within: ClassVar[bool] = False
    """True if the framework hands the question of an agent that another one calls to the person.
    Otherwise, such an agent is halted: the other one's model would get the question."""

    attributes: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    """Attributes for quotas and the audit, from the configuration of the call."""
    span: trace.Span = field(default=trace.INVALID_SPAN, kw_only=True)
    is_paused: bool = field(default=False, kw_only=True)
    """True once it has ended with a question to a person."""
    is_halted: bool = field(default=False, kw_only=True)
    """True once the agent was made to end, by our text or exception or the model's last answer."""
    last_answer: str | None = field(default=None, kw_only=True)
    """The text of the model's last answer after a limit, if it gave one."""
    turns: list[RequestedTurn] = field(default_factory=list, kw_only=True)
    """Turns whose tools have not all ended."""
    tools: dict[str, RequestedTool] = field(default_factory=dict, kw_only=True)
    """The tools of these turns, by the ID of the call."""
    resumed: RequestedTurn | None = field(default=None, kw_only=True)
    """Tools that a response of an earlier, interrupted invocation has requested."""
    refused_answers: dict[str, Breach] = field(default_factory=dict, kw_only=True)
    """Refusals of tools whose result may be the answer: the text for the model → the limit."""
    nudge: tuple[str, str] | None = field(default=None, kw_only=True)
    """The ID of a tool call to warn the model about, and the warning."""
    reason: str = field(default="aborted", kw_only=True)
    """The framework's stop reason, once it has ended by itself."""
    interrupts: Collection[str] = field(default=(), kw_only=True)
    """Keys of the interrupts that it ends with, for the invocation that answers them."""
    scope: TaskScope | None = field(default=None, kw_only=True)
    """The tool call or the node that has started it, if any."""
    _tokens: list[tuple[Any, Any]] = field(default_factory=list, kw_only=True)

    # --- its begin --------------------------------------------------------------------------------

    @classmethod
    def start(  # noqa: PLR0913  what bindings know when an invocation starts
        cls,
        host: Host,
        agent: str,
        *,
        policy: Policy | None = None,
        attributes: Mapping[str, object] = MappingProxyType({}),
        session_id: str | None = None,
        conversation: str | None = None,
        note: str = "",
        span: trace.Span | None = None,
        model: str | None = None,
        answers: Collection[str] = (),
        more: Overrides | None = None,
        given: object = UNKNOWN_INPUT,
        **state: Any,
    ) -> Self:
        """Start an invocation, with a span below the current one.

        Args:
            host: The runtime of the process.
            agent: The name of the agent.
            policy: Its policy, if that differs from the one of its name.
            attributes: Attributes for quotas and the audit.
            session_id: The ID of its session, if any.
            conversation: The ID of its conversation, if that is not its session.
            note: A remark on the name for the log.
            span: The framework's own span of it, if it makes one, even if that is not recorded.
            model: The ID of its model, if it has one model.
            answers: Keys of the interrupts that it answers: it continues their task.
            more: By how much a person has extended the limits.
            given: The user's input, of which only a hash is kept.
            state: Further fields of the binding's own class.
        """
        if span is None:
            span = start_agent_span(agent, session_id) or trace.INVALID_SPAN
        context = span.get_span_context()
        policy = policy or host.policy(agent)
        run = host.runs.start(
            agent,
            policy,
            context.trace_id,
            context.span_id,
            sampled=context.trace_flags.sampled,
            model=model,
            session_id=session_id,
            conversation=conversation_of(
                policy, attributes, session_id if conversation is None else conversation
            ),
            attributes=audited(attributes, host.runs.audit_keys),
            note=note,
            answers=answers,
            more=more,
            given=given,
        )
        try:
            own = cls(run, attributes=attributes, span=span, scope=TASK_SCOPE.get(), **state)
        except Exception:  # an internal error: else it would stay active forever
            run.finish("aborted")
            raise
        IN_PROGRESS[id(own)] = own
        own.request_pending()
        run.state, run.cancel = own, own.cancel
        run.time_limit.start()
        return own

    @classmethod
    def start_if_on(
        cls,
        host: Host | None,
        agent: str,
        *,
        asked: object = None,
        answer: object = None,
        answers: Collection[str] = (),
        **options: Any,
    ) -> Self | None:
        """Start an invocation; return `None` if agents are not limited.

        Args:
            host: The `host` of the framework.
            agent: The name of the agent.
            asked: The question for a person that it continues after, if any.
            answer: The answer, which may extend the limit.
            answers: Keys of the framework's own interrupts that it answers: see `interrupts_of`.
            options: Arguments of `start`.
        """
        if host is None or not host.is_on:
            return None
        host.prepare(has_own=False)
        more, declined = None, None
        if asked is not None:
            more, declined = extension_of(asked, answer), declined_verdict(asked, answer)
            answers = [*answers, *_keys_of(asked)]
        return cls.start(host, agent, more=more, verdict=declined, answers=answers, **options)

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let what runs now belong to it, in threads as well."""
        context = otel_context.get_current()
        if self.span.get_span_context().is_valid:
            context = trace.set_span_in_context(self.span, context)
        attached = otel_context.attach(for_threads(self.run, self.scope, context) or context)
        self._tokens.append((CURRENT.set(self.run), attached))

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Restore the context of the caller."""
        if self._tokens:  # else an internal error, which was reported
            entered, attached = self._tokens.pop()
            otel_context.detach(attached)
            CURRENT.reset(entered)

    # --- what a binding says of its framework, for `followed_runs` --------------------------------

    def reason_of(self, result: Any) -> str:  # noqa: ARG002  not every framework has words for it
        """Return the framework's reason for the end of an agent that has not been halted.

        By default, `interrupt` for an agent that waits for a person, and else `end_turn`.
        """
        return ""

    def result_of_halt(self, text: str) -> Any:  # noqa: ARG002
        """Return the result of a halted agent, with a text for the end user as its last message.

        By default it has none, and the limit's error is raised.
        """
        return None

    def result_of_question(self, asked: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return the result of an agent that waits for a person.

        Store the question, and begin the next invocation with it and the answer. By default, an
        agent cannot wait, and is halted instead.

        Args:
            asked: The question, as JSON values. `question` is its text.
        """
        return None

    def interrupts_of(self, result: Any) -> Iterable[str]:  # noqa: ARG002
        """Return a key of each interrupt of the framework with which an agent waits for a person.

        The invocation that answers is started with these keys, and continues the task. By default,
        only the answer to `result_of_question` does.
        """
        return ()

    def is_result(self, part: Any) -> bool:  # noqa: ARG002  a run may yield texts only
        """Return whether a part of a run that yields parts is its result."""
        return False

    def parts_of(self, result: Any) -> Iterable[Any]:
        """Return the last parts of a halted run that yields parts; by default, its result."""
        return (result,)

    def with_marker(self, result: Any, marker: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return the result of a halted agent with the stop, where `marker_of` finds it.

        Args:
            result: The result.
            marker: The stop, as JSON values. `reason` is its reason.
        """
        return result

    def succeed(self, result: Any) -> Any:
        """Note that the agent has ended by itself, and return what the application gets."""
        default = "interrupt" if self.is_paused else "end_turn"
        self.reason = suppress_errors("binding")(self.reason_of)(result) or default
        waits = suppress_errors("binding")(self.interrupts_of)(result) or ()
        self.interrupts = [*self.interrupts, *waits]
        if self.is_halted and self.run.verdict is not None:  # by the model's last answer
            return self._marked(result, self.run.verdict, synthetic=False) or result
        return result

    def end_by(self, error: BaseException) -> Any:
        """Return the end of an agent that was halted, or raise the exception that has ended it."""
        verdict = error.verdict if isinstance(error, LoopEndError) else None
        if verdict is None and isinstance(error, Exception):  # e.g. of a refused side call
            verdict = halt_from_error(self, error)
        if verdict is None:
            raise error
        if isinstance(error, LoopEndError) and error.asks:
            log_question(verdict, self.run.invocation)
            asked = question(verdict, self.run.invocation)
            paused = suppress_errors("binding")(self.result_of_question)(asked)
            if paused is not None:
                self.is_paused, self.interrupts = True, _keys_of(asked)
                return self.succeed(paused)
        # The model may have given its last answer, and the agent has called it again.
        is_ours, text = self.last_answer is None, self.last_answer or self.text_of(verdict)
        result = suppress_errors("binding")(self.result_of_halt)(text)
        is_written = result is not None
        self.halt(verdict, can_show=is_written, is_written=is_written)
        if result is not None:
            result = self._marked(result, verdict, synthetic=is_ours) or result
        if self.run.raised or result is None:
            raise limit_reached(verdict, self.run.stop(verdict.reason)) from error
        return result

    @suppress_errors("binding")
    def _marked(self, result: Any, verdict: Verdict, *, synthetic: bool) -> Any:
        return self.with_marker(
            result, marked_stop(self.run.stop(verdict.reason), synthetic=synthetic)
        )

    # --- its turns --------------------------------------------------------------------------------

    def request_tools(self, text: str, requested: Iterable[tuple[str, str, object]]) -> None:
        """Begin the tools of a response: decide in its order which of them may run.

        Args:
            text: The text of the response.
            requested: The ID, name and arguments of each tool call.
        """
        turn = RequestedTurn(text)
        self.turns.append(turn)
        for identity, name, arguments in requested:
            tool = RequestedTool(name, arguments, self.run.tools.admit_tool(name))
            turn.tools[identity] = self.tools[identity] = tool

    @suppress_errors("binding")
    def request_pending(self) -> None:
        """Request the tools again that have waited for the answer to an interrupt."""
        for waited in self.run.task.pending:
            tools = [
                (identity, each.name, each.arguments) for identity, each in waited.tools.items()
            ]
            self.request_tools(waited.text, tools)
            for tool in self.turns[-1].tools.values():
                tool.has_waited = True
        self.run.task.pending = ()

    @suppress_errors("binding")
    def _await_answer(self) -> None:
        """Keep its task, and the tools that wait, until a person has answered."""
        pending: list[RequestedTurn] = []
        for turn in tuple(self.turns):
            waiting = {key: tool for key, tool in turn.tools.items() if not tool.is_answered}
            for identity, tool in waiting.items():
                del turn.tools[identity]
                if tool.refusal is None:
                    self.run.tools.release(tool.name)
            if waiting:
                pending.append(RequestedTurn(turn.text, waiting))
            if not turn.tools:
                self.turns.remove(turn)
        self.run.task.pending = pending
        self.run.await_answer(self.interrupts)

    def warn(self) -> None:
        """Write warnings about limits that come near into the span."""
        if self.run.policy.warn_at:
            write_warnings(self.span, self.run.warn())

    def resume_tool(self, identity: str, name: str, arguments: object) -> RequestedTool:
        """Begin a tool that a response of an earlier, interrupted invocation has requested."""
        tool = RequestedTool(name, arguments, self.run.tools.admit_tool(name))
        if self.resumed is None or self.resumed not in self.turns:
            self.resumed = RequestedTurn("")
            self.turns.append(self.resumed)
        self.resumed.tools[identity] = self.tools[identity] = tool
        return tool

    @suppress_errors("binding")
    def end_turns(
        self,
        answers: Callable[[], Mapping[str, ToolAnswer]] = dict,
        shown: Collection[str] | None = None,
    ) -> None:
        """Record the tools of turns that have ended.

        Args:
            answers: Returns the results that the conversation shows that is sent now, by the ID of
                the tool call. Not every one comes from a tool: its name may be unknown, or the
                application answers instead of it.
            shown: IDs of the tool calls at the end of that conversation; `None` ends all turns.
        """
        for turn in tuple(self.turns):
            if shown is None or turn.has_ended(shown):
                with contextlib.suppress(ValueError):  # another thread ends it
                    self.turns.remove(turn)
                    self.end_turn(turn, answers)

    def end_turn(
        self, turn: RequestedTurn, answers: Callable[[], Mapping[str, ToolAnswer]] = dict
    ) -> None:
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
                tool.status = "refused"
            else:
                self._note_answer(tool, identity, answers)
            if not tool.status:  # such as the last one, which is structured output
                continue
            shown = None
            if run.loops is not None or run.services.keeps_fingerprints:
                call = self._finished(identity, tool)
                calls.append(call)
                identities.append(identity)
                shown = fingerprint(call.request, call.result)
            status: Any = tool.status
            run.tools.record(
                tool.name,
                status,
                tool.seconds,
                shown,
                tool.admitted.limit,
                is_handoff=tool.is_handoff,
            )
        run.tools.end_turn([tool.admitted for tool in tools.values()])
        if run.loops is not None:
            run.check_loops(calls, turn.text)
            # After an extension, the count may be that of an earlier turn.
            if (nudge := run.nudge()) is not None and nudge[0] < len(identities):
                self.nudge = identities[nudge[0]], nudge[1]
        self.warn()
        verdict = run.check_limits() if run.services.tool_log is not None else None
        ended = [tool for tool in tools.values() if tool.is_answered and tool.refusal is None]
        for number, tool in enumerate(ended, start=1):
            halts = verdict is not None and number == len(ended)
            run.tools.log(tool.name, tool.arguments, tool.result, trigger=halts)

    def _note_answer(
        self, tool: RequestedTool, identity: str, answers: Callable[[], Mapping[str, ToolAnswer]]
    ) -> None:
        """Note how a call was answered that no tool of the framework has run."""
        if tool.is_answered:
            return
        answer = answers().get(identity)
        if answer is not None:
            tool.status = "error" if answer.is_error else "success"
            tool.result = answer.text
            tool.is_rejected = tool.has_waited  # a person's answer, and not a tool's
        if tool.status != "success":  # only calls that ran use a limit on tool calls
            self.run.tools.release(tool.name)

    def _finished(self, identity: str, tool: RequestedTool) -> Call:
        failed, result = None, tool.result  # neither a failure nor a success
        if tool.is_rejected:
            result = result.replace(identity, "")  # which LangChain's text for the model contains
        else:
            failed = self.run.policy.is_failure(tool.name, tool.status, result)
        return Call(
            tool=tool.name,
            request=fingerprint(tool.name, tool.arguments),
            result=fingerprint(tool.status, result),
            news=fingerprint(tool.status, without_moving_parts(result)),
            failed=failed,
            error=first_line(result) if failed else "",
            exempt=self.run.policy.exempts(tool.name),
        )

    # --- its end ----------------------------------------------------------------------------------

    @suppress_errors("binding")
    def verdict_on_answer(self, text: str) -> Verdict | None:
        """Return the halt of an agent that would end with the refusal of a tool.

        The framework ends an agent with the result of such a tool, so its model never reads why
        the tool was refused, and the end user would.

        Args:
            text: The answer to the end user.
        """
        if (breach := self.refused_answers.get(text)) is None:
            return None
        self.run.tools.halt_by(breach)
        return self.run.check_limits()

    @suppress_errors("binding")
    def halt(self, verdict: Verdict, *, can_show: bool = True, is_written: bool = False) -> str:
        """Publish a halt, once, and return its text for the end user.

        Args:
            verdict: Its reason.
            can_show: The framework's result can be that text; else an exception must be raised.
            is_written: The text is in the conversation, also if an exception is raised.
        """
        run = self.run
        if not self.is_halted:
            is_raised = (verdict.action or run.policy.action) == "raise" or not can_show
            self.is_halted, self.verdict, self.wrapping = True, verdict, None
            run.halt(verdict, "raised" if is_raised else "halted")
            run.synthetic = is_written or not run.raised
            run.note_halt(run.sentence, verdict)
            write_halt(self.span, verdict, run)
        return self.text_of(verdict)

    def finish_after(self, failure: Exception | None) -> None:
        """End it by its own reason, by that of its halt, or by an exception that has left it."""
        run, reason = self.run, "error" if failure is not None else self.reason
        if run.verdict is not None and run.action != "observed":
            reason = run.verdict.reason
        self.finish(reason, failure)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it, however it has ended, once.

        Args:
            reason: The framework's stop reason.
            error: The exception that it has ended with.
        """
        if id(self) not in IN_PROGRESS:  # ended by `disable()`, for example
            return
        IN_PROGRESS.pop(id(self), None)
        if reason == "interrupt":
            self._leave_waiting()
        if self.interrupts:
            self._await_answer()
        self._close(error)
        self.run.judge(reason, error)
        self._finish_run(reason)

    @classmethod
    def abort_all(cls) -> None:
        """End the invocations of one framework when otel-limits is disabled."""
        inner_first = list(IN_PROGRESS.values())[::-1]
        for each in (each for each in inner_first if isinstance(each, cls)):
            each.run.released = True
            each.finish("aborted")

    @suppress_errors("binding")
    def _leave_waiting(self) -> None:
        """Leave refused calls that wait for a person to the invocation that resumes this one."""
        for turn in self.turns:
            for identity, tool in tuple(turn.tools.items()):
                if tool.refusal is not None and not tool.status:
                    del turn.tools[identity]

    @suppress_errors("binding")
    def _close(self, error: BaseException | None) -> None:
        self.end_turns()
        self.close_span(error)

    def close_span(self, error: BaseException | None) -> None:
        """Write the end into the span, and end it."""
        write_end(self.span, self.run, is_interrupted=bool(self.interrupts))
        end_span(self.span, error or self.raised_error())

    def raised_error(self) -> LimitReachedError | None:
        """Return the limit's error that ends the agent; `None` if its result shows the halt."""
        run = self.run
        if run.verdict is None or not run.raised:
            return None
        return limit_reached(run.verdict, run.stop(run.verdict.reason))

    @suppress_errors("binding")
    def _finish_run(self, reason: str) -> None:
        self.run.finish(reason)


def _keys_of(asked: object) -> list[str]:
    """Return the key of our question as an interrupt."""
    identity = asked.get("invocation_id") if isinstance(asked, Mapping) else None
    return [f"question:{identity}"] if isinstance(identity, str) else []


P = TypeVar("P", bound=InvocationInProgress)

IN_PROGRESS: Final[dict[int, InvocationInProgress]] = {}
"""Invocations in progress, to end them when otel-limits is disabled.

By identity: a binding may forget `eq=False`, and then its class has no hash."""


def invocation_of_task(kind: type[P]) -> P | None:
    """Return the invocation in whose own task the current code runs, outside of its tools.

    Args:
        kind: The class of a binding: another framework's invocation is none.
    """
    run, scope = current_scope()
    invocation = getattr(run, "state", None)
    if not isinstance(invocation, kind) or invocation.run.finished:
        return None
    return None if scope is not None and scope.owner is run else invocation


def requester_of_task(kind: type[P]) -> tuple[P | None, Run | None]:
    """Return the invocation whose turn a request of the current code is, and that it belongs to.

    The first is `None` if it is a side call, e.g. of a tool; both are if nothing is limited there.
    """
    invocation = invocation_of_task(kind)
    run = invocation.run if invocation is not None else current_scope()[0]
    return invocation, run if isinstance(run, Run) and not run.released else None


def conversation_of(
    policy: Policy, attributes: Mapping[str, object], own: str | None = None
) -> str:
    """Return the ID of a call's conversation: the value of `conversation_key`, if that is set.

    Args:
        policy: The policy of the agent.
        attributes: The attributes of the call.
        own: The ID that its framework has.
    """
    key = policy.conversation_key
    if key is None:
        return own or ""
    kind, _, name = key.partition(".")
    value = baggage.get_baggage(name) if kind == "baggage" else attributes.get(name)
    return keyed_identity(key, str(value)) if value not in (None, "") else ""


def audited(attributes: Mapping[str, object], keys: tuple[str, ...]) -> dict[str, str]:
    """Return the values of `keys` in the call's attributes, or in the caller's baggage."""
    if not keys:
        return {}
    found = {**baggage.get_all(), **attributes}
    return {key: str(found[key]) for key in keys if key in found}
