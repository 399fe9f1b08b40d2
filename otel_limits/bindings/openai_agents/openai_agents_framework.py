"""The interface of the binding for the OpenAI Agents SDK, which it does not import."""

from __future__ import annotations

import functools
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.base_framework import BaseFramework
from otel_limits.bindings.class_patches import subclasses_of, wrapped_at_first_call
from otel_limits.bindings.openai_agents.openai_agents_probe import INVOKE, TOOLS
from otel_limits.bindings.openai_agents.run_marks import marker_of, markers_of
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap
    from otel_limits.bindings.script import ScriptedRun

RESULTS: Final = "agents.result"
RUNNER: Final = "agents.run"
AGENTS: Final = "agents.agent"
MODELS: Final = "agents.models.interface"

RUNNER_METHODS: Final = {"run": "track_run", "run_streamed": "track_run_streamed"}
MODEL_METHODS: Final = {
    "get_response": "track_get_response",
    "stream_response": "track_stream_response",
}
"""Methods, each with our function that wraps it."""


class OpenAIAgentsFramework(BaseFramework):
    """Tracks the runs of all agents of the SDK."""

    name = "openai-agents"
    module = RUNNER
    distribution = "openai-agents"
    packages: Collection[str] = ("agents",)
    requirement = "openai-agents >= 0.20"
    needed: Mapping[str, Sequence[str]] = MappingProxyType(
        {
            RUNNER: ("Runner.run", "AgentRunner.run", "AgentRunner.run_streamed"),
            AGENTS: ("AgentBase.get_all_tools",),
            MODELS: ("Model.get_response", "Model.stream_response"),
            "agents.lifecycle": ("RunHooksBase.on_llm_start",),
        }
    )
    importers: Sequence[str] = (f"{__package__}.model_calls", f"{__package__}.runner_methods")
    without = "Without it no agent can be tracked or halted."
    stop_reasons: Collection[str] = (
        *("end_turn", "handoff", "interrupt"),
        *("cancelled", "guardrail", "max_turns_exceeded"),
    )
    """The SDK has no words for its ends, so those of other frameworks are used where they fit."""
    successes: Collection[str] = ("end_turn", "handoff")
    own_limits: Mapping[str, str] = MappingProxyType(
        {"max_turns_exceeded": "max_turns of Runner.run() in the OpenAI Agents SDK"}
    )

    def __init__(self) -> None:
        """Start without classes: the SDK may be imported later, or never."""
        super().__init__()
        self._is_on = False
        self._is_registered = False

    def gaps(self) -> Sequence[Gap]:
        """Import the SDK and return the names of it that are used but missing.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.openai_agents.openai_agents_probe import gaps

        return gaps(self)

    def watch(self) -> None:
        """Track every run."""
        import wrapt  # here, as commands that only read a ledger import this module

        self._is_on = True
        for module, patch in self._parts():
            if module in sys.modules and self._is_registered:
                patch(sys.modules[module])
            elif not self._is_registered:
                wrapt.register_post_import_hook(patch, module)
        self._is_registered = True

    def _parts(self) -> tuple[tuple[str, Callable[[Any], None]], ...]:
        return (
            (AGENTS, self._patch_agents),
            (RUNNER, self._patch_runner),
            (MODELS, self._patch_models),
            (RESULTS, self._patch_results),
            (TOOLS, self._patch_tools),
        )

    @suppress_errors("binding")
    def _patch_runner(self, module: Any) -> None:
        if self._is_on:
            for name, wrapper in RUNNER_METHODS.items():
                wrap = functools.partial(_wrapped, "runner_methods", wrapper)
                self.patches.wrap(module.AgentRunner, name, wrap)

    @suppress_errors("binding")
    def _patch_agents(self, module: Any) -> None:
        if self._is_on:
            wrapper = "track_get_all_tools"
            wrap = functools.partial(_wrapped, "limit_questions", wrapper)
            self.patches.wrap(module.AgentBase, "get_all_tools", wrap)

    @suppress_errors("binding")
    def _patch_models(self, module: Any) -> None:
        if self._is_on:
            self.patches.watch_subclasses(module.Model, self._patch_model)
            for derived in subclasses_of(module.Model):
                self._patch_model(derived)

    @suppress_errors("binding")
    def _patch_model(self, derived: Any) -> None:
        """Patch the class that defines a model's method: this one, a parent or a mix-in."""
        for name, wrapper in MODEL_METHODS.items():
            owner = next((each for each in derived.__mro__ if name in vars(each)), None)
            is_abstract = getattr(vars(owner).get(name), "__isabstractmethod__", False)
            if self._is_on and owner is not None and not is_abstract:
                wrap = functools.partial(_wrapped, "model_calls", wrapper)
                self.patches.wrap(owner, name, wrap)

    @suppress_errors("binding")
    def _patch_results(self, module: Any) -> None:
        if self._is_on:
            wrap = functools.partial(_wrapped, "agent_runs", "track_to_state")
            for owner in (module.RunResult, module.RunResultStreaming):
                self.patches.wrap(owner, "to_state", wrap)

    @suppress_errors("binding")
    def _patch_tools(self, module: Any) -> None:
        if self._is_on:
            wrap = functools.partial(_wrapped, "function_tools", "track_invocation")
            self.patches.wrap(module, INVOKE, wrap)

    def release(self) -> bool:
        """Stop tracking runs. No agent has its own limits."""
        self._is_on = False
        # Looked up, not imported: without the module, no run was ever tracked.
        module = sys.modules.get(f"{__package__}.agent_runs")
        if module is not None:
            module.AgentInvocation.abort_all()
        self.patches.restore()
        return False

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a run's result, else `None`."""
        return marker_of(result)

    def markers_of(self, result: Any) -> Sequence[Mapping[str, Any]]:
        """Return the stops in a run's result, in their order."""
        return markers_of(result)

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run an agent with a scripted model."""
        from otel_limits.bindings.openai_agents.scripted_agent_run import run_script

        return run_script(run)


def _wrapped(module: str, name: str, original: Any) -> Any:
    return wrapped_at_first_call(f"{__package__}.{module}", name, original)


OPENAI_AGENTS: Final = OpenAIAgentsFramework()
"""Wraps the runner, the model classes and the function that calls tools."""
