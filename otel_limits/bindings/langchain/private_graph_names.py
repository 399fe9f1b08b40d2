"""Every private name of LangGraph that is used, with its reason and the consequence without it."""

from __future__ import annotations

from importlib import import_module
from typing import Final

TASK: Final = "__pregel_task_id"
"""Key of a configuration that LangGraph passes to the graphs within a node.

There is no public name. By this key LangGraph decides that a graph streams its values unless asked
otherwise (langgraph, pregel/main.py, `stream`), and that its interrupts also interrupt the graph
around it.
"""

CONSTANTS: Final = "langgraph._internal._constants"
CONSTANT: Final = "CONFIG_KEY_TASK_ID"
"""Where LangGraph defines that key."""

WITHOUT_TASK: Final = "Graphs within a node stream as if called alone, and `ask` halts them."


def has_task() -> bool:
    """Return whether LangGraph still uses that key."""
    try:
        constants = import_module(CONSTANTS)
    except ImportError:
        return False
    return getattr(constants, CONSTANT, None) == TASK
