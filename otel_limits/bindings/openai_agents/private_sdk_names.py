"""Every private name of the SDK that is used, each with its reason and its fallback."""

from __future__ import annotations

from typing import Any, Final

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


def client_of(model: Any) -> Any:
    """Return the client of one of OpenAI's model classes, if it has one."""
    return getattr(model, CLIENT, None)


def refused_result(text: str) -> Any:
    """Return the result of a function tool that was not run."""
    import agents.tool

    return getattr(agents.tool, RESULT)(**{OUTPUT: text, IS_ERROR: True})
