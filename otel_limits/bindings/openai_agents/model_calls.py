"""Tracks every model call of the SDK: what its requests, responses and ends are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from agents import ModelBehaviorError

from otel_limits.bindings.invocation import requester_of_task
from otel_limits.bindings.model_call import (
    IDS,
    ModelCallInProgress,
    enclosing_request,
    follow_async,
    follow_parts_async,
)
from otel_limits.bindings.openai_agents.agent_runs import AgentInvocation
from otel_limits.bindings.openai_agents.halt_responses import (
    TEXT,
    error_of,
    events_of,
    message_of,
    response_of,
)
from otel_limits.bindings.openai_agents.limit_questions import (
    can_ask,
    hide_questions,
    question_item,
)
from otel_limits.bindings.openai_agents.model_readers import (
    RequestArguments,
    answers_in,
    as_texts,
    call_to,
    is_own_model,
    items_in,
    nudged,
    requests_in,
    text_of,
    tools_in,
    usage_of,
    with_note,
    with_raw_usage,
)
from otel_limits.bindings.openai_agents.openai_agents_probe import raw_usage_of
from otel_limits.core.halt_texts import failed_remark
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.usage.normaliser import completed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.policy import Verdict

COMPLETED: Final = "response.completed"
FAILED: Final = ("response.incomplete", "response.failed", "response.error", "error")
"""Events for which the SDK raises an exception."""
ITEM_ADDED: Final = "response.output_item.added"
ITEM_DONE: Final = "response.output_item.done"


# --- one request ----------------------------------------------------------------------------------


def _request(model: Any, *args: Any, **options: Any) -> ModelRequest | None:
    """Describe a model call; `None` if it belongs to no run."""
    invocation, run = requester_of_task(AgentInvocation)
    if run is None:
        return None
    if invocation is not None:
        invocation = invocation.agent_run.active
        run = invocation.run
    arguments = RequestArguments(args, options)
    outer = enclosing_request(run)
    if outer is not None:
        invocation = invocation if outer.invocation is not None else None
    elif invocation is not None and arguments["input"] is not invocation.agent_run.next_input:
        invocation = None  # not of the loop, but of a guardrail, a hook or an agent's instructions
    is_askable = can_ask(arguments)
    hide_questions(arguments, invocation)
    call = call_to(model, arguments, invocation)
    if outer is not None and (given := outer.give_calls([call])):
        return ModelRequest(
            run,
            invocation,
            given,
            model=model,
            outer=outer,
            taken=given,
            arguments=arguments,
        )
    call.id = str(next(IDS)) if invocation is not None else ""
    if invocation is not None and outer is None:
        invocation.end_turns(lambda: answers_in(arguments["input"]))
        invocation.agent_run.called.clear()  # the model, not its tools, answers
    request = ModelRequest(
        run, invocation, [call], model=model, outer=outer, can_ask=is_askable, arguments=arguments
    )
    request.previous_response_id = arguments["previous_response_id"]
    return request


track_get_response = follow_async(_request)
"""Wraps `get_response` of a class of models."""
track_stream_response = follow_parts_async(_request)
"""Wraps `stream_response` of a class of models."""


@dataclass(slots=True, eq=False)
class ModelRequest(ModelCallInProgress):
    """A call of a model's method."""

    cannot_ask: str = field(
        default="because its run cannot be interrupted. An agent can ask if its action is ask and "
        "its tool_use_behavior is run_llm_again.",
        kw_only=True,
    )

    invocation: AgentInvocation | None
    arguments: RequestArguments = field(kw_only=True)
    previous_response_id: str | None = field(default=None, kw_only=True)
    """The ID of the last response that is stored at the vendor, if any."""
    keeps_raw_usage: bool = field(default=True, kw_only=True)
    """True if the vendor's usage stays in the response: the application asked for it."""
    items_begun: int = field(default=0, kw_only=True)
    """Number of items that a stream has begun."""
    items: list[Any] = field(default_factory=list, kw_only=True)
    """The items of a stream."""

    # --- the request ------------------------------------------------------------------------------

    def send(self, method: Any) -> Any:
        """Call the model's method."""
        self._request_raw_usage()
        return method(self.model, *self.arguments.positional, **self.arguments.named)

    @suppress_errors("binding")
    def _request_raw_usage(self) -> None:
        """Let the SDK keep the vendor's usage, which `note_answer` reads."""
        settings = self.arguments["model_settings"]
        self.arguments["model_settings"] = with_raw_usage(settings, self.model)
        self.keeps_raw_usage = settings is self.arguments["model_settings"]

    def add_note(self, note: str) -> None:
        """Add a message to the input."""
        self.arguments["input"] = with_note(self.arguments["input"], note)

    def nudge(self, identity: str, note: str) -> None:
        """Add a sentence to the output of a function call."""
        self.arguments["input"] = nudged(self.arguments["input"], identity, note)

    def remove_tools(self, note: str) -> None:
        """Declare no tools and no hand-offs, and write earlier calls as texts."""
        given = self.arguments
        if not (
            given["previous_response_id"] or given["conversation_id"]
        ):  # else the vendor has them
            given["input"] = as_texts(given["input"])
        self.add_note(note)
        given["tools"], given["handoffs"] = [], []
        given["model_settings"] = replace(
            given["model_settings"], tool_choice=None, parallel_tool_calls=None
        )

    # --- the response -----------------------------------------------------------------------------

    def note_part(self, part: Any) -> bool:
        """Note an event of a stream. The last one has the response."""
        call, kind = self.calls[0], getattr(part, "type", None)
        if isinstance(delta := getattr(part, "delta", None), str):
            call.has_content = True
            call.parts.append(delta)
        elif kind == ITEM_ADDED:
            self.items_begun += 1
        elif kind == ITEM_DONE:
            self.items.append(part.item)
        elif kind in FAILED:
            return self._note_failed_event(part)
        if kind != COMPLETED:
            return False
        if not part.response.output:  # as the SDK does, since some vendors only stream items
            part.response.output = list(self.items)
        self.note_answer(part.response)
        return True

    def _note_failed_event(self, event: Any) -> bool:
        """Note that a stream has failed. Return whether its usage is known, or it was the last."""
        call = self.calls[0]
        if (response := getattr(event, "response", None)) is not None:
            call.record = usage_of(response, call.model)
        if self.outer is None and self.wrapping is not None:
            remark = failed_remark(ModelBehaviorError(event.type))
            self.failed_last = replace(self.wrapping, remark=remark)
        return self.failed_last is not None or call.record.has_input

    def note_answer(self, answer: Any) -> None:
        """Note a response."""
        call = self.calls[0]
        raw = raw_usage_of(answer, keeps=self.keeps_raw_usage)
        usage = usage_of(answer, call.model, raw, is_own=is_own_model(self.model))
        # Also for zeros: those of an answer are not a report.
        needs_text = usage.is_zero or not usage.has_output
        text = text_of(answer.output) + requests_in(answer.output) if needs_text else ""
        self.note(call, answer, usage, text)
        if (invocation := self.invocation) is not None:
            used = call.record.usage
            if call.record.sure != "measured":
                used = completed(call.record, call.input_estimate, call.output_estimate)
            items = items_in(self.arguments["input"])
            invocation.answered_items = len(items) + len(answer.output)
            invocation.first_item = items[0] if items else None
            invocation.answered_tokens = used.input + used.output

    def text_of(self, answer: Any) -> str:
        """Return the text of the messages in a response."""
        return text_of(answer.output)

    def tools_of(self, answer: Any) -> Iterable[tuple[str, str, object]]:
        """Return the function calls in a response, without hand-offs."""
        return tools_in(answer.output, self.arguments["handoffs"] or ())

    # --- the end ----------------------------------------------------------------------------------

    def flaw_of_last(self, text: str) -> Exception | None:
        """Return why a last answer is not of the type of the output."""
        if self._is_typed:
            try:
                self.arguments["output_schema"].validate_json(text)
            except Exception as error:  # noqa: BLE001  schemas may be the application's own
                return error
        return None

    def end_with_last(self, answer: Any, text: str) -> None:
        """Keep the messages of a response only."""
        messages = [each for each in answer.output if getattr(each, "type", "") == "message"]
        answer.output = messages or [message_of(text)]

    def asked(self, verdict: Verdict) -> Any:
        """Return a response that requests our tool, which needs approval."""
        return response_of(self._question(verdict), self.previous_response_id)

    def asked_parts(self, verdict: Verdict) -> Iterator[Any]:
        """Do the same as `asked` for a stream."""
        return events_of(self._question(verdict), self.previous_response_id, 0)

    def _question(self, verdict: Verdict) -> Any:
        assert self.invocation is not None  # no human is asked about side calls
        return question_item(self.invocation, verdict)

    def halted(self, verdict: Verdict, cause: BaseException | None) -> Any:
        """Return the response that the SDK takes as the final output.

        Raises:
            LimitReachedError: The output has a type, or the action is `raise`.
        """
        return response_of(self._message(verdict, cause), self.previous_response_id)

    def halted_parts(self, verdict: Verdict, cause: BaseException | None) -> Iterator[Any]:
        """Do the same as `halted` for a stream."""
        message = self._message(verdict, cause)
        return events_of(message, self.previous_response_id, self.items_begun)

    def _message(self, verdict: Verdict, cause: BaseException | None) -> Any:
        """Publish the halt, once, and return its message or raise its exception."""
        text = self._published(verdict)
        if (error := self._error(verdict)) is not None:
            raise error from cause
        return message_of(text or TEXT)

    @property
    def _halted_invocation(self) -> AgentInvocation:
        """The invocation whose halt ends the run."""
        assert self.invocation is not None  # side calls are never halted
        return self.invocation.agent_run.ended or self.invocation

    @suppress_errors("binding")
    def _published(self, verdict: Verdict) -> str | None:
        invocation = self._halted_invocation
        if self.outer is not None:  # which may recover, and otherwise halts
            invocation.verdict = verdict
            return None
        text, agent_run = (
            invocation.halt(verdict, can_show=not self._is_typed),
            invocation.agent_run,
        )
        if agent_run.result is not None:  # before the reader of the stream sees its end
            agent_run.write_marks(agent_run.result)
        return text

    @suppress_errors("binding")
    def _error(self, verdict: Verdict) -> LimitReachedError | None:
        """Return the exception of a halt whose text cannot be the output."""
        run = self._halted_invocation.run
        is_raised = (verdict.action or run.policy.action) == "raise"
        if self.outer is None and not is_raised and not self._is_typed:
            return None
        return error_of(verdict, run.stop(verdict.reason))

    @property
    def _is_typed(self) -> bool:
        schema = self.arguments["output_schema"]
        return schema is not None and not schema.is_plain_text()
