"""The interface of the binding for LangChain and LangGraph, which it does not import."""

from __future__ import annotations

import functools
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.base_framework import BaseFramework
from otel_limits.bindings.class_patches import subclasses_of, when_imported, wrapped_at_first_call
from otel_limits.bindings.langchain.halt_marks import marker_of, markers_of
from otel_limits.bindings.langchain.langchain_probe import CONVERTERS
from otel_limits.bindings.langchain.unfollowed_methods import report_unfollowed
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap
    from otel_limits.bindings.script import ScriptedRun

GRAPHS: Final = "langgraph.pregel.main"
MODELS: Final = "langchain_core.language_models.chat_models"
LLMS: Final = "langchain_core.language_models.llms"
TOOLS: Final = "langchain_core.tools.base"


class LangChainFramework(BaseFramework):
    """Tracks compiled graphs, and with them the agents of `create_agent`."""

    name = "langchain"
    module = GRAPHS
    distribution = "langgraph"
    packages: Collection[str] = ("langchain", "langchain_core", "langgraph")
    requirement = "langgraph >= 1.0"
    needed: Mapping[str, Sequence[str]] = MappingProxyType(
        {
            GRAPHS: ("Pregel.stream", "Pregel.astream", "Pregel.bulk_update_state"),
            MODELS: (
                "BaseChatModel.generate",
                "BaseChatModel.agenerate",
                "BaseChatModel.stream",
                "BaseChatModel.astream",
            ),
            TOOLS: ("BaseTool.run", "BaseTool.arun"),
        }
    )
    importers: Sequence[str] = tuple(
        f"{__package__}.{name}"
        for name in ("chat_calls", "graph_invocation", "graph_runs", "graph_streams")
    )
    without = "Without it no graph can be tracked or halted."
    stop_reasons: Collection[str] = ("end_turn", "interrupt", "recursion_limit")
    """LangGraph has no words for its ends, so those of other frameworks are used."""
    successes: Collection[str] = ("end_turn",)
    own_limits: Mapping[str, str] = MappingProxyType(
        {"recursion_limit": "recursion_limit of LangGraph"}
    )

    def __init__(self) -> None:
        """Start without classes: LangChain may be imported later, or never."""
        super().__init__()
        self._is_on = False
        self._is_registered = False

    def gaps(self) -> Sequence[Gap]:
        """Import LangGraph and return the names of it that are used but missing.

        Raises:
            ImportError: It is not installed.
        """
        from otel_limits.bindings.langchain.langchain_probe import gaps

        return gaps(self)

    def watch(self) -> None:
        """Track every invocation of a graph."""
        self._is_on = True
        for module in METHODS:
            if module in sys.modules and self._is_registered:
                self._patch(sys.modules[module])
            elif not self._is_registered:
                when_imported(module, self._patch)
        self._is_registered = True

    @suppress_errors("binding")
    def _patch(self, module: Any) -> None:
        name, methods = METHODS[module.__name__]
        base = getattr(module, name, None)  # the probe reports a missing one
        if not self._is_on or base is None:
            return
        self._wrap(base, methods)
        if module.__name__ in OF_AUTHORS:
            self.patches.watch_subclasses(base, self._patch_model)
            for derived in subclasses_of(base):
                self._patch_model(derived)

    @suppress_errors("binding")
    def _patch_model(self, derived: type) -> None:
        """Patch the methods that a class of models defines itself."""
        if self._is_on:
            is_text = any(each.__name__ == "BaseLLM" for each in derived.__mro__)
            kind = LLMS if is_text else MODELS
            followed = {**METHODS[kind][1], **OF_AUTHORS[kind]}
            self._wrap(derived, followed)
            report_unfollowed(derived, followed)

    def _wrap(self, owner: Any, methods: Mapping[str, tuple[str, str]]) -> None:
        for name, (ours, wrapper) in methods.items():
            wrap = functools.partial(_wrapped, ours, wrapper)
            if _is_method(vars(owner).get(name)):
                self.patches.wrap(owner, name, wrap)
            elif (owner.__name__, name) == INHERITED:
                self.patches.put(owner, name, wrap(getattr(owner, name)))

    def release(self) -> bool:
        """Stop tracking graphs. No graph has its own limits."""
        self._is_on = False
        # Looked up, not imported: without the module, no graph was ever tracked.
        module = sys.modules.get(f"{__package__}.graph_invocation")
        if module is not None:
            module.GraphInvocation.abort_all()
        self.patches.restore()
        return False

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop that a halt left in a message or a state, else `None`."""
        return marker_of(result)

    def markers_of(self, result: Any) -> Sequence[Mapping[str, Any]]:
        """Return the stops in a state or a message, in their order."""
        return markers_of(result)

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        """Run a graph with a scripted model."""
        from otel_limits.bindings.langchain.scripted_graph import run_script

        return run_script(run)


INHERITED: Final = ("Pregel", "astream_events")
"""A class and its method that LangGraph 1.0 inherits from LangChain's `Runnable`."""

ANSWERS: Final = {
    "generate": ("chat_calls", "track_generate"),
    "agenerate": ("chat_calls", "track_agenerate"),
    "stream": ("chat_calls", "track_stream"),
    "astream": ("chat_calls", "track_astream"),
}
"""The methods by which models answer: `invoke`, `batch` and their variants call one of these."""

OWN: Final = {
    "invoke": ("chat_calls", "track_inner"),
    "ainvoke": ("chat_calls", "track_ainner"),
    "_call": ("chat_calls", "track_inner"),
    "_acall": ("chat_calls", "track_ainner"),
    "_stream": ("chat_calls", "track_inner_stream"),
    "_astream": ("chat_calls", "track_inner_astream"),
    **dict.fromkeys(CONVERTERS, ("chat_readers", "track_converted_part")),
}
OF_AUTHORS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    MODELS: {
        **OWN,
        "_generate": ("chat_calls", "track_inner"),
        "_agenerate": ("chat_calls", "track_ainner"),
    },
    LLMS: {
        **OWN,
        "_generate": ("chat_calls", "track_inner_all"),
        "_agenerate": ("chat_calls", "track_inner_aall"),
    },
}
"""Methods that a class of models may define itself, and that an application may call:
https://docs.langchain.com/oss/python/contributing/implement-langchain."""

METHODS: Final[dict[str, tuple[str, dict[str, tuple[str, str]]]]] = {
    # `invoke`, `batch` and their variants call one of these.
    GRAPHS: (
        "Pregel",
        {
            "stream": ("graph_runs", "track_stream"),
            "astream": ("graph_runs", "track_astream"),
            "astream_events": ("graph_streams", "track_astream_events"),
        },
    ),
    MODELS: (
        "BaseChatModel",
        {
            **ANSWERS,
            "stream_events": ("chat_calls", "track_stream_events"),
            "astream_events": ("chat_calls", "track_astream_events"),
        },
    ),
    LLMS: ("BaseLLM", ANSWERS),
    TOOLS: (
        "BaseTool",
        {"run": ("graph_invocation", "track_run"), "arun": ("graph_invocation", "track_arun")},
    ),
}
"""By module, the class and its methods, each with our module and function that wraps it."""


def _is_method(value: object) -> bool:
    """Return whether an attribute of a class is a method that can be called.

    A class may have a field named `stream`, or a static method named like one of LangChain's.
    """
    is_abstract = getattr(value, "__isabstractmethod__", False)
    return callable(value) and not is_abstract and not isinstance(value, (type, staticmethod))


def _wrapped(module: str, name: str, original: Any) -> Any:
    return wrapped_at_first_call(f"{__package__}.{module}", name, original)


LANGCHAIN: Final = LangChainFramework()
"""Wraps public methods of `Pregel`, `BaseChatModel` and `BaseTool`."""
