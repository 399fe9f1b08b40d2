"""A tool call in progress, in any framework: refused at a limit, run, worded for the model.

A binding's subclass of `ToolCallInProgress` says what a result of its framework is. The
functions before it wrap the method that runs it.
"""

from __future__ import annotations

import functools
import json
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from opentelemetry import context as otel_context

from otel_limits.bindings.followed_runs import owned
from otel_limits.bindings.invocation import invocation_of_task
from otel_limits.core.halt_texts import for_end_user, for_model, not_run_note, refusal_note
from otel_limits.core.internal_errors import (
    report_suppressed,
    suppress_errors,
    suppress_lapses,
)
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.current import CURRENT, TASK_SCOPE, for_threads, has_owner, is_within
from otel_limits.runs.run import TaskScope

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence

    from opentelemetry.context import Context
    from typing_extensions import Self

    from otel_limits.bindings.invocation import InvocationInProgress, RequestedTool
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.run import Run


# --- one tool call --------------------------------------------------------------------------------

Begin: TypeAlias = "Callable[..., ToolCallInProgress | None]"
Wrapper: TypeAlias = "Callable[[Any], Any]"


def follow_tool(begin: Begin) -> Wrapper:
    """Follow a method that runs a tool.

    Args:
        begin: Describes a call, with the arguments of the method; `None` if it is not followed.
    """
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            if (running := guarded(*args, **options)) is None:
                return original(*args, **options)
            if (note := running.refusal()) is not None:
                return running.answer_of(note)
            try:
                with running:
                    result = original(*args, **options)
            except BaseException as error:
                running.fail(error)
                raise
            return running.end(result) or result

        return run

    return wrap


def follow_tool_async(begin: Begin) -> Wrapper:
    """Do the same as `follow_tool` for a coroutine method."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        async def run(*args: Any, **options: Any) -> Any:
            if (running := guarded(*args, **options)) is None:
                return await original(*args, **options)
            if (note := running.refusal()) is not None:
                return running.answer_of(note)
            try:
                with running:
                    result = await original(*args, **options)
            except BaseException as error:
                running.fail(error)
                raise
            return running.end(result) or result

        return run

    return wrap


def follow_tool_parts(begin: Begin) -> Wrapper:
    """Follow a method that runs a tool and yields parts, one of which is the result."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Generator[Any, None, Any]:
            if (running := guarded(*args, **options)) is None:
                return (yield from original(*args, **options))
            if (note := running.refusal()) is not None:
                yield from running.parts_of_refusal(note)
                return None
            parts = iter(original(*args, **options))
            try:
                while True:
                    try:
                        with running:
                            part = next(parts)
                    except StopIteration as end:
                        running.end_of_parts()
                        return end.value
                    except BaseException as error:
                        running.fail(error)
                        raise
                    yield running.shown(part)
            finally:
                if hasattr(parts, "close"):
                    with running:
                        parts.close()

        return run

    return wrap


def follow_tool_parts_async(begin: Begin) -> Wrapper:  # noqa: C901  one story
    """Do the same as `follow_tool_parts` for an asynchronous method."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        async def run(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
            if (running := guarded(*args, **options)) is None:
                async with aclosing(owned(original(*args, **options))) as parts:
                    async for part in parts:
                        yield part
                return
            if (note := running.refusal()) is not None:
                for part in running.parts_of_refusal(note):
                    yield part
                return
            parts = owned(aiter(original(*args, **options)))
            try:
                while True:
                    try:
                        with running:
                            part = await anext(parts)
                    except StopAsyncIteration:
                        running.end_of_parts()
                        return
                    except BaseException as error:
                        running.fail(error)
                        raise
                    yield running.shown(part)
            finally:
                if hasattr(parts, "aclose"):
                    with running:
                        await parts.aclose()

        return run

    return wrap


class ToolCallInProgress:
    """One call of a tool, as a context manager while the tool's own code runs.

    Args:
        invocation: The invocation that has requested it.
        requested: The request.
        is_answer: Its result is the answer to the end user, not to the model.
    """

    def __init__(
        self, invocation: InvocationInProgress, requested: RequestedTool, *, is_answer: bool = False
    ) -> None:
        """Begin the call."""
        self.invocation = invocation
        self.requested = requested
        self.is_answer = is_answer
        self.scope = requested.scope = TaskScope(invocation.run, TASK_SCOPE.get())
        self._started = CLOCK.now()
        self.context: Context | None = None
        """OpenTelemetry's context of its code, once that has run; it may run part by part."""
        self._tokens: tuple[Any, Any, Any] | None = None
        self._last: Any = ""
        """The last part of a tool that yields parts."""

    @classmethod
    def start(
        cls,
        kind: type[InvocationInProgress],
        identity: str,
        name: str,
        arguments: object,
        **options: Any,
    ) -> Self | None:
        """Begin a tool call of the current task; return `None` if it belongs to no invocation.

        Args:
            kind: The binding's class of invocations, whose loop calls such tools.
            identity: The ID of the call.
            name: The name of the tool.
            arguments: Its arguments.
            options: Further arguments of the class.
        """
        invocation = invocation_of_task(kind)
        if invocation is None:
            return None
        requested = invocation.tools.get(identity) or invocation.resume_tool(
            identity, name, arguments
        )
        return cls(invocation, requested, **options)

    # --- what a binding says of its framework; by default, a result is a text ---------------------

    def refused(self, note: str) -> Any:
        """Return the result of a call that must not run, for the model."""
        return note

    def text_of(self, result: Any) -> str:
        """Return the text of a result."""
        return str(result)

    def with_text(self, result: Any, text: str) -> Any:  # noqa: ARG002
        """Return a result with another text, or the same if that is not text."""
        return text

    def is_error(self, result: Any) -> bool:  # noqa: ARG002  others raise
        """Return whether a result is that of a tool that failed."""
        return False

    def with_stops(
        self,
        result: Any,
        stops: Sequence[Stop],  # noqa: ARG002  few keep them
        *,
        synthetic: bool,  # noqa: ARG002
    ) -> Any:
        """Return a result that shows the halts of agents that the tool has called.

        Args:
            result: The result.
            stops: The halts.
            synthetic: The result is the text of a halt, as the answer to the end user.
        """
        return result

    def is_result(self, part: Any) -> bool:  # noqa: ARG002  a tool may yield texts only
        """Return whether a part of a tool that yields parts is its result.

        By default, the last part is. Its text for the model cannot be changed then.
        """
        return False

    def parts_of(self, result: Any) -> Iterable[Any]:
        """Return the parts of the result of a call that must not run; by default, the result."""
        return (result,)

    def is_pause(self, error: Exception) -> bool:  # noqa: ARG002  few raise one
        """Return whether an exception of the tool is none: it waits for a human, or hands off."""
        return False

    # --- the call ---------------------------------------------------------------------------------

    # Guarded inside, not by a decorator, because both may run for each part of a result.

    def __enter__(self) -> None:
        """Let what the tool starts belong to it, in plain threads as well."""
        try:
            context = self.context or otel_context.get_current()
            context = for_threads(self.invocation.run, self.scope, context) or context
            attached = otel_context.attach(context)
            self._tokens = CURRENT.set(self.invocation.run), TASK_SCOPE.set(self.scope), attached
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)

    def __exit__(self, *_: object) -> None:
        """Leave the tool's code."""
        tokens, self._tokens = self._tokens, None
        if tokens is None:  # an internal error, which was reported
            return
        try:
            run, scope, context = tokens
            self.context = otel_context.get_current()
            otel_context.detach(context)
            TASK_SCOPE.reset(scope)
            CURRENT.reset(run)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)

    @suppress_errors("binding")
    def refusal(self) -> str | None:
        """Return why the call must not run, for the model."""
        breach = self.requested.refusal
        pending = self.invocation.verdict or self.invocation.wrapping
        if breach is not None:
            note = refusal_note(breach, is_final=breach.limit in self.invocation.run.refusals)
        elif pending is not None:
            note = not_run_note(pending)
        else:
            return None
        self.requested.status = "refused"
        return note

    def answer_of(self, note: str) -> Any:
        """Return the result of a call that must not run."""
        return suppress_errors("binding")(self.refused)(note) or note

    @suppress_errors("binding")
    def fail(self, error: BaseException) -> None:
        """Note an exception of the tool."""
        if isinstance(error, Exception) and not self.is_pause(error):
            self._note("error", str(error))

    def end(self, result: Any) -> Any:
        """Note the result, and return it with the texts for the model around a halted agent."""
        # Strands reports the result of a refused call like that of a tool, but none has run.
        if self.requested.refusal is not None:
            return None
        try:
            return self._end(result)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)
            self._note("success", "")  # it has run
            return None

    def parts_of_refusal(self, note: str) -> Iterable[Any]:
        """Return the parts of the result of a call that must not run."""
        result = self.answer_of(note)
        return suppress_errors("binding")(self.parts_of)(result) or (result,)

    def shown(self, part: Any) -> Any:
        """Return a part; if it is the result, note it, with the texts for the model in it."""
        if suppress_errors("binding")(self.is_result)(part):
            return self.end(part) or part
        self._last = part
        return part

    @suppress_errors("binding")
    def end_of_parts(self) -> None:
        """Note that there are no further parts."""
        if not self.requested.is_answered:
            self.end(self._last)

    def _end(self, result: Any) -> Any:
        run, is_error, text = self.invocation.run, self.is_error(result), self.text_of(result)
        if run.halted:
            if not self.is_answer:  # which keeps the text for the end user
                result, text = self.reword(result, text, is_error=is_error)
            halts = [each for each in run.halted.values() if is_within(each[0], self.scope)]
            if halts:
                stops = [child.stop(verdict.reason) for child, verdict in halts]
                is_ours = self.is_answer and any(is_text_of_halt(text, *each) for each in halts)
                result = self.with_stops(result, stops, synthetic=is_ours)
        self._note("error" if is_error else "success", text)
        return result

    def reword(self, result: Any, text: str, *, is_error: bool) -> tuple[Any, str]:
        """Return a result, and its text, with the texts for the model around a halted agent."""
        # A framework's text for an exception suggests another attempt.
        raised = raised_text(self.invocation.run, self.scope) if is_error else None
        text = raised or reworded_text(text, self.invocation.run, self.scope)
        return self.with_text(result, text), text

    def _note(self, status: str, text: str) -> None:
        requested = self.requested
        requested.status, requested.result = status, text
        requested.seconds = CLOCK.now() - self._started
        self.scope.has_ended = True


# --- results of tools that called a halted agent --------------------------------------------------

EDGE: Final = r"""["']|\\n"""
"""Around a whole text within JSON: quotes, or the line breaks of its other lines."""


def is_text_of_halt(text: str, child: Run, verdict: Verdict) -> bool:
    """Return whether a text is that of the halt of an agent, so that no model wrote it."""
    return text.strip() == _text_of_halt(child, verdict)


def _text_of_halt(child: Run, verdict: Verdict) -> str:
    return for_end_user(child.invocation.agent, verdict, child.policy.halt_message)


def raised_text(run: Run, scope: TaskScope | None) -> str | None:
    """Return the text for the model if a tool has failed by the halt of an agent it has called."""
    texts = [
        for_model(child.invocation.agent, verdict)
        for child, verdict in run.halted.values()
        if child.raised and is_within(child, scope)
    ]
    return texts[-1] if texts else None


def reworded_text(text: str, run: Run, scope: TaskScope | None = None) -> str:
    """Replace the texts of halted agents by those for the model around them.

    The sentence for the end user is replaced where it is a whole line, with the name of a node
    before it in the result of a group. In the result of the tool that ran the halted agent, it is
    also replaced where it is a whole text within JSON or in quotes.

    Args:
        text: The result of a tool.
        run: The invocation that called the tool.
        scope: The call, if known.
    """
    # Several agents may have the same last message: those of this tool first, then the latest.
    halts = list(run.halted.items())[::-1]
    halts.sort(key=lambda each: not is_within(each[1][0], scope))
    for sentence, (child, verdict) in halts:
        text = text.replace(sentence, for_model(child.invocation.agent, verdict))
    for is_named in (True, False):
        for _, (child, verdict) in halts:
            agent = child.invocation.agent
            read = _text_of_halt(child, verdict)
            front = rf".*\b{re.escape(agent)}: " if is_named else "(?:.*: )?"
            line = rf"^({front}){re.escape(read)}$"
            text = _replaced(line, text, read, for_model(agent, verdict))
    for _, (child, verdict) in halts:
        if scope is not None and is_within(child, scope):
            told, read = for_model(child.invocation.agent, verdict), _text_of_halt(child, verdict)
            for written in (str, _in_json, _in_ascii_json):
                text_within = rf"({EDGE}){re.escape(written(read))}(?={EDGE})"
                text = _replaced(text_within, text, written(read), written(told))
    return text


def _replaced(pattern: str, text: str, read: str, told: str) -> str:
    if not read or read not in text:
        return text
    return re.sub(pattern, lambda found: found[1] + told, text, flags=re.MULTILINE)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]
