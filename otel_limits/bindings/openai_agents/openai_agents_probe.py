"""Every private name of the SDK in use, and a check of all names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.recognition import release, vital_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.bindings.framework import Framework


# --- private names --------------------------------------------------------------------------------

TOOLS: Final = "agents.run_internal.tool_execution"
"""The module that calls function tools."""
INVOKE: Final = "_invoke_function_tool_with_metadata"
"""Calls a function tool, including those of MCP servers and agents as tools.

There is no public name: hooks see a tool's end but cannot replace its result, and guardrails belong
to single tools. Without it, tools are counted when they are requested, but not recorded, refused or
compared.
"""
RESULT: Final = "_FunctionToolInvocationResult"
"""The result of that function: the output, and whether the SDK made it from an error."""
OUTPUT: Final = "output"
IS_ERROR: Final = "is_sdk_generated_error"

CLIENT: Final = "_client"
"""The client of OpenAI's model classes, whose address determines the vendor. Without it, prices are
OpenAI's."""


RAW_USAGE: Final = "_agents_sdk_raw_usage"
"""The vendor's usage, as an attribute of the last response of a stream of Chat Completions.

The public `ModelResponse.raw_usage` is made from it later. Without it, such calls cost what the
price list says.
"""


def raw_usage_of(response: Any, *, keeps: bool) -> Any:
    """Return the vendor's usage of a response, if the SDK has kept it.

    Args:
        response: A `ModelResponse`, or the last response of a stream.
        keeps: False to remove it, as the application did not ask for it.
    """
    held = vars(response)
    name = RAW_USAGE if RAW_USAGE in held else "raw_usage"
    raw = held.get(name)
    if raw is not None and not keeps:
        held[name] = None
    return raw


def client_of(model: Any) -> Any:
    """Return the client of one of OpenAI's model classes, if it has one."""
    return getattr(model, CLIENT, None)


def refused_result(text: str) -> Any:
    """Return the result of a function tool that was not run."""
    import agents.tool

    return getattr(agents.tool, RESULT)(**{OUTPUT: text, IS_ERROR: True})


# --- checks ---------------------------------------------------------------------------------------

PRIVATE: Final = {TOOLS: INVOKE, "agents.tool": RESULT}
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
