"""Every private name of LangChain and LangGraph in use, and a check of all names."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.recognition import release, vital_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.bindings.framework import Framework


# --- private names of LangGraph -------------------------------------------------------------------
# Each with its reason, and the consequence without it.

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


# --- checks ---------------------------------------------------------------------------------------

KNOWN: Final = frozenset(
    {
        *("agenerate", "astream", "generate", "stream"),
        *("astream_events", "stream_events"),
        # These call them.
        *("agenerate_prompt", "ainvoke", "call_as_llm", "generate_prompt", "invoke", "predict"),
        *("predict_messages", "apredict", "apredict_messages"),
        # These reach no provider.
        *("asdict", "bind", "bind_tools", "dict", "with_structured_output"),
    }
)
"""Public methods of chat models in the tested releases."""


def gaps(framework: Framework) -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: LangGraph is not installed.
    """
    return tuple(vital_gaps(framework)) or tuple(_other_gaps(framework))


def _other_gaps(framework: Framework) -> Iterator[Gap]:
    if not has_task():
        name = f"configuration key {TASK}"
        yield Gap(name=name, version=release(framework), without=WITHOUT_TASK, still_limited="all")
    models = sys.modules.get("langchain_core.language_models.chat_models")
    for name, value in vars(getattr(models, "BaseChatModel", object)).items():
        is_public = not name.startswith("_") and inspect.isfunction(value)
        if is_public and name not in KNOWN:
            yield Gap(
                name=f"known meaning of BaseChatModel.{name}",
                version=release(framework),
                without="Model calls that are made only by it are not counted.",
                still_limited="all",
            )


# --- private names of model packages --------------------------------------------------------------

OF_OPENAI: Final = "_convert_chunk_to_generation_chunk"
"""Of langchain-openai, and of the packages built on it."""
OF_ANTHROPIC: Final = "_make_message_chunk_from_anthropic_event"
"""Of langchain-anthropic."""
CONVERTERS: Final = (OF_OPENAI, OF_ANTHROPIC)
"""Methods of model classes that convert a part of a stream.

They drop stated costs and the tier that was served, and there is no public name. Without them,
streamed calls cost what the price list says, at the tier of the request.
"""


def usage_in_part(_: Any, part: Any, *__: Any, **___: Any) -> object:
    """Return the vendor's usage in what one of `CONVERTERS` converts; `None` if there is none."""
    if isinstance(part, dict):
        return part.get("usage")
    return getattr(getattr(part, "message", None), "usage", None)  # Anthropic's message_start
