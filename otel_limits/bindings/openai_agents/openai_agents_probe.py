"""Checks that all used names of the OpenAI Agents SDK exist."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.openai_agents import private_sdk_names as private
from otel_limits.bindings.probing import release, vital_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.bindings.framework import Framework

PRIVATE: Final = {private.TOOLS: private.INVOKE, "agents.tool": private.RESULT}
"""Private names without which tools are not tracked."""

NO_TOOLS: Final = (
    "Without it tool calls are counted when they are requested, but neither refused, recorded nor "
    "compared."
)


def gaps(framework: Framework) -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: The SDK is not installed.
    """
    return tuple(vital_gaps(framework)) or tuple(_private_gaps(framework))


def _private_gaps(framework: Framework) -> Iterator[Gap]:
    for module, name in PRIVATE.items():
        try:
            is_there = hasattr(import_module(module), name)
        except ImportError:
            is_there = False
        if not is_there:
            yield Gap(
                name=f"{module}.{name}",
                version=release(framework),
                without=NO_TOOLS,
                still_limited="all",
            )
