"""The runaway graph of `otel-limits doctor`, of LangGraph alone: LangChain may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from otel_limits.bindings.langchain.halt_marks import markers_of
from otel_limits.bindings.langchain.scripted_chat_model import ScriptedChatModel
from otel_limits.bindings.script import runaway_script

if TYPE_CHECKING:
    from collections.abc import Callable


def run_away(most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
    """Run a graph that calls a tool `most_calls` times unless it is halted."""

    @tool
    def search() -> str:
        """Search."""
        observe()
        return "nothing found"

    model = ScriptedChatModel(runaway_script(most_calls))

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def further(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", further)
    graph.add_edge("tools", "think")
    runaway = graph.compile(name="runaway")
    state = runaway.invoke({"messages": [HumanMessage("go")]}, {"recursion_limit": 3 * most_calls})
    stops = markers_of(state)
    return model.calls, stops[-1]["reason"] if stops else "end_turn"
