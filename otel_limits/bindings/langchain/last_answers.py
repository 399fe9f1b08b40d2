"""Decides which model call of a graph can be its last answer (`wrap_up`), or only formats one.

The answer is text without tool calls. An agent's own loop ends with it, and so does a loop of tools
that was written by hand. Any other node expects something else of its call, such as a route, and
its graph would continue with nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage
from langchain_core.runnables.config import ensure_config
from langgraph.graph import END
from langgraph.graph.state import CompiledStateGraph

from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.bindings.langchain.graph_invocation import DEFAULT_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.bindings.langchain.graph_invocation import GraphInvocation

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
    return f"No final answer was requested: {reason}." if reason else ""


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
