"""Lets the nodes next to a halted one finish, as their model calls were paid for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import ensure_config
from langgraph.graph.state import CompiledStateGraph

from otel_limits.bindings.admission import IMMEDIATE
from otel_limits.bindings.langchain.graph_invocation import GraphHaltedError
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
