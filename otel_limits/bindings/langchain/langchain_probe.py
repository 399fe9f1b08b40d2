"""Checks that all used names of LangChain and LangGraph exist."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.langchain.private_graph_names import TASK, WITHOUT_TASK, has_task
from otel_limits.bindings.probing import release, vital_gaps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits.bindings.framework import Framework

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
