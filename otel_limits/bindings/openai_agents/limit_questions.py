"""Requests approval from a human to continue a run at a limit, as the SDK does for tools.

The question is a call of our tool, which needs approval. The SDK interrupts the run for it,
stores it with the run's state, and calls the tool if it is approved. Models never see the tool, its
call or its result.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agents import FunctionTool, RunState
from agents.models.fake_id import FAKE_RESPONSES_ID
from openai.types.responses import ResponseFunctionToolCall

from otel_limits.bindings.extensions import declined_verdict, extension_of, log_question, question
from otel_limits.bindings.openai_agents.agent_runs import AgentInvocation, active_of_task
from otel_limits.bindings.openai_agents.openai_agents_framework import OPENAI_AGENTS
from otel_limits.core.halt_texts import allowed_by_yes, origin_of, question_for_end_user, usage_of
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import quoted

if TYPE_CHECKING:
    from otel_limits.bindings.openai_agents.model_readers import RequestArguments
    from otel_limits.core.limits import Breach
    from otel_limits.core.policy import Verdict

TOOL_NAME: Final = "otel_limits_continue"
"""The name of the tool, by which a program recognizes our questions."""
CALL_PREFIX: Final = "otel_limits_"
"""The beginning of the IDs of our calls."""

RUN_AGAIN: Final = "run_llm_again"
"""The `tool_use_behavior` with which the model is called after tools. With others, the result of
our tool would become the final output."""


# --- the tool -------------------------------------------------------------------------------------


def track_get_all_tools(original: Any) -> Any:
    """Wrap `AgentBase.get_all_tools`, for runs and for states that are read from a store."""

    @functools.wraps(original)
    async def get_all_tools(agent: Any, run_context: Any) -> Any:
        tools = await original(agent, run_context)
        return [*tools, _question_tool()] if _asks_at_limits(agent) or _is_asked() else tools

    return get_all_tools


@suppress_errors("binding")
def _asks_at_limits(agent: Any) -> bool:
    host = OPENAI_AGENTS.host
    if host is None or not host.is_on or getattr(agent, "tool_use_behavior", "") != RUN_AGAIN:
        return False
    invocation = active_of_task()
    if invocation is not None and invocation.run.invocation.agent == agent.name:
        return invocation.run.policy.action == "ask"
    return host.policy(agent.name).action == "ask"


@suppress_errors("binding")
def _is_asked() -> bool:
    """Return whether the run answers a question, which may be older than today's policy."""
    invocation = active_of_task()
    return invocation is not None and bool(invocation.agent_run.questions)


@functools.cache
def _question_tool() -> FunctionTool:
    return FunctionTool(
        name=TOOL_NAME,
        description="Continue at a limit of otel-limits.",
        params_json_schema={"type": "object", "properties": {}},
        on_invoke_tool=_approved,
        strict_json_schema=False,
        needs_approval=True,
    )


async def _approved(context: Any, _: str) -> str:
    """Note that a human has approved. The run that does so is a new invocation."""
    if (invocation := active_of_task()) is not None:
        asked = invocation.agent_run.questions.pop(context.tool_call_id, None)
        _extend_conversation(invocation, asked)
    return "approved"


@suppress_errors("binding")
def _extend_conversation(invocation: AgentInvocation, asked: object) -> None:
    """Extend the conversation if the question was about its limit.

    Only now, because it is not extended if the question is declined.
    """
    more = None if asked is None else extension_of(asked, True)  # noqa: FBT003
    if more is not None and more.conversation.active:
        invocation.run.extend_conversation(more.conversation)


# --- the question ---------------------------------------------------------------------------------


def can_ask(request: RequestArguments) -> bool:
    """Return whether a run can be interrupted at a model call."""
    return any(tool.name == TOOL_NAME for tool in request["tools"] or ())


def question_item(invocation: AgentInvocation, verdict: Verdict) -> ResponseFunctionToolCall:
    """Return the call of our tool, with the question as its arguments."""
    origin = invocation.run.invocation
    breach: Breach = verdict.breach  # type: ignore[assignment]  # only these can be extended
    how = f"Approve to allow {allowed_by_yes(breach)}, or reject to stop."
    asked = {
        **question(verdict, origin),
        "question": question_for_end_user(verdict, how),
        "sentence": f"Agent {quoted(origin.agent)} reached {usage_of(breach)}"
        f"{origin_of(breach)} {how} Invocation ID: {origin.id}.",
    }
    log_question(verdict, origin)
    return ResponseFunctionToolCall(
        id=FAKE_RESPONSES_ID,
        call_id=f"{CALL_PREFIX}{origin.id}",
        name=TOOL_NAME,
        arguments=json.dumps(asked),
        type="function_call",
    )


# --- the answer -----------------------------------------------------------------------------------


def questions_in(given: Any) -> Mapping[str, object]:
    """Return the questions that a run resumes with, by ID: it approves or declines each."""
    items = given.get_interruptions() if isinstance(given, RunState) else ()
    return {
        item.call_id: _parsed(item.arguments or "")
        for item in items
        if item.name == TOOL_NAME and item.call_id
    }


@suppress_errors("binding")
def hide_questions(request: RequestArguments, invocation: AgentInvocation | None) -> None:
    """Remove our tool, its calls and their results from a request; decide on a declined one."""
    request["tools"] = [tool for tool in request["tools"] or () if tool.name != TOOL_NAME]
    given = request["input"]
    if not isinstance(given, list) or (
        invocation is not None and not invocation.agent_run.has_questions
    ):
        return
    ours = [item for item in given if _is_ours(item)]
    if not ours:
        if invocation is not None:
            invocation.agent_run.has_questions = False
        return
    request["input"] = [item for item in given if not _is_ours(item)]
    questions = {} if invocation is None else invocation.agent_run.questions
    for item in ours:
        if item["call_id"] not in questions:
            continue
        asked = questions.pop(item["call_id"])
        if invocation is not None and "output" in item:
            declined = declined_verdict(asked, False)  # noqa: FBT003
            invocation.verdict = invocation.verdict or declined
        else:  # the result follows the call
            questions[item["call_id"]] = asked


def _is_ours(item: Any) -> bool:
    return isinstance(item, Mapping) and str(item.get("call_id")).startswith(CALL_PREFIX)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # a stored state may be damaged
        return None
