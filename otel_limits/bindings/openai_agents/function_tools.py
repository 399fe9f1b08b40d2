"""Tracks the function tools that a model has requested: refused at a limit, recorded at the end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.halted_agents import reworded_text
from otel_limits.bindings.openai_agents.agent_runs import AgentPath
from otel_limits.bindings.openai_agents.limit_questions import NAME
from otel_limits.bindings.openai_agents.model_readers import arguments_of
from otel_limits.bindings.openai_agents.private_sdk_names import IS_ERROR, OUTPUT, refused_result
from otel_limits.bindings.requested_turns import RunningTool
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import for_model
from otel_limits.runs.tree import CURRENT, current_scope, is_within
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from otel_limits.bindings.requested_turns import RequestedTool


FAILED: Final = "An error occurred while running the tool."
"""The beginning of the SDK's text for an exception, which it does not mark for agents as tools."""


def track_invocation(original: Any) -> Any:
    """Wrap the function of the SDK that calls a function tool."""

    @functools.wraps(original)
    async def invoke(**call: Any) -> Any:
        running = _begun(call)
        if running is None:
            return await original(**call)
        if (refusal := running.refusal()) is not None:
            return refusal
        try:
            with running:
                result = await original(**call)
        except BaseException as error:
            running.fail(error)
            raise
        return running.ended(result)

    return invoke


@suppress_errors("binding")
def _begun(call: Mapping[str, Any]) -> RunningFunctionTool | None:
    """Begin a tool call; `None` if its run is not tracked."""
    run, scope = current_scope()
    path = getattr(run, "state", None)
    if not isinstance(path, AgentPath) or path.agent_run.is_over:
        return None
    if call["function_tool"].name == NAME:  # our question
        return None
    if scope is not None and scope.owner is run:  # a tool that calls another one itself
        return None
    context = call["context"]
    if context.agent is not None:  # a run may resume with the tools of its second agent
        path.agent_run.activate(context.agent.name)
    path = path.agent_run.active
    requested = path.tools.get(context.tool_call_id)
    if requested is None:  # requested by a response of an earlier, interrupted run
        arguments = arguments_of(call["arguments"])
        requested = path.resume_tool(context.tool_call_id, call["function_tool"].name, arguments)
    is_answer = _ends_run(context.agent, call["function_tool"].name)
    return RunningFunctionTool(path, requested, is_answer=is_answer)


def _ends_run(agent: Any, tool: str) -> bool:
    """Return whether a tool's output becomes the final output of the run."""
    behavior = getattr(agent, "tool_use_behavior", None)
    if isinstance(behavior, Mapping):
        return tool in behavior.get("stop_at_tool_names", ())
    return bool(behavior == "stop_on_first_tool")


class RunningFunctionTool(RunningTool):
    """One call of a function tool."""

    _run_token: Any = None

    def __init__(self, path: AgentPath, requested: RequestedTool, *, is_answer: bool) -> None:
        """Begin the call."""
        super().__init__(path, requested)
        self.agent_run = path.agent_run
        self._is_answer = is_answer

    @suppress_errors("binding")
    def __enter__(self) -> None:
        """Let what the tool starts belong to it, and to the agent that has requested it."""
        super().__enter__()
        self._run_token = CURRENT.set(self.path.run)

    @suppress_errors("binding")
    def __exit__(self, *_: object) -> None:
        """Leave the tool's code."""
        token, self._run_token = self._run_token, None
        if token is not None:
            CURRENT.reset(token)
        super().__exit__()

    @suppress_errors("binding")
    def refusal(self) -> Any:
        """Return the result of a call that must not run, for the model."""
        note = self.refusal_text()
        return None if note is None else refused_result(note)

    @suppress_errors("binding")
    def fail(self, error: BaseException) -> None:
        """Note an exception of the tool, which ends the run."""
        if isinstance(error, Exception):
            self.note("error", str(error))

    def ended(self, result: Any) -> Any:
        """Note the result, and return it with the texts for the model around a halted agent."""
        return self._worded(result) or result

    @suppress_errors("binding")
    def _worded(self, result: Any) -> Any:
        output, run = getattr(result, OUTPUT), self.path.run
        self.agent_run.called += self.inner_stops
        is_error = getattr(result, IS_ERROR) or str(output).startswith(FAILED)
        # A final output keeps the text for the end user.
        if isinstance(output, str) and run.halted and not self._is_answer:
            # The SDK's text suggests another attempt.
            raised = self._text_of_raised_halt() if is_error else None
            output = raised or reworded_text(output, run, self.scope)
            result = dataclasses.replace(result, **{OUTPUT: output})
        status = "error" if is_error else "success"
        self.note(status, output if isinstance(output, str) else as_json(output))
        return result

    def _text_of_raised_halt(self) -> str | None:
        """Return the text for the model if the exception was the halt of an agent it has called."""
        texts = [
            for_model(child.invocation.agent, verdict)
            for child, verdict in self.path.run.halted.values()
            if child.raised and is_within(child, self.scope)
        ]
        return texts[-1] if texts else None
