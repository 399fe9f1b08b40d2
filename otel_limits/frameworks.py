"""The interface for bindings of other frameworks: what `otel-limits docs own-framework` uses.

A distribution names the object of its binding in the entry point group `otel_limits.frameworks`.
"""

from otel_limits.bindings.base_framework import BaseFramework
from otel_limits.bindings.followed_runs import (
    follow_run,
    follow_run_async,
    follow_run_parts,
    follow_run_parts_async,
)
from otel_limits.bindings.framework import Gap
from otel_limits.bindings.invocation import InvocationInProgress, ToolAnswer
from otel_limits.bindings.model_call import (
    ModelCallInProgress,
    follow,
    follow_async,
    follow_parts,
    follow_parts_async,
)
from otel_limits.bindings.script import ScriptedRun
from otel_limits.bindings.tool_call import (
    ToolCallInProgress,
    follow_tool,
    follow_tool_async,
    follow_tool_parts,
    follow_tool_parts_async,
)
from otel_limits.core.events import MARKER
from otel_limits.core.usage import NOTHING_REPORTED, Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.text import tokens_of_text

__all__ = [
    "MARKER",
    "NOTHING_REPORTED",
    "BaseFramework",
    "Gap",
    "InFlightCall",
    "InvocationInProgress",
    "ModelCallInProgress",
    "ScriptedRun",
    "ToolAnswer",
    "ToolCallInProgress",
    "Usage",
    "follow",
    "follow_async",
    "follow_parts",
    "follow_parts_async",
    "follow_run",
    "follow_run_async",
    "follow_run_parts",
    "follow_run_parts_async",
    "follow_tool",
    "follow_tool_async",
    "follow_tool_parts",
    "follow_tool_parts_async",
    "measured",
    "tokens_of_text",
]
