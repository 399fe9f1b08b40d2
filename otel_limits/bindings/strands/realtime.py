"""Realtime agents (`BidiAgent`): their invocations, responses and tools."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from strands.bidi.models import AudioCapable
from strands.bidi.types import (
    BidiAudioDeltaEvent,
    BidiBargeInEvent,
    BidiConnectionRestartEvent,
    BidiConnectionStartEvent,
    BidiConnectionStopEvent,
    BidiReasoningDeltaEvent,
    BidiResponseStartEvent,
    BidiResponseStopEvent,
    BidiTextDeltaEvent,
    BidiToolUseBlocksEvent,
    BidiTranscriptDeltaEvent,
    BidiUsageEvent,
)
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, MessageAddedEvent

from otel_limits.bindings.admission import IMMEDIATE
from otel_limits.bindings.invocation import InvocationInProgress
from otel_limits.bindings.span_writer import write_end, write_halt, write_warnings
from otel_limits.bindings.strands.agent_hooks import FIRST, LAST
from otel_limits.bindings.strands.invocations import (
    STATES,
    RealtimeBatch,
    note_denial,
    note_run,
    own_conversation_of,
)
from otel_limits.bindings.strands.marks import mark
from otel_limits.bindings.strands.private import realtime_span
from otel_limits.bindings.strands.readers import (
    known_provider,
    model_id,
    provider_of,
)
from otel_limits.bindings.strands.requests import projected_input
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.strands.tool_context import StrandsTool
from otel_limits.bindings.waits import InvocationEndedError, Wait
from otel_limits.core.errors import limit_reached
from otel_limits.core.halt_texts import no_last_answer, not_run_note, refusal_note
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import quoted
from otel_limits.core.limits import KILLED_STOP_REASON, without_prefix
from otel_limits.core.policy import KILLED
from otel_limits.core.terms import PricingTerms
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.normaliser import record_of_usage
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterator, Mapping

    from strands.bidi import BidiAgent
    from strands.types.content import Message

    from otel_limits.core.errors import LimitReachedError
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.run import Run


logger = logging.getLogger(__name__)

RESPONSE_CAPS: Final = ("max_iterations", "max_turns", "max_model_calls")
"""Limits that count responses."""
USAGE_CAPS: Final = ("max_token_budget", "max_input_tokens", "max_output_tokens", "max_cost_usd")
"""Limits that need the usage of responses."""
QUOTAS: Final = "quotas"
"""Their name among those of limits."""

NO_LAST_ANSWER: Final = no_last_answer("a realtime session cannot be asked for one")

PARTLY_REPORTED: Final = "strands.bidi.models.openai.live"
"""Strands' class for OpenAI Live: "Response boundaries do not mark completed spoken turns", and
"token usage covers only the Responses model", not the voice, which is billed by the second."""

AUDIO: Final = PricingTerms(audio_in=True, audio_out=True)

DELTAS: Final = (BidiTextDeltaEvent, BidiReasoningDeltaEvent, BidiTranscriptDeltaEvent)
OUTPUT: Final = (BidiAudioDeltaEvent, BidiTextDeltaEvent)
"""Events with a part of an answer."""


@dataclass(eq=False)
class RealtimeInvocation(InvocationInProgress):
    """An invocation in progress.

    Its model calls are no `ModelCallInProgress`: a realtime model sends and receives continuously,
    and begins a response by itself. So none can be refused or changed before it is sent, and a
    limit ends the agent instead. Its tools run while the model continues.
    """

    agent_ref: weakref.ref[BidiAgent] = field(kw_only=True)
    batches: list[RealtimeBatch] = field(default_factory=list, kw_only=True)
    """Tools that have not all ended yet, by request."""
    text: str = field(default="", kw_only=True)
    """Text of the last response."""
    readers: int = field(default=0, kw_only=True)
    """Streams of events that are being read."""
    closing: asyncio.Task[None] | None = field(default=None, kw_only=True)
    """Our call of `agent.stop()`."""
    has_failed: bool = field(default=False, kw_only=True)
    is_cut: bool = field(default=False, kw_only=True)
    """True if the agent ends immediately, without waiting for a response or a tool."""
    _connection_id: str = field(default="unknown", kw_only=True)
    _call: InFlightCall | None = field(default=None, kw_only=True)
    """The call of the current response, or of the next one if usage comes before it."""
    _is_responding: bool = field(default=False, kw_only=True)
    _has_responded: bool = field(default=False, kw_only=True)
    _warned: set[tuple[str, str]] = field(default_factory=set, kw_only=True)

    def __post_init__(self) -> None:
        """Keep the context of the application, for the hooks of its agent."""
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()

    @classmethod
    def begin(cls, agent: BidiAgent) -> RealtimeInvocation:
        """Begin the invocation of an agent whose model has just been connected."""
        assert STRANDS.host is not None  # set before the patches are applied
        own = cls.start(
            STRANDS.host,
            agent.name,
            session_id=agent.session_id,
            conversation=own_conversation_of(agent),
            span=realtime_span(agent) or trace.INVALID_SPAN,
            model=model_id(agent.model),
            agent_ref=weakref.ref(agent),
        )
        own.warn_at_start()
        return own

    # --- decisions --------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """True if the agent must end now: a response and its tools run to their end first."""
        return self.verdict is not None and (
            self.is_cut or not (self._is_responding or self.batches)
        )

    @suppress_errors("binding")
    def check(self) -> None:
        """Check the limits before the agent continues."""
        if self.verdict is None and not self.run.finished:
            verdict = self.run.check_limits()
            if verdict is not None:
                self._reach(verdict)

    def _reach(self, verdict: Verdict) -> None:
        """Decide on the end of the agent, unless the limit is only observed."""
        action = verdict.action or self.run.policy.action
        if action == "observe" and verdict.reason != KILLED_STOP_REASON:
            self.run.halt(verdict, "observed")
            return
        self.verdict = self.verdict or verdict
        self.is_cut = self.is_cut or verdict.reason in IMMEDIATE
        agent = self.agent_ref()
        if agent is not None:
            agent.cancel()  # else the results of its tools request another response

    @suppress_errors("binding")
    def cancel(self, verdict: Verdict) -> None:
        """End the agent immediately, from any thread: a time limit or a kill."""
        with self.run.services.lock:
            if self.run.outcome_frozen:
                return  # the application stops it
            self.verdict, self.is_cut = self.verdict or verdict, True
        self.waits.cut()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.begin_to_close, context=self._context)

    @property
    def error(self) -> LimitReachedError | None:
        """The error that ends the stream of events, if that is the action."""
        if not self.run.raised or self.run.verdict is None:
            return None
        return limit_reached(self.run.verdict, self.run.stop(self.run.verdict.reason))

    def last_event(self) -> Any:
        """Return the event that ends the stream, as after `agent.cancel()`."""
        event = BidiConnectionStopEvent(self._connection_id, "user_request")
        if self.run.verdict is not None:
            mark(event, self.run.stop(self.run.verdict.reason))
        return event

    # --- events of the model ----------------------------------------------------------------------

    async def note(self, event: Any) -> None:
        """Count an event that the agent passes on; quotas may wait before a response."""
        if self.run.finished:
            return
        self._note(event)
        if isinstance(event, BidiResponseStartEvent):
            await self._ask_quotas()
        elif isinstance(event, BidiResponseStopEvent):
            await self.settle_quotas()

    @suppress_errors("binding")
    def _note(self, event: Any) -> None:
        if isinstance(event, BidiResponseStartEvent):
            self._begin_response()
        elif isinstance(event, BidiUsageEvent):
            self._add_usage(event)
        elif isinstance(event, BidiResponseStopEvent):
            self._end_response()
        elif isinstance(event, BidiToolUseBlocksEvent):
            self._add_text(as_json([each["input"] for each in event.tool_uses]))
        elif isinstance(event, DELTAS):
            if not isinstance(event, BidiTranscriptDeltaEvent) or event.role == "assistant":
                self._add_text(event.delta)
                self.text += event.delta
        else:
            self._note_connection(event)
        if isinstance(event, OUTPUT) and not self._has_responded:
            caps = RESPONSE_CAPS if self.run.tally.tokens else (*RESPONSE_CAPS, *USAGE_CAPS)
            why = "sends no responses, only their parts"
            self._report_caps(why, caps, "never take effect")
            self._report_caps(why, [QUOTAS], "are checked at its start and charged at its end")

    def _note_connection(self, event: Any) -> None:
        if isinstance(event, BidiBargeInEvent):
            self.is_cut = self.is_cut or self.verdict is not None
        elif isinstance(event, BidiConnectionStartEvent):
            self._connection_id = event.connection_id
        elif isinstance(event, BidiConnectionRestartEvent):
            self._break_off_response()

    def _begin_response(self) -> None:
        if self._is_responding:  # as in the framework, a response ends the one before
            self._break_off_response()
        self._is_responding = self._has_responded = True
        self.text = ""
        self.run.cycle()
        if self._call is None:
            self._open_call()
        else:
            self.check()
        # It has begun before it could be refused, so only its end is left to decide.
        self.is_cut = self.is_cut or self.verdict is not None

    def _open_call(self) -> None:
        agent, run = self.agent_ref(), self.run
        if agent is None:
            return
        extra = (agent.tool_registry.get_all_tool_specs(), agent.system_prompt)
        tokens = projected_input(agent.model, agent.messages, extra)
        self._call = call = InFlightCall(
            model_id(agent.model), tokens, provider_of(agent.model.__class__)
        )
        if isinstance(agent.model, AudioCapable):
            call.terms = AUDIO
        if known_provider(agent.model.__class__) is None:
            call.terms = replace(call.terms, own_class=call.provider)
        verdict = run.calls.admit_by_limits(call, turn=True)
        call.is_of_loop = call.answered = True
        run.calls.open(call)
        if verdict is not None:
            self._reach(verdict)

    def _add_text(self, text: str) -> None:
        if self._call is not None:
            self._call.parts.append(text)

    def _add_usage(self, event: BidiUsageEvent) -> None:
        """Count usage, which adds to what was reported before, in this response or since."""
        if self._call is None:
            self._open_call()
        if self._call is not None:
            usage = {
                **event,
                "input_token_details": _by_modality(event.input_token_details),
                "output_token_details": _by_modality(event.output_token_details),
            }
            call = self._call
            part = record_of_usage(usage, call.provider, call.model)
            self.run.calls.add_part(call, part)

    def _end_response(self) -> None:
        call, self._call = self._call, None
        if call is None or not self._is_responding:
            self._call = call
            return
        self._is_responding = False
        self.run.calls.settle(call)
        self.run.count_turn()
        self.check()  # before the results of its tools are sent
        if call.record.sure == "missing":
            caps = (*USAGE_CAPS, QUOTAS)
            self._report_caps("reports no usage", caps, "count estimates of texts, without audio")
        if self.run.policy.warn_at:
            write_warnings(self.span, self.run.warn())

    def _break_off_response(self) -> None:
        """Settle a response that will not be completed; the provider bills what it has sent."""
        call, self._call = self._call, None
        if call is not None:
            self.run.calls.settle(call, failed=self._is_responding, aborted=self._is_responding)
        self._is_responding = False

    # --- quotas -----------------------------------------------------------------------------------

    async def probe_quotas(self) -> None:
        """Decide on the end of the agent if its quotas leave nothing for a response."""
        await self._ask_quotas()
        await self.settle_quotas()

    async def _ask_quotas(self) -> None:
        """Reserve quota for the response that has begun, or decide on the end of the agent."""
        agent = self.agent_ref()
        if agent is None:
            return
        call = self._call or InFlightCall(
            model_id(agent.model), 1, provider_of(agent.model.__class__)
        )
        request = self.admission_request([call], self.attributes, obstacle=NO_LAST_ANSWER)
        verdict = None if request is None else await self.ask_quotas(request)
        verdict = call.refused_by or verdict
        if verdict is not None:
            self._reach(verdict)
            self.is_cut = self.is_cut or self.verdict is not None

    # --- caps that cannot hold --------------------------------------------------------------------

    @suppress_errors("binding")
    def warn_at_start(self) -> None:
        """Name the caps that cannot hold with what is known of the model's class."""
        agent = self.agent_ref()
        kinds = () if agent is None else type(agent.model).__mro__
        if any(each.__module__ == PARTLY_REPORTED for each in kinds):
            caps = (*USAGE_CAPS, QUOTAS)
            self._report_caps("reports no usage of its voice", caps, "do not include it")
            self._report_caps(
                "has responses that are not turns", RESPONSE_CAPS, "count its responses instead"
            )

    def _report_caps(self, why: str, caps: Collection[str], effect: str) -> None:
        """Log once why some of the caps cannot hold."""
        held = [name for name in _caps_of(self.run) if without_prefix(name) in caps]
        if not held or (why, effect) in self._warned:
            return
        self._warned.add((why, effect))
        agent = self.agent_ref()
        logger.warning(
            "otel-limits: the realtime model %s of agent %s %s. In this invocation %s %s. "
            "Set max_duration_seconds as well.",
            "unknown" if agent is None else model_id(agent.model),
            quoted(self.run.invocation.agent),
            why,
            ", ".join(held),
            effect,
        )

    # --- the end ----------------------------------------------------------------------------------

    def begin_to_close(self) -> asyncio.Task[None] | None:
        """Start to stop the agent, once."""
        agent, run = self.agent_ref(), self.run
        has_ended = run.finished or run.outcome_frozen  # by the application's own stop, too
        if self.closing is None and agent is not None and not has_ended:
            self.closing = self._loop.create_task(agent.stop())
            self.closing.add_done_callback(_note_error)
        return self.closing

    async def close(self) -> None:
        """Stop the agent; an error of that reaches the application's own `stop()`."""
        if (closing := self.begin_to_close()) is not None:
            await asyncio.wait([closing])

    @suppress_errors("binding")
    def conclude(self) -> None:
        """Settle what is in flight and write the outcome to the span, before the agent stops."""
        run = self.run
        if run.finished:
            return
        killed, agent = run.freeze_outcome(), self.agent_ref()
        verdict = KILLED if killed else self.verdict if self.closing is not None else None
        self._break_off_response()
        run.calls.release_unused()
        if verdict is not None:
            run.halt(verdict, "raised" if run.policy.action == "raise" else "halted")
            run.reason = verdict.reason
            write_halt(self.span, verdict, run)
        elif self.has_failed:
            run.reason = "error"
        else:
            is_cancelled = agent is not None and agent.cancel_signal.is_set()
            run.reason = "cancelled" if is_cancelled and self.verdict is None else "end_turn"
        write_end(self.span, run)

    def close_span(self, error: BaseException | None) -> None:
        """Do nothing: Strands has ended the span, which `conclude` wrote to before."""


def realtime_of(agent: object) -> RealtimeInvocation | None:
    """Return the invocation of a realtime agent, if it is tracked."""
    state = STATES.get(agent)
    realtime: RealtimeInvocation | None = None if state is None else state.realtime
    return realtime


@suppress_errors("binding")
def begin_realtime(agent: BidiAgent) -> bool:
    """Begin the invocation of an agent that has just been started; False if it is not tracked."""
    if STRANDS.host is None or not STRANDS.host.is_on:
        return False
    STATES.of(agent).realtime = RealtimeInvocation.begin(agent)
    return True


def _by_modality(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return token details, in which a vendor may omit a modality without tokens."""
    return {"audio": 0, **details} if "text" in details else details


def _caps_of(run: Run) -> Iterator[str]:
    """Yield the names of the limits of an invocation and of its trees, and that of quotas."""
    for budget in run.budgets:
        for kind, _ in budget.policy.limits.active:
            yield budget.prefix + kind.name
    gate = run.services.observers.gate
    if gate is not None and gate.holds_quotas:
        yield QUOTAS


def _note_error(closing: asyncio.Task[None]) -> None:
    """Retrieve the error of a stop, which asyncio would log otherwise."""
    if not closing.cancelled():
        closing.exception()


# --- tools ----------------------------------------------------------------------------------------
# They run while the model continues.


def attach_realtime_hooks(agent: BidiAgent) -> None:
    """Attach to a realtime agent. Idempotent."""
    event = MessageAddedEvent(agent=agent, message={"role": "user", "content": []})
    if message_added not in list(agent.hooks.get_callbacks_for(event)):
        # As for other agents: see `HOOKS` in `agent_hooks`.
        agent.add_hook(message_added, MessageAddedEvent, order=FIRST)
        agent.add_hook(before_tool, BeforeToolCallEvent, order=LAST)
        agent.add_hook(after_tool, AfterToolCallEvent, order=LAST)


@suppress_errors("binding")
def message_added(event: MessageAddedEvent[Any]) -> None:
    """Begin a batch of tools when they are requested, and end it when all have answered."""
    realtime, kind = realtime_of(event.agent), _kind_of(event.message)
    if realtime is None or realtime.run.finished:
        return
    if kind == "tool_dispatch":  # follows the message with the requests
        requests = [block["toolUse"] for block in event.agent.messages[-2]["content"]]
        batch = RealtimeBatch(requests, realtime.verdict)
        if batch.against is None:
            realtime.request_tools(realtime.text, batch.tools)
            batch.turn = realtime.turns[-1]
        realtime.batches.append(batch)
    elif kind == "tool_result":
        ids = [block["toolResult"]["toolUseId"] for block in event.message["content"]]
        for batch in realtime.batches:
            if [each["toolUseId"] for each in batch.requests] == ids:
                _end_batch(realtime, batch)
                return


def _kind_of(message: Message) -> object:
    custom: Any = (message.get("metadata") or {}).get("custom") or {}
    return (custom.get("bidi") or {}).get("kind")


def _batch_of(
    realtime: RealtimeInvocation, use: Mapping[str, Any]
) -> tuple[RealtimeBatch, int] | None:
    """Return the batch and the position of a tool call; `None` if the model did not request it."""
    for batch in realtime.batches:
        if (position := batch.position_of(use)) is not None:
            return batch, position
    return None


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent[Any]) -> None:
    """Run a tool within the invocation of its agent, or refuse it if it exceeds a limit."""
    realtime = realtime_of(event.agent)
    found = None if realtime is None else _batch_of(realtime, event.tool_use)
    if realtime is None or found is None:
        return
    batch, position = found
    requested = (batch.turn or batch.denied).tools[str(position)]
    if position not in batch.attempts:
        batch.attempts[position] = attempt = StrandsTool(realtime, requested)
        attempt.__enter__()  # never left: its task ends with the tool
    if event.cancel_tool:
        return
    # A later verdict lets tools that were requested before it run to their end.
    if batch.against is not None:
        event.cancel_tool = not_run_note(batch.against)
    elif requested.refusal is not None:
        is_final = requested.refusal.limit in realtime.run.refusals
        event.cancel_tool = refusal_note(requested.refusal, is_final=is_final)


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent[Any]) -> None:
    """Keep the final attempt of a tool."""
    realtime = realtime_of(event.agent)
    found = None if realtime is None else _batch_of(realtime, event.tool_use)
    if found is not None and not event.retry:
        batch, position = found
        if (attempt := batch.attempts.get(position)) is not None:
            event.result = attempt.end(event.result) or event.result
        batch.results[position] = event


def _end_batch(realtime: RealtimeInvocation, batch: RealtimeBatch) -> None:
    """Record the calls of a batch in request order, and check the limits."""
    realtime.batches.remove(batch)
    turn = batch.turn or batch.denied
    for position, tool in enumerate(tuple(turn.tools.values())):
        done = batch.results.get(position)
        if tool.refusal is not None:
            continue
        if done is None:
            del turn.tools[str(position)]
        elif done.cancel_message is None:
            note_run(tool, done)
        else:
            if batch.turn is not None:
                realtime.run.tools.release(tool.name)
            note_denial(tool, done.result)
    if turn in realtime.turns:
        realtime.turns.remove(turn)
    realtime.end_turn(turn)
    realtime.check()


# --- wrappers of public methods -------------------------------------------------------------------


def track_start(original: Any) -> Any:
    """Wrap `start`, with which the invocation begins, before its first event."""

    @functools.wraps(original)
    async def start(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        _prepare()
        await original(agent, *args, **kwargs)
        _begun(agent)
        realtime = realtime_of(agent)
        if realtime is not None:
            # Nothing was sent yet: an agent without quota ends before its first response.
            await realtime.probe_quotas()

    return start


@suppress_errors("binding")
def _prepare() -> None:
    if (host := STRANDS.host) is not None:
        host.prepare(has_own=False)


@suppress_errors("binding")
def _begun(agent: BidiAgent) -> None:
    STATES.of(agent).realtime = None  # one that ended without the application's `stop()`
    host, is_tracked = STRANDS.host, begin_realtime(agent)
    if is_tracked:
        attach_realtime_hooks(agent)
    elif host is not None and host.is_on:
        host.report_untracked_agent("strands", agent.name)


def track_send(original: Any) -> Any:
    """Wrap `send`: input for an agent that ends would request another response."""

    @functools.wraps(original)
    async def send(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        realtime = realtime_of(agent)
        if realtime is not None:
            realtime.check()
            # Without an error while its events are read: their reader is about to see the end.
            # Afterwards the sender gets the framework's own error.
            if realtime.verdict is not None and realtime.readers:
                return
        await original(agent, *args, **kwargs)

    return send


def track_receive(original: Any) -> Any:
    """Wrap `receive`, where limits are checked and the agent is ended."""

    @functools.wraps(original)
    async def receive(agent: BidiAgent, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        realtime, events = realtime_of(agent), original(agent, *args, **kwargs)
        if realtime is None:
            async for event in events:
                yield event
            return
        wait = Wait()
        wait.join(realtime.waits)
        realtime.readers += 1
        try:
            async for event in _follow(realtime, wait, events):
                yield event
        finally:
            wait.close()
            await events.aclose()
            realtime.readers -= 1

    return receive


async def _follow(
    realtime: RealtimeInvocation, wait: Wait, events: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass on the events of an agent until it ends, or has to."""
    while True:
        realtime.check()
        if realtime.is_due:
            break
        try:
            event = await wait.next_of(events)
        except (StopAsyncIteration, InvocationEndedError):
            break
        except Exception:
            realtime.has_failed = True
            raise
        await realtime.note(event)
        if realtime.is_cut or (realtime.verdict and isinstance(event, BidiConnectionStopEvent)):
            break
        yield event
    if realtime.verdict is not None and not realtime.run.released:
        await realtime.close()
        if (error := realtime.error) is not None:
            raise error
        yield realtime.last_event()


def track_stop(original: Any) -> Any:
    """Wrap `stop`, with which the invocation ends."""

    @functools.wraps(original)
    async def stop(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        realtime = realtime_of(agent)
        if realtime is None:
            await original(agent, *args, **kwargs)
            return
        if realtime.closing is not None and asyncio.current_task() is not realtime.closing:
            # The application's own stop after ours, which would call its hooks twice.
            STATES.of(agent).realtime = None
            await asyncio.shield(realtime.closing)
            return
        realtime.conclude()
        try:
            await original(agent, *args, **kwargs)
        finally:
            realtime.finish(realtime.run.reason or "aborted")
            if realtime.closing is None:
                STATES.of(agent).realtime = None

    return stop
