"""Graphs of the commands `doctor` and `demo`, of LangGraph alone: LangChain may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from otel_limits.bindings.langchain.halt_marks import markers_of
from otel_limits.bindings.langchain.scripted_chat_model import ScriptedChatModel
from otel_limits.bindings.script import MOST_TURNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_limits.bindings.script import ScriptedRun


def run_script(run: ScriptedRun) -> tuple[int, str]:
    """Run a graph until its script ends or it is halted."""
    model = ScriptedChatModel(run.script, model=run.model)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def further(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([make_tool(*each) for each in run.tools.items()]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", further)
    graph.add_edge("tools", "think")
    compiled = graph.compile(name=run.agent)
    state = compiled.invoke({"messages": [HumanMessage("go")]}, {"recursion_limit": MOST_TURNS})
    stops = markers_of(state)
    return model.calls, stops[-1]["reason"] if stops else "end_turn"


def make_tool(name: str, action: Callable[[], str]) -> StructuredTool:
    """Make a tool that calls a function without arguments."""

    def act(query: str = "") -> str:  # noqa: ARG001  it tells calls apart
        return action()

    return StructuredTool.from_function(act, name=name, description=name)
