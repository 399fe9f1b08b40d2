"""Follows the invocations of graphs, from their start to their end."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables.config import ensure_config, merge_configs
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphBubbleUp, GraphInterrupt, GraphRecursionError
from langgraph.graph import END
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import StateUpdate

from otel_limits.bindings.admission import IMMEDIATE, halt_from_error, is_halted_by_vendor
from otel_limits.bindings.extensions import declined_verdict, extension_of
from otel_limits.bindings.followed_runs import owned
from otel_limits.bindings.gateways import chain_of, members_of
from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.bindings.langchain.graph_invocation import (
    DEFAULT_NAME,
    UNANSWERED,
    GraphHaltedError,
    GraphInvocation,
    LimitQuestion,
    is_own_loop,
)
from otel_limits.bindings.langchain.graph_questions import (
    Resumed,
    akeep,
    aresumed,
    can_ask,
    configurable_of,
    keep,
    resumed,
)
from otel_limits.bindings.langchain.graph_streams import GraphStream, ends_of_task
from otel_limits.bindings.langchain.halt_marks import mark, with_mark_of
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.bindings.langchain.langchain_probe import TASK
from otel_limits.core.errors import LimitReachedError
from otel_limits.core.halt_texts import not_run_note
from otel_limits.core.internal_errors import (
    suppress_errors,
    suppress_errors_async,
    suppress_lapses,
)
from otel_limits.core.policy import KILLED, NO_OVERRIDES
from otel_limits.runs.current import current_scope
from otel_limits.runs.run import Run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from langchain_core.messages import ToolCall
    from langgraph.types import StateSnapshot

    from otel_limits.core.policy import Overrides, Verdict
    from otel_limits.runs.tasks import Task


# --- wrappers of a graph's methods ----------------------------------------------------------------

Saved: TypeAlias = "tuple[Any, list[list[StateUpdate]]]"

UNNAMED: Final = (
    f"All graphs without a name share {DEFAULT_NAME!r}: set name= in create_agent() or compile()."
)


def track_stream(original: Any) -> Any:
    """Wrap `Pregel.stream`, which `invoke` and `batch` call."""

    @functools.wraps(original)
    def stream(
        graph: Any,
        input: Any,  # noqa: A002  the name of LangChain
        config: Any = None,
        **options: Any,
    ) -> Iterator[Any]:
        if (resume := resumed(graph, input, config)) is not None:
            input = resume.given  # noqa: A001  the name of LangChain
        call = _begun(graph, input, config, options, resume)
        if call is None:
            yield from original(graph, input, config, **options)
            return
        chunks = original(graph, input, call.config, **call.stream.options)
        try:
            try:
                while True:
                    with call.invocation:
                        try:
                            chunk = next(chunks)
                        except StopIteration:
                            break
                    yield from call.stream.passed(chunk)
                saved = call.succeed()
            except BaseException as error:  # noqa: BLE001  raised again if it is not the halt
                is_halt = call.catch(error)
                saved = call.halt(_stored(graph, call)) if is_halt else None
            if saved is not None:
                _save(graph, saved)
            yield from call.last_chunks()
        finally:
            try:
                chunks.close()
            finally:
                call.finish()
                _keep(graph, call)
        call.raise_if_asked()

    return stream


def track_astream(original: Any) -> Any:  # noqa: C901  one story, read from top to bottom
    """Wrap `Pregel.astream`, which `ainvoke`, `abatch` and `astream_events` call."""

    @functools.wraps(original)
    async def astream(
        graph: Any,
        input: Any,  # noqa: A002  the name of LangChain
        config: Any = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        if (resume := await aresumed(graph, input, config)) is not None:
            input = resume.given  # noqa: A001  the name of LangChain
        call = _begun(graph, input, config, options, resume)
        ends = ends_of_task()
        if call is None:
            async with aclosing(owned(original(graph, input, config, **options))) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        chunks = owned(original(graph, input, call.config, **call.stream.options))
        try:
            try:
                while True:
                    with call.invocation:
                        try:
                            chunk = await anext(chunks)
                        except StopAsyncIteration:
                            break
                    for each in call.stream.passed(chunk):
                        yield each
                saved = call.succeed()
            except BaseException as error:  # noqa: BLE001  raised again if it is not the halt
                is_halt = call.catch(error)
                saved = call.halt(await _astored(graph, call)) if is_halt else None
            if saved is not None:
                await _asave(graph, saved)
            call.note_end(ends)
            for each in call.last_chunks():
                yield each
        finally:
            try:
                await chunks.aclose()
            finally:
                call.finish()
                await _akeep(graph, call)
        call.raise_if_asked()

    return astream


@suppress_errors("binding")
def _stored(graph: Any, call: GraphCall) -> StateSnapshot | None:
    """Return the state of a halted graph as its checkpoints have it; `None` if it has none."""
    thread = call.thread
    return None if thread is None else graph.get_state(thread)


@suppress_errors_async("binding")
async def _astored(graph: Any, call: GraphCall) -> StateSnapshot | None:
    """Do the same without blocking the event loop."""
    thread = call.thread
    return None if thread is None else await graph.aget_state(thread)


@suppress_errors("binding")
def _save(graph: Any, saved: Saved) -> None:
    """Store the end of a halted graph in its checkpoints."""
    graph.bulk_update_state(*saved)


@suppress_errors_async("binding")
async def _asave(graph: Any, saved: Saved) -> None:
    """Do the same without blocking the event loop."""
    await graph.abulk_update_state(*saved)


@suppress_errors("binding")
def _keep(graph: Any, call: GraphCall) -> None:
    """Keep the tasks that wait for answers in the checkpoints of a graph."""
    keep(graph, call.thread, call.waiting)


@suppress_errors_async("binding")
async def _akeep(graph: Any, call: GraphCall) -> None:
    """Do the same without blocking the event loop."""
    await akeep(graph, call.thread, call.waiting)


# --- one invocation -------------------------------------------------------------------------------


@suppress_lapses("binding")
def _begun(
    graph: Any, given: Any, config: Any, options: Mapping[str, Any], resume: Resumed | None
) -> GraphCall | None:
    """Begin an invocation; `None` if graphs are not limited."""
    host = LANGCHAIN.host
    if host is None or not host.is_on:
        return None
    host.prepare(has_own=False)
    return GraphCall(graph, given, config, GraphStream(graph, config, options), resume)


class GraphCall:
    """One call of a graph."""

    def __init__(
        self,
        graph: Any,
        given: Any,
        config: Any,
        stream: GraphStream,
        resume: Resumed | None,
    ) -> None:
        """Begin an invocation."""
        host, name = LANGCHAIN.host, graph.get_name()
        assert host is not None  # checked before
        self.config = with_node_ends(graph, config)
        """The configuration that LangGraph gets."""
        config = merge_configs(graph.config, config)
        self.stream = stream
        self._graph, self._config = graph, config
        within = configurable_of(graph, config)
        parent = _graph_around() if TASK in within else None
        answered = resume if parent is None else parent
        questions: Sequence[LimitQuestion] = () if answered is None else answered.questions
        answers: Sequence[str] = () if answered is None else answered.answers
        thread = (config.get("configurable") or {}).get("thread_id")
        self._interrupt_prefix = interrupt_prefix(name, within)
        more, declined = _answered(name, within, questions)
        self.invocation = GraphInvocation.start(
            host,
            name,
            attributes=_attributes_of(config),
            session_id=None if thread is None else str(thread),
            conversation=own_conversation_of(within),
            answers=[self._interrupt_prefix + each for each in answers],
            more=more,
            given=_without_ids(given),
            note=UNNAMED if name == DEFAULT_NAME else "",
            graph=graph,
            verdict=declined,
            can_ask=can_ask(graph, within, parent),
            questions=questions,
        )
        self.invocation.answers = answers
        self._is_within = parent is not None
        if parent is not None:
            self.invocation.waiting = parent.waiting
        self._run = self.invocation.run
        self._is_declined = declined is not None
        """True if a human has answered our question, and not with more."""
        self._reason = "aborted"
        self._failure: Exception | None = None
        self._cause: BaseException | None = None
        """The error of the graph at the last answer of its model."""
        self._last: list[Any] = []
        """The messages of a halt."""
        self._is_late = False
        """True if the halt came after the answer, which the reader has then."""
        self._unseen: list[Any] = []
        """The model's last answer, if its reader got parts without the mark only."""

    # --- the end ----------------------------------------------------------------------------------

    def catch(self, error: BaseException) -> bool:
        """Catch a halt; raise any other exception again.

        Returns:
            Whether the halt is to be published. It was already, if the graph's own code failed at
            the last answer.
        """
        if self._is_halt(error) or self._has_halt(error) or self._is_caused_by_halt(error):
            return True
        if not self._has_failed_at_last_answer(error):
            self._fail(error)
            raise  # noqa: PLE0704  called while it is handled
        return False

    @property
    def thread(self) -> dict[str, Any] | None:
        """The configuration of the thread of the graph's checkpoints, if it has any."""
        configurable = dict(self._config.get("configurable") or {})
        if not isinstance(self._graph.checkpointer, BaseCheckpointSaver):
            return None
        if "thread_id" not in configurable:
            return None
        configurable.pop("checkpoint_id", None)  # of where this call began
        return {"configurable": configurable}

    @suppress_errors("binding")
    def halt(self, stored: StateSnapshot | None) -> Saved | None:
        """End with the halt.

        Args:
            stored: The graph's state as its checkpoints have it, if it has any.

        Returns:
            What to store there, if anything.
        """
        is_pending = stored is not None and bool(stored.next)
        is_parallel = stored is not None and is_pending and len(stored.tasks) > 1
        stream = self.stream
        stream.end_step(stored.values if stored is not None and is_parallel else {})
        # LangGraph can continue with the nodes that are pending, and has what the others wrote. But
        # a conversation that waits for the results of tools must not stay so, nor does a question
        # that was answered.
        waits_for_tools = stream.has_conversation and bool(_unanswered(stream.messages))
        has_ended = self.invocation.answer is not None or self._is_declined
        stays_pending = is_parallel and not waits_for_tools and not has_ended
        self._halt(stays_pending=stays_pending)
        if stays_pending:
            return None
        if is_pending and has_ended and not self._last:  # the state has the last answer already
            return self.thread, [[StateUpdate(None, END)]]
        return self._checkpoint()

    def _is_halt(self, error: BaseException) -> bool:
        """Return whether an exception carries the halt of this graph."""
        return isinstance(error, GraphHaltedError) and error.invocation is self.invocation

    @suppress_errors("binding")
    def _has_halt(self, error: BaseException) -> bool:
        """Return whether one of a group does."""
        return any(map(self._is_halt, members_of(error)))

    @suppress_errors("binding")
    def _has_failed_at_last_answer(self, error: BaseException) -> bool:
        """Note a graph whose own code could not use the last answer, e.g. to choose a route."""
        is_failure = isinstance(error, Exception) and not isinstance(error, GraphBubbleUp)
        if not is_failure or self.invocation.answer is None:
            return False
        self._halt()
        self._run.raised, self._cause = True, error
        return True

    @suppress_errors("binding")
    def _is_caused_by_halt(self, error: BaseException) -> bool:
        invocation = self.invocation
        if isinstance(error, Exception) and not isinstance(error, GraphBubbleUp):
            # Of a side call that was refused or ended, or of our question, unless it was handled.
            causes = tuple(chain_of(error))
            if invocation.verdict and any(isinstance(each, LimitReachedError) for each in causes):
                return True
            if invocation.unanswered and any(isinstance(each, GraphInterrupt) for each in causes):
                invocation.verdict = (
                    invocation.verdict or invocation.unanswered
                )  # no human sees the question
                return True
            verdict = halt_from_error(invocation, error)
            if verdict is not None:
                invocation.verdict = invocation.verdict or verdict
                return True
            return bool(is_halted_by_vendor(invocation, error))
        return False

    @suppress_errors("binding")
    def _halt(self, *, stays_pending: bool = False) -> None:
        """Publish the halt, and write its messages.

        Args:
            stays_pending: The thread is left as it is, without them.
        """
        invocation, run = self.invocation, self._run
        verdict = invocation.verdict or invocation.wrapping
        assert verdict is not None  # every refusal has one
        invocation.end_turns()
        self._reason = verdict.reason
        if invocation.answer is not None:  # the model gave a last answer, and the graph continued
            self._show(invocation.answer)
            return
        if invocation.lacks_form and self._ends_with_answer:
            self._halt_late(verdict)
            return
        has_thread = self.thread is not None and not stays_pending
        is_stored = has_thread and self.stream.has_conversation
        text = invocation.halt(verdict, can_show=self.stream.can_carry, is_written=is_stored) or ""
        message = AIMessage(text, id=str(uuid.uuid4()), name=self._name_of_answers)
        mark(message, run.stop(verdict.reason), synthetic=True)
        if self.stream.has_conversation:
            self._last = [*_results_of_unanswered(self.stream.messages, verdict), message]

    @property
    def _ends_with_answer(self) -> bool:
        return isinstance(next(reversed(self.stream.messages), None), AIMessage)

    @property
    def _name_of_answers(self) -> str | None:
        """The name that the agent's own messages have, if any."""
        answers = (each for each in reversed(self.stream.messages) if isinstance(each, AIMessage))
        name = self._run.invocation.agent
        own = name if name != DEFAULT_NAME and is_own_loop(self._graph) else None
        return next((each.name for each in answers if each.name), own)

    def _show(self, answer: Any) -> None:
        """Show the halt in a result that has lost the mark of the model's answer, or never had it.

        A node may store a copy of the answer, only its text, or nothing of it.
        """
        run, stream = self._run, self.stream
        if stream.carries(run.invocation.id):
            self._unseen = [answer] if stream.shows_only_parts else []
            return
        if stream.has_conversation:
            last = next(reversed(stream.messages), None)
            is_it = isinstance(last, BaseMessage) and (
                last.id == answer.id or (last.type, text_of(last)) == (answer.type, text_of(answer))
            )
            self._last = [with_mark_of(last, answer) if is_it else answer]
        run.raised = run.raised or not stream.can_carry

    @suppress_errors("binding")
    def _last_chunks(self) -> list[Any]:
        if self._run.raised:
            return []
        is_streamed = self.invocation.answer is not None or self._is_late
        messages, metadata = self._last or self._unseen, self.invocation.call_metadata
        return list(self.stream.of_halt(messages, metadata, is_streamed=is_streamed))

    def last_chunks(self) -> list[Any]:
        """Return the halt as the reader of the stream asked for it."""
        return self._last_chunks() or []

    @suppress_errors("binding")
    def note_end(self, ends: list[Any] | None) -> None:
        """Note the state with which a halted graph has ended, for its events."""
        if ends is not None and self._last and not self._run.raised:
            ends.append(self.stream.values_with(self._last))

    @suppress_errors("binding")
    def _checkpoint(self) -> Saved | None:
        """Return the updates that let the thread continue after our message."""
        graph, thread = self._graph, self.thread
        if thread is None or not self._last:
            return None
        # Conditional edges of the node would run now, with our message and without limits.
        branches = getattr(getattr(graph, "builder", None), "branches", {})
        nodes = [each for each in graph.nodes if not each.startswith("__")]
        node = min(nodes, key=lambda each: (bool(branches.get(each)), each != self._halted_node))
        return thread, [
            [StateUpdate(None, END)],  # what ended in this step is kept, the rest is dropped
            *([StateUpdate(each, node)] for each in self.stream.updates_with(self._last)),
            [StateUpdate(None, END)],  # nor does anything follow our message
        ]

    @property
    def _halted_node(self) -> str | None:
        return self.invocation.call_metadata.get("langgraph_node")

    @suppress_errors("binding")
    def _fail(self, error: BaseException) -> None:
        """Note how the graph ended by itself."""
        if isinstance(error, GraphRecursionError):
            self._reason = "recursion_limit"
        elif isinstance(error, GraphInterrupt):
            self._reason = "interrupt"
            self.stream.interrupts += [each.id for each in next(iter(error.args), ())]
        elif isinstance(error, GraphBubbleUp):  # a hand-off to the graph around it
            self._reason = "end_turn"
        elif isinstance(error, Exception):
            verdict = self._run.verdict if self._run.action == "raised" else None
            self._reason = "error" if verdict is None else verdict.reason
            self._failure = error

    def finish(self) -> None:
        """End the invocation, however the graph ended."""
        interrupts = [self._interrupt_prefix + each for each in self.stream.interrupts]
        self.invocation.interrupts = interrupts
        self.invocation.finish(self._reason, self._failure)
        self.invocation.waiting |= dict.fromkeys(interrupts, self._run.task)

    @property
    def waiting(self) -> Mapping[str, Task]:
        """The tasks to be kept in the checkpoints of the outermost graph, if it has interrupts."""
        is_outermost = not self._is_within and self.stream.interrupts
        return self.invocation.waiting if is_outermost else {}

    @suppress_errors("binding")
    def succeed(self) -> Saved | None:
        """Note that the graph has ended by itself.

        Returns:
            What to store in the graph's checkpoints, if a limit ended it and they do not show that.
        """
        invocation, run, is_interrupted = self.invocation, self._run, self.stream.is_interrupted
        self._reason = "interrupt" if is_interrupted else "end_turn"
        if run.freeze_outcome():  # killed when no model call was left to refuse
            self._halt_late(KILLED)
        elif is_interrupted:
            return None
        elif invocation.unanswered is not None:  # a node has handled the interrupt as an error
            self._halt_late(invocation.unanswered)
        elif (
            invocation.is_refused or invocation.answer is not None
        ):  # a node has handled the refusal
            self._halt()
        elif (verdict := self._refused_answer()) is not None:
            invocation.verdict = verdict
            self._halt()
        return self._checkpoint()

    def _refused_answer(self) -> Verdict | None:
        """Return the halt if the graph ends with the refusal of a tool that returns directly."""
        last = next(reversed(self.stream.messages), None)
        if not isinstance(last, ToolMessage):
            return None
        return self.invocation.verdict_on_answer(text_of(last))

    def _halt_late(self, verdict: Verdict) -> None:
        """Publish a halt that came after the answer, and show it there."""
        run, stream = self._run, self.stream
        self._reason, self._is_late = verdict.reason, True
        answer = next(reversed(stream.messages), None)
        can_show = stream.is_interrupted or isinstance(answer, BaseMessage)
        is_raised = (verdict.action or run.policy.action) == "raise" or not can_show
        run.halt(verdict, "raised" if is_raised else "halted")
        if isinstance(answer, BaseMessage) and not stream.is_interrupted:
            answer = answer.model_copy()
            mark(answer, run.stop(verdict.reason), synthetic=False)
            self._show(answer)

    def raise_if_asked(self) -> None:
        """Raise the limit's error if that is the action, or if the result cannot show the halt.

        Raises:
            LimitReachedError: Either is so.
        """
        if (error := self._error()) is not None:
            raise error from self._cause

    @suppress_errors("binding")
    def _error(self) -> LimitReachedError | None:
        return self.invocation.raised_error()


def _graph_around() -> GraphInvocation | None:
    """Return the invocation that begins another one."""
    around = current_scope()[0]
    invocation = around.state if isinstance(around, Run) else None
    return invocation if isinstance(invocation, GraphInvocation) else None


def _attributes_of(config: Any) -> dict[str, Any]:
    """Return the attributes of a call for quotas and the audit."""
    configurable = config.get("configurable") or {}
    own = {key: value for key, value in configurable.items() if not key.startswith("__")}
    return {**own, **(config.get("metadata") or {})}


def _without_ids(given: Any) -> Any:
    """Return an input without the IDs of its messages, which LangGraph sets in them."""
    if not isinstance(given, Mapping) or not isinstance(given.get("messages"), list):
        return given
    messages = [
        (each.type, each.content) if isinstance(each, BaseMessage) else each
        for each in given["messages"]
    ]
    return {**given, "messages": messages}


def interrupt_prefix(agent: str, configurable: Mapping[str, Any]) -> str:
    """Return the prefix of the keys of a graph's interrupts.

    A graph and those within it share an interrupt, and each has its own task.
    """
    thread, space = configurable.get("thread_id"), _space_of(configurable)
    return json.dumps(["langgraph", str(thread), space, agent])


def own_conversation_of(configurable: Mapping[str, Any]) -> str:
    """Return the ID of a graph's conversation: its thread, and the namespace there if any."""
    thread = str(configurable.get("thread_id") or "")
    space = str(configurable.get("checkpoint_ns") or "")
    if not thread or not space:
        return thread
    # Without the IDs of tasks, which differ each time: `researcher:1c0…|writer:9f2…`.
    return json.dumps([thread, *(each.partition(":")[0] for each in space.split("|"))])


def _space_of(configurable: Mapping[str, Any]) -> str:
    """Return the namespace of a graph's checkpoints; empty for the outermost graph."""
    return str(configurable.get("checkpoint_ns", "")) if TASK in configurable else ""


def _answered(
    agent: str, configurable: Mapping[str, Any], questions: Sequence[LimitQuestion]
) -> tuple[Overrides | None, Verdict | None]:
    """Read the answers to an agent's own questions: an extension, or the halt otherwise."""
    more: Overrides | None = None
    declined: Verdict | None = None
    space = _space_of(configurable)
    for each in questions:
        if each.is_of(space, agent) and each.answer is not UNANSWERED:
            extension = extension_of(each.interrupt.value, each.answer)
            more = (more or NO_OVERRIDES).extended_by(extension) if extension else more
            declined = declined or declined_verdict(each.interrupt.value, each.answer)
    return more, declined


def _results_of_unanswered(messages: Sequence[Any], verdict: Verdict) -> list[ToolMessage]:
    """Return results for the tools that were requested but never ran."""
    return [
        ToolMessage(
            not_run_note(verdict), name=call["name"], tool_call_id=call["id"], status="error"
        )
        for call in _unanswered(messages)
    ]


def _unanswered(messages: Sequence[Any]) -> list[ToolCall]:
    """Return the tool calls of a conversation that have no result."""
    answered = {each.tool_call_id for each in messages if isinstance(each, ToolMessage)}
    return [
        call
        for each in messages
        if isinstance(each, AIMessage)
        for call in each.tool_calls
        if call["id"] not in answered
    ]


# --- nodes next to a halted one -------------------------------------------------------------------
# They finish, as their model calls were paid for.

NODE: Final = "graph:step:"
"""How the tag of a node's own run begins, which callbacks and traces get."""


class NodeEnds(BaseCallbackHandler):
    """Sees the end of each node of a graph."""

    run_inline = True
    ignore_agent = ignore_chat_model = ignore_custom_event = True
    ignore_llm = ignore_retriever = ignore_retry = True

    @suppress_errors("binding")
    def on_chain_error(
        self, error: BaseException, *, tags: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Note that a halt leaves its node. A time limit or a kill does not wait for the others."""
        is_of_node = any(each.startswith(NODE) for each in tags or ())
        if is_of_node and isinstance(error, GraphHaltedError):
            verdict = error.invocation.verdict
            error.has_left_node = verdict is not None and verdict.reason not in IMMEDIATE


NODE_ENDS: Final = NodeEnds()


def with_node_ends(graph: Any, config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the configuration of a call that sees the ends of the graph's nodes.

    The tasks of a function (functional API) raise in that function, which may handle exceptions.
    """
    if not isinstance(graph, CompiledStateGraph):
        return config
    # LangGraph takes the callbacks of the first of these that has any, or merges them.
    known = (config or {}, graph.config or {}, ensure_config())
    callbacks: Any = next((each["callbacks"] for each in known if each.get("callbacks")), [])
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
    else:
        callbacks = BaseCallbackManager([*callbacks], [*callbacks])
    callbacks.add_handler(NODE_ENDS)  # no effect if it is there
    return {**(config or {}), "callbacks": callbacks}
