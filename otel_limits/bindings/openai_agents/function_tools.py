"""Tracks the function tools that a model has requested: refused at a limit, recorded at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.openai_agents.agent_runs import AgentInvocation
from otel_limits.bindings.openai_agents.limit_questions import TOOL_NAME
from otel_limits.bindings.openai_agents.model_readers import arguments_of
from otel_limits.bindings.openai_agents.openai_agents_probe import IS_ERROR, OUTPUT, refused_result
from otel_limits.bindings.tool_call import ToolCallInProgress, follow_tool_async
from otel_limits.runs.current import current_scope
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.events import Stop


FAILED: Final = "An error occurred while running the tool."
"""The beginning of the SDK's text for an exception, which it does not mark for agents as tools."""


def _begun(**call: Any) -> RunningFunctionTool | None:
    """Begin a tool call; `None` if its run is not tracked."""
    run, scope = current_scope()
    invocation = getattr(run, "state", None)
    if not isinstance(invocation, AgentInvocation) or invocation.agent_run.root.run.finished:
        return None
    if call["function_tool"].name == TOOL_NAME:  # our question
        return None
    if scope is not None and scope.owner is run:  # a tool that calls another one itself
        return None
    context = call["context"]
    if context.agent is not None:  # a run may resume with the tools of its second agent
        invocation.agent_run.activate(context.agent.name)
    invocation = invocation.agent_run.active
    requested = invocation.tools.get(context.tool_call_id)
    if requested is None:  # requested by a response of an earlier, interrupted run
        arguments = arguments_of(call["arguments"])
        requested = invocation.resume_tool(
            context.tool_call_id, call["function_tool"].name, arguments
        )
    is_answer = _ends_run(context.agent, call["function_tool"].name)
    return RunningFunctionTool(invocation, requested, is_answer=is_answer)


def _ends_run(agent: Any, tool: str) -> bool:
    """Return whether a tool's output becomes the final output of the run."""
    behavior = getattr(agent, "tool_use_behavior", None)
    if isinstance(behavior, Mapping):
        return tool in behavior.get("stop_at_tool_names", ())
    return bool(behavior == "stop_on_first_tool")


track_invocation = follow_tool_async(_begun)
"""Wraps the function of the SDK that calls a function tool."""


class RunningFunctionTool(ToolCallInProgress):
    """One call of a function tool. An exception of it ends the run."""

    invocation: AgentInvocation

    def end(self, result: Any) -> Any:
        """Note the result, unless an agent within the tool waits for a person."""
        if self.scope in self.invocation.agent_run.waiting and getattr(result, OUTPUT, "") is None:
            return None
        return super().end(result)

    def refused(self, note: str) -> Any:
        """Return the result of a call that must not run."""
        # Of any tool: a function of the application may choose any result as the answer.
        if (breach := self.requested.refusal) is not None:
            self.invocation.refused_answers[note] = breach
        return refused_result(note)

    def text_of(self, result: Any) -> str:
        """Return the output of a result."""
        output = getattr(result, OUTPUT)
        return output if isinstance(output, str) else as_json(output)

    def is_error(self, result: Any) -> bool:
        """Return whether a result is that of a tool that failed."""
        return bool(getattr(result, IS_ERROR)) or str(getattr(result, OUTPUT)).startswith(FAILED)

    def with_text(self, result: Any, text: str) -> Any:
        """Return a result with another output."""
        if not isinstance(getattr(result, OUTPUT), str):
            return result
        return dataclasses.replace(result, **{OUTPUT: text})

    def with_stops(self, result: Any, stops: Sequence[Stop], *, synthetic: bool) -> Any:
        """Note the stops for the result of the run, which this result may become."""
        self.invocation.agent_run.called += [(stop, synthetic) for stop in stops]
        return result
