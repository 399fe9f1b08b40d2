"""Tracks every model call of the SDK: admits it, follows its response and settles it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from agents import ModelBehaviorError

from otel_limits.bindings.openai_agents.agent_runs import AgentPath, path_of_task
from otel_limits.bindings.openai_agents.halt_responses import (
    TEXT,
    error_of,
    events_of,
    message_of,
    response_of,
)
from otel_limits.bindings.openai_agents.item_notes import noted, without_tools
from otel_limits.bindings.openai_agents.limit_questions import (
    can_ask,
    hide_questions,
    question_item,
    report_not_asked,
)
from otel_limits.bindings.openai_agents.model_readers import (
    arguments_in,
    call_to,
    items_in,
    text_of,
    tools_in,
    usage_of,
)
from otel_limits.bindings.openai_agents.model_requests import RequestArguments
from otel_limits.bindings.own_spans import write_call_span
from otel_limits.bindings.path import Refusal, admit_side_call, can_be_extended, settle_call
from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.span_writer import write_halt
from otel_limits.core.errors import LimitReachedError
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import EMPTY_REMARK, failed_remark
from otel_limits.runs.calls import ENCLOSING_CALL, EnclosingCall, InFlightCall
from otel_limits.runs.run import Run
from otel_limits.runs.tree import current_scope
from otel_limits.usage.normaliser import completed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from otel_limits.core.policy import Verdict

IDS: Final = itertools.count(1)
"""IDs of calls, as a model may make several at the same time."""

COMPLETED: Final = "response.completed"
FAILED: Final = ("response.incomplete", "response.failed", "response.error", "error")
"""Events for which the SDK raises an exception."""
ITEM_ADDED: Final = "response.output_item.added"
ITEM_DONE: Final = "response.output_item.done"


# --- wrappers of a model's methods ----------------------------------------------------------------


def track_get_response(original: Any) -> Any:
    """Wrap `get_response` of a class of models."""

    @functools.wraps(original)
    async def get_response(model: Any, *args: Any, **options: Any) -> Any:
        request = _request(model, args, options)
        if request is None:
            return await original(model, *args, **options)
        if (refusal := await request.admit()) is not None:
            return request.refused(refusal)
        wait = request.wait()
        given = request.arguments
        try:
            with request:
                answer = original(model, *given.positional, **given.named)
                response = await wait.next_of(_only(answer))
        except BaseException as error:
            await request.settle(error)
            if (verdict := request.verdict_after(error)) is not None:
                return request.halt(verdict, error)
            raise
        finally:
            wait.close()
        request.note_answer(response)
        await request.settle()
        if (verdict := request.verdict_of_last()) is not None:
            return request.halt(verdict)
        return response

    return get_response


def track_stream_response(original: Any) -> Any:  # noqa: C901  one story, as below
    """Wrap `stream_response` of a class of models."""

    @functools.wraps(original)
    async def stream_response(  # noqa: C901, PLR0912  one story, read from top to bottom
        model: Any, *args: Any, **options: Any
    ) -> AsyncIterator[Any]:
        request = _request(model, args, options)
        if request is None:
            untracked = aiter(original(model, *args, **options))
            try:
                async for event in untracked:
                    yield event
            finally:  # a reader that closes our stream closes the vendor's
                if hasattr(untracked, "aclose"):
                    await untracked.aclose()
            return
        if (refusal := await request.admit()) is not None:
            for event in request.refusing_events(refusal):
                yield event
            return
        wait = request.wait()
        given = request.arguments
        events = aiter(original(model, *given.positional, **given.named))
        error: BaseException | None = None
        verdict: Verdict | None = None
        try:
            while True:
                with request:
                    try:
                        event = await wait.next_of(events)
                    except StopAsyncIteration:
                        break
                if request.note_event(event):  # the last one, after which the reader may leave
                    await request.settle()
                    verdict = request.verdict_of_last()
                    if verdict is not None:
                        break
                yield event
        except BaseException as failure:
            error = failure
            await request.settle(error)
            verdict = request.verdict_after(error)
            if verdict is None:
                raise
        finally:
            wait.close()
            if hasattr(events, "aclose"):
                await events.aclose()
            await request.settle(error)
        if verdict is not None:
            for event in request.halting_events(verdict, error):
                yield event

    return stream_response


async def _only(awaitable: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await awaitable


# --- one request ----------------------------------------------------------------------------------


@suppress_errors("binding")
def _request(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ModelRequest | None:
    """Describe a model call; `None` if it belongs to no run."""
    path = path_of_task()
    run = path.run if path is not None else current_scope()[0]
    if not isinstance(run, Run) or run.released:
        return None
    arguments = RequestArguments(args, options)
    around = ENCLOSING_CALL.get()
    outer = around.request if isinstance(around, EnclosingRequest) else None
    if outer is not None and (outer.run is not run or outer.has_ended):
        outer = None
    if path is not None and outer is None and arguments["input"] is not path.agent_run.next_input:
        path = None  # not of the loop, but of a guardrail, a hook or an agent's instructions
    is_askable = can_ask(arguments)
    hide_questions(arguments, path)
    call = call_to(model, arguments, path)
    call.id = str(next(IDS)) if path is not None else ""
    if outer is not None and not outer.is_taken_over:
        # A class that calls its parent's method, or another model. It is the same call, to the
        # model further in; what the outer one calls after it, such as a fallback, is another call.
        outer.is_taken_over = True
        taken = outer.call
        taken.model, taken.provider, taken.terms = call.model, call.provider, call.terms
        return ModelRequest(run, path, arguments, taken, outer, is_admitted=True)
    if path is not None and outer is None:
        path.end_turns()
        path.agent_run.called.clear()  # the model, not its tools, answers
    request = ModelRequest(run, path, arguments, call, outer, is_askable)
    request.previous_response_id = arguments["previous_response_id"]
    return request


class EnclosingRequest(EnclosingCall):
    """A request within which a model may make others."""

    request: ModelRequest


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One request to a model, as a context manager while the model's own code runs."""

    run: Run
    path: AgentPath | None
    """The agent whose turn it is; `None` for a side call."""
    arguments: RequestArguments
    call: InFlightCall
    outer: ModelRequest | None
    """The request within which this one is made."""
    can_ask: bool = False
    """True if the run can be interrupted for a human."""
    is_admitted: bool = False
    """True if it is the outer request's call."""
    is_taken_over: bool = False
    """True if a request within this one is its call."""
    has_ended: bool = False
    previous_response_id: str | None = None
    """The ID of the last response that is stored at the vendor, if any."""
    response: Any = None
    items_begun: int = 0
    """Number of items that a stream has begun."""
    items: list[Any] = field(default_factory=list)
    """The items of a stream."""
    _failed_last: Verdict | None = None
    """The halt, if the model's last answer cannot be the output."""
    _token: Any = None

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let the model's own requests belong to this one."""
        within = EnclosingRequest()
        within.run, within.call, within.request = self.run, self.call, self
        self._token = ENCLOSING_CALL.set(within)

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Leave the model's code."""
        token, self._token = self._token, None
        if token is not None:
            ENCLOSING_CALL.reset(token)

    def wait(self) -> Wait:
        """Return a wait that a deadline or a kill of the active or the first agent ends."""
        wait = Wait()
        if (path := self.path) is not None:
            wait.join(path.waits)
            if path is not (root := path.agent_run.root):
                root.waits.open.append(wait)
        return wait

    # --- admission --------------------------------------------------------------------------------

    async def admit(self) -> Refusal | None:
        """Admit the call, or return why the run must end.

        Raises:
            LimitReachedError: It is a side call, and refused.
        """
        path = self.path
        if self.is_admitted:
            return None
        if path is None:
            admit_side_call(self.run, self.call)
            self.run.calls.open(self.call)
            return None
        if (ended := path.agent_run.ended) is not None:
            assert ended.verdict is not None  # which makes it one
            return Refusal(ended.verdict)
        can_ask = self.can_ask and self.outer is None
        refusal = await path.admit(self.call, path.agent_run.attributes, can_ask=can_ask)
        if refusal is None:
            self._begin(path)
        return refusal

    @suppress_errors("binding")
    def _begin(self, path: AgentPath) -> None:
        self.run.calls.open(self.call)
        self.run.cycle()
        given = self.arguments
        if (wrapping := self._wrapping) is None:
            given["input"] = noted(given["input"], path)
            return
        is_stored = bool(given["previous_response_id"] or given["conversation_id"])
        given["input"] = without_tools(given["input"], wrapping, is_stored=is_stored)
        given["tools"], given["handoffs"] = [], []
        given["model_settings"] = replace(
            given["model_settings"], tool_choice=None, parallel_tool_calls=None
        )

    # --- the response -----------------------------------------------------------------------------

    @suppress_errors("binding")
    def note_event(self, event: Any) -> bool:
        """Note an event of a stream. Return whether it is the last one, with the response."""
        call = self.call
        call.answered = True
        kind = getattr(event, "type", None)
        delta = getattr(event, "delta", None)
        if isinstance(delta, str):
            call.has_content = True
            call.parts.append(delta)
        elif kind == ITEM_ADDED:
            self.items_begun += 1
        elif kind == ITEM_DONE:
            self.items.append(event.item)
        elif kind in FAILED:
            return self._note_failure(event)
        if kind != COMPLETED:
            return False
        if not event.response.output:  # as the SDK does, since some vendors only stream items
            event.response.output = list(self.items)
        self.note_answer(event.response)
        return True

    def _note_failure(self, event: Any) -> bool:
        """Note that a stream has failed. Return whether its usage is known, or it was the last."""
        response = getattr(event, "response", None)
        if response is not None:
            self.call.record = usage_of(response)
        if self.outer is None and (wrapping := self._wrapping) is not None:
            remark = failed_remark(ModelBehaviorError(event.type))
            self._failed_last = replace(wrapping, remark=remark)
        return self._failed_last is not None or self.call.record.has_input

    @suppress_errors("binding")
    def note_answer(self, response: Any) -> None:
        """Note a response, with its usage."""
        call = self.call
        call.answered = call.has_content = True
        call.record = usage_of(response)
        self.response = response
        if not call.parts and not call.record.has_output:  # its tokens are estimated
            call.parts += [text_of(response.output), arguments_in(response.output)]
        if (path := self.path) is not None:
            usage = call.record.usage
            if call.record.sure != "measured":
                usage = completed(call.record, call.input_estimate, call.output_estimate)
            items = items_in(self.arguments["input"])
            path.answered_items = len(items) + len(response.output)
            path.first_item = items[0] if items else None
            path.answered_tokens = usage.input + usage.output

    async def settle(self, error: BaseException | None = None) -> None:
        """Count the call, and its turn; further calls do nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        if self.call.is_open:
            self._write_span(error)
            if self.path is None:
                settle_call(self.run, self.call, error)
            else:
                await self.path.settle(self.call, error)
        if self.path is not None:
            self._end(self.path, error)

    @suppress_errors("binding")
    def _write_span(self, error: BaseException | None) -> None:
        """Write the span of the call, before it is counted with the ID of the span."""
        path = self.run.state
        if isinstance(path, AgentPath) and self.call.started is not None:
            seconds = self.run.services.now() - self.call.started
            write_call_span(path.span, self.call, seconds, error)

    @suppress_errors("binding")
    def _end(self, path: AgentPath, error: BaseException | None) -> None:
        if error is not None or self.response is None:
            self.run.calls.on_response_rejected(self.call)
        elif self.outer is not None:  # which decides whether the loop gets this response
            self.outer.call = self.call
        elif (wrapping := self._wrapping) is not None:
            self._end_with_last(path, wrapping)
        else:
            output = self.response.output
            requested = tools_in(output, self.arguments["handoffs"] or ())
            path.begin_turn(text_of(output), requested, self.call)

    # --- the end ----------------------------------------------------------------------------------

    @property
    def _wrapping(self) -> Verdict | None:
        """The halt that follows this call, if it is for the model's last answer."""
        path = self.path
        return path.wrapping if path is not None and path.last_call is self.call else None

    def _end_with_last(self, path: AgentPath, verdict: Verdict) -> None:
        """Make the model's last answer the output of the run."""
        response = self.response
        self.run.turn(self.call)
        text = text_of(response.output)
        schema = self.arguments["output_schema"]
        if not text.strip():
            self._failed_last = replace(verdict, remark=EMPTY_REMARK)
            return
        if self._is_typed:
            try:
                schema.validate_json(text)
            except Exception as error:  # noqa: BLE001  schemas may be the application's own
                self._failed_last = replace(verdict, remark=failed_remark(error))
                return
        # Without tools, none can have been requested; some models write such calls anyway.
        messages = [each for each in response.output if getattr(each, "type", "") == "message"]
        response.output = messages or [message_of(text)]
        path.is_halted = True
        self.run.halt(verdict, "wrapped_up")
        write_halt(path.span, verdict, self.run, synthetic=False)

    def verdict_of_last(self) -> Verdict | None:
        """Return the halt if the model's last answer cannot be the output."""
        return self._failed_last

    @suppress_errors("binding")
    def verdict_after(self, error: BaseException) -> Verdict | None:
        """Return the halt if the call was ended, or was the last one and failed."""
        path = self.path
        if path is None or self.outer is not None:
            return None
        if isinstance(error, (InvocationEndedError, LimitReachedError)):
            ended = path.agent_run.ended  # a model that was called within may have been refused
            return None if ended is None else ended.verdict
        if (wrapping := self._wrapping) is not None and isinstance(error, Exception):
            return replace(wrapping, remark=failed_remark(error))
        return None

    def refused(self, refusal: Refusal) -> Any:
        """Interrupt the run for a human, or end it; see `halt`."""
        if refusal.asks and self.path is not None:
            asked = question_item(self.path, refusal.verdict)
            return response_of(asked, self.previous_response_id)
        return self.halt(refusal.verdict)

    def refusing_events(self, refusal: Refusal) -> Iterator[Any]:
        """Do the same as `refused` for a stream."""
        if refusal.asks and self.path is not None:
            asked = question_item(self.path, refusal.verdict)
            return events_of(asked, self.previous_response_id, 0)
        return self.halting_events(refusal.verdict)

    def halt(self, verdict: Verdict, cause: BaseException | None = None) -> Any:
        """End the run: return the response that the SDK takes as the final output.

        Raises:
            LimitReachedError: The output has a type, or the action is `raise`.
        """
        message = message_of(self._halted(verdict, cause))
        return response_of(message, self.previous_response_id)

    def halting_events(self, verdict: Verdict, cause: BaseException | None = None) -> Iterator[Any]:
        """Do the same as `halt` for a stream."""
        message = message_of(self._halted(verdict, cause))
        return events_of(message, self.previous_response_id, self.items_begun)

    def _halted(self, verdict: Verdict, cause: BaseException | None) -> str:
        """Publish the halt, once, and return its text or raise its exception."""
        text = self._published(verdict)
        if (error := self._error(verdict)) is not None:
            raise error from cause
        return text or TEXT

    @property
    def _halted_path(self) -> AgentPath:
        """The invocation whose halt ends the run."""
        assert self.path is not None  # side calls are never halted
        return self.path.agent_run.ended or self.path

    @suppress_errors("binding")
    def _published(self, verdict: Verdict) -> str | None:
        path = self._halted_path
        if self.outer is not None:  # which may recover, and otherwise halts
            path.verdict = verdict
            return None
        run, agent_run = path.run, path.agent_run
        action = verdict.action or run.policy.action
        if not path.is_halted:
            if action == "ask" and not self.can_ask and can_be_extended(verdict):
                report_not_asked(path)
            path.is_halted, path.verdict, path.wrapping = True, verdict, None
            path.is_synthetic = not (action == "raise" or self._is_typed)
            run.halt(verdict, "raised" if action == "raise" else "halted")
            run.raised = not path.is_synthetic
            run.note_halt(run.sentence, verdict)
            write_halt(path.span, verdict, run, synthetic=path.is_synthetic)
        if agent_run.result is not None:  # before the reader of the stream sees its end
            agent_run.write_marks(agent_run.result)
        return path.text_of(verdict)

    @suppress_errors("binding")
    def _error(self, verdict: Verdict) -> LimitReachedError | None:
        """Return the exception of a halt whose text cannot be the output."""
        run = self._halted_path.run
        is_raised = (verdict.action or run.policy.action) == "raise"
        if self.outer is None and not is_raised and not self._is_typed:
            return None
        return error_of(verdict, run.stop(verdict.reason))

    @property
    def _is_typed(self) -> bool:
        schema = self.arguments["output_schema"]
        return schema is not None and not schema.is_plain_text()
