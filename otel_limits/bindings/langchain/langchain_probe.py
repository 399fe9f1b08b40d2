"""Checks that all used names of LangChain and LangGraph exist."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.langchain.private_graph_names import TASK, WITHOUT_TASK, has_task

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS: Final = {
    "langgraph.pregel.main": ("Pregel.stream", "Pregel.astream", "Pregel.bulk_update_state"),
    "langchain_core.language_models.chat_models": (
        "BaseChatModel.generate",
        "BaseChatModel.agenerate",
        "BaseChatModel.stream",
        "BaseChatModel.astream",
    ),
    "langchain_core.tools.base": ("BaseTool.run", "BaseTool.arun"),
}
"""Public methods through which graphs, models and tools are called."""

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

UNFOLLOWED: Final = "Without it no graph can be tracked or halted."


def gaps() -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: LangGraph is not installed.
    """
    if find_spec("langgraph") is None:
        raise ImportError("langgraph is not installed", name="langgraph")
    return tuple(_gaps())


def _gaps() -> Iterator[Gap]:
    for module, names in METHODS.items():
        try:
            owner = import_module(module)
        except ImportError as error:
            yield _gap(f"importable {module} ({error})")
            continue
        for name in names:
            of_class, _, method = name.partition(".")
            if not hasattr(getattr(owner, of_class, None), method):
                yield _gap(f"{module}.{name}")
    if not has_task():
        name = f"configuration key {TASK}"
        yield Gap(name=name, version=_version(), without=WITHOUT_TASK, is_vital=False)
    models = sys.modules.get("langchain_core.language_models.chat_models")
    for name, value in vars(getattr(models, "BaseChatModel", object)).items():
        is_public = not name.startswith("_") and inspect.isfunction(value)
        if is_public and name not in KNOWN:
            yield Gap(
                name=f"known meaning of BaseChatModel.{name}",
                version=_version(),
                without="Model calls that are made only by it are not counted.",
                is_vital=False,
            )
    try:
        # These import every other name, so a missing one raises here.
        import otel_limits.bindings.langchain.chat_calls
        import otel_limits.bindings.langchain.chat_events
        import otel_limits.bindings.langchain.graph_events
        import otel_limits.bindings.langchain.graph_runs
        import otel_limits.bindings.langchain.requested_tools  # noqa: F401
    except ImportError as error:
        yield _gap(str(error.name or error))


def _gap(name: str) -> Gap:
    return Gap(name=name, version=_version(), without=UNFOLLOWED, is_vital=True)


def _version() -> str:
    """Return the release; frozen applications may lack its metadata."""
    try:
        return f"langgraph {version('langgraph')}"
    except PackageNotFoundError:
        return "langgraph"
