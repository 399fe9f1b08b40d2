"""Tracks the tools that a model has requested: refused at a limit, recorded when they end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from langchain_core.messages import ToolMessage
from langgraph.errors import GraphBubbleUp

from otel_limits.bindings.halted_agents import reworded_text
from otel_limits.bindings.langchain.chat_readers import text_of
from otel_limits.bindings.langchain.graph_path import GraphPath
from otel_limits.bindings.langchain.halt_marks import mark_inner
from otel_limits.bindings.requested_turns import RunningTool
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.tree import current_scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_limits.bindings.requested_turns import RequestedTool


def track_run(original: Any) -> Any:
    """Wrap `BaseTool.run`, which `invoke` calls."""

    @functools.wraps(original)
    def run(tool: Any, tool_input: Any, *args: Any, **options: Any) -> Any:
        running = _begun(tool, tool_input, options)
        if running is None:
            return original(tool, tool_input, *args, **options)
        if (refusal := running.refusal()) is not None:
            return refusal
        try:
            with running:
                result = original(tool, tool_input, *args, **options)
        except BaseException as error:
            running.fail(error)
            raise
        return running.ended(result)

    return run


def track_arun(original: Any) -> Any:
    """Wrap `BaseTool.arun`, which `ainvoke` calls."""

    @functools.wraps(original)
    async def arun(tool: Any, tool_input: Any, *args: Any, **options: Any) -> Any:
        running = _begun(tool, tool_input, options)
        if running is None:
            return await original(tool, tool_input, *args, **options)
        if (refusal := running.refusal()) is not None:
            return refusal
        try:
            with running:
                result = await original(tool, tool_input, *args, **options)
        except BaseException as error:
            running.fail(error)
            raise
        return running.ended(result)

    return arun


@suppress_errors("binding")
def _begun(tool: Any, asked: Any, options: Mapping[str, Any]) -> RunningGraphTool | None:
    """Begin a tool call; `None` if no model has requested it, or no graph is limited.

    Only a call that a model has requested has an ID.
    """
    identity = options.get("tool_call_id")
    run, scope = current_scope()
    path = getattr(run, "state", None)
    if identity is None or not isinstance(path, GraphPath) or path.run.finished:
        return None
    if scope is not None and scope.owner is run:  # a tool that runs another one itself
        return None
    requested = path.tools.get(identity)
    if requested is None:  # requested by a response of an earlier invocation of this thread
        requested = path.resume_tool(identity, tool.name, asked)
    return RunningGraphTool(path, requested, identity, tool)


class RunningGraphTool(RunningTool):
    """One call of a tool of LangChain."""

    def __init__(self, path: GraphPath, requested: RequestedTool, identity: str, tool: Any) -> None:
        """Begin the call."""
        super().__init__(path, requested)
        self._identity = identity
        self._name = tool.name
        self._is_answer = tool.return_direct

    @suppress_errors("binding")
    def refusal(self) -> ToolMessage | None:
        """Return the result of a call that must not run, for the model."""
        note = self.refusal_text()
        if note is None:
            return None
        return ToolMessage(note, name=self._name, tool_call_id=self._identity, status="error")

    @suppress_errors("binding")
    def fail(self, error: BaseException) -> None:
        """Note an exception of the tool. One that waits for a human has not ended."""
        if not isinstance(error, Exception) or isinstance(error, GraphBubbleUp):
            return
        self.note("error", str(error))

    def ended(self, result: Any) -> Any:
        """Note the result, and return it with the texts for the model around a halted agent."""
        return self._worded(result) or result

    @suppress_errors("binding")
    def _worded(self, result: Any) -> Any:
        run = self.path.run
        stops = self.inner_stops
        if isinstance(result, ToolMessage) and run.halted:
            result = result.model_copy()
            # The answer of the graph keeps the text for the end user.
            if isinstance(result.content, str) and not self._is_answer:
                result.content = reworded_text(result.content, run, self.scope)
            if stops:
                mark_inner(result, stops)
        status = getattr(result, "status", "success")
        self.note(status if status in ("success", "error") else "success", text_of(result))
        return result
