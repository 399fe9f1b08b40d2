"""Tracks every model call of LangChain: admits it, follows its answer and settles it."""

from __future__ import annotations

import asyncio
import functools
import itertools
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_messages
from langchain_core.runnables.config import ensure_config

from otel_limits.bindings.langchain.chat_readers import (
    answer_in,
    call_to,
    is_blocked,
    is_cached,
    unread_call,
    usage_of,
)
from otel_limits.bindings.langchain.graph_path import GraphPath, path_of_task
from otel_limits.bindings.langchain.graph_questions import ask, report_not_asked, unanswered
from otel_limits.bindings.langchain.halt_marks import mark
from otel_limits.bindings.langchain.inner_streams import AnswerEndedError, AnswerReader, with_reader
from otel_limits.bindings.langchain.last_answers import obstacle_to_last_answer
from otel_limits.bindings.langchain.notes_for_chat import noted, without_tools
from otel_limits.bindings.own_spans import write_call_span
from otel_limits.bindings.path import (
    IMMEDIATE,
    admit_side_call,
    can_be_extended,
    settle_call,
)
from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.span_writer import write_halt
from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.texts import EMPTY_REMARK, failed_remark
from otel_limits.runs.calls import ENCLOSING_CALL, EnclosingCall, InFlightCall
from otel_limits.runs.run import Run
from otel_limits.runs.tree import current_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from otel_limits.bindings.path import Refusal

IDS: Final = itertools.count(1)
"""IDs of calls, as parallel branches of a graph can have several in flight."""

WITH_TOOLS: Final = (
    *("tools", "tool_choice", "tool_config"),
    *("functions", "function_call", "response_format"),
)
"""Options of a request that its last answer does without."""

LEFT: Final = (GeneratorExit, asyncio.CancelledError)
"""How a stream ends for the model if its reader does not read it to the end."""


# --- wrappers of a model's methods ----------------------------------------------------------------


def track_generate(original: Any) -> Any:
    """Wrap `BaseChatModel.generate`, which `invoke` and `batch` call."""

    @functools.wraps(original)
    def generate(model: Any, messages: Any, *args: Any, **options: Any) -> Any:
        request = _request(model, messages, options)
        if request is None:
            return original(model, messages, *args, **options)
        request.admit_blocking()
        request.read_along(args)
        try:
            with request:
                result = original(model, request.messages, *args, **request.options)
        except BaseException as error:
            request.fail(error)
            request.settle_blocking(error)
            request.raise_if_ended(error)
            request.raise_if_last(error)
            raise
        request.note_result(result)
        request.settle_blocking()
        return result

    return generate


def track_agenerate(original: Any) -> Any:
    """Wrap `BaseChatModel.agenerate`, which `ainvoke` and `abatch` call."""

    @functools.wraps(original)
    async def agenerate(model: Any, messages: Any, *args: Any, **options: Any) -> Any:
        request = _request(model, messages, options)
        if request is None:
            return await original(model, messages, *args, **options)
        await request.admit()
        request.read_along(args)
        wait = request.wait()
        try:
            with request:
                answer = original(model, request.messages, *args, **request.options)
                result = await wait.next_of(_only(answer))
        except BaseException as error:
            request.fail(error)
            await request.settle(error)
            request.raise_if_ended(error)
            request.raise_if_last(error)
            raise
        finally:
            wait.close()
        request.note_result(result)
        await request.settle()
        return result

    return agenerate


def track_stream(original: Any) -> Any:
    """Wrap `BaseChatModel.stream`."""

    @functools.wraps(original)
    def stream(model: Any, input: Any, *args: Any, **options: Any) -> Iterator[Any]:  # noqa: A002
        request = request_of_stream(model, input, options)
        if request is None:
            yield from original(model, input, *args, **options)
            return
        request.admit_blocking()
        chunks = original(model, request.messages[0], *args, **request.options)
        error: BaseException | None = None
        try:
            while True:
                with request:
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        break
                request.note_chunk(chunk)
                with request.handed_on():
                    yield chunk
                request.raise_if_cut()  # a sync stream can be ended between two chunks only
            request.note_answer()
        except BaseException as failure:
            error = request.end_by(failure)
            request.fail(error)
            request.raise_if_last(failure)
            raise
        finally:
            try:
                chunks.close()
            finally:
                request.settle_blocking(error)

    return stream


def track_astream(original: Any) -> Any:
    """Wrap `BaseChatModel.astream`."""

    @functools.wraps(original)
    async def astream(
        model: Any,
        input: Any,  # noqa: A002  the name of LangChain
        *args: Any,
        **options: Any,
    ) -> AsyncIterator[Any]:
        request = request_of_stream(model, input, options)
        if request is None:
            async with aclosing(original(model, input, *args, **options)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        await request.admit()
        wait = request.wait()
        chunks = original(model, request.messages[0], *args, **request.options)
        error: BaseException | None = None
        try:
            while True:
                with request:
                    try:
                        chunk = await wait.next_of(chunks)
                    except StopAsyncIteration:
                        break
                request.note_chunk(chunk)
                with request.handed_on():
                    yield chunk
            request.note_answer()
        except BaseException as failure:
            error = request.end_by(failure)
            request.fail(error)
            request.raise_if_ended(failure)
            request.raise_if_last(failure)
            raise
        finally:
            wait.close()
            try:
                await chunks.aclose()
            finally:  # an event loop that ends closes both concurrently, which is an error here
                await request.settle(error)

    return astream


async def _only(awaitable: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await awaitable


# --- one request ----------------------------------------------------------------------------------


def _request(model: Any, messages: Any, options: Mapping[str, Any]) -> ChatRequest | None:
    """Describe the model calls of a request; `None` if they belong to no invocation.

    After an internal error they are described without reading the request, so that they count.
    """
    try:
        return _described(model, messages, options, call_to)
    except Exception as error:  # noqa: BLE001  the graph must not feel it
        report_suppressed("binding", error)
    return _unread(model, messages, options)


@suppress_errors("binding")
def _unread(model: Any, messages: Any, options: Mapping[str, Any]) -> ChatRequest | None:
    return _described(model, messages, options, unread_call)


def _described(
    model: Any, messages: Any, options: Mapping[str, Any], read: Callable[..., InFlightCall]
) -> ChatRequest | None:
    path = path_of_task()
    run = path.run if path is not None else current_scope()[0]
    if not isinstance(run, Run) or run.released:
        return None
    around = ENCLOSING_CALL.get()
    is_within = around is not None and around.run is run and around.call in run.calls.in_flight
    if around is not None and is_within and not around.is_carried:
        around.is_carried = True  # such as `invoke` within `stream`
        return None
    known: dict[int, tuple[Any, int]] = path.tokens if path is not None else {}
    calls = [read(model, each, options, known) for each in messages]
    if path is not None:
        for call, each in zip(calls, messages, strict=True):
            call.id = str(next(IDS))
            path.end_turns_before(each)
    return ChatRequest(model, run, path, list(messages), dict(options), calls)


def request_of_stream(model: Any, asked: Any, options: Mapping[str, Any]) -> ChatRequest | None:
    """Describe the model call of a stream; `None` if it belongs to no invocation."""
    request = _request(model, [_messages_in(asked)], options)
    if request is not None:
        request.messages = [asked]
    return request


def _messages_in(asked: Any) -> Any:
    try:
        if hasattr(asked, "to_messages"):
            return asked.to_messages()
        return convert_to_messages([asked] if isinstance(asked, str) else asked)
    except Exception:  # noqa: BLE001  the model raises the same
        return ()


@dataclass(slots=True, eq=False)
class ChatRequest:
    """One request to a model, as a context manager while the model's own code runs.

    `generate` takes several conversations: each is a model call.
    """

    model: Any
    run: Run
    path: GraphPath | None
    """The graph whose turn it is; `None` for a side call."""
    messages: list[Any]
    options: dict[str, Any]
    calls: list[InFlightCall]
    obstacle: str = ""
    """Why it cannot be the graph's last answer, for the operator."""
    chunks: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    """The response to each call."""
    _within: EnclosingCall = field(default_factory=EnclosingCall)
    _token: Any = None
    _thrown: BaseException | None = None

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let the model's own requests belong to this one."""
        within = self._within
        within.run, within.model, within.call = self.run, self.model, self.calls[0]
        self._token = ENCLOSING_CALL.set(within)

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Leave the model's code."""
        token, self._token = self._token, None
        if token is not None:
            ENCLOSING_CALL.reset(token)

    def wait(self) -> Wait:
        """Return a wait that a deadline or a kill ends."""
        wait = Wait()
        if (path := self._ending()) is not None:
            wait.join(path.waits)
        return wait

    @suppress_errors("binding")
    def _ending(self) -> GraphPath | None:
        """Return the graph whose deadline or kill ends this request, also if it is a side call."""
        path = self.run.state
        return path if isinstance(path, GraphPath) and not self.run.finished else None

    # --- admission --------------------------------------------------------------------------------

    def admit_blocking(self) -> None:
        """Admit each call, or raise its refusal."""
        path = self.path
        if path is None:
            self._admit_as_side()
            return
        self._prepare(path)
        for call in self.calls:
            refusal = path.admit_blocking(
                call, path.attributes, can_be_last=not self.obstacle, can_ask=path.can_ask
            )
            if refusal is not None:
                self._refuse(path, refusal)
        self._reopen(path)
        self._begin(path)

    async def admit(self) -> None:
        """Do the same as `admit_blocking` without blocking the event loop."""
        path = self.path
        if path is None:
            self._admit_as_side()
            return
        self._prepare(path)
        for call in self.calls:
            refusal = await path.admit(
                call, path.attributes, can_be_last=not self.obstacle, can_ask=path.can_ask
            )
            if refusal is not None:
                self._refuse(path, refusal)
        self._reopen(path)
        self._begin(path)

    def _admit_as_side(self) -> None:
        for call in self.calls:
            admit_side_call(self.run, call)
            self.run.calls.open(call)

    def _prepare(self, path: GraphPath) -> None:
        if path.can_ask and (interruption := unanswered(path)) is not None:
            raise interruption
        self._note_obstacle(path)

    @suppress_errors("binding")
    def _note_obstacle(self, path: GraphPath) -> None:
        if path.may_wrap_up and not path.wrapped_up:
            self.obstacle = obstacle_to_last_answer(path, self.options)

    def _refuse(self, path: GraphPath, refusal: Refusal) -> None:
        for call in self.calls:
            if call.reservation is not None and call.is_open:
                self.run.calls.release(call)
        if refusal.asks and (interruption := ask(path, refusal.verdict)) is not None:
            raise interruption
        verdict = refusal.verdict
        action = verdict.action or path.run.policy.action
        if action == "ask" and not path.can_ask and can_be_extended(verdict):
            report_not_asked(path)
        if action == "wrap_up" and verdict.reason not in IMMEDIATE:
            verdict = replace(verdict, remark=verdict.remark or self.obstacle)
        raise path.refuse(verdict, ensure_config().get("metadata") or {})

    def _reopen(self, path: GraphPath) -> None:
        """Go on with calls whose graph has ended while they waited, as its threads may do."""
        for call in self.calls:
            if call.is_open:
                continue
            if path.verdict is not None:
                raise path.refuse(path.verdict, path.place)
            call.is_open, call.is_of_loop = True, False  # counted like any call after the end

    @suppress_errors("binding")
    def _begin(self, path: GraphPath) -> None:
        for call in self.calls:
            self.run.calls.open(call)
        self.run.cycle()
        if path.wrapping is not None and path.last_call in self.calls:
            self.messages = [without_tools(each, path.wrapping) for each in self.messages]
            for name in WITH_TOOLS:
                self.options.pop(name, None)
        else:
            self.messages = [noted(each, path) for each in self.messages]

    @suppress_errors("binding")
    def read_along(self, positional: tuple[Any, ...]) -> None:
        """Read an answer that the model streams although it returns it as a whole.

        Args:
            positional: The other positional arguments; LangChain itself passes callbacks by name.
        """
        if len(self.calls) == 1 and len(positional) < 2:  # noqa: PLR2004  `stop` and the callbacks
            reader = AnswerReader(self.note_chunk, self.raise_if_cut)
            self.options["callbacks"] = with_reader(self.options.get("callbacks"), reader)

    # --- the answer -------------------------------------------------------------------------------

    @suppress_errors("binding")
    def note_chunk(self, chunk: Any) -> None:
        """Note a part of a streamed answer."""
        call = self.calls[0]
        call.answered = call.has_content = True
        self.chunks.append(chunk)
        call.parts.append(answer_in(chunk))

    @suppress_errors("binding")
    def note_answer(self) -> None:
        """Note the whole of a streamed answer."""
        if self.chunks:
            self._note(self.calls[0], self._merged(), None)

    def _merged(self) -> Any:
        """Return the parts of a streamed answer as one message."""
        first, *rest = self.chunks
        # In linear time: a list of chunks is merged in one step.
        return first.__add__(rest) if isinstance(first, AIMessageChunk) and rest else first

    @suppress_errors("binding")
    def note_result(self, result: Any) -> None:
        """Note the answers of a request."""
        for call, generations in zip(self.calls, result.generations, strict=False):
            first, *others = (each.message for each in generations)
            self._note(call, first, result.llm_output)
            # The vendor reports and bills all of them, which were requested with `n`.
            call.parts += [answer_in(each) for each in others]
            call.is_unbilled = call.is_unbilled and all(map(is_blocked, others))

    def _note(self, call: InFlightCall, message: Any, output: Mapping[str, Any] | None) -> None:
        call.answered = call.has_content = True
        call.record = usage_of(message, output, call.provider)
        call.is_unbilled = is_blocked(message)
        if not any(call.parts):
            call.parts.append(answer_in(message))
        self.answers.append(message)

    # --- the end ----------------------------------------------------------------------------------

    def settle_blocking(self, error: BaseException | None = None) -> None:
        """Count the calls, and their turns."""
        for number, call in enumerate(self.calls):
            self._write_span(number, call, error)
            if self._is_unsent(number, call):
                self.run.calls.release(call)
            elif self.path is None:
                settle_call(self.run, call, error)
            else:
                self.path.settle_blocking(call, error)
            self._end(number, call, error)

    async def settle(self, error: BaseException | None = None) -> None:
        """Do the same as `settle_blocking` without blocking the event loop."""
        for number, call in enumerate(self.calls):
            self._write_span(number, call, error)
            if self._is_unsent(number, call):
                self.run.calls.release(call)
            elif self.path is None:
                settle_call(self.run, call, error)
            else:
                await self.path.settle(call, error)
            self._end(number, call, error)

    @suppress_errors("binding")
    def _is_unsent(self, number: int, call: InFlightCall) -> bool:
        """Return whether a call was answered from a cache."""
        return call.is_open and number < len(self.answers) and is_cached(self.answers[number])

    @suppress_errors("binding")
    def _write_span(self, number: int, call: InFlightCall, error: BaseException | None) -> None:
        """Write the span of a call, before it is counted with the ID of the span."""
        path = self.run.state
        if not isinstance(path, GraphPath) or call.started is None or not call.is_open:
            return
        if not self._is_unsent(number, call):
            seconds = self.run.services.now() - call.started
            write_call_span(path.span, call, seconds, error)

    @suppress_errors("binding")
    def _end(self, number: int, call: InFlightCall, error: BaseException | None) -> None:
        path = self.path
        if path is None:
            return
        message = self._used(number, error)
        if not isinstance(message, AIMessage):
            self.run.calls.on_response_rejected(call)
            return
        if path.wrapping is not None and call is path.last_call:
            _end_with(path, message, call)
        else:
            shown: Any = message.text  # a method in older releases
            text = shown if isinstance(shown, str) else shown()
            called = [
                (each["id"] or each["name"], each["name"], each["args"])
                for each in message.tool_calls
            ]
            path.begin_turn(text, called, call)

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """Note an error that the reader of a stream throws into it."""
        try:
            yield
        except Exception as error:
            self._thrown = error
            raise

    def end_by(self, error: BaseException) -> BaseException:
        """Return how a stream has ended for the model: its reader has left it, or it failed."""
        return GeneratorExit() if error is self._thrown else error

    def _used(self, number: int, error: BaseException | None) -> Any:
        """Return the answer that the graph got, as far as it has read it; `None` if none."""
        if error is None:
            return self.answers[number] if number < len(self.answers) else None
        # It left the stream, and has what it read. A call that failed or was ended gave no answer.
        is_ended = self.run.finished or (self.path is not None and self.path.verdict is not None)
        is_left = isinstance(error, LEFT) and not is_ended
        return self._merged() if is_left and self.chunks else None

    @suppress_errors("binding")
    def fail(self, error: BaseException) -> None:
        """Note an answer that was broken off, or a request that was refused."""
        if self.path is not None:
            self.path.place = ensure_config().get("metadata") or {}
        if self.chunks and not self.answers and isinstance(error, Exception):
            self.note_answer()
            self.answers.clear()  # it does not count as a turn

    def raise_if_ended(self, error: BaseException) -> None:
        """Replace the end of a wait, or of an answer, by the halt that ended it."""
        if isinstance(error, AnswerEndedError):
            raise error.error from None
        path = self._ending()
        if isinstance(error, InvocationEndedError) and path is not None:
            self._raise_halt(path, error)

    def raise_if_cut(self) -> None:
        """End a stream whose invocation was ended between two chunks."""
        path = self._ending()
        if path is not None and path.waits.is_cut:
            self._raise_halt(path, None)

    def _raise_halt(self, path: GraphPath, error: BaseException | None) -> None:
        """End the graph, or raise the limit's error to the code that made a side call."""
        if path.verdict is None:
            return
        if self.path is None:
            stop = self.run.stop(path.verdict.reason)
            raise limit_reached(path.verdict, stop) from error
        raise path.refuse(path.verdict, ensure_config().get("metadata") or {}) from error

    def raise_if_last(self, error: BaseException) -> None:
        """End the graph if its last answer failed: there is no further call."""
        path = self.path
        if path is None or path.wrapping is None or not isinstance(error, Exception):
            return
        if path.last_call in self.calls:
            verdict = replace(path.wrapping, remark=failed_remark(error))
            path.wrapping = None
            raise path.refuse(verdict, ensure_config().get("metadata") or {}) from error


def _end_with(path: GraphPath, message: AIMessage, call: InFlightCall) -> None:
    """Make a model's last answer the end of the graph."""
    run, verdict = path.run, path.wrapping
    assert verdict is not None  # checked before
    run.turn(call)
    text = str(message.text)
    is_empty = not text.strip()
    # Without tools, none can have been requested; some models write such calls anyway. They are in
    # the content and in the vendor's own fields, too, and the next request would contain them.
    if message.tool_calls or message.invalid_tool_calls:
        message.content, message.tool_calls, message.invalid_tool_calls = text, [], []
        message.additional_kwargs = {}
    if is_empty:
        message.content = path.text_of(verdict)
        verdict = replace(verdict, remark=EMPTY_REMARK)
    run.halt(verdict, "halted" if is_empty else "wrapped_up")
    path.answer = message
    mark(message, run.stop(verdict.reason), synthetic=is_empty)
    write_halt(path.span, verdict, run, synthetic=is_empty)
