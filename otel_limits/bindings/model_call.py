"""A request to a model, in any framework: admitted, sent, counted, or ended by a halt.

A binding's subclass of `ModelCallInProgress` says what a request and an answer of its framework
are, and how a halt reaches the framework. `answered`, `streamed` and their blocking twins are what
happens at a model call, in this order, for a whole answer or a stream.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.bindings.admission import (
    Refusal,
    admit_side_call,
    can_be_extended,
    settle_call,
)
from otel_limits.bindings.extensions import report_not_asked
from otel_limits.bindings.followed_runs import OwnedStream, owned
from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.invocation import InvocationInProgress, LoopEndError, requester_of_task
from otel_limits.bindings.span_writer import write_call_span, write_halt
from otel_limits.bindings.waits import EndedBeforeError, InvocationEndedError, Wait, wait_for
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.halt_texts import (
    EMPTY_REMARK,
    TOOLS_REMARK,
    budget_note,
    failed_remark,
    wrap_up_note,
)
from otel_limits.core.internal_errors import report_suppressed, suppress_errors, suppress_lapses
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.current import ENCLOSING_CALL, EnclosingCall, has_owner

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from typing_extensions import Self

    from otel_limits.bindings.invocation import ToolAnswer
    from otel_limits.core.policy import Verdict
    from otel_limits.core.usage import UsageRecord
    from otel_limits.runs.run import Run

Begin: TypeAlias = "Callable[..., ModelCallInProgress | None]"
Wrapper: TypeAlias = "Callable[[Any], Any]"

IDS: Final = itertools.count(1)
"""IDs of calls, as an agent's loop may have several in flight."""

UNKNOWN_MODEL: Final = "unknown"
"""The model of a request whose binding does not know it, or could not describe the request."""

ENDED: Final = (
    "otel-limits has not sent this model call: its agent ended while the call waited for a quota."
)

LEFT: Final = (GeneratorExit, asyncio.CancelledError)
"""How a stream ends for the model if its reader does not read it to the end."""


# --- wrappers of a model's methods ----------------------------------------------------------------

# Each takes a function that describes a request, with the arguments of the method; `None`, or an
# error in it, means that it is not followed. It returns the wrapper of a method of one kind.


def follow(begin: Begin) -> Wrapper:
    """Follow a method that returns an answer."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def answer(*args: Any, **options: Any) -> Any:
            if (request := guarded(*args, **options)) is None:
                return original(*args, **options)
            return answered_blocking(request, lambda: request.send(original))

        return answer

    return wrap


def follow_async(begin: Begin) -> Wrapper:
    """Follow a coroutine method that returns an answer."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        async def answer(*args: Any, **options: Any) -> Any:
            if (request := guarded(*args, **options)) is None:
                return await original(*args, **options)
            return await answered(request, lambda: request.send(original))

        return answer

    return wrap


def follow_parts(begin: Begin) -> Wrapper:
    """Follow a method that yields the parts of an answer."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def stream(*args: Any, **options: Any) -> Iterator[Any]:
            if (request := guarded(*args, **options)) is None:
                yield from original(*args, **options)
            else:
                yield from streamed_blocking(request, lambda: request.send(original))

        return stream

    return wrap


def follow_parts_async(begin: Begin) -> Wrapper:
    """Follow an asynchronous method that yields the parts of an answer."""
    guarded = suppress_lapses("binding", has_owner)(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def stream(*args: Any, **options: Any) -> AsyncIterator[Any]:
            if (request := guarded(*args, **options)) is None:
                parts: AsyncIterator[Any] = original(*args, **options)
                return parts
            return streamed(request, lambda: request.send(original))

        return stream

    return wrap


# --- what happens at a model call -----------------------------------------------------------------


async def answered(request: ModelCallInProgress, send: Callable[[], Awaitable[Any]]) -> Any:
    """Send an admitted request, and return its answer or that of the halt.

    Args:
        request: The request.
        send: Calls the model, with what `request` then contains.
    """
    if (refusal := await request.admit()) is not None:
        return request.refused(refusal)
    wait = request.wait()
    try:
        with request:
            answer = await wait.next_of(_only(send()))
    except BaseException as error:
        await request.settle(error)
        if (verdict := request.verdict_after(error)) is not None:
            return request.end_by(verdict, error)
        raise
    finally:
        wait.close()
    request.read_answer(answer)
    await request.settle()
    return answer if request.failed_last is None else request.end_by(request.failed_last)


def answered_blocking(request: ModelCallInProgress, send: Callable[[], Any]) -> Any:
    """Do the same as `answered` in a thread that may block."""
    if (refusal := request.admit_blocking()) is not None:
        return request.refused(refusal)
    try:
        with request:
            answer = send()
    except BaseException as error:
        request.settle_blocking(error)
        if (verdict := request.verdict_after(error)) is not None:
            return request.end_by(verdict, error)
        raise
    request.read_answer(answer)
    request.settle_blocking()
    return answer if request.failed_last is None else request.end_by(request.failed_last)


async def streamed(  # noqa: C901, PLR0912, PLR0915  one story, read from top to bottom
    request: ModelCallInProgress, send: Callable[[], Any]
) -> AsyncIterator[Any]:
    """Do the same as `answered` for a stream: its parts, then those of a halt that ends it."""
    if (refusal := await request.admit()) is not None:
        for each in request.parts_of_refusal(refusal):
            yield each
        return
    wait = request.wait()
    parts: Any = None
    error: BaseException | None = None
    verdict: Verdict | None = None
    try:
        with request:  # a method may return the stream of another model
            parts = owned(aiter(send()))
        while verdict is None:
            token = ENCLOSING_CALL.set(request.within)  # not `with request`: this is hot
            try:
                part = await wait.next_of(parts)
            except StopAsyncIteration:
                break
            finally:
                with suppress(ValueError):  # a task that is destroyed is closed in another context
                    ENCLOSING_CALL.reset(token)
            if type(parts) is OwnedStream:  # no event loop knows of it
                parts = parts.generator
            if request.read_part(part):  # the last one, after which the reader may leave
                await request.settle()
                if (verdict := request.failed_last) is not None:
                    break
            request.calls[0].is_paused = True
            try:
                yield part
            except Exception as failure:
                request.thrown = failure
                raise
            request.calls[0].is_paused = False
            if request.calls[0].reservation is None:
                request.resume()
        request.read_end_of_parts()
    except BaseException as failure:
        error = request.end_of_stream(failure)
        await request.settle(error)
        if (verdict := request.verdict_after(error)) is None:
            raise
    finally:
        wait.close()
        try:
            if hasattr(parts, "aclose"):
                await parts.aclose()
        finally:
            await request.settle(error)
    if (verdict := verdict or request.failed_last) is not None:
        for each in request.parts_of_end(verdict, error):
            yield each


def streamed_blocking(  # noqa: C901, PLR0912  as above
    request: ModelCallInProgress, send: Callable[[], Any]
) -> Iterator[Any]:
    """Do the same as `streamed` in a thread: it can be ended between two parts only."""
    if (refusal := request.admit_blocking()) is not None:
        yield from request.parts_of_refusal(refusal)
        return
    parts: Any = None
    error: BaseException | None = None
    verdict: Verdict | None = None
    try:
        with request:
            parts = iter(send())
        while verdict is None:
            with request:
                try:
                    part = next(parts)
                except StopIteration:
                    break
            if request.read_part(part):
                request.settle_blocking()
                if (verdict := request.failed_last) is not None:
                    break
            request.calls[0].is_paused = True
            try:
                yield part
            except Exception as failure:
                request.thrown = failure
                raise
            request.calls[0].is_paused = False
            if request.calls[0].reservation is None:
                request.resume()
            request.raise_if_cut()
        request.read_end_of_parts()
    except BaseException as failure:
        error = request.end_of_stream(failure)
        request.settle_blocking(error)
        if (verdict := request.verdict_after(error)) is None:
            raise
    finally:
        try:
            if hasattr(parts, "close"):
                parts.close()
        finally:
            request.settle_blocking(error)
    if (verdict := verdict or request.failed_last) is not None:
        yield from request.parts_of_end(verdict, error)


async def _only(awaitable: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await awaitable


# --- one request ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ModelCallInProgress(ABC):
    """One request to a model, as a context manager while the model's own code runs.

    A request may be several model calls, as LangChain's `generate` takes several conversations.
    """

    run: Run
    invocation: InvocationInProgress | None
    """The invocation whose turn it is; `None` for a side call."""
    calls: list[InFlightCall]
    model: Any = field(default=None, kw_only=True)
    outer: ModelCallInProgress | None = field(default=None, kw_only=True)
    """The request within which this one is made, by a model that calls its parent or another one.
    The first such request is the outer one's call; each further one is another call."""
    can_ask: bool = field(default=False, kw_only=True)
    """True if the framework can interrupt the agent for a human."""
    cannot_ask: str = field(
        default="because its framework cannot wait for an answer.", kw_only=True
    )
    """Why no human can be asked if `can_ask` is false, and what to do about it."""
    obstacle: str = field(default="", kw_only=True)
    """Why it cannot be the model's last answer, for the operator."""
    answers: list[Any] = field(default_factory=list, kw_only=True)
    """The answer to each call."""
    unsent: list[InFlightCall] = field(default_factory=list, kw_only=True)
    """Calls that are not sent, e.g. because a cache of the framework has answered them, or because
    another one of the same request was refused."""
    has_ended: bool = field(default=False, kw_only=True)
    failed_last: Verdict | None = field(default=None, kw_only=True)
    """The halt, if the model's last answer cannot be the agent's."""
    given: int = field(default=0, kw_only=True)
    """How many of its calls are those of requests within this one."""
    taken: list[InFlightCall] = field(default_factory=list, kw_only=True)
    """Those of its calls that are the outer request's, and were admitted with it."""
    within: EnclosingCall | None = field(default=None, kw_only=True)
    """Its entry for the model's own requests and spans."""
    is_unread: bool = field(default=False, kw_only=True)
    """True once a part of the answer could not be read. It is still a turn."""
    _token: Any = field(default=None, kw_only=True)
    thrown: BaseException | None = field(default=None, kw_only=True)
    """The error that the reader of a stream has thrown into it."""

    @classmethod
    def start(cls, kind: type[InvocationInProgress], **state: Any) -> Self | None:
        """Begin a request of the current task; return `None` if it belongs to no invocation.

        Args:
            kind: The binding's class of invocations, whose loop makes such requests.
            state: Further fields of the binding's own class.
        """
        invocation, run = requester_of_task(kind)
        if run is None:
            return None
        request = cls(run, invocation, [], outer=enclosing_request(run), **state)
        if kind.result_of_question is not InvocationInProgress.result_of_question:
            request.can_ask = run.parent is None or kind.can_ask_within
            request.cannot_ask = "because another agent has called it."
        call = suppress_errors("binding")(request.describe)() or InFlightCall(UNKNOWN_MODEL)
        outer = request.outer
        if outer is not None and (given := outer.give_calls([call])):
            request.calls = request.taken = given
            return request
        request.calls = [call]
        if invocation is not None:
            call.id = str(next(IDS))
            invocation.end_turns(lambda: suppress_errors("binding")(request.tool_results)() or {})
        return request

    # --- what a binding says of its framework -----------------------------------------------------

    def describe(self) -> InFlightCall:
        """Return the call that a request is, for `start`."""
        raise NotImplementedError

    def tool_results(self) -> Mapping[str, ToolAnswer]:
        """Return the results that the conversation shows, by the ID of the tool call.

        They are for calls that no tool has answered, e.g. as its name is unknown.
        """
        return {}

    @abstractmethod
    def send(self, method: Any) -> Any:
        """Call the method of the model with the request, as it is now."""

    @abstractmethod
    def add_note(self, note: str) -> None:
        """Add a sentence for the model to the request, but not to the conversation."""

    @abstractmethod
    def remove_tools(self, note: str) -> None:
        """Make it a request for a last answer: add a sentence, and declare no tools."""

    def nudge(self, identity: str, note: str) -> None:  # noqa: B027  not every framework can
        """Add a sentence for the model to the result of a tool call.

        Args:
            identity: The ID of the tool call.
            note: The sentence.
        """

    def note_part(self, part: Any) -> bool:  # noqa: ARG002  for frameworks without streams
        """Note a part of a stream, e.g. with `note_text`. Return whether the answer is complete."""
        return False

    def note_end_of_parts(self) -> None:  # noqa: B027  the last part may say so
        """Note that a stream has ended."""

    @abstractmethod
    def note_answer(self, answer: Any) -> None:
        """Note the answer to a request, and what it used, by calls of `note`."""

    def note_failure(self, error: BaseException) -> None:  # noqa: B027  few have more to note
        """Note why a request has failed, was ended or left."""

    def partial_answer(self) -> Any:
        """Return what the reader of a stream has read before it left; `None` if nothing."""
        return None

    @abstractmethod
    def text_of(self, answer: Any) -> str:
        """Return the text of an answer."""

    @abstractmethod
    def tools_of(self, answer: Any) -> Iterable[tuple[str, str, object]]:
        """Return the ID, the name and the arguments of each tool call that an answer requests."""

    def flaw_of_last(self, text: str) -> Exception | None:  # noqa: ARG002  most output is text
        """Return why a last answer with some text cannot be the output of the agent."""
        return None

    def end_with_last(self, answer: Any, text: str) -> None:  # noqa: B027  it may be as it is
        """Make a last answer the end of the agent: without broken tool calls, and marked."""

    def prepare(self, invocation: InvocationInProgress) -> None:  # noqa: B027  few have to
        """Raise what interrupts the agent if it still waits for a human, or note an obstacle."""

    def halted(self, verdict: Verdict, cause: BaseException | None) -> Any:
        """End the agent: return our answer, or raise what ends the agent's loop."""
        raise LoopEndError(verdict) from cause

    def halted_parts(self, verdict: Verdict, cause: BaseException | None) -> Iterable[Any]:
        """Do the same as `halted` for a stream."""
        return (self.halted(verdict, cause),)

    def asked(self, verdict: Verdict) -> Any:
        """Interrupt the agent for a human: return our answer, or raise."""
        raise LoopEndError(verdict, asks=True)

    def asked_parts(self, verdict: Verdict) -> Iterable[Any]:
        """Do the same as `asked` for a stream."""
        return (self.asked(verdict),)

    # --- while the model's code runs --------------------------------------------------------------

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let the model's own requests belong to this one."""
        if (within := self.within) is None:
            self.within = within = EnclosingCall()
            within.run, within.call = self.run, self.calls[0]
            within.model, within.request = self.model, self
        self._token = ENCLOSING_CALL.set(within)

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Leave the model's code."""
        token, self._token = self._token, None
        if token is not None:
            ENCLOSING_CALL.reset(token)

    @suppress_errors("binding")
    def resume(self) -> None:
        """Count again for a call whose invocation has ended while the answer was not read."""
        self.run.calls.resume(self.calls[0])

    def give_calls(self, calls: Sequence[InFlightCall]) -> list[InFlightCall]:
        """Return which calls of this one a request within it is; `calls` describe them better.

        A class that calls its parent's method, or another model, makes one call to the model
        further in. Calls of the outer one after it, such as a fallback, and further ones of the
        same request are other calls, which help to answer it and share its turn.
        """
        given = self.calls[self.given : self.given + len(calls)]
        self.given += len(given)
        for own, call in zip(given, calls, strict=False):
            own.model, own.provider, own.terms = call.model, call.provider, call.terms
        first = (given or self.calls)[0]
        for call in calls[len(given) :]:
            call.around, call.formats_answer = first.owner_of_turn, first.formats_answer
        return given

    @property
    def own_calls(self) -> list[InFlightCall]:
        """Its calls that are not the outer request's."""
        return [each for each in self.calls if each not in self.taken]

    def wait(self) -> Wait:
        """Return a wait that a deadline or a kill ends."""
        wait = Wait()
        self._join(wait)
        return wait

    @suppress_errors("binding")
    def _join(self, wait: Wait) -> None:
        invocation = self.invocation or self._invocation()
        for each in () if invocation is None else invocation.enders:
            wait.join(each.waits)

    @suppress_errors("binding")
    def _invocation(self) -> InvocationInProgress | None:
        """Return the invocation whose deadline or kill ends this request, or side call."""
        invocation = self.invocation or self.run.state
        return (
            invocation
            if isinstance(invocation, InvocationInProgress) and not self.run.finished
            else None
        )

    @property
    def is_cut(self) -> bool:
        """True once the invocation was ended: by a deadline, or by a kill."""
        invocation = self._invocation()
        return invocation is not None and any(each.waits.is_cut for each in invocation.enders)

    def raise_if_cut(self) -> None:
        """End a stream whose invocation was ended between two parts."""
        if self.is_cut:
            raise InvocationEndedError

    # --- admission --------------------------------------------------------------------------------

    async def admit(self) -> Refusal | None:
        """Admit the calls, or return why the agent must end.

        Raises:
            LimitReachedError: It is a side call, and refused.
        """
        if not (calls := self.own_calls):
            return None
        if (invocation := self.invocation) is None:
            self._admit_side_calls(calls)
            return None
        if (refusal := self._prepare(invocation)) is not None:
            return refusal
        can_ask = self.can_ask and self.outer is None  # a model within a model only raises
        had_ended = self.run.finished  # a thread continues it
        refusal = await invocation.admit_calls(
            calls, invocation.attributes, obstacle=self.obstacle, can_ask=can_ask
        )
        return refusal or self._opened(invocation, had_ended=had_ended)

    def admit_blocking(self) -> Refusal | None:
        """Do the same as `admit` in a thread that may block."""
        if not (calls := self.own_calls):
            return None
        if (invocation := self.invocation) is None:
            self._admit_side_calls(calls)
            return None
        if (refusal := self._prepare(invocation)) is not None:
            return refusal
        can_ask = self.can_ask and self.outer is None  # a model within a model only raises
        had_ended = self.run.finished
        refusal = invocation.admit_calls_blocking(
            calls, invocation.attributes, obstacle=self.obstacle, can_ask=can_ask
        )
        return refusal or self._opened(invocation, had_ended=had_ended)

    def _admit_side_calls(self, calls: Sequence[InFlightCall]) -> None:
        try:
            for call in calls:
                admit_side_call(self.run, call)
        except LimitReachedError:
            for call in self.calls:  # none is sent
                self.run.calls.release(call)
            raise
        for call in calls:
            self.run.calls.open(call)

    def _prepare(self, invocation: InvocationInProgress) -> Refusal | None:
        if self.outer is not None:
            self.outer.unsent += self.taken  # until the others are admitted, too
        if (
            end := invocation.end
        ) is not None and invocation.verdict is None:  # of what it continues
            return Refusal(end)
        self.prepare(invocation)
        return None

    def _opened(self, invocation: InvocationInProgress, *, had_ended: bool) -> Refusal | None:
        """Begin the calls, unless their invocation has ended while they waited, as in a thread.

        Raises:
            asyncio.CancelledError: It has ended without a halt.
        """
        if had_ended or not self.run.finished or self.run.released or self.run.evicted:
            self._begin(invocation)
            return None
        invocation.release_all(self.own_calls)
        if invocation.verdict is not None:
            return Refusal(invocation.verdict)
        # Not an `Exception`, after which the code around the call would try again.
        raise asyncio.CancelledError(ENDED)

    def note_sent(self) -> None:
        """Note that the calls are sent, in a new cycle of the agent's loop."""
        if self.outer is not None:
            self.outer.unsent = [each for each in self.outer.unsent if each not in self.taken]
        for call in self.own_calls:
            self.run.calls.open(call)
        self.run.cycle()

    @suppress_errors("binding")
    def _begin(self, invocation: InvocationInProgress) -> None:
        run = self.run
        self.note_sent()
        if (wrapping := self.wrapping) is not None:
            self.remove_tools(wrap_up_note(wrapping))
            return
        nudge, invocation.nudge = invocation.nudge, None
        if nudge is not None:
            self.nudge(*nudge)
        if run.policy.budget_hints and (levels := run.levels()):
            self.add_note(budget_note(levels))

    # --- the answer -------------------------------------------------------------------------------

    def read_part(self, part: Any) -> bool:
        """Note a part of a stream. Return whether the answer is complete."""
        try:
            self.calls[0].answered = True
            return self.note_part(part)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            self.is_unread = True
            report_suppressed("binding", error)
            return False

    @suppress_errors("binding")
    def read_end_of_parts(self) -> None:
        """Note that a stream has ended."""
        self.note_end_of_parts()

    def read_answer(self, answer: Any) -> None:
        """Note the answer to a request."""
        try:
            self.note_answer(answer)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            self.is_unread = self.calls[0].answered = True
            report_suppressed("binding", error)

    def note_text(self, text: str) -> None:
        """Note a part of the text that the model streams."""
        self.calls[0].has_content = True
        self.calls[0].parts.append(text)

    def note(self, call: InFlightCall, answer: Any, usage: UsageRecord, text: str) -> None:
        """Note the answer to a call.

        Args:
            call: The call.
            answer: Its answer.
            usage: The usage that the vendor reports.
            text: All that the model wrote, to estimate its tokens if they are not reported.
        """
        call.answered = call.has_content = True
        call.record = usage
        if not any(call.parts):
            call.parts.append(text)
        self.answers.append(answer)

    # --- the end ----------------------------------------------------------------------------------

    async def settle(self, error: BaseException | None = None) -> None:
        """Count the calls, and their turns, once."""
        if self.has_ended:
            return
        self.has_ended = True
        if error is not None:
            self._note_failure(error)
        for call in self.unsent:
            if call.is_open:
                self.run.calls.release(call)
                if self.invocation is not None:
                    await self.invocation.settle_quotas(call.id)
        for number, call in enumerate(self.calls):
            if call.is_open:
                self._write_span(call, error)
                if self.invocation is None:
                    settle_call(self.run, call, error)
                else:
                    await self.invocation.settle(call, error)
            self.accept_or_reject(number, call, error)

    def settle_blocking(self, error: BaseException | None = None) -> None:
        """Do the same as `settle` in a thread that may block."""
        if self.has_ended:
            return
        self.has_ended = True
        if error is not None:
            self._note_failure(error)
        for call in self.unsent:
            if call.is_open:
                self.run.calls.release(call)
                if self.invocation is not None and self.invocation.gate is not None:
                    wait_for(self.invocation.settle_quotas(call.id))
        for number, call in enumerate(self.calls):
            if call.is_open:
                self._write_span(call, error)
                if self.invocation is None:
                    settle_call(self.run, call, error)
                else:
                    self.invocation.settle_blocking(call, error)
            self.accept_or_reject(number, call, error)

    @suppress_errors("binding")
    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, EndedBeforeError) and not self.calls[0].answered:
            self.unsent += self.calls
        self.note_failure(error)

    @suppress_errors("binding")
    def _write_span(self, call: InFlightCall, error: BaseException | None) -> None:
        """Write the span of a call, before it is counted with the ID of the span."""
        invocation = self.run.state
        if isinstance(invocation, InvocationInProgress) and call.started is not None:
            seconds = self.run.services.now() - call.started
            write_call_span(invocation.span, call, seconds, error)

    @suppress_errors("binding")
    def accept_or_reject(
        self, number: int, call: InFlightCall, error: BaseException | None
    ) -> None:
        """Count the turn of a call, or let the outer request decide whether it is one."""
        invocation = self.invocation
        if invocation is None or call.formats_answer:
            return
        answer = self._used(number, error)
        is_rejected = answer is None and (error is not None or not self.is_unread)
        if self.outer is not None:
            if not is_rejected:
                self.outer.replace_call(call)
        elif is_rejected:
            self.run.calls.on_response_rejected(call)
            invocation.failures += isinstance(error, Exception)
        else:
            invocation.failures_before, invocation.failures = invocation.failures, 0
            self.run.count_turn(call)  # first, as an answer that cannot be read is a turn, too
            wrapping = self.wrapping
            if wrapping is None:
                invocation.warn()
            if answer is None:
                return
            if wrapping is not None:
                self._end_with_last(invocation, wrapping, answer)
            else:
                invocation.request_tools(self.text_of(answer), self.tools_of(answer))

    def replace_call(self, call: InFlightCall) -> None:
        """Note which of the calls with the same turn was answered last."""
        if call not in self.calls:
            owners = [each.owner_of_turn for each in self.calls]
            self.calls[owners.index(call.owner_of_turn)] = call

    def _used(self, number: int, error: BaseException | None) -> Any:
        """Return the answer that the agent got, as far as it has read it; `None` if none."""
        if error is None:
            return self.answers[number] if number < len(self.answers) else None
        # It left the stream, and has what it read. A call that failed or was ended gave no answer.
        is_ended = self.run.finished or (
            self.invocation is not None and self.invocation.verdict is not None
        )
        return self.partial_answer() if isinstance(error, LEFT) and not is_ended else None

    @property
    def wrapping(self) -> Verdict | None:
        """The halt that follows this request, if it is for the model's last answer."""
        invocation = self.invocation
        return (
            invocation.wrapping
            if invocation is not None and invocation.last_call in self.calls
            else None
        )

    def _end_with_last(
        self, invocation: InvocationInProgress, verdict: Verdict, answer: Any
    ) -> None:
        """Make the model's last answer the end of the agent."""
        text = self.text_of(answer)
        if any(self.tools_of(answer)):  # although none were declared
            self.failed_last = replace(verdict, remark=TOOLS_REMARK)
        elif not text.strip():
            self.failed_last = replace(verdict, remark=EMPTY_REMARK)
        elif (flaw := self.flaw_of_last(text)) is not None:
            self.failed_last = replace(verdict, remark=failed_remark(flaw))
        else:
            invocation.is_halted, invocation.last_answer = True, text
            self.run.halt(verdict, "wrapped_up")
            self.end_with_last(answer, text)
            write_halt(invocation.span, verdict, self.run)

    def end_of_stream(self, error: BaseException) -> BaseException:
        """Return how a stream has ended for the model: its reader has left it, or it failed."""
        return GeneratorExit() if error is self.thrown else error

    @suppress_errors("binding")
    def verdict_after(self, error: BaseException) -> Verdict | None:
        """Return the halt if the calls were ended, or were the last ones and failed."""
        invocation = self._invocation()
        if invocation is None or self.outer is not None:
            return None
        # A model that was called within may have been refused, also in a group of tasks.
        errors = chain_of(error, only_causes=True) if self.invocation is not None else ()
        is_refused = any(isinstance(each, LimitReachedError) for each in errors)
        if is_refused or isinstance(error, InvocationEndedError):
            return invocation.end
        wrapping = self.wrapping
        if wrapping is None or not isinstance(error, Exception):
            return None
        failed = replace(wrapping, remark=failed_remark(error))
        return None if invocation.falls_back(failed) else failed

    # --- what the framework gets ------------------------------------------------------------------

    def refused(self, refusal: Refusal) -> Any:
        """Interrupt the agent for a human, or end it."""
        if refusal.asks:
            return self.asked(refusal.verdict)
        self._report_not_asked(refusal.verdict)
        return self.halted(refusal.verdict, None)

    def parts_of_refusal(self, refusal: Refusal) -> Iterable[Any]:
        """Do the same as `refused` for a stream."""
        if refusal.asks:
            return self.asked_parts(refusal.verdict)
        self._report_not_asked(refusal.verdict)
        return self.halted_parts(refusal.verdict, None)

    @suppress_errors("binding")
    def _report_not_asked(self, verdict: Verdict) -> None:
        """Say why no human was asked, where that was the action."""
        action = verdict.action or self.run.policy.action
        if action == "ask" and not self.can_ask and can_be_extended(verdict):
            report_not_asked(self.run.invocation.agent, self.cannot_ask)

    def end_by(self, verdict: Verdict, cause: BaseException | None = None) -> Any:
        """End the agent, or raise the limit's error to the code that made a side call."""
        self._raise_to_side(verdict, cause)
        return self.halted(verdict, cause)

    def parts_of_end(self, verdict: Verdict, cause: BaseException | None = None) -> Iterable[Any]:
        """Do the same as `end_by` for a stream."""
        self._raise_to_side(verdict, cause)
        return self.halted_parts(verdict, cause)

    def _raise_to_side(self, verdict: Verdict, cause: BaseException | None) -> None:
        if self.invocation is None:
            raise limit_reached(verdict, self.run.stop(verdict.reason)) from cause


def enclosing_request(run: Run) -> ModelCallInProgress | None:
    """Return the request of an invocation within which the current code runs, if any."""
    around = ENCLOSING_CALL.get()
    outer = around.request if around is not None else None
    if not isinstance(outer, ModelCallInProgress):
        return None
    return None if outer.run is not run or outer.has_ended else outer
