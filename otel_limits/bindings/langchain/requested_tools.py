"""Tracks the tools that a model has requested: refused at a limit, recorded when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.bindings.langchain.graph_invocation import GraphInvocation
from otel_limits.bindings.langchain.halt_marks import mark_inner
from otel_limits.bindings.tool_call import ToolCallInProgress, follow_tool, follow_tool_async

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.bindings.invocation import RequestedTool
    from otel_limits.core.events import Stop


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
