"""One invocation of a graph in progress: its turns, tools, last answer, and end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables.config import ensure_config
from langgraph.errors import GraphBubbleUp
from langgraph.graph import END
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from otel_limits.bindings.invocation import InvocationInProgress, ToolAnswer
from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.bindings.langchain.halt_marks import mark_inner
from otel_limits.bindings.tool_call import ToolCallInProgress, follow_tool, follow_tool_async
from otel_limits.core.halt_texts import no_last_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langgraph.errors import GraphInterrupt
    from langgraph.types import Interrupt

    from otel_limits.bindings.invocation import RequestedTool
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.tasks import Task


class GraphHaltedError(BaseException):
    """Carries a halt from a model call to the graph's own method, which ends the graph.

    Not an `Exception`, as a node may handle any of these: retries, fallbacks and parsers do.
    """

    # No `__init__`: an error raised in it would reach the application.
    invocation: GraphInvocation
    """The invocation that was halted."""
    has_left_node = False
    """True once no code of its node can handle it, but nodes next to it may still run."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` takes it for, in addition to its own class.

        LangGraph cancels the other nodes of a step, unless an exception is a `GraphBubbleUp`, such
        as that of a node that waits for a human.
        """
        return GraphBubbleUp if self.has_left_node else GraphHaltedError


UNANSWERED: Final = object()

DEFAULT_NAME: Final = "LangGraph"
"""The name of each graph that has none."""


@dataclass(frozen=True, slots=True)
class LimitQuestion:
    """Our question that an earlier invocation has ended with."""

    interrupt: Interrupt
    answer: object
    """The answer, or `UNANSWERED`."""

    @property
    def task(self) -> str:
        """The task whose model call was refused."""
        return str(self.interrupt.value.get("checkpoint_ns", ""))

    def is_of(self, space: str, agent: str) -> bool:
        """Return whether it comes from an agent in a namespace of checkpoints."""
        parts = [part for part in self.task.split("|")[:-1] if not part.isdecimal()]
        return "|".join(parts) == space and self.interrupt.value.get("agent") == agent


@dataclass(slots=True, eq=False)
class GraphInvocation(InvocationInProgress):
    """The state of an invocation of a graph."""

    graph: Any = field(kw_only=True)
    answer: Any = field(default=None, kw_only=True)
    """The model's last answer after a limit, if it gave one."""
    has_asked_for_form: bool = field(default=False, kw_only=True)
    """True once the model was asked to give its answer another form."""
    lacks_form: bool = field(default=False, kw_only=True)
    """True if the refused model call would only have given the answer another form."""
    call_metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Metadata of the model call that was refused or failed: its node, among others."""
    is_refused: bool = field(default=False, kw_only=True)
    """True once a model call was refused, even if a node has handled that."""
    can_ask: bool = field(default=False, kw_only=True)
    """True if an interrupt can be resumed later, so that a human can be asked."""
    questions: Sequence[LimitQuestion] = field(default=(), kw_only=True)
    """Our questions that earlier invocations of the thread have ended with."""
    answers: Sequence[str] = field(default=(), kw_only=True)
    """IDs of the interrupts that the call answers, in this graph or in one within it."""
    question: tuple[str, GraphInterrupt] | None = field(default=None, kw_only=True)
    """The question that this invocation ends with, and its task of the graph."""
    unanswered: Verdict | None = field(default=None, kw_only=True)
    """The limit that the question is about."""
    waiting: dict[str, Task] = field(default_factory=dict, kw_only=True)
    """Tasks that wait for answers, by the keys of the interrupts: of it and of graphs within it."""
    tokens: dict[int, tuple[Any, int]] = field(default_factory=dict, kw_only=True)
    """Estimated tokens of each message, by identity."""

    # --- turns ------------------------------------------------------------------------------------

    def end_turns_before(self, messages: Sequence[Any]) -> None:
        """Record the tools of turns that have ended before a conversation is sent."""
        if self.turns:
            self.end_turns(lambda: _answers_in(messages), _last_tools_in(messages))

    # --- the end ----------------------------------------------------------------------------------

    def refuse(self, verdict: Verdict, metadata: Mapping[str, Any]) -> GraphHaltedError:
        """Return the exception that ends the graph before a model call."""
        self.verdict, self.call_metadata, self.is_refused = verdict, metadata, True
        error = GraphHaltedError("halted by otel-limits")
        error.invocation = self
        return error


def _answers_in(messages: Sequence[Any]) -> dict[str, ToolAnswer]:
    """Return the results of tools in a conversation."""
    return {
        each.tool_call_id: ToolAnswer(str(each.content), each.status == "error")
        for each in messages
        if hasattr(each, "tool_call_id")
    }


def _last_tools_in(messages: Sequence[Any]) -> set[str]:
    """Return the IDs of the last tool calls in a conversation."""
    shown: set[str] = set()
    for message in reversed(messages):
        if (answered := getattr(message, "tool_call_id", None)) is not None:
            shown.add(answered)
        if calls := getattr(message, "tool_calls", None):
            return shown.union(call["id"] or call["name"] for call in calls)
    return shown


# --- the last answer ------------------------------------------------------------------------------
# Which model call of a graph answers last (`wrap_up`), or only formats an answer.
# The answer is text without tool calls. An agent's own loop ends with it, and so does a loop of
# tools that was written by hand. Any other node expects something else of its call, such as a
# route, and its graph would continue with nothing.

BUILDERS: Final = (
    ("langchain.agents", "create_agent"),
    ("langgraph.prebuilt", "create_react_agent"),
)
"""The functions that build an agent's own loop."""

TOOLS: Final = ("tools", "functions")

WITH_SCHEMA: Final = "ls_structured_output_format"
"""Set by `with_structured_output` of every vendor's class."""

SCHEMAS: Final = (WITH_SCHEMA, "response_format", "response_schema", "response_json_schema")
"""Options of a request whose answer has a schema."""

FREE: Final = ("", "auto", "none")
"""Values of `tool_choice` that let the model answer with text."""


def obstacle_to_last_answer(invocation: GraphInvocation, options: Mapping[str, Any]) -> str:
    """Return why a model call cannot be the last answer, for the operator; empty if it can.

    Args:
        invocation: The graph that makes the call.
        options: The options of the request.
    """
    reason = _reason_against(invocation, options)
    return no_last_answer(reason) if reason else ""


def _reason_against(invocation: GraphInvocation, options: Mapping[str, Any]) -> str:
    graph, run = invocation.graph, invocation.run
    node = _node_of_call()
    described = f"the call in node {node!r}" if node else "the call"
    is_agent = is_own_loop(graph, node)
    answers_for_tree = run.invocation.agent != DEFAULT_NAME and run.answers_for_tree
    if not (run.is_outermost_loop or answers_for_tree):
        return f"{run.invocation.agent!r} is a part of another graph or agent"
    if not any(options.get(each) for each in TOOLS):
        return f"{described} offers no tools, so it belongs to no loop of tools"
    if options.get(WITH_SCHEMA) or (not is_agent and _is_bound(options)):
        return f"{described} must return more than text"
    if is_agent or _can_end_at(graph, node):
        return ""
    if not node:  # called without the node's context, e.g. in a thread
        return "the node of the call is unknown"
    return f"no edge from node {node!r} leads to END"


def formats_answer(
    invocation: GraphInvocation, options: Mapping[str, Any], messages: Sequence[Any]
) -> bool:
    """Return whether a call only gives a graph's answer another form, and the graph ends with that.

    Args:
        invocation: The graph that makes the call.
        options: The options of the request.
        messages: Its conversation.
    """
    last = messages[-1] if messages else None
    is_answer = isinstance(last, AIMessage) and not last.tool_calls and bool(text_of(last))
    has_form = bool(options.get(WITH_SCHEMA)) or _is_bound(options)
    return is_answer and has_form and _must_end_at(invocation.graph, _node_of_call())


def is_own_loop(graph: Any, node: str = "") -> bool:
    """Return whether a node, or any node if it is unknown, is the model's in an agent's own loop.

    Before Python 3.11, an asynchronous node does not know its name.
    """
    builders = (getattr(sys.modules.get(module), name, None) for module, name in BUILDERS)
    makers = {each.__module__ for each in builders if each is not None}
    nodes = graph.builder.nodes if isinstance(graph, CompiledStateGraph) else {}
    asked = [nodes[node]] if node in nodes else [] if node else nodes.values()
    return any(getattr(_code_of(each), "__module__", None) in makers for each in asked)


def _node_of_call() -> str:
    return str((ensure_config().get("metadata") or {}).get("langgraph_node", ""))


def _code_of(node: Any) -> Any:
    return getattr(node.runnable, "func", None) or getattr(node.runnable, "afunc", None)


def _is_bound(options: Mapping[str, Any]) -> bool:
    """Return whether a request forces a tool or has a schema. An agent ends without it, too."""
    is_forced = any(map(_forces, (options.get("tool_choice"), options.get("function_call"))))
    is_forced = is_forced or "ANY" in str(options.get("tool_config"))  # Google's
    return is_forced or any(options.get(each) for each in SCHEMAS)


def _forces(choice: Any) -> bool:
    if isinstance(choice, Mapping):  # `{"type": "auto"}`, or `{"auto": {}}` of Bedrock
        choice = choice.get("type") or next(iter(choice), "")
    return str(choice or "").lower() not in FREE


def _can_end_at(graph: Any, node: str) -> bool:
    """Return whether a graph can end right after a node."""
    if not isinstance(graph, CompiledStateGraph):
        return len(graph.nodes) == 1  # a function of the functional API, with its tasks
    builder = graph.builder
    if node not in builder.nodes:
        return False
    followers = _followers(builder, node)
    if followers - {END}:
        return False
    # Without a list of targets, a condition or a `Command` can choose any.
    ways = [each.ends for each in builder.branches.get(node, {}).values()]
    ends = builder.nodes[node].ends
    targets = followers.union(*(way.values() for way in ways if way), ends or ())
    return END in targets or any(way is None for way in ways) or not targets


def _must_end_at(graph: Any, node: str) -> bool:
    """Return whether a graph always ends right after a node."""
    if not isinstance(graph, CompiledStateGraph) or node not in graph.builder.nodes:
        return False
    builder = graph.builder
    has_choice = bool(builder.branches.get(node) or builder.nodes[node].ends)
    return not has_choice and not _followers(builder, node) - {END}


def _followers(builder: Any, node: str) -> set[str]:
    """Return the nodes to which edges lead from a node."""
    followers = {target for source, target in builder.edges if source == node}
    return followers | {target for sources, target in builder.waiting_edges if node in sources}


# --- tools ----------------------------------------------------------------------------------------


def _begun(tool: Any, asked: Any, *_: Any, **options: Any) -> RunningGraphTool | None:
    """Begin a tool call; `None` if no model has requested it, or no graph is limited.

    Only a call that a model has requested has an ID.
    """
    identity = options.get("tool_call_id")
    if identity is None:
        return None
    return RunningGraphTool.start(
        GraphInvocation, identity, tool.name, asked, tool=tool, call_id=identity
    )


track_run = follow_tool(_begun)
"""Wraps `BaseTool.run`, which `invoke` calls."""
track_arun = follow_tool_async(_begun)
"""Wraps `BaseTool.arun`, which `ainvoke` calls."""


class RunningGraphTool(ToolCallInProgress):
    """One call of a tool of LangChain."""

    def __init__(
        self, invocation: GraphInvocation, requested: RequestedTool, *, call_id: str, tool: Any
    ) -> None:
        """Begin the call."""
        super().__init__(invocation, requested, is_answer=tool.return_direct)
        self._identity, self._name = call_id, tool.name

    def refused(self, note: str) -> ToolMessage:
        """Return the message of a call that must not run."""
        if self.is_answer and (breach := self.requested.refusal) is not None:
            self.invocation.refused_answers[note] = breach
        return ToolMessage(note, name=self._name, tool_call_id=self._identity, status="error")

    def text_of(self, result: Any) -> str:
        """Return the content of a message."""
        return text_of(result)

    def is_error(self, result: Any) -> bool:
        """Return whether a message is that of a tool that failed."""
        return getattr(result, "status", "") == "error"

    def with_text(self, result: Any, text: str) -> Any:
        """Return a copy of a message with another content."""
        if not isinstance(result, ToolMessage) or not isinstance(result.content, str):
            return result
        return result.model_copy(update={"content": text})

    def with_stops(self, result: Any, stops: Sequence[Stop], *, synthetic: bool) -> Any:
        """Return a copy of a message with the stops of the agents that it has called."""
        if not isinstance(result, ToolMessage):
            return result
        result = result.model_copy()
        mark_inner(result, stops, synthetic=synthetic)
        return result

    def end(self, result: Any) -> Any:
        """Note the result; a command to the graph around it hands over to another agent."""
        self.requested.is_handoff = isinstance(result, Command) and result.graph == Command.PARENT
        return super().end(result)

    def is_pause(self, error: Exception) -> bool:
        """Return whether the tool waits for a human, or hands off to the graph around it."""
        return isinstance(error, GraphBubbleUp)
