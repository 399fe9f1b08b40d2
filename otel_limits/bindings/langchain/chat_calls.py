"""Tracks every model call of LangChain: its request, answer, stream and end."""

from __future__ import annotations

import functools
import inspect
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_messages
from langchain_core.runnables.config import ensure_config, merge_configs

from otel_limits.bindings.invocation import requester_of_task
from otel_limits.bindings.langchain.chat_readers import (
    answer_in,
    as_texts,
    call_to,
    chunk_of,
    has_usage,
    is_blocked,
    is_cached,
    messages_in,
    model_in,
    nudged,
    usage_of,
    with_note,
)
from otel_limits.bindings.langchain.graph_invocation import (
    GraphInvocation,
    formats_answer,
    obstacle_to_last_answer,
)
from otel_limits.bindings.langchain.graph_questions import ask, unanswered
from otel_limits.bindings.langchain.halt_marks import mark
from otel_limits.bindings.model_call import (
    IDS,
    UNKNOWN_MODEL,
    ModelCallInProgress,
    enclosing_request,
    follow,
    follow_async,
    follow_parts,
    follow_parts_async,
)
from otel_limits.bindings.waits import InvocationEndedError
from otel_limits.core.internal_errors import (
    report_suppressed,
    suppress_errors,
    suppress_errors_async,
)
from otel_limits.runs.current import ENCLOSING_CALL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from otel_limits.core.policy import Verdict
    from otel_limits.runs.calls import InFlightCall


# --- requests -------------------------------------------------------------------------------------

ASKED: Final = ("input", "messages", "prompts", "prompt")
"""Names of the first argument of a model's methods."""

FOLLOWED_BY_EVENTS: Final[weakref.WeakSet[ChatRequest]] = weakref.WeakSet()
"""Requests in progress whose events are read, as the model's code runs when its reader wants."""

UNREAD: Final[ContextVar[Any]] = ContextVar("otel_limits_unread", default=None)
"""The model whose request could not be read, because of an internal error. Its own methods count it
then, as a side call: a halt of the graph within them would reach LangChain's code instead."""

WITH_TOOLS: Final = (
    *("tools", "tool_choice", "tool_config"),
    *("functions", "function_call", "response_format"),
)
"""Options of a request that its last answer does without."""


def request_for(model: Any, *args: Any, **options: Any) -> ChatRequest | None:
    """Describe the model call of a method that takes one conversation."""
    return _described(model, args, options)


def _request_for_all(model: Any, *args: Any, **options: Any) -> ChatRequest | None:
    """Describe the model calls of a method that takes a list of conversations."""
    return _described(model, args, options, has_several=True)


def _request_within(model: Any, *args: Any, **options: Any) -> ChatRequest | None:
    """Describe a call of a method that others of a model call: within these, it is their call."""
    return None if _is_asked(model) else _described(model, args, options, is_own=True)


def _request_for_all_within(model: Any, *args: Any, **options: Any) -> ChatRequest | None:
    """Do the same for a method that takes a list of conversations."""
    if _is_asked(model):
        return None
    return _described(model, args, options, is_own=True, has_several=True)


def _described(
    model: Any, args: tuple[Any, ...], options: dict[str, Any], **kind: bool
) -> ChatRequest | None:
    """Describe the model calls of a request; `None` also after an internal error."""
    try:
        return _read(model, args, options, **kind)
    except Exception as error:  # noqa: BLE001  the graph must not feel it
        UNREAD.set(model)
        report_suppressed("binding", error)
        return None


def _read(
    model: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    *,
    is_own: bool = False,
    has_several: bool = False,
) -> ChatRequest | None:
    """Describe the model calls of a request; `None` if it has none, or they have no invocation.

    Args:
        model: The model.
        args: The positional arguments of its method; the first one is what is asked.
        options: The others.
        is_own: Others of the model's methods call it; this time none of them does.
        has_several: It takes a list of conversations.
    """
    keyword = "" if args else next((each for each in ASKED if each in options), None)
    if keyword is None:
        return None
    given, rest = (options[keyword], ()) if keyword else (args[0], args[1:])
    messages = list(given) if has_several else [given]
    invocation, run = requester_of_task(GraphInvocation)
    if run is None or not messages:
        return None
    if is_own and UNREAD.get() is model:
        invocation = None
    known: dict[int, tuple[Any, int]] = invocation.tokens if invocation is not None else {}
    conversations = [_messages_in(each) for each in messages]
    calls = [call_to(model, each, options, known) for each in conversations]
    outer = enclosing_request(run)
    told: dict[str, Any] = {"model": model, "outer": outer, "messages": messages}
    told |= {"rest": rest, "keyword": keyword, "options": options, "has_several": has_several}
    if isinstance(outer, ChatRequest):
        told["formats"] = outer.formats
    taken = [] if outer is None else outer.give_calls(calls)  # as `invoke` within `stream`
    calls[: len(taken)] = taken
    if invocation is not None:
        for call, each in list(zip(calls, conversations, strict=True))[len(taken) :]:
            call.id = str(next(IDS))
            invocation.end_turns_before(each)
    if invocation is not None and outer is None:
        told["formats"] = formats_answer(invocation, options, conversations[0])
        # Once, so that limits see a loop of answers without the form.
        calls[0].formats_answer = told["formats"] and not invocation.has_asked_for_form
        invocation.has_asked_for_form = invocation.has_asked_for_form or told["formats"]
    told["can_ask"] = invocation is not None and invocation.can_ask
    return ChatRequest(run, invocation, calls, taken=taken, **told)


# Wrappers of the methods that other code calls, and of those that they call in turn.
track_generate, track_agenerate = follow(_request_for_all), follow_async(_request_for_all)
track_stream, track_astream = follow_parts(request_for), follow_parts_async(request_for)
track_inner, track_ainner = follow(_request_within), follow_async(_request_within)
track_inner_stream = follow_parts(_request_within)
track_inner_astream = follow_parts_async(_request_within)
track_inner_all = follow(_request_for_all_within)
track_inner_aall = follow_async(_request_for_all_within)


def _is_asked(model: Any) -> bool:
    """Return whether the code runs within a request of the same model."""
    around = ENCLOSING_CALL.get()
    if around is not None and around.model is model:
        return True
    return any(each.model is model and not each.has_ended for each in FOLLOWED_BY_EVENTS)


def _messages_in(asked: Any) -> Any:
    """Return the messages of a conversation."""
    try:
        if hasattr(asked, "to_messages"):
            return asked.to_messages()
        return convert_to_messages([asked] if isinstance(asked, str) else asked)
    except Exception:  # noqa: BLE001  the model raises the same
        return ()


@dataclass(eq=False)
class ChatRequest(ModelCallInProgress):
    """A call of a model's method. `generate` takes several conversations: each is a model call."""

    cannot_ask: str = field(
        default="because its graph has no checkpointer. Compile it with one, e.g. "
        "checkpointer=InMemorySaver().",
        kw_only=True,
    )

    invocation: GraphInvocation | None
    messages: list[Any] = field(kw_only=True)
    """The conversations, as LangChain's method takes them."""
    options: dict[str, Any] = field(kw_only=True)
    rest: tuple[Any, ...] = field(kw_only=True)
    """The other positional arguments."""
    keyword: str = field(kw_only=True)
    """The name by which the conversations were given; empty if by position."""
    has_several: bool = field(kw_only=True)
    formats: bool = field(default=False, kw_only=True)
    """True if it only gives the graph's answer another form, for the first time or again."""
    chunks: list[Any] = field(default_factory=list, kw_only=True)
    has_usage: bool = field(default=False, kw_only=True)
    """True if the chunks report usage, and no text has followed it."""

    # --- the request ------------------------------------------------------------------------------

    def add_note(self, note: str) -> None:
        """Add a sentence at the end of each conversation."""
        self.messages = [with_note(each, note) for each in self.messages]

    def nudge(self, identity: str, note: str) -> None:
        """Add a sentence to the result of a tool call."""
        self.messages = [nudged(each, identity, note) for each in self.messages]

    def remove_tools(self, note: str) -> None:
        """Declare no tools, and write earlier calls as texts."""
        self.messages = [with_note(as_texts(each), note) for each in self.messages]
        for name in WITH_TOOLS:
            self.options.pop(name, None)

    def send(self, method: Any) -> Any:
        """Call the model's method, and read its answer along.

        Raises:
            InvocationEndedError: The invocation has ended between two parts of the answer.
        """
        self._read_along()
        given = self.messages if self.has_several else self.messages[0]
        args, options = (given, *self.rest), self.options
        if self.keyword:
            args, options = self.rest, {**self.options, self.keyword: given}
        try:
            answer = method(self.model, *args, **options)
        except AnswerEndedError as error:
            raise InvocationEndedError from error
        return _ended_in_time(answer) if inspect.iscoroutine(answer) else answer

    @suppress_errors("binding")
    def _read_along(self) -> None:
        """Read an answer that the model streams although it returns it as a whole."""
        # LangChain itself passes callbacks by name; positional are `stop` and the callbacks.
        if self.has_several and len(self.calls) == 1 and len(self.rest) < 2:  # noqa: PLR2004
            reader = AnswerReader(self.read_part, lambda: self.is_cut)
            self.options["callbacks"] = with_reader(self.options.get("callbacks"), reader)

    # --- the answer -------------------------------------------------------------------------------

    def note_part(self, part: Any) -> bool:
        """Note a part of a streamed answer."""
        call, chunk = self.calls[0], chunk_of(part)
        call.has_content = True
        self.chunks.append(chunk)
        call.parts.append(text := answer_in(chunk))
        self.has_usage = has_usage(chunk) or (self.has_usage and not text)
        return False

    def note_end_of_parts(self) -> None:
        """Note the whole of a streamed answer."""
        if self.chunks:
            self._note(self.calls[0], self.partial_answer(), None)

    def partial_answer(self) -> Any:
        """Return the parts of a streamed answer as one message."""
        if not self.chunks:
            return None
        first, *rest = self.chunks
        # In linear time: a list of chunks is merged in one step.
        return first.__add__(rest) if isinstance(first, AIMessageChunk) and rest else first

    def note_answer(self, answer: Any) -> None:
        """Note the answers of a request."""
        for call, messages in zip(self.calls, messages_in(answer), strict=False):
            first, *others = messages
            self._note(call, first, getattr(answer, "llm_output", None))
            # The vendor reports and bills all of them, which were requested with `n`.
            call.parts += [answer_in(each) for each in others]
            call.is_unbilled = call.is_unbilled and all(map(is_blocked, others))

    def _note(self, call: InFlightCall, message: Any, output: Mapping[str, Any] | None) -> None:
        if call.model == UNKNOWN_MODEL:
            call.model = model_in(self.chunks or [message], output)
        usage = usage_of(message, output, call, self.chunks)
        call.is_unbilled = is_blocked(message)
        if is_cached(message):
            self.unsent.append(call)
        is_answer = isinstance(message, AIMessage)
        text = "" if any(call.parts) else answer_in(message)
        self.note(call, message if is_answer else None, usage, text)

    def note_failure(self, error: BaseException) -> None:  # noqa: ARG002  of every request
        """Note the node of the call, and the usage of an answer that was broken off."""
        if self.invocation is not None:
            self.invocation.call_metadata = _metadata() or {}
        if self.chunks and not self.answers:
            self.note_end_of_parts()
            self.answers.clear()  # it does not count as a turn
            call = self.calls[0]
            if call.record.sure == "measured" and not self.has_usage:  # only the input is known
                call.record = replace(call.record, sure="partial", has_output=False)

    def text_of(self, answer: Any) -> str:
        """Return the text of a message."""
        shown = answer.text  # a method in older releases
        return shown if isinstance(shown, str) else shown()

    def tools_of(self, answer: Any) -> Iterable[tuple[str, str, object]]:
        """Return the tool calls of a message."""
        return [
            (each["id"] or each["name"], each["name"], each["args"]) for each in answer.tool_calls
        ]

    # --- the end ----------------------------------------------------------------------------------

    def verdict_after(self, error: BaseException) -> Verdict | None:
        """Return the halt, also of a request within that LangChain has ended with another error.

        Its `agenerate` expects only exceptions that are an `Exception`.
        """
        invocation = self.invocation
        is_lost = self.outer is None and self.given > 0 and isinstance(error, Exception)
        if is_lost and invocation is not None and invocation.is_refused:
            return invocation.end
        return super().verdict_after(error)

    def end_with_last(self, answer: Any, text: str) -> None:
        """Keep the text of a message, and mark it."""
        invocation, run = self.invocation, self.run
        assert invocation is not None and run.verdict is not None  # noqa: PT018  there is a halt of it
        # A broken tool call is in the content and in the vendor's own fields, too, and the next
        # request would contain it.
        if answer.invalid_tool_calls:
            answer.content, answer.invalid_tool_calls, answer.additional_kwargs = text, [], {}
        mark(answer, run.stop(run.verdict.reason), synthetic=False)
        invocation.answer = answer

    def prepare(self, invocation: Any) -> None:
        """Wait for a human with the node of the question, or note an obstacle to a last answer."""
        if invocation.can_ask and (interruption := unanswered(invocation)) is not None:
            raise interruption
        self._note_obstacle(invocation)

    @suppress_errors("binding")
    def _note_obstacle(self, invocation: GraphInvocation) -> None:
        if invocation.may_wrap_up and not invocation.wrapped_up:
            self.obstacle = obstacle_to_last_answer(invocation, self.options)

    def asked(self, verdict: Verdict) -> NoReturn:
        """Interrupt the graph with our question."""
        assert self.invocation is not None  # no human is asked about side calls
        if (interruption := ask(self.invocation, verdict)) is not None:
            raise interruption
        self.halted(verdict, None)

    def halted(self, verdict: Verdict, cause: BaseException | None) -> NoReturn:
        """End the graph."""
        invocation = self.invocation
        assert invocation is not None  # side calls are never halted
        invocation.wrapping, invocation.lacks_form = None, self.formats
        raise invocation.refuse(verdict, _metadata() or {}) from cause


async def _ended_in_time(answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await answer
    except AnswerEndedError as error:
        raise InvocationEndedError from error


@suppress_errors("binding")
def _metadata() -> Mapping[str, Any]:
    """Return the metadata of the current call: its node, among others."""
    return ensure_config().get("metadata") or {}


# --- events of a model ----------------------------------------------------------------------------
# Tracks `stream_events(version="v3")` of a model, which calls none of its other public methods.

EVENTS_VERSION = "v3"
"""Earlier versions call `astream`."""


def track_stream_events(original: Any) -> Any:
    """Wrap `BaseChatModel.stream_events`."""

    @functools.wraps(original)
    def stream_events(model: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        is_tracked = options.get("version") == EVENTS_VERSION
        request = request_for(model, input, **options) if is_tracked else None
        if request is None:
            return original(model, input, config, **options)
        if (refusal := request.admit_blocking()) is not None:
            return request.refused(refusal)
        FOLLOWED_BY_EVENTS.add(request)
        config = merge_configs(ensure_config(config), {"callbacks": [EndOfStream(request)]})
        try:
            return original(model, request.messages[0], config, **request.options)
        except BaseException as error:
            request.settle_blocking(error)
            raise

    return stream_events


def track_astream_events(original: Any) -> Any:
    """Wrap `BaseChatModel.astream_events`."""

    @functools.wraps(original)
    def astream_events(model: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        if options.get("version") != EVENTS_VERSION:
            return original(model, input, config, **options)
        return _astream_events(original, model, input, config, options)

    return astream_events


async def _astream_events(
    original: Any, model: Any, asked: Any, config: Any, options: dict[str, Any]
) -> Any:
    request = request_for(model, asked, **options)
    if request is None:
        return await original(model, asked, config, **options)
    if (refusal := await request.admit()) is not None:
        return request.refused(refusal)
    FOLLOWED_BY_EVENTS.add(request)
    config = merge_configs(ensure_config(config), {"callbacks": [EndOfAsyncStream(request)]})
    try:
        return await original(model, request.messages[0], config, **request.options)
    except BaseException as error:
        await request.settle(error)
        raise


class EndOfStream(BaseCallbackHandler):
    """Settles the call of a stream when it ends. One that is left is settled with the graph."""

    run_inline = True

    def __init__(self, request: ChatRequest) -> None:
        """Wait for the end of a request."""
        self._request = request

    def on_stream_event(self, event: Any, **_: Any) -> None:  # noqa: ARG002  LangChain's name
        """End the stream of a turn if its invocation was ended."""
        _end_if_cut(self._request)

    @suppress_errors("binding")
    def on_llm_end(self, response: Any, **_: Any) -> None:
        """Count the answer."""
        self._request.read_answer(response)
        self._request.settle_blocking()

    @suppress_errors("binding")
    def on_llm_error(self, error: BaseException, **more: Any) -> None:
        """Count the failure."""
        note_begun(self._request, more.get("response"))
        self._request.settle_blocking(error)


class EndOfAsyncStream(AsyncCallbackHandler):
    """Does the same for an asynchronous stream."""

    run_inline = True

    def __init__(self, request: ChatRequest) -> None:
        """Wait for the end of a request."""
        self._request = request

    async def on_stream_event(self, event: Any, **_: Any) -> None:  # noqa: ARG002
        """End the stream of a turn if its invocation was ended."""
        _end_if_cut(self._request)

    async def on_llm_end(self, response: Any, **_: Any) -> None:
        """Count the answer."""
        self._request.read_answer(response)
        await self._settle(None)

    async def on_llm_error(self, error: BaseException, **more: Any) -> None:
        """Count the failure."""
        note_begun(self._request, more.get("response"))
        await self._settle(error)

    @suppress_errors_async("binding")
    async def _settle(self, error: BaseException | None) -> None:
        await self._request.settle(error)


def _end_if_cut(request: ChatRequest) -> None:
    invocation = request.invocation
    # LangChain would only log the error of a side call.
    if invocation is not None and request.is_cut and invocation.end is not None:
        request.end_by(invocation.end)


@suppress_errors("binding")
def note_begun(request: ChatRequest, response: Any) -> None:
    """Note an answer that was broken off: its vendor bills what it has sent."""
    if response is not None and any(response.generations):
        request.calls[0].answered = request.calls[0].has_content = True


# --- answers streamed within a method that returns whole ones -------------------------------------
# LangChain streams them if a reader of the graph asks for messages or events, and shows the parts
# to callbacks only.


class AnswerEndedError(BaseException):
    """Ends an answer from a callback: LangChain only logs those that are an `Exception`."""


class AnswerReader(BaseCallbackHandler):
    """Notes each part of an answer, and ends the answer if its invocation was ended.

    Args:
        note: Called with each part.
        is_cut: Returns, after each part, whether the invocation was ended.
    """

    run_inline = True
    ignore_chat_model = True

    def __init__(self, note: Callable[[Any], object], is_cut: Callable[[], bool]) -> None:
        """Create a reader."""
        self._note = note
        self._is_cut = is_cut

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Note a part."""
        if chunk is not None:
            self._note(chunk.message)
        if self._is_cut():
            raise AnswerEndedError


def with_reader(callbacks: Any, reader: AnswerReader) -> Any:
    """Return the callbacks of a request with a reader, which requests within it do not inherit."""
    manager = callbacks.copy() if isinstance(callbacks, BaseCallbackManager) else None
    if manager is None:
        handlers = list(callbacks or ())
        manager = BaseCallbackManager(handlers=handlers, inheritable_handlers=[*handlers])
    manager.add_handler(reader, inherit=False)
    return manager
