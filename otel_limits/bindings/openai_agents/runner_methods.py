"""Tracks each run of the SDK, and which of its agents is active."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from agents import RunConfig, RunHooks, RunState
from agents.exceptions import (
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    OutputGuardrailTripwireTriggered,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
)
from agents.lifecycle import RunHooksBase
from agents.run import DEFAULT_MAX_TURNS

from otel_limits.bindings.admission import halt_from_error, is_halted_by_vendor
from otel_limits.bindings.openai_agents.agent_runs import AgentRun, recalled
from otel_limits.bindings.openai_agents.limit_questions import questions_in
from otel_limits.bindings.openai_agents.openai_agents_framework import OPENAI_AGENTS
from otel_limits.core.errors import StopNote, stop_of_error
from otel_limits.core.internal_errors import suppress_errors, suppress_lapses
from otel_limits.runs.tasks import UNKNOWN_INPUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from otel_limits.bindings.openai_agents.agent_runs import AgentInvocation


# --- `AgentRunner.run` and `run_streamed` ---------------------------------------------------------

TRIPWIRES = (
    InputGuardrailTripwireTriggered,
    OutputGuardrailTripwireTriggered,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
)


def track_run(original: Any) -> Any:
    """Wrap `AgentRunner.run`, which `Runner.run` and `run_sync` call."""

    @functools.wraps(original)
    async def run(runner: Any, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002
        agent_run = _begun(starting_agent, input, options)
        if agent_run is None:
            return await original(runner, starting_agent, input, **options)
        try:
            with agent_run.root:
                result = await original(runner, starting_agent, input, **options)
            limit_error = agent_run.succeed(result)
        except BaseException as error:
            note_failure(agent_run, error)
            raise
        finally:
            agent_run.finish()
        if limit_error is not None:
            raise limit_error
        return result

    return run


def track_run_streamed(original: Any) -> Any:
    """Wrap `AgentRunner.run_streamed`, which starts a task and returns its result immediately."""

    @functools.wraps(original)
    def run_streamed(runner: Any, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002
        agent_run = _begun(starting_agent, input, options)
        if agent_run is None:
            return original(runner, starting_agent, input, **options)
        try:
            with agent_run.root:  # the task inherits the context
                result = original(runner, starting_agent, input, **options)
        except BaseException as error:
            note_failure(agent_run, error)
            agent_run.finish()
            raise
        agent_run.result = result
        result.run_loop_task.add_done_callback(functools.partial(_end, agent_run))
        return result

    return run_streamed


def _end(agent_run: AgentRun, task: Any) -> None:
    """End a streamed run with its task."""
    if not task.cancelled():
        if (error := task.exception()) is None:
            agent_run.succeed(agent_run.result)
        else:
            note_failure(agent_run, error)
    agent_run.finish()


@suppress_lapses("binding")
def _begun(agent: Any, given: Any, options: dict[str, Any]) -> AgentRun | None:
    """Begin a run; `None` if agents are not limited."""
    host = OPENAI_AGENTS.host
    if host is None or not host.is_on:
        return None
    host.prepare(has_own=False)
    agent_run = AgentRun(
        host,
        agent.name,
        attributes=_attributes_of(options),
        session_id=_session_of(options),
        given=UNKNOWN_INPUT if isinstance(given, RunState) else given,
        questions=suppress_errors("binding")(questions_in)(given) or {},
        answers=recalled(given, agent.name, host) or {},
    )
    agent_run.own_cap = options.get("max_turns", DEFAULT_MAX_TURNS)
    options["hooks"] = ActiveAgentHooks.around(options.get("hooks"), agent_run)
    return agent_run


def _attributes_of(options: Mapping[str, Any]) -> dict[str, object]:
    """Return the metadata of a run's trace, and its group."""
    given = options.get("run_config")
    config = given if isinstance(given, RunConfig) else RunConfig(**(given or {}))
    group = {} if config.group_id is None else {"group_id": config.group_id}
    return {**(config.trace_metadata or {}), **group}


def _session_of(options: Mapping[str, Any]) -> str | None:
    """Return the ID of a run's session, or of its conversation at OpenAI."""
    session = getattr(options.get("session"), "session_id", None) or options.get("conversation_id")
    return None if session is None else str(session)


@suppress_errors("binding")
def note_failure(agent_run: AgentRun, error: BaseException) -> None:
    """Note why a run has ended with an exception."""
    invocation = agent_run.active
    if not isinstance(error, Exception):
        return
    agent_run.root.error = invocation.error = error
    if (halted := next((each for each in invocation.enders if each.is_halted), None)) is not None:
        _note_halt_in(error, halted)
    elif isinstance(error, MaxTurnsExceeded):
        agent_run.end_at_own_cap()
    elif isinstance(error, TRIPWIRES):
        agent_run.end_with("guardrail")
    else:
        agent_run.end_with("error")
        _halt_by(error, invocation)


def _note_halt_in(error: Exception, invocation: AgentInvocation) -> None:
    """Show a halt in an exception that came after it, e.g. of a guardrail that rejects its text."""
    verdict = invocation.run.verdict
    if verdict is not None and stop_of_error(error) is None:
        StopNote.add(error, invocation.run.stop(verdict.reason))


def _halt_by(error: Exception, invocation: AgentInvocation) -> None:
    """Record the halt that has caused an exception of the run, if any."""
    verdict = halt_from_error(invocation, error)
    if verdict is None and is_halted_by_vendor(invocation, error):
        verdict = invocation.verdict
    if verdict is not None and invocation.run.action != "raised":
        invocation.run.halt(verdict, "raised")
        invocation.run.note_halt(str(error), verdict)
        StopNote.add(error, invocation.run.stop(verdict.reason))


# --- hooks for the active agent -------------------------------------------------------------------


class ActiveAgentHooks(RunHooks):
    """Calls the hooks of the application, and notes the agent of each model call."""

    # Set by `around`: a subclass of the application's hooks may need arguments.
    application: RunHooks
    agent_run: AgentRun

    @classmethod
    def around(cls, application: Any, agent_run: AgentRun) -> Any:
        """Return hooks around those of the application. The SDK rejects anything else."""
        if application is None:
            application = RunHooks()
        elif not isinstance(application, RunHooksBase):
            return application
        hooks = cls()
        hooks.application, hooks.agent_run = application, agent_run
        return hooks

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: Any, input_items: Any
    ) -> None:
        """Note the active agent: after a hand-off it is another one than before."""
        self.agent_run.activate(agent.name)
        self.agent_run.next_input = input_items
        await self.application.on_llm_start(context, agent, system_prompt, input_items)


def _passed_on(name: str) -> Callable[..., Awaitable[None]]:
    async def hook(self: ActiveAgentHooks, *args: Any, **named: Any) -> None:
        await getattr(self.application, name)(*args, **named)

    return hook


# Every other hook of the installed release, including those that are newer than this file.
for _name in vars(RunHooksBase):
    if _name.startswith("on_") and _name not in vars(ActiveAgentHooks):
        setattr(ActiveAgentHooks, _name, _passed_on(_name))
