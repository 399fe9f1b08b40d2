"""Checks that all used names of the OpenAI Agents SDK exist."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.openai_agents import private_sdk_names as private

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS: Final = {
    "agents.agent": ("AgentBase.get_all_tools",),
    "agents.run": ("AgentRunner.run", "AgentRunner.run_streamed"),
    "agents.models.interface": ("Model.get_response", "Model.stream_response"),
    "agents.lifecycle": ("RunHooksBase.on_llm_start",),
}
"""Public methods through which runs and models are called."""

PRIVATE: Final = {private.TOOLS: private.INVOKE, "agents.tool": private.RESULT}
"""Private names without which tools are not tracked."""

UNFOLLOWED: Final = "Without it no agent can be tracked or halted."
NO_TOOLS: Final = (
    "Without it tool calls are counted when they are requested, but neither refused, recorded nor "
    "compared."
)


def gaps() -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: The SDK is not installed.
    """
    # Another package may have this name.
    if find_spec("agents") is None or find_spec("agents.run") is None:
        raise ImportError("openai-agents is not installed", name="agents")
    return tuple(_gaps())


def _gaps() -> Iterator[Gap]:
    for module, names in METHODS.items():
        try:
            owner = import_module(module)
        except ImportError as error:
            yield _gap(f"importable {module} ({error})", UNFOLLOWED)
            continue
        for name in names:
            of_class, _, method = name.partition(".")
            if not hasattr(getattr(owner, of_class, None), method):
                yield _gap(f"{module}.{name}", UNFOLLOWED)
    for module, name in PRIVATE.items():
        try:
            is_there = hasattr(import_module(module), name)
        except ImportError:
            is_there = False
        if not is_there:
            yield _gap(f"{module}.{name}", NO_TOOLS, is_vital=False)
    try:
        # These import every other name, so a missing one raises here.
        import otel_limits.bindings.openai_agents.model_calls
        import otel_limits.bindings.openai_agents.runner_methods  # noqa: F401
    except ImportError as error:
        yield _gap(str(error.name or error), UNFOLLOWED)


def _gap(name: str, without: str, *, is_vital: bool = True) -> Gap:
    return Gap(name=name, version=_version(), without=without, is_vital=is_vital)


def _version() -> str:
    """Return the release; frozen applications may lack its metadata."""
    try:
        return f"openai-agents {version('openai-agents')}"
    except PackageNotFoundError:
        return "openai-agents"
